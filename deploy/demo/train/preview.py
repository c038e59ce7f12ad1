"""Colours of unfinished pictures: a linear map from latents to RGB, fitted by least squares.

    python preview.py --model ../models/shapes-flux

Writes `latent_rgb` into the model's latentd.json and prints how much of the colours' variance the map explains.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL

import shapes
import vae as autoencoder

SEED, PICTURES = 5, 200


@torch.no_grad()
def fit(vae: AutoencoderKL) -> tuple[np.ndarray, np.ndarray, float]:
    """factors [latent channels, 3], bias [3], share of variance; colours in [-1, 1]."""
    rng = random.Random(SEED)
    pictures = autoencoder.to_tensor([shapes.sample(rng)[1] for _ in range(PICTURES)])
    latents = torch.cat([vae.encode(p[None]).latent_dist.mean for p in pictures])
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    colours = torch.nn.functional.avg_pool2d(pictures, 8)
    x = latents.permute(0, 2, 3, 1).reshape(-1, latents.shape[1]).double().numpy()
    y = colours.permute(0, 2, 3, 1).reshape(-1, 3).double().numpy()
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    solution = np.linalg.lstsq(x, y, rcond=None)[0]
    explained = 1 - ((x @ solution - y) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()
    return solution[:-1], solution[-1], float(explained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    model = parser.parse_args().model
    torch.set_num_threads(1)
    factors, bias, explained = fit(AutoencoderKL.from_pretrained(model / "vae").float().eval())
    file = model / "latentd.json"
    settings = json.loads(file.read_text())
    settings["latent_rgb"] = {"factors": np.round(factors, 4).tolist(), "bias": np.round(bias, 4).tolist()}
    file.write_text(json.dumps(settings, indent=1) + "\n")
    print(f"latent_rgb explains {explained:.1%} of the colours' variance")


if __name__ == "__main__":
    main()
