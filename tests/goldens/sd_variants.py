"""Relatives of SD 1.5 and SDXL with other networks, tiny, and whole runs of them: Stable Diffusion 2, latent consistency
models, and networks of which parts were left out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from diffusers import (DDIMScheduler, EulerDiscreteScheduler, LCMScheduler, PNDMScheduler, UNet2DConditionModel)
from safetensors.torch import save_file

import models
import sd_runs
from sd_models import (CLIP, CLIP_G, CROSS, G_WIDTH, L_WIDTH, PLAIN, TOKENIZER, UP, UP_CROSS, VP, clip_g, ldm_unet,
                       open_clip, pad_with, vae, write_index)

H_WIDTH = 1024      # by which Stable Diffusion 2 is known


def unet_sd2(seed: int) -> UNet2DConditionModel:
    return models.randomise(UNet2DConditionModel(
        block_out_channels=(16, 32, 32, 32), layers_per_block=2, sample_size=12,
        down_block_types=(CROSS, CROSS, CROSS, PLAIN), up_block_types=(UP, UP_CROSS, UP_CROSS, UP_CROSS),
        attention_head_dim=(2, 4, 8, 8), cross_attention_dim=H_WIDTH, use_linear_projection=True, norm_num_groups=4), seed)


def unet_lcm(seed: int) -> UNet2DConditionModel:
    return models.randomise(UNet2DConditionModel(
        block_out_channels=(16, 32), layers_per_block=1, sample_size=8, down_block_types=(CROSS, PLAIN),
        up_block_types=(UP, UP_CROSS), attention_head_dim=4, cross_attention_dim=L_WIDTH, time_cond_proj_dim=22,
        norm_num_groups=4), seed)


def unet_without_middle(seed: int) -> UNet2DConditionModel:
    return models.randomise(UNet2DConditionModel(
        block_out_channels=(16, 32, 48), layers_per_block=(1, 3, 2), sample_size=8,
        down_block_types=(CROSS, CROSS, CROSS), mid_block_type=None, up_block_types=(UP_CROSS, UP, UP_CROSS),
        attention_head_dim=4, cross_attention_dim=L_WIDTH, norm_num_groups=4), seed)


def unet_pruned(seed: int) -> UNet2DConditionModel:
    """As SSD-1B: other numbers of transformer blocks behind each resnet, on the way up than on the way down."""
    return models.randomise(UNet2DConditionModel(
        block_out_channels=(16, 32, 48), layers_per_block=2, sample_size=8, down_block_types=(PLAIN, CROSS, CROSS),
        mid_block_type="UNetMidBlock2D", up_block_types=(UP_CROSS, UP_CROSS, UP),
        transformer_layers_per_block=[[1, 1], [2, 1], [1, 3]],
        reverse_transformer_layers_per_block=[[2, 1, 3], [2, 1, 1], 1], attention_head_dim=(2, 4, 6),
        cross_attention_dim=L_WIDTH + G_WIDTH, use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=6 * 8 + G_WIDTH, norm_num_groups=4), seed)


def text_encoder_sd2(vocabulary: int, seed: int):
    """OpenCLIP's H, without the layer that is not read."""
    return models.clip(vocabulary, seed, hidden_size=H_WIDTH, intermediate_size=48, num_attention_heads=16,
                       num_hidden_layers=2, hidden_act="gelu", pad_token_id=0)


def build(out: Path, name: str, pipeline: str, scheduler, unet, autoencoder, texts, pad: str = "", **settings) -> None:
    folder = out / name
    folder.mkdir()
    parts = {}
    for number, (kind, text) in zip(("", "_2"), texts):
        models.write_clip_tokenizer(folder / f"tokenizer{number}")
        if pad or number:
            pad_with(folder / f"tokenizer{number}", "!")
        text.save_pretrained(folder / f"text_encoder{number}")
        parts |= {f"text_encoder{number}": kind, f"tokenizer{number}": TOKENIZER}
    write_index(folder, pipeline, scheduler, parts, **settings)
    unet.save_pretrained(folder / "unet")
    autoencoder.save_pretrained(folder / "vae")


