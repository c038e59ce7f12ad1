"""Patch files of every layer type, and the weights that they make.

peft is the oracle where it has the type; the others are written out as plain products with whole matrices (a
rotation of blocks as one block-diagonal matrix, say), which is not how the daemon computes them. A file names a few
layers of the tiny transformer, alone and fused, and OUT/layers/NAME.safetensors holds the weights with it merged.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file

import cases

# Alone and rectangular; fused; fused with rows that differ in number; halves that change places.
MODULES = {
    "transformer_blocks.0.attn.to_q": ["transformer_blocks.0.attn.to_q"],
    "transformer_blocks.0.ff.net.0.proj": ["transformer_blocks.0.ff.net.0.proj"],
    "double_blocks.0.txt_attn.qkv": [f"transformer_blocks.0.attn.add_{p}_proj" for p in "qkv"],
    "single_blocks.0.linear1": [f"single_transformer_blocks.0.{p}"
                                for p in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")],
    "final_layer.adaLN_modulation.1": ["norm_out.linear"],
}
SWAPPED = "final_layer.adaLN_modulation.1"
RANK, ALPHA = 3, 1.5


class Source:
    """Random numbers that depend on how many were drawn before, so that no two layers are alike."""

    def __init__(self, seed: int):
        self.seed = seed

    def __call__(self, *shape: int) -> torch.Tensor:
        self.seed += 1
        return cases.randn(self.seed, *shape)


def through_peft(config, weight, bias, fill):
    """Weight and bias after peft merged its adapter; `fill` gives a parameter's values by name."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight.data.copy_(weight)
    linear.bias.data.copy_(bias)
    box = torch.nn.Sequential(OrderedDict(layer=linear))
    config.target_modules = ["layer"]
    inject_adapter_in_model(config, box, "oracle")
    for name, parameter in box.named_parameters():
        if "oracle" in name:
            parameter.data.copy_(fill(name.replace(".oracle", ""), parameter.shape))
    box.layer.merge()
    merged = box.layer.get_base_layer()
    return merged.weight.data.clone(), merged.bias.data.clone()


def with_peft(make_config, key_of, alpha=None):
    """A layer type of peft. `key_of` gives the file's suffix for a parameter, and its values in the file."""
    def layer(weight, bias, draw):
        tensors = {}

        def fill(name, shape):
            value = draw(*shape) / max(shape) ** 0.5
            suffix, stored, value = key_of(name.removeprefix("layer."), value)
            tensors[suffix] = stored
            return value
        merged = through_peft(make_config(), weight, bias, fill)
        if alpha is not None:
            tensors["alpha"] = torch.tensor(alpha)
        return tensors, *merged
    return layer


def plain(name, value):
    return name.removesuffix(".default"), value, value


def lora_key(name, value):
    if name == "lora_magnitude_vector.weight":
        return "lora_magnitude_vector", value.abs() + 0.5, value.abs() + 0.5
    return name, value, value


def ia3_key(name, value):
    return "weight", value.flatten(), value + 1  # files hold the difference from one


def dora_columns(weight, bias, draw):
    down, up = draw(RANK, weight.shape[1]), draw(weight.shape[0], RANK) / 8
    magnitude = draw(1, weight.shape[1]).abs() + 0.5
    new = weight + (ALPHA / RANK) * up @ down
    scale = torch.diag((magnitude / new.norm(dim=0, keepdim=True)).flatten())
    return {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(ALPHA),
            "dora_scale": magnitude}, new @ scale, bias


