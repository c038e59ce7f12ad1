"""Whole runs of the tiny SD 1.5 and SDXL models by diffusers' pipelines: conditioning, latents after every step,
pictures."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import torch
from diffusers import (AutoencoderKL, LatentConsistencyModelImg2ImgPipeline, LatentConsistencyModelPipeline, StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline,
                       StableDiffusionPipeline, StableDiffusionXLImg2ImgPipeline, StableDiffusionXLInpaintPipeline,
                       StableDiffusionXLPipeline, UNet2DConditionModel)
from compel import Compel, ReturnedEmbeddingsType
from PIL import Image
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from cases import save, text
from samplers import SAMPLERS, TWICE

PIPELINES = {
    ("sd15", "text"): StableDiffusionPipeline, ("sd15", "image"): StableDiffusionImg2ImgPipeline,
    ("sd15", "mask"): StableDiffusionInpaintPipeline, ("sdxl", "text"): StableDiffusionXLPipeline,
    ("sdxl", "image"): StableDiffusionXLImg2ImgPipeline, ("sdxl", "mask"): StableDiffusionXLInpaintPipeline,
    ("lcm", "text"): LatentConsistencyModelPipeline, ("lcm", "image"): LatentConsistencyModelImg2ImgPipeline,
}


def load(folder: Path, task: str, sampler: str, schedule: str):
    family = "sd15" if "sd15" in folder.name or "sd2" in folder.name else "sdxl"
    cls, extra, _ = SAMPLERS[sampler]
    config = json.loads((folder / "scheduler/scheduler_config.json").read_text())
    if schedule:
        extra = extra | {f"use_{schedule}_sigmas": True}
    parts = dict(scheduler=cls.from_config(config, **extra),
                 unet=UNet2DConditionModel.from_pretrained(folder / "unet").eval(),
                 vae=AutoencoderKL.from_pretrained(folder / "vae").eval())
    for number, kind in (("", CLIPTextModel), ("_2", CLIPTextModelWithProjection)):
        if number and family == "sd15":
            continue
        there = (folder / f"text_encoder{number}").exists()
        parts[f"text_encoder{number}"] = kind.from_pretrained(folder / f"text_encoder{number}").eval() if there else None
        parts[f"tokenizer{number}"] = CLIPTokenizer.from_pretrained(folder / f"tokenizer{number}") if there else None
        if there and not hasattr(parts[f"text_encoder{number}"], "text_model"):
            # diffusers looks for the final norm where transformers had it up to 4.
            object.__setattr__(parts[f"text_encoder{number}"], "text_model", parts[f"text_encoder{number}"])
    index = json.loads((folder / "model_index.json").read_text())
    if family == "sd15":
        parts |= dict(safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    else:
        parts["force_zeros_for_empty_prompt"] = index["force_zeros_for_empty_prompt"]
        if task != "text":
            parts["requires_aesthetics_score"] = index.get("requires_aesthetics_score", False)
        parts["add_watermarker"] = False
    if "lcm" in folder.name:
        family = "lcm"
    pipe = PIPELINES[family, task](**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def step_ends(sampler: str, index: int, count: int) -> bool:
    """Whether a user's step ends with that evaluation."""
    if sampler == "pndm":
        return index > 0 or count == 1
    return index % 2 == 1 or index == count - 1 if sampler in TWICE else True


