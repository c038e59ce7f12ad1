"""Names, shapes and settings of full-size models' networks, into one JSON file: what a machine without diffusers needs to
write models of random weights (random_models.py). Tokenizers and noise schedules are those of a small model of the pack.
Each model is there a second time, scaled down, so that the same path runs on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import diffusers
import torch
import transformers
from models import Shape
from sd_bench import SD15, SDXL, VAE

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deploy/demo/models/shapes-flux"
GOLDENS = ROOT / "build/goldens"

CLIP_L = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768)
CLIP_G = dict(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, projection_dim=1280)
T5_XXL = dict(d_model=4096, d_ff=10240, d_kv=64, num_heads=64, num_layers=24, num_decoder_layers=24)
CLIP_L_SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=1, projection_dim=64)
CLIP_G_SMALL = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2, projection_dim=128)
T5_SMALL = dict(d_model=256, d_ff=512, d_kv=64, num_heads=4, num_layers=2, num_decoder_layers=2)

FLUX_JOINTS = dict(in_channels=64, joint_attention_dim=4096, pooled_projection_dim=768)
FLUX_JOINTS_SMALL = FLUX_JOINTS | dict(joint_attention_dim=256, pooled_projection_dim=64)
SD15_SMALL = SD15 | dict(cross_attention_dim=64, block_out_channels=[64, 128, 256, 256])
SDXL_SMALL = SDXL | dict(cross_attention_dim=192, block_out_channels=[64, 128, 256], attention_head_dim=[1, 2, 4],
                         transformer_layers_per_block=[1, 1, 2], projection_class_embeddings_input_dim=128 + 6 * 256)
VAE_SMALL = VAE | dict(block_out_channels=[32, 64, 64, 64])


def network(kind: type, config: dict, file: str) -> dict:
    with torch.device("meta"):
        module = kind.from_config(config) if issubclass(kind, diffusers.ModelMixin) else kind(config)
    text = module.to_json_string() if hasattr(module, "to_json_string") else module.config.to_json_string()
    shared = {"encoder.embed_tokens.weight"}    # T5's table, which files have once
    return {"file": file, "config": json.loads(text),
            "sizes": {name: list(tensor.shape) for name, tensor in module.state_dict().items()
                      if tensor.is_floating_point() and name not in shared}}


def diffusion(kind: type, config: dict) -> dict:
    return network(kind, config, "diffusion_pytorch_model.safetensors")


def encoder(kind: type, small: Path, size: dict) -> dict:
    """Its vocabulary and special tokens are the small model's, whose tokenizer it gets."""
    ours = json.loads((small / "config.json").read_text())
    return network(kind, kind.config_class(**(ours | size)), "model.safetensors")


def vae(config: dict, small: Path) -> dict:
    ours = json.loads((small / "vae/config.json").read_text())
    kept = ("scaling_factor", "shift_factor", "use_quant_conv", "use_post_quant_conv", "force_upcast")
    return diffusion(diffusers.AutoencoderKL, config | {key: ours[key] for key in kept})


def flux(shape: Shape, joints: dict, decoder: dict, clip: dict, t5: dict, side: int) -> dict:
    return {"small": "deploy/demo/models/shapes-flux", "side": side, "denoiser": "transformer",
            "flags": ["--guidance", "3.5", "--max-sequence-length", "512"],
            "networks": {"transformer": diffusion(diffusers.FluxTransformer2DModel, shape.config(DEMO) | joints),
                         "vae": vae(decoder | dict(latent_channels=16), DEMO),
                         "text_encoder": encoder(transformers.CLIPTextModel, DEMO / "text_encoder", clip),
                         "text_encoder_2": encoder(transformers.T5EncoderModel, DEMO / "text_encoder_2", t5)}}


def sd(small: str, config: dict, decoder: dict, encoders: list, side: int) -> dict:
    folder = GOLDENS / small
    names = ["text_encoder", "text_encoder_2"]
    return {"small": f"goldens/{small}", "side": side, "denoiser": "unet", "flags": ["--guidance", "5"],
            "networks": {"unet": diffusion(diffusers.UNet2DConditionModel, config), "vae": vae(decoder, folder)} |
                        {name: encoder(kind, folder / name, size) for name, (kind, size) in zip(names, encoders)}}


def main(out: Path) -> None:
    clip, projected = transformers.CLIPTextModel, transformers.CLIPTextModelWithProjection
    out.write_text(json.dumps({
        "full": {
            "FLUX.1-dev": flux(Shape(heads=24, double=19, single=38), FLUX_JOINTS, VAE, CLIP_L, T5_XXL, 1024),
            "SDXL": sd("tiny-sdxl", SDXL, VAE, [(clip, CLIP_L), (projected, CLIP_G)], 1024),
            "SD 1.5": sd("tiny-sd15", SD15, VAE, [(clip, CLIP_L)], 512)},
        "scaled": {
            "FLUX.1-dev": flux(Shape(heads=2, double=2, single=4), FLUX_JOINTS_SMALL, VAE_SMALL, CLIP_L_SMALL, T5_SMALL, 256),
            "SDXL": sd("tiny-sdxl", SDXL_SMALL, VAE_SMALL, [(clip, CLIP_L_SMALL), (projected, CLIP_G_SMALL)], 256),
            "SD 1.5": sd("tiny-sd15", SD15_SMALL, VAE_SMALL, [(clip, CLIP_L_SMALL)], 256)}}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
