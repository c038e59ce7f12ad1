"""Textual inversions in whole runs of diffusers: files that both sides read, alone, with compel's weights, in long
prompts, negative prompts and pooled text."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from compel import DiffusersTextualInversionManager
from safetensors.torch import load_file, save_file

from cases import randn, text
from sd_models import G_WIDTH, L_WIDTH
from sd_runs import run


def files(out: Path) -> None:
    """Vectors of about the size of a word's, so that they matter."""
    folder = out / "embeddings"
    folder.mkdir()

    def vectors(seed: int, *shape: int) -> torch.Tensor:
        return randn(seed, *shape) * 0.5

    save_file({"emb_params": vectors(1, 3, L_WIDTH)}, folder / "cat.safetensors")
    save_file({"<night>": vectors(2, 8, L_WIDTH).half()}, folder / "night.safetensors")
    save_file({"<dot>": vectors(3, L_WIDTH).bfloat16()}, folder / "dot.safetensors")
    save_file({"clip_l": vectors(4, 4, L_WIDTH), "clip_g": vectors(5, 4, G_WIDTH)}, folder / "catxl.safetensors")
    save_file({"text_encoders_0": vectors(6, 2, L_WIDTH).half(), "text_encoders_1": vectors(7, 2, G_WIDTH).half()},
              folder / "nightxl.safetensors")


def adder(folder: Path, names: list[str]):
    def add(pipe) -> None:
        encoders = [(pipe.text_encoder, pipe.tokenizer)]
        if hasattr(pipe, "text_encoder_2"):
            encoders.append((pipe.text_encoder_2, pipe.tokenizer_2))
        for encoder, tokenizer in encoders:
            # Configs of old say 2, and then the largest id is taken for the end, which a new token would be.
            for module in encoder.modules():
                if hasattr(module, "eos_token_id"):
                    module.eos_token_id = tokenizer.eos_token_id
        for name in names:
            tensors = load_file(folder / f"{name}.safetensors")
            halves = [tensors[key] for key in (sorted(tensors, reverse="clip_g" in tensors))]
            assert len(halves) == len(encoders)
            for half, (encoder, tokenizer) in zip(halves, encoders):
                before = encoder.get_input_embeddings().weight.clone()
                pipe.load_textual_inversion(half, token=f"<{name}>", text_encoder=encoder, tokenizer=tokenizer)
                after = encoder.get_input_embeddings().weight
                assert torch.equal(after[:len(before)], before) and torch.equal(
                    after[len(before):], half.float().reshape(-1, half.shape[-1]))
    return add


def write_all(out: Path) -> None:
    files(out)
    size = dict(width=80, height=48, steps=3)

    def case(name: str, model: str, names: list[str], prompt: str, negative: str, **more) -> None:
        # The oracle knows "<cat>" alone.
        spoken = {key: re.sub(r"embedding:(\w+)", r"<\1>", value) for key, value in
                  dict(prompt=prompt, negative=negative).items()}
        run(out, name, model, **size, **spoken, patch=adder(out / "embeddings", names),
            written={"prompt": text(prompt), "negative": text(negative)}, embeddings=",".join(names),
            inversions=DiffusersTextualInversionManager, **more)

    words = "birds sing in the night a blue car on the road "  # 11 tokens
    long = words * 6 + "a house a house "  # 70, and 8 more do not go into a window of 75
    case("sd15-embedding", "tiny-sd15", ["cat", "night", "dot"], "a <cat> by a red-<dot>house, embedding:cat",
         "<night>, blurry <lora:x:1>", seeds=[71])
    case("sd15-embedding-cut", "tiny-sd15", ["night", "cat"], long + "<night><cat> end", "embedding:cat", seeds=[72])
    case("sd15-embedding-compel", "tiny-sd15", ["cat", "night", "dot"],
         "a (<cat>)1.4 house, (old embedding:dot)0.5 embedding:cat++ tree", "(<night>)0.7 fog-", seeds=[73],
         syntax="compel")
    # Windows that end before an embedding; and embeddings with no word between them, of which 25 fill one.
    case("sd15-embedding-long", "tiny-sd15", ["night", "cat"], long + "<night> a (tree)1.2 embedding:cat",
         "a fog, (" + words * 7 + ")0.8 " + "<cat> " * 30, seeds=[74], syntax="compel")
    case("sdxl-embedding", "tiny-sdxl", ["catxl", "nightxl"], "a photo of <catxl> in embedding:nightxl", "<nightxl>",
         seeds=[75], guidance=5.0)
    case("sdxl-embedding-compel", "tiny-sdxl", ["catxl", "nightxl"],
         "a (red <catxl>)1.3 (trees)0.5 " + words * 6 + "(embedding:catxl)0.6 <nightxl>", "(<nightxl>)1.2 blurry-",
         seeds=[76], guidance=5.0, syntax="compel")
