"""Whole runs of diffusers in fp32, bf16 and fp16, over eight seeds: how far low precision takes its own pictures.

Noise is drawn in fp32 and given to each run, which casts it: torch draws other numbers in other types."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file

SEEDS, STEPS, SIDE, PROMPT, NEGATIVE = 8, 4, 64, "a red circle on a blue background", "grey"
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MODELS = {"tiny-dev": dict(guidance_scale=3.5), "tiny-schnell": dict(guidance_scale=0.0),
          "tiny-sd15": dict(guidance_scale=5.0, negative_prompt=NEGATIVE),
          "tiny-sdxl": dict(guidance_scale=5.0, negative_prompt=NEGATIVE)}


def noise_of(seed: int, channels: int, scale: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, channels, SIDE // scale, SIDE // scale, generator=generator)


def packed(noise: torch.Tensor) -> torch.Tensor:
    n, c, h, w = noise.shape
    return noise.view(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(n, h // 2 * (w // 2), c * 4)


def unpacked(x: torch.Tensor, shape) -> torch.Tensor:
    n, c, h, w = shape
    return x.view(n, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(shape)


def run(folder: Path, dtype: torch.dtype, **arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noise, finished latents and pictures in 0 to 1, of all seeds, in fp32."""
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype)
    flux = hasattr(pipe, "transformer")
    scale = 2 ** (len(pipe.vae.config.block_out_channels) - 1)
    out = []
    for seed in range(SEEDS):
        noise = noise_of(seed, pipe.vae.config.latent_channels, scale)
        last = {}

        def keep(pipe, step, timestep, values):
            last["latents"] = values["latents"]
            return {}

        given = packed(noise) if flux else noise
        picture = pipe(PROMPT, num_inference_steps=STEPS, width=SIDE, height=SIDE, latents=given.to(dtype), output_type="pt",
                       callback_on_step_end=keep, callback_on_step_end_tensor_inputs=["latents"],
                       **(dict(max_sequence_length=32) if flux else {}), **arguments).images
        latents = unpacked(last["latents"], noise.shape) if flux else last["latents"]
        out.append((noise, latents.float(), picture.float().clone()))
    return tuple(torch.cat(parts) for parts in zip(*out))


def build_all(out: Path) -> None:
    for model, arguments in MODELS.items():
        tensors = {}
        for name, dtype in TYPES.items():
            noise, latents, pictures = run(out / model, dtype, **arguments)
            tensors |= {f"{name}.latents": latents, f"{name}.pictures": pictures}
            tensors["noise"] = noise
        save_file({k: v.contiguous() for k, v in tensors.items()}, out / "cases" / f"precision-{model}.safetensors",
                  {"prompt": PROMPT, "negative": arguments.get("negative_prompt", ""), "steps": str(STEPS),
                   "guidance": str(arguments["guidance_scale"])})
