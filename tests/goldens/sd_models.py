"""The tiny random models of SD 1.5 and SDXL: diffusers folders, and the same weights as checkpoints in one file.

All structural features of the published ones at toy size, with pairwise different widths, so that a mix-up fails on a
shape.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, PNDMScheduler, UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import models

L_WIDTH, G_WIDTH = 24, 40
CROSS, PLAIN, UP_CROSS, UP = "CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"


# --- components --------------------------------------------------------------

def unet_sd15(seed: int, channels: int = 4) -> UNet2DConditionModel:
    return models.randomise(UNet2DConditionModel(
        in_channels=channels, block_out_channels=(16, 32, 32, 32), layers_per_block=2, sample_size=8,
        down_block_types=(CROSS, CROSS, CROSS, PLAIN), up_block_types=(UP, UP_CROSS, UP_CROSS, UP_CROSS),
        attention_head_dim=4, cross_attention_dim=L_WIDTH, norm_num_groups=4), seed)


def unet_sdxl(seed: int, channels: int = 4) -> UNet2DConditionModel:
    return models.randomise(UNet2DConditionModel(
        in_channels=channels, block_out_channels=(16, 32, 48), layers_per_block=2, sample_size=8,
        down_block_types=(PLAIN, CROSS, CROSS), up_block_types=(UP_CROSS, UP_CROSS, UP),
        transformer_layers_per_block=(1, 2, 3), attention_head_dim=(2, 4, 6), cross_attention_dim=L_WIDTH + G_WIDTH,
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + G_WIDTH, norm_num_groups=4), seed)


def unet_refiner(seed: int) -> UNet2DConditionModel:
    return models.randomise(UNet2DConditionModel(
        block_out_channels=(16, 32, 48, 48), layers_per_block=2, sample_size=8,
        down_block_types=(PLAIN, CROSS, CROSS, PLAIN), up_block_types=(UP, UP_CROSS, UP_CROSS, UP),
        transformer_layers_per_block=2, attention_head_dim=(2, 4, 6, 6), cross_attention_dim=G_WIDTH,
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=5 * 8 + G_WIDTH, norm_num_groups=4), seed)


def clip_g(vocabulary: int, seed: int, **changes) -> CLIPTextModelWithProjection:
    config = dict(vocab_size=vocabulary, hidden_size=G_WIDTH, intermediate_size=56, num_hidden_layers=4,
                  num_attention_heads=5, max_position_embeddings=77, hidden_act="gelu", projection_dim=G_WIDTH,
                  bos_token_id=vocabulary - 2, eos_token_id=vocabulary - 1, pad_token_id=1)
    return models.randomise(CLIPTextModelWithProjection(CLIPTextConfig(**(config | changes))), seed)


def vae(seed: int, scaling: float, **changes) -> AutoencoderKL:
    return models.vae(seed, latent_channels=4, scaling_factor=scaling, shift_factor=None, use_quant_conv=True,
                      use_post_quant_conv=True, **changes)


# --- names of checkpoints in one file ----------------------------------------
# Written from the layout of CompVis', Stability's and OpenCLIP's code, independently of the C++ tables.

def ldm_names(model: UNet2DConditionModel) -> dict[str, str]:
    """diffusers module → its name in CompVis' layout."""
    per_level = model.config.layers_per_block + 1
    modules = {name.rsplit(".", 1)[0] for name in model.state_dict()}
    inside = {"norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
              "conv2": "out_layers.3", "conv_shortcut": "skip_connection"}
    names = {"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
             "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
             "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2"}
    for module in modules - set(names):
        if match := re.match(r"(down|up)_blocks\.(\d+)\.(down|up)samplers\.0\.conv", module):
            level = int(match[2])
            if match[1] == "down":
                names[module] = f"input_blocks.{per_level * (level + 1)}.0.op"
            else:
                attention = any(other.startswith(f"up_blocks.{level}.attentions") for other in modules)
                last = per_level * level + per_level - 1
                names[module] = f"output_blocks.{last}.{2 if attention else 1}.conv"
            continue
        match = re.match(r"(?:(down|up)_blocks\.(\d+)|(mid)_block)\.(resnets|attentions)\.(\d+)\.(.*)", module)
        side, level, index, attention = match[1], int(match[2] or 0), int(match[5]), match[4] == "attentions"
        if side is None:
            block = f"middle_block.{1 if attention else 2 * index}"
        else:
            first, where = (1, "input_blocks") if side == "down" else (0, "output_blocks")
            block = f"{where}.{first + per_level * level + index}.{1 if attention else 0}"
        names[module] = f"{block}.{match[6] if attention else inside[match[6]]}"
    assert len(set(names.values())) == len(names)
    return names


