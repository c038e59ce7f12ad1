"""One LoRA under every naming, and what peft makes of it on the tiny models.

All spellings hold the same differences, so that one oracle serves all. Layers that a native file fuses share
their `down` matrix, as they must when a fused layer is trained.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file

import cases

RANK, ALPHA = 4, 2.0       # a scale of one half, so that a forgotten alpha shows
WEIGHT = 0.75              # the user's

DOUBLE = {
    "img_mod.lin": ["norm1.linear"], "txt_mod.lin": ["norm1_context.linear"],
    "img_attn.qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "txt_attn.qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "img_attn.proj": ["attn.to_out.0"], "txt_attn.proj": ["attn.to_add_out"],
    "img_mlp.0": ["ff.net.0.proj"], "img_mlp.2": ["ff.net.2"],
    "txt_mlp.0": ["ff_context.net.0.proj"], "txt_mlp.2": ["ff_context.net.2"],
}
SINGLE = {
    "modulation.lin": ["norm.linear"], "linear1": ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"],
    "linear2": ["proj_out"],
}
TOP = {
    "img_in": ["x_embedder"], "txt_in": ["context_embedder"], "final_layer.linear": ["proj_out"],
    "final_layer.adaLN_modulation.1": ["norm_out.linear"],
    "time_in.in_layer": ["time_text_embed.timestep_embedder.linear_1"],
}


def native_modules(model) -> dict[str, list[str]]:
    """native module → its canonical parts, in order of rows."""
    out = dict(TOP)
    for i in range(model.config.num_layers):
        out |= {f"double_blocks.{i}.{n}": [f"transformer_blocks.{i}.{c}" for c in cs] for n, cs in DOUBLE.items()}
    for i in range(model.config.num_single_layers):
        out |= {f"single_blocks.{i}.{n}": [f"single_transformer_blocks.{i}.{c}" for c in cs] for n, cs in SINGLE.items()}
    return out


def factors(module: torch.nn.Linear, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    down = cases.randn(seed, RANK, module.in_features) / module.in_features ** 0.5
    up = cases.randn(seed + 1, module.out_features, RANK) / RANK ** 0.5
    return down, up


def encoder_linears(model, pattern: str) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and re.search(pattern, n)]


def with_lora(model, lora: dict[str, tuple[torch.Tensor, torch.Tensor]], weight: float):
    """`model` with peft layers that hold `lora` (module → down, up), at scale weight · alpha / rank."""
    targets = "|".join(re.escape(n) for n in lora)
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=weight * ALPHA, target_modules=targets), model, "oracle")
    modules = dict(model.named_modules())
    for name, (down, up) in lora.items():
        modules[name].lora_A["oracle"].weight.copy_(down)
        modules[name].lora_B["oracle"].weight.copy_(up)
    return model


def text_module(name: str) -> str:
    """A module of CLIP's text model as LoRA files call it, whether or not this version nests it."""
    return name if name.startswith("text_model.") else "text_model." + name


def demo_runs(out: Path, demo: Path) -> None:
    """The demo's own LoRAs through diffusers' loader."""
    for file in sorted((demo.parents[1] / "loras").glob("*.safetensors")):
        pipe = cases.pipeline(demo.resolve())
        pipe.load_lora_weights(str(file), adapter_name="oracle")
        pipe.set_adapters("oracle", WEIGHT)
        cases.run_with(pipe, out, f"demo-lora-{file.stem}", demo.resolve(), prompt="a red circle on a blue background",
                       width=128, height=128, steps=6, seeds=[1], length=64)


def write_all(out: Path, demo: Path | None) -> None:
    if demo is not None:
        demo_runs(out, demo)
    folder = out / "tiny-dev"
    files = out / "loras"
    files.mkdir()
    pipe = cases.pipeline(folder)

    native, transformer = {}, {}
    for k, (name, parts) in enumerate(native_modules(pipe.transformer).items()):
        modules = dict(pipe.transformer.named_modules())
        down = cases.randn(1000 + 10 * k, RANK, modules[parts[0]].in_features) / modules[parts[0]].in_features ** 0.5
        ups = []
        for j, part in enumerate(parts):
            up = cases.randn(1001 + 10 * k + j, modules[part].out_features, RANK) / RANK ** 0.5
            transformer[part] = (down, up)
            if name == "final_layer.adaLN_modulation.1":
                up = torch.cat(up.chunk(2)[::-1])  # native rows are [shift | scale]
            ups.append(up)
        native[name] = (down, torch.cat(ups))
    clip = {n: factors(dict(pipe.text_encoder.named_modules())[n], 5000 + 10 * i)
            for i, n in enumerate(encoder_linears(pipe.text_encoder, r"encoder\.layers"))}
    t5 = {n: factors(dict(pipe.text_encoder_2.named_modules())[n], 8000 + 10 * i)
          for i, n in enumerate(encoder_linears(pipe.text_encoder_2, r"block\.\d+"))}

    def peft(prefix: str, layers, infix: str = "") -> dict[str, torch.Tensor]:
        """PEFT files without a config have no alpha: the scale is in `up`."""
        tensors = {}
        for name, (down, up) in layers.items():
            tensors[f"{prefix}{name}.lora_A.{infix}weight"] = down
            tensors[f"{prefix}{name}.lora_B.{infix}weight"] = up * (ALPHA / RANK)
        return tensors

    def kohya(prefix: str, layers) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, (down, up) in layers.items():
            flat = prefix + name.replace(".", "_")
            tensors |= {f"{flat}.lora_down.weight": down, f"{flat}.lora_up.weight": up,
                        f"{flat}.alpha": torch.tensor(ALPHA)}
        return tensors

    def dotted_kohya(prefix: str, layers) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, (down, up) in layers.items():
            tensors |= {f"{prefix}{name}.lora_down.weight": down, f"{prefix}{name}.lora_up.weight": up,
                        f"{prefix}{name}.alpha": torch.tensor(ALPHA)}
        return tensors

    clip_named = {text_module(n): v for n, v in clip.items()}
    diffusers_encoders = peft("text_encoder.", clip_named) | peft("text_encoder_2.", t5)
    kohya_encoders = kohya("lora_te1_", clip_named) | kohya("lora_te2_", t5)
    spellings = {
        "diffusers": peft("transformer.", transformer) | diffusers_encoders,
        "peft": peft("base_model.model.", transformer) | diffusers_encoders,
        "adapter": peft("transformer.", transformer, "default.") | diffusers_encoders,
        "kohya": kohya("lora_unet_", native) | kohya_encoders,
        "kohya-te3": kohya("lora_unet_", native) | kohya("lora_te1_", clip_named) | kohya("lora_te3_", t5),
        "kohya-diffusers": kohya("lora_transformer_", transformer) | kohya_encoders,
        "bfl": peft("diffusion_model.", native) | diffusers_encoders,
        "bfl-bare": dotted_kohya("", native) | diffusers_encoders,
    }
    for name, tensors in spellings.items():
        save_file({k: v.contiguous().clone() for k, v in tensors.items()}, files / f"{name}.safetensors")

    with_lora(pipe.transformer, transformer, WEIGHT)
    with_lora(pipe.text_encoder, clip, WEIGHT)
    with_lora(pipe.text_encoder_2, t5, WEIGHT)
    cases.run_with(pipe, out, "run-lora", folder, prompt="a red house with a LoRA", width=80, height=48, steps=3,
                   seeds=[41], length=20, guidance=3.5)
