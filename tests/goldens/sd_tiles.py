"""MultiDiffusion on the tiny models: tiles by hand around diffusers' UNet and schedulers, one scheduler for each."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import torch

from cases import save, text
from sd_runs import load


def starts(extent: int, tile: int, overlap: int) -> list[int]:
    count = 1 if tile >= extent else math.ceil((extent - overlap) / (tile - overlap))
    return [0] if count == 1 else [math.floor(i * (extent - tile) / (count - 1)) for i in range(count)]


def weight_of(tops: list[int], lefts: list[int], row: int, column: int, height: int, width: int) -> torch.Tensor:
    weight = torch.ones(height, width)
    for begins, i, size, view in ((tops, row, height, weight), (lefts, column, width, weight.T)):
        if i > 0 and (shared := begins[i - 1] + size - begins[i]) > 0:
            view[:shared] *= torch.linspace(0, 1, shared)[:, None]
        if i + 1 < len(begins) and (shared := begins[i] + size - begins[i + 1]) > 0:
            view[size - shared:] *= torch.linspace(1, 0, shared)[:, None]
    return weight


def run(out: Path, name: str, sampler: str, *, width: int, height: int, tile_width: int, tile_height: int, overlap: int,
        steps: int, seed: int, guidance: float) -> None:
    prompt, negative = "a red house by the road", "blurry"
    pipe = load(out / "tiny-sd15", "text", sampler, "")
    positive, unwanted = pipe.encode_prompt(prompt, "cpu", 1, True, negative)
    context = torch.cat([unwanted, positive])
    h, w = height // 8, width // 8
    th, tw, ov = min(tile_height // 8, h), min(tile_width // 8, w), overlap // 8
    tops, lefts = starts(h, th, ov), starts(w, tw, ov)
    assert len(tops) > 1 and len(lefts) > 1
    generator = torch.Generator().manual_seed(seed)
    pipe.scheduler.set_timesteps(steps)
    x = torch.randn((1, 4, h, w), generator=generator) * pipe.scheduler.init_noise_sigma
    schedulers = {(i, j): copy.deepcopy(pipe.scheduler) for i in range(len(tops)) for j in range(len(lefts))}
    tensors = {"prompt": text(prompt), "negative": text(negative), "seed.0": torch.tensor([seed])}
    for k, t in enumerate(pipe.scheduler.timesteps):
        merged, weights = torch.zeros_like(x), torch.zeros(h, w)
        for (i, j), scheduler in schedulers.items():
            place = (..., slice(tops[i], tops[i] + th), slice(lefts[j], lefts[j] + tw))
            part = x[place]
            model_input = scheduler.scale_model_input(torch.cat([part] * 2), t)
            low, high = pipe.unet(model_input, t, encoder_hidden_states=context).sample.chunk(2)
            extra = {"generator": generator} if sampler == "euler_a" else {}
            stepped = scheduler.step(low + guidance * (high - low), t, part, **extra).prev_sample
            weight = weight_of(tops, lefts, i, j, th, tw)
            merged[place] += weight * stepped
            weights[place] += weight
        x = merged / weights
        tensors[f"latents.0.{k + 1}"] = x
    picture = pipe.vae.decode(x / pipe.vae.config.scaling_factor).sample
    tensors["pixels.0"] = ((picture / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)[0].permute(1, 2, 0)
    save(out, name, tensors, model="tiny-sd15", width=width, height=height, steps=steps, count=1, ran=steps,
         guidance=guidance, sampler=sampler, schedule="", syntax="", tiles=f"{tile_width},{tile_height},{overlap}")


def write_all(out: Path) -> None:
    # 3 by 2 tiles that share more than they must, unevenly.
    size = dict(width=152, height=104, tile_width=64, tile_height=72, overlap=16)
    run(out, "tiles-multistep", "dpmpp_2m", **size, steps=4, seed=61, guidance=6.0)
    run(out, "tiles-ancestral", "euler_a", **size, steps=3, seed=62, guidance=5.0)
