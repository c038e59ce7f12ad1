"""FLUX.1 drawing after a control image: a control model, and a text-to-image model with a control LoRA.

The LoRA is spelled as Black Forest Labs spell theirs; the oracle is diffusers' control pipeline on a transformer into
which the same numbers were put by hand, as whole matrices.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxControlPipeline, FluxTransformer2DModel
from PIL import Image
from safetensors.torch import save_file

import cases
import loras
import models

RANK = 3


def norms(model) -> dict[str, str]:
    """Native name of a query or key norm → its own."""
    out = {}
    for i in range(model.config.num_layers):
        for side, names in (("img", ("norm_q", "norm_k")), ("txt", ("norm_added_q", "norm_added_k"))):
            for kind, name in zip(("query", "key"), names):
                out[f"double_blocks.{i}.{side}_attn.norm.{kind}_norm"] = f"transformer_blocks.{i}.attn.{name}"
    for i in range(model.config.num_single_layers):
        for kind in ("query", "key"):
            out[f"single_blocks.{i}.norm.{kind}_norm"] = f"single_transformer_blocks.{i}.attn.norm_{kind[0]}"
    return out


def control_lora(model: FluxTransformer2DModel) -> dict[str, torch.Tensor]:
    tensors = {}
    for seed, (native, parts) in enumerate(loras.native_modules(model).items(), start=700):
        linears = [model.get_submodule(part) for part in parts]
        rows, columns = sum(m.out_features for m in linears), linears[0].in_features * (2 if native == "img_in" else 1)
        tensors[native + ".lora_A.weight"] = cases.randn(seed, RANK, columns) / columns ** 0.5
        tensors[native + ".lora_B.weight"] = 0.5 * cases.randn(seed + 1000, rows, RANK) / RANK ** 0.5
        tensors[native + ".lora_B.bias"] = 0.1 * cases.randn(seed + 2000, rows)
    for seed, native in enumerate(norms(model), start=3700):
        tensors[native + ".scale"] = 1 + 0.2 * cases.randn(seed, model.config.attention_head_dim)
    return tensors


def with_control(model: FluxTransformer2DModel, lora: dict[str, torch.Tensor], weight: float) -> FluxTransformer2DModel:
    config = dict(model.config) | {"in_channels": 2 * model.config.in_channels, "out_channels": model.config.in_channels}
    grown = FluxTransformer2DModel.from_config(config).eval()
    state = model.state_dict()
    state["x_embedder.weight"] = torch.nn.functional.pad(state["x_embedder.weight"], (0, model.config.in_channels))
    for native, parts in loras.native_modules(model).items():
        delta = lora[native + ".lora_B.weight"] @ lora[native + ".lora_A.weight"]
        bias = lora[native + ".lora_B.bias"]
        if native == "final_layer.adaLN_modulation.1":      # (shift, scale) there, (scale, shift) here
            delta, bias = (torch.cat(t.chunk(2)[::-1]) for t in (delta, bias))
        sizes = [model.get_submodule(part).out_features for part in parts]
        for part, rows, offset in zip(parts, delta.split(sizes), bias.split(sizes)):
            state[part + ".weight"] = state[part + ".weight"] + weight * rows
            state[part + ".bias"] = state[part + ".bias"] + weight * offset
    for native, name in norms(model).items():
        state[name + ".weight"] = lora[native + ".scale"]
    grown.load_state_dict(state)
    return grown


def run(out: Path, name: str, folder: Path, transformer: FluxTransformer2DModel, **settings) -> None:
    """A whole run: latents after every step, and the picture."""
    parts = cases.pipeline(folder).components | {"transformer": transformer}
    pipe = FluxControlPipeline(**{k: v for k, v in parts.items() if k not in ("image_encoder", "feature_extractor")})
    pipe.set_progress_bar_config(disable=True)
    control = np.random.default_rng(9).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    width, height, steps, length, guidance, seed, prompt = 80, 48, 4, 16, 3.5, 41, "a red house on a road"
    seen = []

    def after_step(_, index, t, values):
        seen.append(pipe._unpack_latents(values["latents"], height, width, pipe.vae_scale_factor).clone())
        return {}

    image = pipe(prompt=prompt, control_image=Image.fromarray(control), width=width, height=height, num_inference_steps=steps,
                 guidance_scale=guidance, max_sequence_length=length, generator=torch.Generator().manual_seed(seed),
                 output_type="np", callback_on_step_end=after_step).images[0]
    tensors = {"prompt": cases.text(prompt), "control_image": torch.from_numpy(control), "seed": torch.tensor([seed]),
               "pixels": torch.from_numpy((image * 255).round().astype("uint8"))}
    tensors |= {f"latents.{k + 1}": latents for k, latents in enumerate(seen)}
    cases.save(out, name, tensors, width=width, height=height, steps=steps, length=length, guidance=guidance, **settings)


def write_all(out: Path) -> None:
    dev = FluxTransformer2DModel.from_pretrained(out / "tiny-dev/transformer").float().eval()
    lora = control_lora(dev)
    save_file(lora, out / "loras/control.safetensors")
    weight = 0.75
    run(out, "run-control-lora", out / "tiny-dev", with_control(dev, lora, weight), weight=weight)

    # The same as a model of its own.
    folder, grown = out / "tiny-control", with_control(dev, lora, 1.0)
    models.build_folder(folder, True, 100)
    grown.save_pretrained(folder / "transformer")
    index = json.loads((folder / "model_index.json").read_text()) | {"_class_name": "FluxControlPipeline"}
    (folder / "model_index.json").write_text(json.dumps(index))
    save_file(models.native_transformer(grown), out / "native/control.safetensors")
    run(out, "run-control", out / "tiny-dev", grown)
