"""Full-size Stable Diffusion against diffusers: steps of a UNet and decoding of pictures, at two threads.

A step is one pass of the UNet on a batch of two, as guidance gives it, with 77 tokens of text. Weights are random:
a pass takes the same time with any. Both sides are processes of their own that know the same commands.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import diffusers
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel

import models
from latentd_side import Bench
from report import Row, Table, progress

THREADS, TOKENS, TOLERANCE = 2, 77, 1e-3
MB = 1 << 20

SD15 = dict(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
SDXL = dict(sample_size=128, cross_attention_dim=2048, attention_head_dim=[5, 10, 20], use_linear_projection=True,
            block_out_channels=[320, 640, 1280], transformer_layers_per_block=[1, 2, 10],
            down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816)
VAE = dict(block_out_channels=[128, 256, 512, 512], layers_per_block=2, latent_channels=4, sample_size=512,
           down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4)


def write_network(folder: Path, kind: type, config: dict, dtype: torch.dtype, seed: int) -> int:
    """Random weights; returns how many."""
    with torch.device("meta"):
        network = kind.from_config(config)
    sizes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    folder.mkdir(parents=True)
    network.save_config(folder)
    models.write_safetensors(folder / models.WEIGHTS.name, sizes, dtype, models.random_values(seed))
    return sum(size.numel() for size in sizes.values())


def write_lora(file: Path, config: dict, kinds: tuple[type, ...], rank: int, seed: int) -> None:
    """For all layers of those kinds, in bf16, named as peft and diffusers do."""
    with torch.device("meta"):
        network = diffusers.UNet2DConditionModel.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in network.named_modules():
        if isinstance(module, kinds):
            out, *row = module.weight.shape
            down = torch.randn(rank, *row, generator=generator) / np.prod(row) ** 0.5
            up = 0.1 * torch.randn(out, rank, *[1] * (len(row) - 1), generator=generator) / rank ** 0.5
            tensors[f"unet.{name}.lora_A.weight"] = down.bfloat16()
            tensors[f"unet.{name}.lora_B.weight"] = up.bfloat16()
    save_file(tensors, file)


def write_clip(file: Path) -> None:
    """SD 1.5's text encoder, under the names that its files have."""
    with torch.device("meta"):
        network = CLIPTextModel(CLIPTextConfig(vocab_size=49408, hidden_size=768, intermediate_size=3072,
                                               num_hidden_layers=12, num_attention_heads=12))
    sizes = {"text_model." + name.removeprefix("text_model."): tensor.shape
             for name, tensor in network.state_dict().items() if tensor.is_floating_point()}
    file.parent.mkdir(parents=True)
    models.write_safetensors(file, sizes, torch.float32, models.random_values(4))


