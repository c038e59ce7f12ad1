"""diffusers' and peft's side of the benchmarks: the loop of FluxPipeline, and its changes of LoRAs."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from safetensors.torch import load_file


def clock() -> float:
    """Seconds: of CPU time on one thread, which other processes do not disturb; on the wall otherwise."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Diffusers:
    """A transformer in fp32, eager."""

    def __init__(self, folder: Path, inputs: Path):
        self.transformer = FluxTransformer2DModel.from_pretrained(folder / "transformer").float().eval()
        self.transformer.requires_grad_(False)
        self.scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
        self.inputs = load_file(inputs)
        self.adapter = None
        self.count = 0

    # --- steps ---------------------------------------------------------------

    def begin(self, steps: int) -> None:
        noise = self.inputs["noise"]
        _, channels, height, width = noise.shape
        self.size = (height, width)
        self.latents = FluxPipeline._pack_latents(noise, 1, channels, height, width)
        self.image_ids = FluxPipeline._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", torch.float32)
        self.text_ids = torch.zeros(self.inputs["t5"].shape[1], 3)
        self.guidance = torch.full([1], 3.5) if self.transformer.config.guidance_embeds else None
        c = self.scheduler.config
        mu = calculate_shift(self.latents.shape[1], c.base_image_seq_len, c.max_image_seq_len, c.base_shift,
                             c.max_shift)
        self.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        self.index = 0

    def step(self, count: int) -> list[float]:
        """Milliseconds of each of the next steps: the body of FluxPipeline's loop."""
        ms = []
        for t in self.scheduler.timesteps[self.index:self.index + count]:
            start = clock()
            timestep = t.expand(self.latents.shape[0]).to(self.latents.dtype)
            velocity = self.transformer(
                hidden_states=self.latents, timestep=timestep / 1000, guidance=self.guidance,
                pooled_projections=self.inputs["pooled"], encoder_hidden_states=self.inputs["t5"],
                txt_ids=self.text_ids, img_ids=self.image_ids, joint_attention_kwargs={}, return_dict=False)[0]
            self.latents = self.scheduler.step(velocity, t, self.latents, return_dict=False)[0]
            ms.append(1000 * (clock() - start))
        self.index += count
        return ms

    def result(self) -> torch.Tensor:
        height, width = self.size
        return FluxPipeline._unpack_latents(self.latents, height * 8, width * 8, 8).flatten()

    # --- LoRAs ---------------------------------------------------------------

    def _next_name(self) -> str:
        self.count += 1
        return f"lora{self.count}"

    def replace(self, source, *, low_memory: bool) -> float:
        """The LoRA that was set goes, another one comes. `source`: a path, or the tensors of a file."""
        start = clock()
        name, old = self._next_name(), self.adapter
        self.transformer.load_lora_adapter(source, prefix="transformer", adapter_name=name,
                                           low_cpu_mem_usage=low_memory)
        self.transformer.set_adapters(name)
        if old is not None:
            self.transformer.delete_adapters(old)
        self.adapter = name
        return 1000 * (clock() - start)

    def stack(self, files: list[Path]) -> None:
        """All of them at once."""
        names = []
        for file in files:
            names.append(self._next_name())
            self.transformer.load_lora_adapter(str(file), prefix="transformer", adapter_name=names[-1])
        self.transformer.set_adapters(names, weights=[1.0] * len(names))

    def fuse(self) -> float:
        """The LoRA that is set, merged into the weights (and, untimed, out of them)."""
        start = clock()
        self.transformer.fuse_lora()
        ms = 1000 * (clock() - start)
        self.transformer.unfuse_lora()
        return ms

    def hotswap(self, source) -> float:
        """The tensors of the LoRA that is set are overwritten; for LoRAs of the same layers and rank only."""
        start = clock()
        self.transformer.load_lora_adapter(source, prefix="transformer", adapter_name=self.adapter, hotswap=True)
        return 1000 * (clock() - start)

    def choose(self, name: str) -> float:
        """Both LoRAs are in the network already and one of them is switched on."""
        start = clock()
        self.transformer.set_adapters(name)
        return 1000 * (clock() - start)

    def drop_loras(self) -> None:
        if getattr(self.transformer, "peft_config", None):
            self.transformer.unload_lora()
        self.adapter = None
