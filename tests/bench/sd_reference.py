"""diffusers' side of the benchmarks of UNets and VAE decoders: a program with the commands that latentd_bench has for
a network, so that each side is a process of its own with a peak of its own.

As somebody has it who changes nothing: fp32, eager, NCHW.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import diffusers
import torch
from safetensors.torch import load_file


class UNet:
    def __init__(self, folder: str):
        self.network = diffusers.UNet2DConditionModel.from_pretrained(Path(folder) / "unet",
                                                                      torch_dtype=torch.float32).eval()

    def __call__(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        added = {"text_embeds": inputs["pooled"], "time_ids": inputs["time_ids"]} if "pooled" in inputs else None
        return self.network(inputs["latents"], inputs["timestep"][0], encoder_hidden_states=inputs["context"],
                            added_cond_kwargs=added, return_dict=False)[0]


class VaeDecoder:
    def __init__(self, folder: str):
        self.network = diffusers.AutoencoderKL.from_pretrained(Path(folder) / "vae", torch_dtype=torch.float32).eval()

    def __call__(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.network.decode(inputs["vae_latents"], return_dict=False)[0]


class Commands:
    def __init__(self):
        self.networks, self.inputs, self.results = {}, {}, {}

    def run(self, what: str, *words: str) -> dict:
        if what == "threads":
            torch.set_num_threads(int(words[0]))
        elif what in ("open-unet", "open-vae"):
            key, folder = words
            self.networks[key] = (UNet if what == "open-unet" else VaeDecoder)(folder)
        elif what == "inputs":
            self.inputs[words[0]] = load_file(words[1])
        elif what == "lora":
            self.networks[words[0]].network.load_lora_adapter(words[1], prefix="unet")
        elif what == "no-lora":
            self.networks[words[0]].network.unload_lora()
        elif what == "call":
            return self.call(words[0], int(words[1]))
        elif what == "result":
            Path(words[1]).write_bytes(self.results[words[0]].float().contiguous().numpy().tobytes())
        elif what == "peak":
            return {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        elif what == "close":
            for kept in (self.networks, self.inputs, self.results):
                kept.pop(words[0], None)
        else:
            raise ValueError(f"unknown command {what}")
        return {}

    def call(self, key: str, count: int) -> dict:
        times = {"wall": [], "cpu": []}
        for _ in range(count):
            wall, cpu = time.perf_counter(), time.process_time()
            self.results[key] = self.networks[key](self.inputs[key])
            times["wall"].append(1000 * (time.perf_counter() - wall))
            times["cpu"].append(1000 * (time.process_time() - cpu))
        return times


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    commands = Commands()
    for line in sys.stdin:
        print(json.dumps(commands.run(*line.rstrip("\n").split("\t"))), flush=True)


if __name__ == "__main__":
    main()