def write_inputs(file: Path, side: int, config: dict, seed: int = 3) -> None:
    """Of a step, and of decoding, for pictures of `side` pixels."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = {"latents": randn(1, 4, side // 8, side // 8).repeat(2, 1, 1, 1), "timestep": torch.tensor([801.0]),
              "context": randn(2, TOKENS, config["cross_attention_dim"]),
              "vae_latents": randn(1, 4, side // 8, side // 8)}
    if "addition_embed_type" in config:
        inputs |= {"pooled": randn(2, 1280), "time_ids": torch.tensor([[side, side, 0, 0, side, side]] * 2).float()}
    save_file(inputs, file)


class Side:
    """One process with one network, started when it is needed."""

    def __init__(self, program: list, what: str, folder: Path):
        self.program, self.what, self.folder = program, what, folder
        self.process, self.peak = None, 0
        self.slices = []    # of latentd: milliseconds of the longest one of a call

    def call(self, inputs: Path) -> list[dict[str, float]]:
        """Milliseconds of two calls: the second has the memory of the first. A process's first one is for warming up."""
        if self.process is None:
            self.process = Bench(*self.program)
            self.process("threads", THREADS)
            self.process(self.what, "it", self.folder)
            self.process("inputs", "it", inputs)
            self.process("call", "it", 1)
        self.process("inputs", "it", inputs)
        times = self.process("call", "it", 2)
        self.peak = max(self.peak, self.process("peak")["bytes"])
        if str(self.program[0]).endswith("latentd_bench"):
            self.slices.append(self.process("slice", "it")["ms"])
        return [{clock: ms[i] for clock, ms in times.items()} for i in range(2)]

    def result(self, file: Path) -> np.ndarray:
        self.process("result", "it", file)
        return np.fromfile(file, dtype=np.float32)

    def end(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None


class SdBenchmarks:
    def __init__(self, program: Path, work: Path, table: Table):
        self.program, self.work, self.table = program, work, table
        self.ours = {}    # by what is measured and size, the wall's milliseconds; and peaks

    def compare(self, name: str, what: str, folder: Path, inputs: dict[str, Path], limits: dict[str, float],
                rounds: int, together: bool) -> None:
        """`inputs`: by picture size. Not `together`: one side is in memory at a time."""
        sides = {"ours": Side([self.program], what, folder),
                 "reference": Side([sys.executable, Path(__file__).with_name("sd_reference.py")], what, folder)}
        times = {size: {side: [] for side in sides} for size in inputs}
        results = {size: {} for size in inputs}
        try:
            for _ in range(rounds):
                for side, process in sides.items():
                    for size, file in inputs.items():
                        times[size][side] += process.call(file)
                        results[size][side] = process.result(self.work / "result.f32")
                    if not together:
                        process.end()
        finally:
            for process in sides.values():
                process.end()
        for size, by_side in times.items():
            check_same(f"{name}, {size}", results[size]["ours"], results[size]["reference"])
            for clock in ("wall", "cpu"):
                ours, reference = ([call[clock] for call in by_side[side]] for side in ("ours", "reference"))
                limit = limits.get(size) if clock == "wall" else None
                row = f"{name}, {size}, {THREADS} threads, against diffusers' default"
                row += " (CPU time of all threads)" if clock == "cpu" else ""
                self.table.compare(row, ours, reference, limit)
                if clock == "wall":
                    self.ours[what, size] = ours
        self.ours[what, "peak"] = sides["ours"].peak
        self.ours[what, "slices"] = sides["ours"].slices
        ours, reference = (sides[side].peak for side in ("ours", "reference"))
        self.table.add(Row(f"peak RSS of a process that did nothing else, {name}", f"{ours / MB:.0f} MiB",
                           f"{reference / MB:.0f} MiB", ours / reference, None, None))

    def run(self, name: str, config: dict, dtype: torch.dtype, limits: dict[str, float], rounds: int,
            together: bool) -> None:
        folder = self.work / name.replace(" ", "-").lower()
        count = write_network(folder / "unet", diffusers.UNet2DConditionModel, config, dtype, seed=1)
        progress(f"== {name} ({count / 1e6:.0f} M)")
        inputs = {}
        for side in (256, 512):
            inputs[f"{side}²"] = folder / f"{side}.safetensors"
            write_inputs(inputs[f"{side}²"], side, config)
        stored = "fp32" if dtype == torch.float32 else "bf16"
        self.compare(f"{name} ({count / 1e6:.0f} M random weights, stored as {stored}), step", "open-unet", folder,
                     inputs, limits, rounds, together)

    def loras(self, name: str, config: dict, size: str, rounds: int, limit: float) -> None:
        """Steps with one LoRA of rank 16, beside the weights of all linear layers, and of convolutions, too."""
        folder = self.work / name.replace(" ", "-").lower()
        inputs = folder / f"{size.removesuffix('²')}.safetensors"
        kinds = {"all linear layers": (torch.nn.Linear,),
                 "all linear layers and convolutions": (torch.nn.Linear, torch.nn.Conv2d)}
        files = {what: folder / f"lora-{i}.safetensors" for i, what in enumerate(kinds)}
        for what, file in files.items():
            write_lora(file, config, kinds[what], rank=16, seed=40)
        sides = {"ours": Side([self.program], "open-unet", folder),
                 "reference": Side([sys.executable, Path(__file__).with_name("sd_reference.py")], "open-unet", folder)}
        times = {(side, what): [] for side in sides for what in ("none", *files)}
        try:
            for _ in range(rounds):
                results = {}
                for side, process in sides.items():
                    times[side, "none"] += process.call(inputs)
                    for what, file in files.items():
                        process.process("lora", "it", file)
                        times[side, what] += process.call(inputs)
                        results[side, what] = process.result(self.work / "result.f32")
                        process.process("no-lora", "it")
                for what in files:
                    check_same(f"{name} with a LoRA of {what}", results["ours", what], results["reference", what])
        finally:
            for process in sides.values():
                process.end()
        cpu = {key: [call["cpu"] for call in calls] for key, calls in times.items()}
        for what in files:
            row = f"step, {name}, {size}, with a LoRA of rank 16 on {what}"
            self.table.compare(f"{row}, sidecar against none (CPU time)", cpu["ours", what], cpu["ours", "none"],
                               limit if what == "all linear layers" else None)
            self.table.compare(f"{row}, against diffusers and peft (CPU time)", cpu["ours", what], cpu["reference", what])

    def vae(self, limits: dict[str, float], rounds: int) -> None:
        folder = self.work / "sd-vae"
        write_network(folder / "vae", diffusers.AutoencoderKL, VAE, torch.float32, seed=2)
        inputs = {}
        for side in (256, 512):
            inputs[f"{side}²"] = folder / f"{side}.safetensors"
            write_inputs(inputs[f"{side}²"], side, SD15)
        self.compare("SD's VAE, decoding", "open-vae", folder, inputs, limits, rounds, together=True)
        # The sizes take turns; a step is of a guided picture.
        self.table.compare("the longest slice of decoding, against a step of SD 1.5, 512²",
                           self.ours["open-vae", "slices"][1::2], self.ours["open-unet", "512²"], 1.0)

    def sd_cpp(self) -> None:
        """stable-diffusion.cpp with the same networks, if some interpreter has its binding. Its pictures are of its own
        prompt and noise, so times alone are compared."""
        python = os.environ.get("LATENTD_SDCPP_PYTHON")
        if python is None and importlib.util.find_spec("stable_diffusion_cpp") is not None:
            python = sys.executable
        name = "stable-diffusion.cpp, SD 1.5"
        if python is None:
            self.table.add(Row(f"{name} (tests/bench/README.md says how to have it measured)", "", "not installed",
                               float("nan"), None, None))
            return
        progress(f"== {name}")
        folder = self.work / "sd-cpp"
        write_clip(folder / "text_encoder/model.safetensors")
        for part, source in (("unet", "sd-1.5"), ("vae", "sd-vae")):
            (folder / part).symlink_to(self.work / source / part)
        output = subprocess.run([python, Path(__file__).with_name("sd_cpp_reference.py"), folder, str(THREADS), "256",
                                 "512"], capture_output=True, text=True, check=True).stdout
        theirs = json.loads(output)
        for what, key in (("step", "open-unet"), ("decode", "open-vae")):
            for side, ms in theirs[what].items():
                self.table.compare(f"{what}, {side}², {THREADS} threads, against {name}", self.ours[key, f"{side}²"],
                                   [ms], 1.0)
        ours = max(self.ours[key, "peak"] for key in ("open-unet", "open-vae"))
        self.table.add(Row(f"peak RSS, UNet or VAE alone, against a whole picture of {name}", f"{ours / MB:.0f} MiB",
                           f"{theirs['peak'] / MB:.0f} MiB", ours / theirs["peak"], None, None))


def check_same(name: str, ours: np.ndarray, reference: np.ndarray) -> None:
    error = float(np.abs(ours - reference).max() / np.abs(reference).max())
    progress(f"  {name}: results differ by {error:.1e}")
    if not error <= TOLERANCE:
        raise RuntimeError(f"{name}: not the same result as diffusers: {error}")