def ldm_unet(model: UNet2DConditionModel) -> dict[str, torch.Tensor]:
    names, out = ldm_names(model), {}
    for name, value in model.state_dict().items():
        module, suffix = name.rsplit(".", 1)
        out[f"{names[module]}.{suffix}"] = value.contiguous()
    return out


def transformers_clip(model) -> dict[str, torch.Tensor]:
    """CLIP-L as transformers 4 named it."""
    out = {}
    for name, value in model.state_dict().items():
        name = name.removeprefix("text_model.")
        out["text_model." + name] = value.contiguous()
    out["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    return out


def open_clip(model, projection: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """`projection`: of models without one of their own."""
    s = {name.removeprefix("text_model."): value for name, value in model.state_dict().items()}
    out = {"positional_embedding": s["embeddings.position_embedding.weight"],
           "token_embedding.weight": s["embeddings.token_embedding.weight"],
           "text_projection": s["text_projection.weight"].t() if projection is None else projection, "logit_scale": torch.tensor(4.6)}
    for suffix in ("weight", "bias"):
        out[f"ln_final.{suffix}"] = s[f"final_layer_norm.{suffix}"]
        for i in range(model.config.num_hidden_layers):
            old, new = f"encoder.layers.{i}.", f"transformer.resblocks.{i}."
            out[f"{new}attn.in_proj_{suffix}"] = torch.cat([s[f"{old}self_attn.{x}_proj.{suffix}"] for x in "qkv"])
            for a, b in (("ln_1", "layer_norm1"), ("ln_2", "layer_norm2"), ("attn.out_proj", "self_attn.out_proj"),
                         ("mlp.c_fc", "mlp.fc1"), ("mlp.c_proj", "mlp.fc2")):
                out[f"{new}{a}.{suffix}"] = s[f"{old}{b}.{suffix}"]
    return out


def checkpoint(unet, vae, l=None, g=None) -> dict[str, torch.Tensor]:
    def put(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {prefix + name: value.contiguous().clone() for name, value in tensors.items()}

    out = put("model.diffusion_model.", ldm_unet(unet)) | put("first_stage_model.", models.native_vae(vae))
    if g is None:
        out |= put("cond_stage_model.transformer.", transformers_clip(l))
    else:
        if l is not None:
            out |= put("conditioner.embedders.0.transformer.", transformers_clip(l))
        out |= put(f"conditioner.embedders.{0 if l is None else 1}.model.", open_clip(g))
    out["model_ema.decay"], out["betas"] = torch.tensor(0.9), torch.zeros(4)
    return out


# --- folders -----------------------------------------------------------------

def write_index(folder: Path, name: str, scheduler, parts: dict, **settings) -> None:
    index = {"_class_name": name, "_diffusers_version": "0.42.0", "scheduler": ["diffusers", type(scheduler).__name__],
             "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"], **parts, **settings}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    scheduler.save_pretrained(folder / "scheduler")


def pad_with(folder: Path, token: str) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": token}))


VP = dict(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, steps_offset=1)
CLIP, CLIP_G, TOKENIZER = ["transformers", "CLIPTextModel"], ["transformers", "CLIPTextModelWithProjection"], \
    ["transformers", "CLIPTokenizer"]


def build_sd15(out: Path, name: str, seed: int, channels: int = 4) -> None:
    folder = out / name
    folder.mkdir()
    vocabulary = models.write_clip_tokenizer(folder / "tokenizer")
    # Old configs say 2 and mean the largest id.
    text = models.clip(vocabulary, seed + 1, hidden_size=L_WIDTH, eos_token_id=2)
    unet, autoencoder = unet_sd15(seed, channels), vae(seed + 2, 0.18215)
    write_index(folder, "StableDiffusionPipeline" if channels == 4 else "StableDiffusionInpaintPipeline",
                PNDMScheduler(skip_prk_steps=True, **VP), {"text_encoder": CLIP, "tokenizer": TOKENIZER},
                safety_checker=[None, None], feature_extractor=[None, None])
    unet.save_pretrained(folder / "unet")
    text.save_pretrained(folder / "text_encoder")
    autoencoder.save_pretrained(folder / "vae")
    save_file(checkpoint(unet, autoencoder, text), out / "single" / f"{name}.safetensors")


def build_sdxl(out: Path, name: str, seed: int, channels: int = 4) -> None:
    folder = out / name
    folder.mkdir()
    vocabulary = models.write_clip_tokenizer(folder / "tokenizer")
    models.write_clip_tokenizer(folder / "tokenizer_2")
    pad_with(folder / "tokenizer_2", "!")
    l, g = models.clip(vocabulary, seed + 1, hidden_size=L_WIDTH), clip_g(vocabulary, seed + 2, eos_token_id=2)
    unet, autoencoder = unet_sdxl(seed, channels), vae(seed + 3, 0.13025)
    write_index(folder, "StableDiffusionXLPipeline" if channels == 4 else "StableDiffusionXLInpaintPipeline",
                EulerDiscreteScheduler(timestep_spacing="leading", **VP),
                {"text_encoder": CLIP, "tokenizer": TOKENIZER, "text_encoder_2": CLIP_G, "tokenizer_2": TOKENIZER},
                force_zeros_for_empty_prompt=True)
    unet.save_pretrained(folder / "unet")
    l.save_pretrained(folder / "text_encoder")
    g.save_pretrained(folder / "text_encoder_2")
    autoencoder.save_pretrained(folder / "vae")
    save_file(checkpoint(unet, autoencoder, l, g), out / "single" / f"{name}.safetensors")


def build_refiner(out: Path, name: str, seed: int) -> None:
    """Shares the VAE of tiny-sdxl, as the published one does."""
    folder = out / name
    folder.mkdir()
    vocabulary = models.write_clip_tokenizer(folder / "tokenizer_2")
    pad_with(folder / "tokenizer_2", "!")
    g = clip_g(vocabulary, 602)
    unet, autoencoder = unet_refiner(seed), vae(603, 0.13025)
    write_index(folder, "StableDiffusionXLImg2ImgPipeline", EulerDiscreteScheduler(timestep_spacing="leading", **VP),
                {"text_encoder": [None, None], "tokenizer": [None, None], "text_encoder_2": CLIP_G,
                 "tokenizer_2": TOKENIZER}, force_zeros_for_empty_prompt=False, requires_aesthetics_score=True)
    unet.save_pretrained(folder / "unet")
    g.save_pretrained(folder / "text_encoder_2")
    autoencoder.save_pretrained(folder / "vae")
    save_file(checkpoint(unet, autoencoder, None, g), out / "single" / f"{name}.safetensors")


def build_all(out: Path) -> None:
    (out / "single").mkdir()
    build_sd15(out, "tiny-sd15", 500)
    build_sd15(out, "tiny-sd15-inpaint", 520, channels=9)
    build_sdxl(out, "tiny-sdxl", 600)
    build_sdxl(out, "tiny-sdxl-inpaint", 620, channels=9)
    build_refiner(out, "tiny-refiner", 640)