def embed(pipe, prompt: str, negative: str, inversions=None) -> dict[str, torch.Tensor]:
    """Both prompts by compel, in place of the pipeline's own text."""
    two = hasattr(pipe, "text_encoder_2")
    manager = inversions(pipe) if inversions else None
    compel = Compel(
        [pipe.tokenizer, pipe.tokenizer_2] if two else pipe.tokenizer,
        [pipe.text_encoder, pipe.text_encoder_2] if two else pipe.text_encoder, truncate_long_prompts=False,
        textual_inversion_manager=manager, requires_pooled=[False, True] if two else False,
        returned_embeddings_type=ReturnedEmbeddingsType.PENULTIMATE_HIDDEN_STATES_NON_NORMALIZED if two
        else ReturnedEmbeddingsType.LAST_HIDDEN_STATES_NORMALIZED)
    results = [compel(prompt), compel(negative), compel("")]
    hidden, pooled = zip(*results) if two else (results, (None, None))
    longest = max(x.shape[1] for x in hidden)
    hidden = [torch.cat([x, *[hidden[2]] * ((longest - x.shape[1]) // 77)], 1) for x in hidden]
    out = dict(prompt_embeds=hidden[0], negative_prompt_embeds=hidden[1])
    return out | (dict(pooled_prompt_embeds=pooled[0], negative_pooled_prompt_embeds=pooled[1]) if two else {})


def to_vae(pipe, latents: torch.Tensor) -> torch.Tensor:
    """As SDXL's pipelines do it; those of SD 1 know no mean."""
    config = pipe.vae.config
    if not hasattr(pipe, "text_encoder_2") or config.latents_mean is None:
        return latents / config.scaling_factor
    mean, std = (torch.tensor(x).view(1, -1, 1, 1) for x in (config.latents_mean, config.latents_std))
    return latents * std / config.scaling_factor + mean


def run(out: Path, name: str, model: str, *, width: int, height: int, steps: int, seeds: list[int],
        prompt: str = "a photo of a red house, \u00e9t\u00e9", negative: str | None = None, guidance: float = 7.5,
        sampler: str = "euler", schedule: str = "", init: np.ndarray | None = None, mask: np.ndarray | None = None,
        latents: list[torch.Tensor] | None = None, strength: float | None = None, patch=None,
        syntax: str = "", written: dict[str, torch.Tensor] | None = None, embeddings: str = "", inversions=None,
        **more) -> list[torch.Tensor]:
    folder = out / model
    task = "mask" if mask is not None else "image" if init is not None or latents is not None else "text"
    tensors, finished, count = {"prompt": text(prompt)}, [], 0
    for i, seed in enumerate(seeds):
        pipe = load(folder, task, sampler, schedule)
        if patch is not None:
            patch(pipe)
        seen = []

        def after(_, index, t, values):
            seen.append(values["latents"].clone())
            return {}

        arguments = dict(prompt=prompt, **({} if "lcm" in model else {"negative_prompt": negative}), num_inference_steps=steps, guidance_scale=guidance,
                         generator=torch.Generator().manual_seed(seed), output_type="latent",
                         callback_on_step_end=after, **more)
        if syntax == "compel":
            arguments |= dict(prompt=None, negative_prompt=None) | embed(pipe, prompt, negative, inversions)
        if "height" in inspect.signature(pipe.__call__).parameters:
            arguments |= dict(height=height, width=width)
        if task != "text":
            arguments["image"] = latents[i] if latents is not None else Image.fromarray(init).resize(
                (width, height), Image.Resampling.LANCZOS)
        if mask is not None:
            arguments["mask_image"] = Image.fromarray(mask)
        if strength is not None:
            arguments["strength"] = strength
        result = pipe(**arguments).images
        kept = [x for k, x in enumerate(seen) if step_ends(sampler, k, len(seen))]
        assert torch.equal(kept[-1], result)
        finished.append(result)
        for k, x in enumerate(kept):
            tensors[f"latents.{i}.{k + 1}"] = x
        count = len(kept)
        picture = pipe.vae.decode(to_vae(pipe, result)).sample
        tensors[f"pixels.{i}"] = ((picture / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)[0].permute(1, 2, 0)
        tensors[f"seed.{i}"] = torch.tensor([seed])
        if latents is not None:
            tensors[f"from.{i}"] = latents[i]
    for key, value in (("negative", negative), ("prompt_2", more.get("prompt_2")),
                       ("negative_2", more.get("negative_prompt_2"))):
        if value is not None:
            tensors[key] = text(value)
    for key, value in (("init_image", init), ("mask_image", mask)):
        if value is not None:
            tensors[key] = torch.from_numpy(value)
    tensors |= written or {}
    settings = {k: v for k, v in more.items() if "prompt" not in k} | ({} if strength is None else {"strength": strength})
    settings = {k: ",".join(map(str, v)) if isinstance(v, tuple) else v for k, v in settings.items()}
    save(out, name, tensors, model=model, width=width, height=height, steps=steps, count=len(seeds), ran=count,
         guidance=guidance, sampler=sampler, schedule=schedule,
         syntax=syntax, embeddings=embeddings, **settings)
    return finished


def write_all(out: Path) -> None:
    rng = np.random.default_rng(8)
    init = rng.integers(0, 256, (100, 60, 3), dtype=np.uint8)
    ramp = np.linspace(0, 255, 90)[None, :, None] + np.linspace(-60, 60, 70)[:, None, None]
    mask = np.broadcast_to(ramp, (70, 90, 3)).clip(0, 255).astype(np.uint8).copy()
    even, odd = dict(width=80, height=48), dict(width=72, height=56)
    negative = "blurry, night"

    run(out, "sd15-text", "tiny-sd15", **even, steps=5, seeds=[11, 12], negative=negative, sampler="pndm")
    run(out, "sd15-odd", "tiny-sd15", **odd, steps=4, seeds=[13], guidance=5.0, sampler="dpmpp_2m", schedule="karras",
        clip_skip=1)
    run(out, "sd15-ancestral", "tiny-sd15", **odd, steps=4, seeds=[2 ** 40 + 5], guidance=1.0, sampler="euler_a")
    run(out, "sd15-rescaled", "tiny-sd15", **even, steps=4, seeds=[14], negative=negative, sampler="heun",
        guidance_rescale=0.7)
    run(out, "sd15-image", "tiny-sd15", **even, steps=7, seeds=[15, 16], negative=negative, sampler="ddim", init=init,
        strength=0.6)
    run(out, "sd15-image-unipc", "tiny-sd15", **odd, steps=6, seeds=[17], sampler="unipc", init=init, strength=0.7,
        clip_skip=2)
    run(out, "sd15-blend", "tiny-sd15", **even, steps=5, seeds=[18, 19], negative=negative, init=init, mask=mask,
        strength=0.8)
    run(out, "sd15-blend-all", "tiny-sd15", **odd, steps=4, seeds=[20], init=init, mask=mask, strength=1.0,
        sampler="euler_a")
    for sampler in ("heun", "pndm"):      # two evaluations in all steps, and in the first
        run(out, f"sd15-blend-{sampler}", "tiny-sd15", **odd, steps=5, seeds=[26], init=init, mask=mask, strength=0.8,
            sampler=sampler)
    for sampler in ("lms", "pndm"):       # which enter the list out of step
        run(out, f"sd15-image-{sampler}", "tiny-sd15", **odd, steps=7, seeds=[27], init=init, strength=0.6,
            sampler=sampler)
    run(out, "sdxl-blend-kdpm_2_a", "tiny-sdxl", **odd, steps=4, seeds=[28], init=init, mask=mask, strength=0.8,
        sampler="kdpm_2_a")
    run(out, "sd15-concat", "tiny-sd15-inpaint", **even, steps=4, seeds=[21, 22], negative=negative, init=init,
        mask=mask, strength=1.0)
    run(out, "sd15-concat-some", "tiny-sd15-inpaint", **odd, steps=6, seeds=[23], init=init, mask=mask, strength=0.7,
        sampler="dpmpp_2m")

    weighted = "a (red)1.4 house, (trees)0.6 by the road++. " + "birds sing in the night, a blue car on the road. " * 6
    run(out, "sd15-compel", "tiny-sd15", **even, steps=3, seeds=[24], prompt=weighted, negative="(blurry)1.3 night-",
        syntax="compel")
    run(out, "sdxl-compel", "tiny-sdxl", **even, steps=3, seeds=[25], prompt="a (red house)1.3 (trees)0.5",
        negative=weighted, syntax="compel")

    run(out, "sdxl-text", "tiny-sdxl", **even, steps=5, seeds=[31, 32], guidance=5.0)
    run(out, "sdxl-odd", "tiny-sdxl", **odd, steps=4, seeds=[33], guidance=6.0, negative=negative, sampler="dpmpp_2m_sde",
        schedule="karras", clip_skip=1, prompt_2="a blue car! 4k", negative_prompt_2="tree", guidance_rescale=0.4,
        original_size=(640, 512), crops_coords_top_left=(16, 8), target_size=(96, 128))
    run(out, "sdxl-one-pass", "tiny-sdxl", **even, steps=3, seeds=[34], guidance=0.0, sampler="lcm")
    run(out, "sdxl-image", "tiny-sdxl", **odd, steps=6, seeds=[35], guidance=5.0, negative="", init=init, strength=0.5,
        sampler="deis")
    run(out, "sdxl-blend", "tiny-sdxl", **even, steps=5, seeds=[36], guidance=5.0, init=init, mask=mask, strength=0.7)
    run(out, "sdxl-concat", "tiny-sdxl-inpaint", **odd, steps=5, seeds=[37], guidance=5.0, negative=negative, init=init,
        mask=mask, strength=0.9999)

    run(out, "refiner-image", "tiny-refiner", **odd, steps=7, seeds=[41], guidance=5.0, negative=negative, init=init,
        strength=0.5, aesthetic_score=7.5, negative_aesthetic_score=2.0, original_size=(512, 640),
        crops_coords_top_left=(4, 12))
    for sampler, schedule in (("euler", ""), ("dpmpp_2m", "karras")):
        name = f"hand-over-{sampler}"
        latents = run(out, f"{name}-base", "tiny-sdxl", **even, steps=10, seeds=[42, 43], guidance=5.0, sampler=sampler,
                      schedule=schedule, denoising_end=0.7)
        run(out, f"{name}-refiner", "tiny-refiner", **even, steps=10, seeds=[42, 43], guidance=5.0, sampler=sampler,
            schedule=schedule, latents=latents, denoising_start=0.7)
