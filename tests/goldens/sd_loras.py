"""One LoRA of the tiny SDXL and SD 1.5 under every naming, convolutions among its layers, and what peft makes of it."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file

import cases
import sd_models
import sd_runs

RANK, ALPHA = 3, 1.5
WEIGHT = 0.8


def draw(model, seed: int, pattern: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """module → down and up, of every linear layer and convolution whose name has the pattern."""
    lora = {}
    for name, module in model.named_modules():
        if not isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)) or not re.search(pattern, name):
            continue
        shape = module.weight.shape
        down = cases.randn(seed, RANK, *shape[1:]) / shape[1:].numel() ** 0.5
        up = cases.randn(seed + 1, shape[0], RANK, *(1,) * (len(shape) - 2)) / RANK ** 0.5
        lora[name] = (down, up)
        seed += 2
    return lora


def inject(model, lora: dict) -> None:
    targets = "|".join(re.escape(name) for name in lora)
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=WEIGHT * ALPHA, target_modules=targets), model, "oracle")
    modules = dict(model.named_modules())
    for name, (down, up) in lora.items():
        modules[name].lora_A["oracle"].weight.copy_(down)
        modules[name].lora_B["oracle"].weight.copy_(up)


def write(out: Path, name: str, model: str) -> None:
    pipe = sd_runs.load(out / model, "text", "euler", "")
    loras = {"unet": draw(pipe.unet, 700, r"attn|\.ff\.|proj_|conv|time_emb|_embedding\.linear")}
    loras["text_encoder"] = draw(pipe.text_encoder, 5000, "self_attn|mlp")
    if "sdxl" in model:
        loras["text_encoder_2"] = draw(pipe.text_encoder_2, 6000, "self_attn|mlp")
    ldm = sd_models.ldm_names(pipe.unet)
    files: dict[str, dict[str, torch.Tensor]] = {"kohya": {}, "kohya-ldm": {}, "diffusers": {}}
    te = {"text_encoder": "te1" if "sdxl" in model else "te", "text_encoder_2": "te2"}
    for component, lora in loras.items():
        for module, (down, up) in lora.items():
            plain = module if component == "unet" else "text_model." + module.removeprefix("text_model.")
            for file, flat in (("kohya", plain), ("kohya-ldm", ldm[module] if component == "unet" else plain)):
                key = f"lora_{'unet' if component == 'unet' else te[component]}_{flat.replace('.', '_')}"
                files[file] |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up,
                                f"{key}.alpha": torch.tensor(ALPHA)}
            files["diffusers"] |= {f"{component}.{plain}.lora_A.weight": down,
                                   f"{component}.{plain}.lora_B.weight": up * (ALPHA / RANK)}
    for file, tensors in files.items():
        save_file({k: v.contiguous().clone() for k, v in tensors.items()}, out / "loras" / f"{name}-{file}.safetensors")

    def patch(pipe) -> None:
        for component, lora in loras.items():
            inject(getattr(pipe, component), lora)

    sd_runs.run(out, name, model, width=80, height=48, steps=3, seeds=[51], negative="blurry", guidance=5.0, patch=patch)


def write_all(out: Path) -> None:
    write(out, "sd15-lora", "tiny-sd15")
    write(out, "sdxl-lora", "tiny-sdxl")
