"""The picture autoencoder: FLUX geometry (factor 8, 16 channels) at toy width.

Three steps: encoder and decoder together on crops, then on whole pictures, then
the decoder alone over frozen latents.  Before the last step the latent channels
are rescaled to equal variance, so that one scaling factor fits them all.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from PIL import Image

import shapes

CONFIG = dict(
    in_channels=3, out_channels=3, latent_channels=16, sample_size=shapes.SIDE,
    down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    block_out_channels=(16, 16, 32, 64), layers_per_block=1,
    norm_num_groups=2,              # more groups on so few channels would erase flat colour
    mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False,
    force_upcast=False,
)
KL_WEIGHT = 2e-4
SCALING, SHIFT = 0.3611, 0.1159     # FLUX's own latent factors
FULL = shapes.SIDE
# (steps, crop side, batch, first learning rate, last learning rate)
JOINT = ((700, 32, 24, 3e-3, 3e-3), (600, 64, 12, 3e-3, 1.5e-3), (3000, FULL, 4, 2e-3, 5e-5))


def to_tensor(images: list[Image.Image]) -> torch.Tensor:
    """PIL pictures as a batch in [-1, 1]."""
    stacked = np.stack([np.asarray(image, dtype=np.float32) for image in images])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2) / 127.5 - 1.0


def recolour(rng: random.Random, image: Image.Image) -> Image.Image:
    """Exchanges the channels and stretches each between two random levels."""
    channels = list(image.split())
    rng.shuffle(channels)
    for i, channel in enumerate(channels):
        low, high = rng.uniform(0, 120), rng.uniform(135, 255)
        if rng.random() < 0.3:
            low, high = high, low
        channels[i] = channel.point([round(low + (high - low) * v / 255) for v in range(256)])
    return Image.merge("RGB", channels)


def training_picture(rng: random.Random) -> Image.Image:
    """A plain picture or, less often, one in a style or in colours of no palette."""
    draw = rng.random()
    if draw < 0.15:
        return shapes.sample(rng, "dusk", rng.random())[1]
    if draw < 0.25:
        return shapes.sample(rng, "checker")[1]
    image = shapes.sample(rng)[1]
    return recolour(rng, image) if draw < 0.50 else image


def _crops(rng: random.Random, count: int, side: int) -> torch.Tensor:
    """Crops of fresh pictures; of two candidate places the busier one is usually taken."""
    out = []
    for image in to_tensor([training_picture(rng) for _ in range(count)]):
        best = None
        for _ in range(1 if side == FULL else 2):
            y, x = rng.randint(0, FULL - side), rng.randint(0, FULL - side)
            crop = image[:, y:y + side, x:x + side]
            if best is None or (rng.random() < 0.8 and crop.std() > best.std()):
                best = crop
        out.append(best)
    return torch.stack(out)


def create(seed: int) -> AutoencoderKL:
    torch.manual_seed(seed)
    vae = AutoencoderKL(**CONFIG)
    with torch.no_grad():
        for name, module in vae.named_modules():
            if not isinstance(module, torch.nn.Conv2d):
                continue
            if name.endswith("conv2"):
                module.weight.mul_(0.3)
            elif name.endswith(("conv_in", "conv_shortcut", "conv")):
                module.weight.mul_(1.7)
        vae.encoder.conv_out.bias[16:].fill_(-5.0)
    return vae.to(memory_format=torch.channels_last)


class Average:
    """Exponential moving average of a module's parameters."""

    def __init__(self, module: torch.nn.Module, decay: float):
        self.decay, self.steps = decay, 0
        self.values = {k: v.detach().clone() for k, v in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: torch.nn.Module) -> None:
        self.steps += 1
        decay = min(self.decay, self.steps / (self.steps + 9))
        for name, value in module.named_parameters():
            self.values[name].lerp_(value, 1 - decay)

    @torch.no_grad()
    def copy_to(self, module: torch.nn.Module) -> None:
        for name, value in module.named_parameters():
            value.copy_(self.values[name])


def _edge_loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (F.l1_loss(a[..., 1:] - a[..., :-1], b[..., 1:] - b[..., :-1])
            + F.l1_loss(a[..., 1:, :] - a[..., :-1, :], b[..., 1:, :] - b[..., :-1, :]))


