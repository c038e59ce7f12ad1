"""LoRAs with peft configs of all kinds, as diffusers' pipelines save them, and the weights that peft makes of them.

Of each random config: the file that `save_lora_weights` writes, OUT/adapters/NAME.safetensors, and the weights that it
changes, merged by peft, OUT/adapters/NAME-merged.safetensors. What diffusers' own loader makes of the file is held
against that for the denoisers; that of transformers 5 refuses ranks by pattern. A manifest lists the names.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file

import cases
import sd_runs

LAYERS = {
    "transformer": ["attn.to_q", "attn.to_k", "attn.add_v_proj", "ff.net.0.proj", "proj_mlp", "proj_out", "norm.linear"],
    "unet": ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "conv1", "conv_shortcut", "time_emb_proj", "ff.net.2"],
    "text_encoder": ["q_proj", "k_proj", "out_proj", "fc1"],
}
# Patterns of the forms that peft takes: an end, a path from the beginning, a regular expression.
PATTERNS = {
    "transformer": ["to_q", "attn.to_k", "^transformer_blocks.0.ff.net.0.proj", r"single_transformer_blocks\.\d+\..*"],
    "unet": ["to_q", "attn1.to_k", "^mid_block.resnets.0.conv1", r"(down|up)_blocks\.\d+\.attentions\..*\.to_v", ".*conv1"],
    "text_encoder": ["q_proj", "self_attn.k_proj", r"encoder\.layers\.0\..*"],
}
KINDS = ["plain", "patterns", "stabilised", "dora", "bias", "mixed"]


def config(kind: str, component: str, draw: random.Random) -> LoraConfig:
    component = component.removesuffix("_2")
    rank = draw.choice([2, 3, 4, 8])
    # diffusers' own names for a UNet's layers, which "plain" is saved under, are for its attention alone.
    layers = [n for n in LAYERS[component] if n.startswith("to_")] if (kind, component) == ("plain", "unet") else LAYERS[component]
    if kind == "bias":  # peft merges a bias into a bias
        layers = [n for n in layers if n not in ("to_q", "to_k", "to_v")]
    args = dict(r=rank, lora_alpha=draw.choice([1, 2, 5, 12]), target_modules=layers)
    if kind in ("patterns", "mixed"):
        for name, values in (("rank_pattern", [1, 2, 4, 6]), ("alpha_pattern", [1, 2.5, 7, 16])):
            patterns = draw.sample(PATTERNS[component], draw.randint(1, len(PATTERNS[component])))
            # In the order of the file: diffusers sorts keys, and the first that matches counts.
            args[name] = {pattern: draw.choice(values) for pattern in sorted(patterns)}
    return LoraConfig(**args, use_rslora=kind in ("stabilised", "mixed"), use_dora=kind == "dora",
                      lora_bias=kind == "bias")


def fill(model, seed: int) -> None:
    """Numbers for an adapter's parameters; a magnitude stays near that of the weight."""
    for i, (name, parameter) in enumerate(sorted(model.named_parameters())):
        if "lora_" not in name:
            continue
        noise = cases.randn(seed + i, *parameter.shape)
        if "magnitude" in name:
            parameter.data.mul_(1 + 0.2 * noise)
        else:
            parameter.data.copy_(noise / max(parameter.shape) ** 0.5)


def layers_of(model):
    return [(n, m) for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)]


def merged(model) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, layer in layers_of(model):
        before = layer.get_base_layer()
        weight, bias = before.weight.clone(), None if before.bias is None else before.bias.clone()
        layer.merge()
        after, name = layer.get_base_layer(), name.removeprefix("text_model.")
        if not torch.equal(after.weight, weight):
            tensors[f"{name}.weight"] = after.weight
        if bias is not None and not torch.equal(after.bias, bias):
            tensors[f"{name}.bias"] = after.bias
    return tensors


