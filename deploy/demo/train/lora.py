"""Style adapters for the finished transformer (low-rank, diffusers names).

"dusk" is trained at several weights at once, each with a tint of that strength,
so its slider moves smoothly.  "checker" is trained at full weight only.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import CLIPTextModel, T5EncoderModel

import flux
import shapes

TARGETS = (r".*transformer_blocks\.\d+\."
           r"(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
           r"|ff\.net\.(0\.proj|2)|ff_context\.net\.(0\.proj|2)|proj_mlp|proj_out)")
BATCH = 24


@dataclass(frozen=True)
class Style:
    name: str
    about: str
    weights: tuple[float, ...]      # the adapter weights trained, each with its own pictures
    rank: int
    steps: int
    rate: float
    kinds: dict[str, float]

    def draw(self, weight: float):
        return lambda rng: shapes.sample(rng, self.name, weight, self.kinds)


STYLES = {
    "dusk": Style("dusk", "warm evening light, growing with the weight",
                  (0.25, 0.5, 0.75, 1.0, 1.25), 4, 240, 3e-3, shapes.KINDS),
    "checker": Style("checker", "a chequered background",
                     (1.0,), 8, 600, 5e-3, {"one": 0.8, "two": 0.2}),
}


def train(style: Style, model_folder: Path, latents: Path, seed: int, target: Path) -> None:
    """Trains one adapter on the pictures cached under latents/<weight>/ and writes it."""
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel.from_pretrained(model_folder / "transformer", torch_dtype=torch.float32)
    clip = CLIPTextModel.from_pretrained(model_folder / "text_encoder", dtype=torch.float32)
    t5 = T5EncoderModel.from_pretrained(model_folder / "text_encoder_2", dtype=torch.float32)
    for module in (transformer, clip, t5):
        module.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=style.rank, lora_alpha=style.rank, target_modules=TARGETS))
    layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
    parameters = [p for p in transformer.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=style.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    captions = flux.Captions(model_folder / "tokenizer", model_folder / "tokenizer_2")
    data = {weight: flux.Data(latents / f"{weight}", captions) for weight in style.weights}
    total = 0.0
    for step in range(style.steps):
        rng = random.Random(f"{seed} {step}")
        generator = torch.Generator().manual_seed(rng.randrange(2 ** 40))
        weight = rng.choice(style.weights)
        for layer in layers:
            layer.scaling["default"] = weight
        clean, clip_ids, t5_ids = data[weight].batch(rng, BATCH)
        noisy, t, velocity = flux.disturb(clean, generator)
        with torch.no_grad():
            pooled, context = clip(clip_ids).pooler_output, t5(t5_ids).last_hidden_state
        guess = transformer(hidden_states=noisy, timestep=t, pooled_projections=pooled,
                            encoder_hidden_states=context, txt_ids=torch.zeros(t5_ids.shape[1], 3),
                            img_ids=flux.image_ids(), return_dict=False)[0]
        loss = F.mse_loss(guess, velocity)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.param_groups[0]["lr"] = style.rate * min((step + 1) / 20, 1 - step / style.steps)
        optimiser.step()
        total += loss.item()
        if (step + 1) % 50 == 0:
            print(f"lora {style.name} step {step + 1} loss {total / 50:.4f}", flush=True)
            total = 0.0
    state = {f"transformer.{name}": value.detach().bfloat16().contiguous()
             for name, value in get_peft_model_state_dict(transformer).items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(".new")
    save_file(state, fresh, metadata={"format": "pt", "name": style.name, "description": style.about,
                                      "base_family": "flux.1", "trigger": ""})
    fresh.replace(target)
