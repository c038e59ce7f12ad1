"""Models and LoRAs of random bf16 weights, as shapes.py describes them. Standard library alone, and as fast as the disk:
all weights are pieces of one block of noise, with which activations keep their order of magnitude."""

from __future__ import annotations

import array
import json
import os
import random
import shutil
import struct
import time
from math import prod
from pathlib import Path

BLOCK = 1 << 20          # numbers
ONE, ZERO = 0x3F80, 0    # bf16


_NOISE: dict[int, bytes] = {}


def noise(shift: int) -> bytes:
    """Numbers of both signs whose root mean square is 0.29 · 2⁻ˢʰⁱᶠᵗ."""
    if 0 not in _NOISE:
        rng = random.Random(1)
        _NOISE[0] = array.array("H", ((rng.getrandbits(1) << 15) | (rng.randint(118, 126) << 7) | rng.getrandbits(7)
                                      for _ in range(BLOCK))).tobytes()
    if shift not in _NOISE:
        _NOISE[shift] = array.array("H", (v - (shift << 7) for v in array.array("H", _NOISE[0]))).tobytes()
    return _NOISE[shift]


def write_weights(file: Path, sizes: dict[str, list[int]], until: float = float("inf")) -> int:
    """A safetensors file; returns its tensors' bytes. Norms are 1 and biases 0. `until`: of time.monotonic()."""
    header, offset = {}, 0
    for name, size in sizes.items():
        end = offset + 2 * prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, size in sizes.items():
            if time.monotonic() > until:
                raise TimeoutError(f"{out.tell() >> 20} of {offset >> 20} MiB of {file.name} were written in time")
            if len(size) == 1:
                out.write(struct.pack("<H", ONE if name.endswith("weight") else ZERO) * size[0])
                continue
            # About 1/√row, as networks are when their training begins.
            block = memoryview(noise(max(0, (prod(size[1:]).bit_length() - 1) // 2 - 1)))
            for at in range(0, 2 * prod(size), len(block)):
                out.write(block[:2 * prod(size) - at])
    return offset


def write_model(folder: Path, small: Path, what: dict, until: float) -> int:
    """`small` lends what has no weights. Returns bytes."""
    shutil.copytree(small, folder, ignore=lambda path, names: [n for n in names if n in what["networks"] or n == "latentd.json"])
    total = 0
    for part, network in what["networks"].items():
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(network["config"]))
        total += write_weights(folder / part / network["file"], network["sizes"], until)
    return total


def write_lora(file: Path, what: dict, rank: int) -> int:
    """For the attention layers of the denoiser, named as diffusers does. Returns how many layers."""
    sizes = {}
    for key, size in what["networks"][what["denoiser"]]["sizes"].items():
        if len(size) == 2 and key.endswith(".weight") and ".attn" in key:
            layer = f"{what['denoiser']}.{key.removesuffix('.weight')}"
            sizes[f"{layer}.lora_A.weight"], sizes[f"{layer}.lora_B.weight"] = [rank, size[1]], [size[0], rank]
    write_weights(file, sizes)
    return len(sizes) // 2


def place(needed: int, otherwise: Path) -> Path:
    """Where so many bytes are written fastest: memory, where it has room for them again and again."""
    shared = Path("/dev/shm")
    try:
        room = shutil.disk_usage(shared).free
        free = int(next(line for line in open("/proc/meminfo") if line.startswith("MemAvailable")).split()[1]) << 10
        if room > 1.1 * needed and free > 2.5 * needed and os.access(shared, os.W_OK):
            return shared
    except (OSError, StopIteration):
        pass
    return otherwise