def reload(pipe, file: Path):
    """The denoiser, with what diffusers reads from a file."""
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    asked = dict(return_alphas=True) if part == "transformer" else dict(unet_config=pipe.unet.config)
    state, alphas, metadata = pipe.lora_state_dict(str(file), return_lora_metadata=True, **asked)
    model = getattr(pipe, part)
    getattr(pipe, f"load_lora_into_{part}")(state, network_alphas=alphas, metadata=metadata, adapter_name="default",
                                            **{part: model})
    return model


def write(out: Path, name: str, kind: str, seed: int, load, components: list[str]) -> None:
    draw = random.Random(seed)
    pipe, layers = load(), {}
    for k, component in enumerate(components):
        model = getattr(pipe, component)
        inject_adapter_in_model(config(kind, component, draw), model, adapter_name="default")
        fill(model, seed * 100_000 + k * 10_000)
        prefix = "unet_" if component == "unet" else "transformer_" if component == "transformer" else f"{component}_"
        state = get_peft_model_state_dict(model)
        # As diffusers' trainers do for each family.
        as_it_is = component == "transformer" or (component == "unet" and kind != "plain")
        layers[f"{prefix}lora_layers"] = state if as_it_is else convert_state_dict_to_diffusers(state)
    pipe.save_lora_weights(out, weight_name=f"{name}.safetensors", **layers,
                           **_collate_lora_metadata({c: getattr(pipe, c) for c in components}))
    expected = {f"{c}.{key}": value for c in components for key, value in merged(getattr(pipe, c)).items()}
    loaded = {f"{components[0]}.{key}": value for key, value in merged(reload(load(), out / f"{name}.safetensors")).items()}
    assert loaded.keys() == {key for key in expected if key.startswith(f"{components[0]}.")}
    for key, value in loaded.items():
        torch.testing.assert_close(value, expected[key])
    save_file({k: v.detach().contiguous().clone() for k, v in expected.items()}, out / f"{name}-merged.safetensors")


def write_kronecker(out: Path, folder: Path) -> None:
    """A component that saves itself: no prefix, and a config with an alpha of another name."""
    from diffusers import FluxTransformer2DModel
    from peft import LoKrConfig

    def load():
        return FluxTransformer2DModel.from_pretrained(folder / "transformer")
    model = load()
    model.add_adapter(LoKrConfig(r=2, alpha=5, target_modules=["attn.to_q", "proj_mlp"], alpha_pattern={"proj_mlp": 1}),
                      adapter_name="default")
    for i, (name, parameter) in enumerate(sorted(model.named_parameters())):
        if "lokr_" in name:
            parameter.data.copy_(cases.randn(990_000 + i, *parameter.shape) / max(parameter.shape) ** 0.5)
    model.save_lora_adapter(out, adapter_name="default", weight_name="flux-lokr.safetensors")
    again = load()
    again.load_lora_adapter(str(out / "flux-lokr.safetensors"), prefix=None, adapter_name="default",
                            use_safetensors=True)  # else the header is not read
    save_file({f"transformer.{k}": v.detach().contiguous().clone() for k, v in merged(again).items()},
              out / "flux-lokr-merged.safetensors")


def write_all(out: Path) -> None:
    folder = out / "adapters"
    folder.mkdir()
    families = {
        "flux": (lambda: cases.pipeline(out / "tiny-dev"), ["transformer", "text_encoder"], "tiny-dev"),
        "sd15": (lambda: sd_runs.load(out / "tiny-sd15", "text", "euler", ""), ["unet", "text_encoder"], "tiny-sd15"),
        "sdxl": (lambda: sd_runs.load(out / "tiny-sdxl", "text", "euler", ""),
                 ["unet", "text_encoder", "text_encoder_2"], "tiny-sdxl"),
    }
    manifest = {}
    for f, (family, (load, components, model)) in enumerate(families.items()):
        for k, kind in enumerate(KINDS):
            write(folder, f"{family}-{kind}", kind, 100 * f + k + 1, load, components)
            manifest[f"{family}-{kind}"] = dict(model=model, components=components)
    write_kronecker(folder, out / "tiny-dev")
    manifest["flux-lokr"] = dict(model="tiny-dev", components=["transformer"])
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