def train_joint(vae: AutoencoderKL, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    optimiser = torch.optim.AdamW(vae.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=1e-4)
    average = Average(vae, 0.995)
    for steps, side, batch, first, last in JOINT:
        for step in range(steps):
            rate = last + (first - last) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimiser.param_groups:
                group["lr"] = rate
            target = _crops(rng, batch, side)
            posterior = vae.encode(target).latent_dist
            output = vae.decode(posterior.sample()).sample
            divergence = posterior.kl().mean() / posterior.mean[0].numel()
            loss = (F.l1_loss(output, target) + 2 * F.mse_loss(output, target)
                    + (0.7 * _edge_loss(output, target) if side == FULL else 0.0)
                    + KL_WEIGHT * divergence)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimiser.step()
            average.update(vae)
            if step % 50 == 0:
                print(f"vae {side}px step {step} loss {loss.item():.4f} kl {divergence.item():.2f}", flush=True)
    average.copy_to(vae)


@torch.no_grad()
def equalise(vae: AutoencoderKL, seed: int) -> None:
    """Gives all latent channels the same mean and spread: those that FLUX's two factors undo."""
    rng = random.Random(seed)
    latents = torch.cat([vae.encode(_crops(rng, 8, FULL)).latent_dist.mean for _ in range(40)])
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    print("channel spread", [round(s, 2) for s in std.tolist()], flush=True)
    gain = SCALING * std.clamp(min=float(std.median()) * 0.5)     # an idle channel stays quiet
    head, entry = vae.encoder.conv_out, vae.decoder.conv_in
    # new = (old - mean) / gain + SHIFT, and the decoder's first layer takes it back.
    head.weight[:16].div_(gain.view(-1, 1, 1, 1))
    head.bias[:16].sub_(mean).div_(gain).add_(SHIFT)
    head.bias[16:].sub_(2 * gain.log())
    entry.bias.add_((entry.weight.sum((2, 3)) * (mean - gain * SHIFT)).sum(1))
    entry.weight.mul_(gain.view(1, -1, 1, 1))
    vae.register_to_config(scaling_factor=SCALING, shift_factor=SHIFT)


def train_decoder(vae: AutoencoderKL, seed: int, steps: int, batch: int = 4, rate: float = 1.5e-3) -> None:
    """Sharpens the decoder over the (now frozen) latents, slightly disturbed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    decoder = vae.decoder
    optimiser = torch.optim.AdamW(decoder.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=1e-4)
    average = Average(decoder, 0.995)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50) * (0.03 + 0.97 * (1 - step / steps))
        target = _crops(rng, batch, FULL)
        with torch.no_grad():
            latents = vae.encode(target).latent_dist.mean
            latents = latents + torch.randn_like(latents) * torch.rand(batch, 1, 1, 1) * 0.12 / SCALING
        output = vae.decode(latents).sample
        loss = (F.l1_loss(output, target) + 2 * F.mse_loss(output, target)
                + _edge_loss(output, target))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimiser.step()
        average.update(decoder)
        if step % 100 == 0:
            print(f"decoder step {step} loss {loss.item():.4f}", flush=True)
    average.copy_to(decoder)


@torch.no_grad()
def psnr(vae: AutoencoderKL, seed: int = 99, count: int = 64) -> float:
    """Peak signal-to-noise ratio of encode and decode over fresh plain pictures."""
    rng = random.Random(seed)
    target = to_tensor([shapes.sample(rng)[1] for _ in range(count)])
    output = torch.cat([vae.decode(vae.encode(part).latent_dist.mean).sample for part in target.split(8)])
    error = ((output.clamp(-1, 1) - target) / 2).pow(2).mean((1, 2, 3))
    return float((-10 * error.log10()).mean())


@torch.no_grad()
def encode_pictures(vae: AutoencoderKL, images: list[Image.Image]) -> torch.Tensor:
    """Posterior means, shifted and scaled as the transformer sees them, in half precision."""
    latents = vae.encode(to_tensor(images)).latent_dist.mean
    return ((latents - vae.config.shift_factor) * vae.config.scaling_factor).half()


def load(folder: Path) -> AutoencoderKL:
    return AutoencoderKL.from_pretrained(folder).to(memory_format=torch.channels_last)


def save(vae: AutoencoderKL, folder: Path) -> None:
    vae.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("_name_or_path", None)
    file.write_text(json.dumps(config, indent=2) + "\n")