def dora_of_lokr(weight, bias, draw):
    w1, w2 = draw(4, 2) / 2, draw(weight.shape[0] // 4, weight.shape[1] // 2) / 8
    magnitude = draw(weight.shape[0], 1).abs() + 0.5
    new = weight + torch.kron(w1, w2)
    scale = torch.diag((magnitude / new.norm(dim=1, keepdim=True)).flatten())
    return {"lokr_w1": w1, "lokr_w2": w2, "alpha": torch.tensor(7.0), "dora_scale": magnitude}, scale @ new, bias


def lokr_full(weight, bias, draw):
    """Alpha means nothing here."""
    w1, w2 = draw(2, 4), draw(weight.shape[0] // 2, weight.shape[1] // 4) / 8
    return {"lokr_w1": w1, "lokr_w2": w2, "alpha": torch.tensor(9.0)}, weight + torch.kron(w1, w2), bias


def lokr_products(weight, bias, draw):
    w1_a, w1_b = draw(4, RANK), draw(RANK, 2)
    w2_a, w2_b = draw(weight.shape[0] // 4, RANK) / 4, draw(RANK, weight.shape[1] // 2) / 4
    delta = (ALPHA / RANK) * torch.kron(w1_a @ w1_b, w2_a @ w2_b)
    return {"lokr_w1_a": w1_a, "lokr_w1_b": w1_b, "lokr_w2_a": w2_a, "lokr_w2_b": w2_b,
            "alpha": torch.tensor(ALPHA)}, weight + delta, bias


def full(weight, bias, draw):
    diff, diff_b = draw(*weight.shape) / 8, draw(*bias.shape) / 8
    return {"diff": diff, "diff_b": diff_b}, weight + diff, bias + diff_b


def lora_diff_b(weight, bias, draw):
    down, up, diff_b = draw(RANK, weight.shape[1]), draw(weight.shape[0], RANK) / 8, draw(*bias.shape) / 8
    return {"lora_down.weight": down, "lora_up.weight": up, "diff_b": diff_b}, weight + up @ down, bias + diff_b


def ia3_rows(weight, bias, draw):
    vector = draw(weight.shape[0]) / 4
    return {"weight": vector, "on_input": torch.tensor(0)}, torch.diag(1 + vector) @ weight, bias


def ia3_columns(weight, bias, draw):
    vector = draw(weight.shape[1]) / 4
    return {"weight": vector, "on_input": torch.tensor(1)}, weight @ torch.diag(1 + vector), bias


def glora(old: bool):
    def layer(weight, bias, draw):
        out, inputs = weight.shape
        a1, a2, b1, b2 = draw(inputs, RANK) / 8, draw(RANK, inputs) / 4, draw(out, RANK) / 8, draw(RANK, inputs)
        merged = weight + (ALPHA / RANK) * (weight @ (a1 @ a2) + b1 @ b2)
        if old:
            a1, a2, b1, b2 = a2, a1, b2, b1
        return {"a1.weight": a1, "a2.weight": a2, "b1.weight": b1, "b2.weight": b2,
                "alpha": torch.tensor(ALPHA)}, merged, bias
    return layer


def cayley(blocks: torch.Tensor, constraint: float) -> torch.Tensor:
    skew = blocks - blocks.transpose(-1, -2)
    norm = skew.norm()
    if 0 < constraint < norm:
        skew = skew * constraint / norm
    eye = torch.eye(blocks.shape[-1])
    return (eye + skew) @ torch.linalg.inv(eye - skew)


def oft(alpha: float, rescaled: bool):
    def layer(weight, bias, draw):
        out, size = weight.shape[0], 8
        blocks = draw(out // size, size, size) / 8
        rotation = torch.block_diag(*cayley(blocks, alpha * out))
        tensors = {"oft_blocks": blocks, "alpha": torch.tensor(alpha)}
        merged = rotation.T @ weight
        if rescaled:
            tensors["rescale"] = 1 + draw(out, 1) / 4
            merged = torch.diag(tensors["rescale"].flatten()) @ merged
        return tensors, merged, bias
    return layer


def boft(weight, bias, draw):
    """Two stages; a stage's rotation as a whole matrix between two permutations."""
    out, size = weight.shape[0], 8
    blocks = draw(2, out // size, size, size) / 8
    rotations = cayley(blocks, 0)
    merged = weight
    for stage in range(2):
        half = 2 ** stage * size // 2
        order = torch.arange(out).view(-1, 2, half).transpose(1, 2).flatten()
        permutation = torch.eye(out)[order]
        merged = permutation.T @ torch.block_diag(*rotations[stage]) @ permutation @ merged
    return {"oft_blocks": blocks, "alpha": torch.tensor(0.0)}, merged, bias


TYPES = {
    "lora-bias": with_peft(lambda: LoraConfig(r=RANK, lora_alpha=RANK, lora_bias=True), lora_key),
    "lora-diff-b": lora_diff_b,
    "dora-peft": with_peft(lambda: LoraConfig(r=RANK, lora_alpha=RANK, use_dora=True), lora_key),
    "dora-columns": dora_columns,
    "dora-of-lokr": dora_of_lokr,
    "loha": with_peft(lambda: LoHaConfig(r=RANK, alpha=ALPHA, init_weights=False), plain, ALPHA),
    "lokr": with_peft(lambda: LoKrConfig(r=RANK, alpha=ALPHA, init_weights=False), plain, ALPHA),
    "lokr-full": lokr_full,
    "lokr-products": lokr_products,
    "full": full,
    "ia3-peft": with_peft(lambda: IA3Config(feedforward_modules=[]), ia3_key),
    "ia3-rows": ia3_rows,
    "ia3-columns": ia3_columns,
    "glora": glora(old=False),
    "glora-old": glora(old=True),
    "oft": oft(0.0, rescaled=False),
    "oft-constraint": oft(1e-3, rescaled=False),
    "oft-rescaled": oft(0.0, rescaled=True),
    "boft": boft,
}


def oft_by_part(weights: list[torch.Tensor], draw) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """As kohya trains fused layers: blocks for each part, one constraint."""
    alpha, count, out = 2e-3, 4, sum(len(w) for w in weights)
    tensors, merged = {"alpha": torch.tensor(alpha)}, []
    for i, weight in enumerate(weights):
        size = len(weight) // count
        tensors[f"oft_blocks.{i}"] = draw(count, size, size) / 8
        merged.append(torch.block_diag(*cayley(tensors[f"oft_blocks.{i}"], alpha * out)).T @ weight)
    return tensors, merged


def swap(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat(rows.chunk(2)[::-1])


def write_all(out: Path) -> None:
    folder, files = out / "layers", out / "loras"
    folder.mkdir()
    state = {k: v.float() for k, v in cases.pipeline(out / "tiny-dev").transformer.state_dict().items()}

    def write(name: str, tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        save_file({k: v.contiguous().clone() for k, v in tensors.items()}, files / f"type-{name}.safetensors")
        save_file({k: v.contiguous().clone() for k, v in expected.items()}, folder / f"{name}.safetensors")

    def flat(module: str) -> str:
        return "lora_unet_" + module.replace(".", "_")

    for k, (name, layer) in enumerate(TYPES.items()):
        tensors, expected = {}, {}
        draw = Source(20_000 + 1000 * k)
        for module, parts in MODULES.items():
            weights, biases = [state[f"{p}.weight"] for p in parts], [state[f"{p}.bias"] for p in parts]
            weight, bias = torch.cat(weights), torch.cat(biases)
            if module == SWAPPED:
                weight, bias = swap(weight), swap(bias)
            made, weight, bias = layer(weight, bias, draw)
            if name == "ia3-peft":
                made["on_input"] = torch.tensor(0)
            if module == SWAPPED:
                weight, bias = swap(weight), swap(bias)
            tensors |= {f"{flat(module)}.{suffix}": value for suffix, value in made.items()}
            rows = [len(w) for w in weights]
            expected |= {f"{p}.weight": w for p, w in zip(parts, weight.split(rows))}
            if any(s in made for s in ("diff_b", "lora_B.bias")):
                expected |= {f"{p}.bias": b for p, b in zip(parts, bias.split(rows))}
        write(name, tensors, expected)

    draw = Source(90_000)
    module, parts = "double_blocks.0.txt_attn.qkv", MODULES["double_blocks.0.txt_attn.qkv"]
    made, merged = oft_by_part([state[f"{p}.weight"] for p in parts], draw)
    write("oft-by-part", {f"oft_unet_{module.replace('.', '_')}.{s}": v for s, v in made.items()},
          {f"{p}.weight": w for p, w in zip(parts, merged)})

    norm = "transformer_blocks.0.attn.norm_q.weight"
    diff = draw(*state[norm].shape)
    write("norm", {f"{flat(norm.removesuffix('.weight'))}.w_norm": diff}, {norm: state[norm] + diff})
