"""What diffusers and transformers make of the tiny SD 1.5 and SDXL models, part by part and in whole runs."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from cases import randn, save


# --- parts -------------------------------------------------------------------

def unet_call(out: Path, name: str, folder: str, height: int, width: int, tokens: int, timestep: float, seed: int,
              tensors: dict, case: int) -> None:
    """One call on a batch of 2, with what every resnet, attention and resampler gave."""
    model = UNet2DConditionModel.from_pretrained(out / folder / "unet").eval()
    config, seen, hooks = model.config, {}, []
    for part, module in model.named_modules():
        if part.split(".")[-2:-1] and part.split(".")[-2] in ("resnets", "attentions", "downsamplers", "upsamplers"):
            def hook(_, args, output, key=part):
                seen[f"{case}.{key}"] = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
            hooks.append(module.register_forward_hook(hook))
    x, context = randn(seed, 2, config.in_channels, height, width), randn(seed + 1, 2, tokens, config.cross_attention_dim)
    added = {}
    if config.addition_embed_type == "text_time":
        count = 5 if "refiner" in folder else 6
        ids = torch.tensor([[1024, 768, 16, 0, 6, 512][:count], [512, 640, 0, 8, 2.5, 1024][:count]])
        added = {"text_embeds": randn(seed + 2, 2, config.projection_class_embeddings_input_dim - 8 * count),
                 "time_ids": ids}
        tensors |= {f"{case}.pooled": added["text_embeds"], f"{case}.time_ids": ids}
    output = model(x, timestep, encoder_hidden_states=context, added_cond_kwargs=added).sample
    for hook in hooks:
        hook.remove()
    assert len(seen) > 20
    tensors |= seen | {f"{case}.x": x, f"{case}.context": context, f"{case}.output": output,
                       f"{case}.timestep": torch.tensor(timestep)}


def unets(out: Path) -> None:
    for name in ("sd15", "sd15-inpaint", "sdxl", "sdxl-inpaint", "refiner"):
        tensors: dict = {}
        # Sizes that halve evenly, that do not, and that are below the number of levels.
        for case, (height, width, tokens, timestep) in enumerate(((8, 16, 77, 981.0), (9, 7, 154, 500.5), (5, 6, 77, 1.0))):
            unet_call(out, name, f"tiny-{name}", height, width, tokens, timestep, 40 + 3 * case, tensors, case)
        save(out, f"unet-{name}", tensors, folder=f"tiny-{name}", count=3)


def text_encoders(out: Path) -> None:
    """Every hidden state, with and without the final norm, and the pooled row."""
    generator = torch.Generator().manual_seed(4)
    for name, folder, kind in (("clip-l", "tiny-sdxl/text_encoder", CLIPTextModel),
                               ("clip-l-eos2", "tiny-sd15/text_encoder", CLIPTextModel),
                               ("clip-g", "tiny-refiner/text_encoder_2", CLIPTextModelWithProjection),
                               ("clip-g-eos2", "tiny-sdxl/text_encoder_2", CLIPTextModelWithProjection)):
        model = kind.from_pretrained(out / folder).eval()
        norm = dict(model.named_modules())
        norm = norm.get("final_layer_norm") or norm["text_model.final_layer_norm"]
        size, tensors = model.config.vocab_size, {}
        for i, length in enumerate((5, 77)):
            ids = torch.randint(0, size - 2, (1, length), generator=generator)
            # The first end is followed by what pads: itself, or another token.
            ids[0, 0], ids[0, length // 2:] = size - 2, 1
            ids[0, length // 2] = size - 1
            result = model(ids, output_hidden_states=True)
            pooled = result.text_embeds if kind is CLIPTextModelWithProjection else result.pooler_output
            tensors |= {f"ids.{i}": ids[0], f"pooled.{i}": pooled, f"last.{i}": result.last_hidden_state}
            for skip in range(model.config.num_hidden_layers):
                state = result.hidden_states[-(skip + 1)]
                tensors |= {f"raw.{i}.{skip}": state, f"normed.{i}.{skip}": norm(state)}
        save(out, name, tensors, folder=folder, count=2, layers=model.config.num_hidden_layers,
             projection=int(kind is CLIPTextModelWithProjection))


def write_all(out: Path) -> None:
    unets(out)
    text_encoders(out)