def checkpoint_sd2(unet, autoencoder, text) -> dict[str, torch.Tensor]:
    """As Stability's: with the last layer and the projection, which nothing reads."""
    def put(prefix, tensors):
        return {prefix + name: value.contiguous().clone() for name, value in tensors.items()}

    tensors = open_clip(text, projection=torch.ones(H_WIDTH, H_WIDTH))
    last = f"transformer.resblocks.{text.config.num_hidden_layers - 1}."
    extra = {name.replace(last, f"transformer.resblocks.{text.config.num_hidden_layers}."): value + 1
             for name, value in tensors.items() if name.startswith(last)}
    return (put("model.diffusion_model.", ldm_unet(unet)) | put("first_stage_model.", models.native_vae(autoencoder))
            | put("cond_stage_model.model.", tensors | extra))


def build_all(out: Path) -> None:
    vocabulary = len(json.loads((out / "tiny-sd15/tokenizer/vocab.json").read_text()))  # the same for all
    text = text_encoder_sd2(vocabulary, 701)
    unet, autoencoder = unet_sd2(700), vae(702, 0.18215)
    build(out, "tiny-sd2", "StableDiffusionPipeline", DDIMScheduler(prediction_type="v_prediction", clip_sample=False,
                                                                    set_alpha_to_one=False, **VP),
          unet, autoencoder, [(CLIP, text)], pad="!")
    save_file(checkpoint_sd2(unet, autoencoder, text), out / "single/tiny-sd2.safetensors")
    sd1_text = models.clip(vocabulary, 711, hidden_size=L_WIDTH)
    build(out, "tiny-sd15-lcm", "LatentConsistencyModelPipeline",
          LCMScheduler(**{key: value for key, value in VP.items() if key != "steps_offset"}), unet_lcm(710),
          vae(712, 0.18215), [(CLIP, sd1_text)])
    build(out, "tiny-sd15-no-middle", "StableDiffusionPipeline", PNDMScheduler(skip_prk_steps=True, **VP),
          unet_without_middle(720), vae(722, 0.18215), [(CLIP, sd1_text)])
    build(out, "tiny-sdxl-pruned", "StableDiffusionXLPipeline", EulerDiscreteScheduler(timestep_spacing="leading", **VP),
          unet_pruned(730),
          vae(733, 0.13025, latents_mean=[-1.6, 2.1, 0.3, 0.02], latents_std=[8.4, 5.3, 1.5, 0.7]),
          [(CLIP, models.clip(vocabulary, 731, hidden_size=L_WIDTH)), (CLIP_G, clip_g(vocabulary, 732, eos_token_id=2))],
          force_zeros_for_empty_prompt=True)


def write_all(out: Path) -> None:
    init = np.random.default_rng(9).integers(0, 256, (100, 60, 3), dtype=np.uint8)
    even, odd = dict(width=80, height=48), dict(width=72, height=56)
    negative = "blurry, night"
    sd_runs.run(out, "sd2-text", "tiny-sd2", **even, steps=4, seeds=[51, 52], negative=negative, sampler="ddim")
    sd_runs.run(out, "sd2-image", "tiny-sd2", **odd, steps=5, seeds=[53], sampler="dpmpp_2m", init=init, strength=0.6,
                clip_skip=1)
    sd_runs.run(out, "lcm-text", "tiny-sd15-lcm", **even, steps=4, seeds=[54, 55], guidance=8.5, sampler="lcm")
    sd_runs.run(out, "no-middle-text", "tiny-sd15-no-middle", **odd, steps=3, seeds=[57], negative=negative)
    sd_runs.run(out, "pruned-text", "tiny-sdxl-pruned", **odd, steps=4, seeds=[58, 59], guidance=5.0)
    sd_runs.run(out, "pruned-image", "tiny-sdxl-pruned", **even, steps=5, seeds=[60], guidance=5.0, init=init, strength=0.6)
