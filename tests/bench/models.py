"""Models, LoRAs and inputs of random numbers, in files, for the benchmarks.

A model is the demo model with another transformer: its text encoders, VAE and schedule stay, so that every
folder is one that the daemon serves.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file

WEIGHTS = Path("transformer/diffusion_pytorch_model.safetensors")
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass
class Shape:
    """Of a FLUX.1 transformer between the demo model's text encoders and VAE."""
    heads: int
    double: int
    single: int
    head_channels: int = 128
    axes: tuple[int, int, int] = (16, 56, 56)

    def config(self, demo: Path) -> dict:
        config = json.loads((demo / "transformer/config.json").read_text())
        return config | dict(num_attention_heads=self.heads, attention_head_dim=self.head_channels,
                             axes_dims_rope=list(self.axes),
                             num_layers=self.double, num_single_layers=self.single, guidance_embeds=True)


def meta_transformer(config: dict) -> FluxTransformer2DModel:
    """Names and shapes without memory."""
    with torch.device("meta"):
        return FluxTransformer2DModel.from_config(config)


def write_model(folder: Path, demo: Path, shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 1) -> int:
    """A model with random weights; returns the number of the transformer's parameters."""
    shutil.copytree(demo, folder, ignore=lambda path, _: ["transformer"] if Path(path) == demo else [])
    (folder / "transformer").mkdir()
    config = shape.config(demo)
    (folder / "transformer/config.json").write_text(json.dumps(config))
    sizes = {name: tensor.shape for name, tensor in meta_transformer(config).state_dict().items()}
    write_safetensors(folder / WEIGHTS, sizes, dtype, random_values(seed))
    return sum(size.numel() for size in sizes.values())


def random_values(seed: int):
    """Weights by name and shape, with which activations keep their order of magnitude."""
    generator = torch.Generator().manual_seed(seed)

    def values(name: str, size: torch.Size) -> torch.Tensor:
        noise = torch.randn(size, generator=generator)
        if len(size) == 1:
            return noise.mul_(0.1).add_(1.0 if name.endswith("weight") else 0.0)
        return noise.mul_(0.9 / size[1:].numel() ** 0.5)

    return values


def write_safetensors(file: Path, sizes: dict[str, torch.Size], dtype: torch.dtype, values) -> None:
    """One tensor in memory at a time. The data starts at a multiple of 16 bytes."""
    header, offset = {}, 0
    for name, size in sizes.items():
        end = offset + size.numel() * dtype.itemsize
        header[name] = {"dtype": TYPES[dtype], "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    with file.open("wb") as out:
        out.write(padded_header(json.dumps(header).encode(), 0))
        for name, size in sizes.items():
            out.write(values(name, size).to(dtype).view(torch.uint8).numpy().data)


def padded_header(text: bytes, remainder: int) -> bytes:
    """Length and text; what follows starts at an offset that is `remainder` modulo 16."""
    text = text.rstrip()
    text += b" " * ((remainder - 8 - len(text)) % 16)
    return len(text).to_bytes(8, "little") + text


def shift_model(folder: Path, source: Path) -> None:
    """The same model, but the tensors' data starts at 8 modulo 16, as the format allows."""
    shutil.copytree(source, folder, ignore=lambda path, _: [WEIGHTS.name] if path.endswith("/transformer") else [])
    with (source / WEIGHTS).open("rb") as old, (folder / WEIGHTS).open("wb") as new:
        length = int.from_bytes(old.read(8), "little")
        new.write(padded_header(old.read(length), 8))
        shutil.copyfileobj(old, new, 8 << 20)


def convert_model(folder: Path, source: Path, dtype: torch.dtype) -> None:
    """The same weights in another type."""
    shutil.copytree(source, folder, ignore=lambda path, _: [WEIGHTS.name] if path.endswith("/transformer") else [])
    state = load_file(source / WEIGHTS)
    write_safetensors(folder / WEIGHTS, {k: v.shape for k, v in state.items()}, dtype, lambda name, _: state[name])


def write_lora(file: Path, model: Path, rank: int, seed: int) -> None:
    """For all linear layers of the transformer, in bf16, named as PEFT and diffusers do."""
    network = meta_transformer(json.loads((model / "transformer/config.json").read_text()))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear):
            down = torch.randn(rank, module.in_features, generator=generator) / module.in_features ** 0.5
            up = 0.1 * torch.randn(module.out_features, rank, generator=generator) / rank ** 0.5
            tensors[f"transformer.{name}.lora_A.weight"] = down.bfloat16()
            tensors[f"transformer.{name}.lora_B.weight"] = up.bfloat16()
    save_file(tensors, file)


def write_inputs(file: Path, model: Path, side: int, tokens: int, seed: int = 2) -> None:
    """What goes into a run: noise for a square picture, and the text as the encoders would give it."""
    config = json.loads((model / "transformer/config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    save_file({
        "noise": torch.randn(1, 16, side // 8, side // 8, generator=generator),
        "t5": torch.randn(1, tokens, config["joint_attention_dim"], generator=generator),
        "pooled": torch.randn(1, config["pooled_projection_dim"], generator=generator),
    }, file)


def write_noop_weights(file: Path) -> None:
    save_file({"weight": torch.zeros(16)}, file)
