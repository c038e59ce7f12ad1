"""Names, shapes and settings of full-size networks, into one JSON file: what a machine without diffusers needs to make
models of random weights. Each is a small model of the pack with its large networks in place of the small ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import diffusers
import torch
from models import Shape
from sd_bench import SD15, SDXL, VAE

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "build/goldens"
DEMO = ROOT / "deploy/demo/models/shapes-flux"
FLUX = Shape(heads=24, double=19, single=38)
FLUX_VAE = VAE | dict(latent_channels=16)


def network(kind: type, config: dict) -> dict:
    with torch.device("meta"):
        module = kind.from_config(config)
    return {"config": json.loads(module.to_json_string()),
            "sizes": {name: list(tensor.shape) for name, tensor in module.state_dict().items()}}


def settings(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def fit(config: dict, small: Path) -> dict:
    """What joins a UNet to the small model's text encoders stays theirs."""
    ours = settings(small / "unet")
    joints = ("cross_attention_dim", "projection_class_embeddings_input_dim", "addition_time_embed_dim")
    return config | {key: ours[key] for key in joints if key in config}


def vae(config: dict, small: Path) -> dict:
    ours = settings(small / "vae")
    return network(diffusers.AutoencoderKL, config | {key: ours[key] for key in ("scaling_factor", "shift_factor",
                                                                                "use_quant_conv", "use_post_quant_conv")
                                                      if key in ours})


def main(out: Path) -> None:
    unet = diffusers.UNet2DConditionModel
    sd15, sdxl = GOLDENS / "tiny-sd15", GOLDENS / "tiny-sdxl"
    models = {
        "FLUX.1-dev": {"small": "deploy/demo/models/shapes-flux", "side": 1024, "networks": {
            "transformer": network(diffusers.FluxTransformer2DModel, FLUX.config(DEMO)),
            "vae": vae(FLUX_VAE, DEMO)}},
        "SDXL": {"small": "goldens/tiny-sdxl", "side": 1024, "networks": {
            "unet": network(unet, fit(SDXL, sdxl)), "vae": vae(VAE, sdxl)}},
        "SD 1.5": {"small": "goldens/tiny-sd15", "side": 512, "networks": {
            "unet": network(unet, fit(SD15, sd15)), "vae": vae(VAE, sd15)}},
    }
    out.write_text(json.dumps(models))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
