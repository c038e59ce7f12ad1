"""The transformer and its two text encoders: configuration, training, saving.

All three are trained together from random weights on cached latents.  Matrices
inside blocks are updated by Muon, the rest by AdamW; what is saved is a moving
average of the weights.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

import shapes
import vocabulary

WIDTH_TEXT = 64
GRID = shapes.SIDE // 16                  # image tokens per side
CLIP_TRAINED = 28                         # longest caption in CLIP tokens; later ones change nothing
T5_PADS, T5_PAD_ODDS = (16, 32, 64), (0.65, 0.20, 0.15)
BATCH = 32
EMPTY_CAPTION = 0.10
TIMESTEP_SHIFT = 3.5                      # favours noise: there the shapes are decided
RATE_MUON, RATE_ADAM = 0.02, 2e-3
WARMUP, DECAY_PART, AVERAGE = 100, 0.40, 0.997
CHECKPOINT_EVERY = 250


class Model(torch.nn.Module):
    """Transformer, CLIP text model and T5 encoder as one trainable thing."""

    def __init__(self, clip_folder: Path):
        super().__init__()
        clip_ids = vocabulary.clip_aliases(clip_folder)
        self.transformer = FluxTransformer2DModel(
            patch_size=1, in_channels=64, num_layers=2, num_single_layers=4,
            attention_head_dim=32, num_attention_heads=4, axes_dims_rope=(8, 12, 12),
            joint_attention_dim=WIDTH_TEXT, pooled_projection_dim=WIDTH_TEXT, guidance_embeds=False)
        self.clip = CLIPTextModel(CLIPTextConfig(
            vocab_size=len(clip_ids), hidden_size=WIDTH_TEXT, intermediate_size=4 * WIDTH_TEXT,
            num_hidden_layers=2, num_attention_heads=2, projection_dim=WIDTH_TEXT,
            max_position_embeddings=vocabulary.CLIP_LENGTH, hidden_act="quick_gelu",
            bos_token_id=len(clip_ids) - 2, eos_token_id=len(clip_ids) - 1, pad_token_id=len(clip_ids) - 1))
        self.t5 = T5EncoderModel(T5Config(
            vocab_size=len(vocabulary.t5_pieces()), d_model=WIDTH_TEXT, d_kv=32, num_heads=2, d_ff=128,
            num_layers=2, feed_forward_proj="gated-gelu", dropout_rate=0.0, is_encoder_decoder=False,
            use_cache=False, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0))

    def forward(self, noisy, t, clip_ids, t5_ids):
        """Velocity for packed noisy latents (batch, 64, 64) at times t in [0, 1]."""
        return self.transformer(
            hidden_states=noisy, timestep=t, return_dict=False,
            pooled_projections=self.clip(clip_ids).pooler_output,
            encoder_hidden_states=self.t5(t5_ids).last_hidden_state,
            txt_ids=torch.zeros(t5_ids.shape[1], 3), img_ids=image_ids())[0]


def image_ids() -> torch.Tensor:
    ids = torch.zeros(GRID, GRID, 3)
    ids[..., 1] += torch.arange(GRID)[:, None]
    ids[..., 2] += torch.arange(GRID)[None, :]
    return ids.view(-1, 3)


def pack(latents: torch.Tensor) -> torch.Tensor:
    """(batch, 16, 16, 16) latents as (batch, 64, 64) tokens of 2x2 places, channel first."""
    batch, channels = latents.shape[:2]
    return (latents.view(batch, channels, GRID, 2, GRID, 2).permute(0, 2, 4, 1, 3, 5)
            .reshape(batch, GRID * GRID, channels * 4))


def create(seed: int, clip_folder: Path) -> Model:
    torch.manual_seed(seed)
    model = Model(clip_folder)
    transformer = model.transformer
    with torch.no_grad():
        for block in transformer.transformer_blocks:
            for norm in (block.norm1, block.norm1_context):
                norm.linear.weight.zero_()
                norm.linear.bias.zero_()
        for block in transformer.single_transformer_blocks:
            block.norm.linear.weight.zero_()
            block.norm.linear.bias.zero_()
        for linear in (transformer.norm_out.linear, transformer.proj_out):
            linear.weight.zero_()
            linear.bias.zero_()
    return model


# --- data --------------------------------------------------------------------

class Captions:
    """Turns captions into token ids, aliases resolved."""

    def __init__(self, clip_folder: Path, t5_folder: Path):
        self.clip = CLIPTokenizer.from_pretrained(clip_folder)
        self.t5 = T5TokenizerFast.from_pretrained(t5_folder)
        self.clip_alias = torch.tensor(vocabulary.clip_aliases(clip_folder))
        self.t5_alias = torch.tensor(vocabulary.t5_aliases())

    def ids(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """(CLIP ids, T5 ids), the latter padded to the longest length trained."""
        def run(tokenizer, length):
            return tokenizer(captions, padding="max_length", truncation=True, max_length=length,
                             return_tensors="pt").input_ids
        return self.clip_alias[run(self.clip, CLIP_TRAINED)], self.t5_alias[run(self.t5, T5_PADS[-1])]


class Data:
    """Cached latents with their token ids."""

    def __init__(self, folder: Path, captions: Captions):
        self.folder, self.captions, self.files = folder, captions, 0
        empty_clip, empty_t5 = captions.ids([""])
        self.empty = empty_clip[0], empty_t5[0]
        self.refresh()

    def refresh(self) -> None:
        """Reads the cache again if it has grown."""
        files = sorted(self.folder.glob("*.pt"))
        if len(files) == self.files:
            return
        latents, texts = [], []
        for file in files:
            part = torch.load(file)
            latents.append(part["latents"])
            texts += part["captions"]
        self.files = len(files)
        self.latents = torch.cat(latents)
        self.clip, self.t5 = self.captions.ids(texts)
        self.lengths = (self.t5 != 0).sum(1)
        print("pictures:", len(self.latents), flush=True)

    def batch(self, rng: random.Random, size: int):
        """(packed latents, CLIP ids, T5 ids cut to one of the trained pad lengths)."""
        pick = torch.tensor([rng.randrange(len(self.latents)) for _ in range(size)])
        clip, t5 = self.clip[pick].clone(), self.t5[pick].clone()
        for i in range(size):
            if rng.random() < EMPTY_CAPTION:
                clip[i], t5[i] = self.empty
        length = rng.choices(T5_PADS, T5_PAD_ODDS)[0]
        while length < int(self.lengths[pick].max()):
            length = T5_PADS[T5_PADS.index(length) + 1]
        return pack(self.latents[pick].float()), clip, t5[:, :length]


def disturb(latents: torch.Tensor, generator: torch.Generator):
    """(noisy latents, times, velocity to predict)."""
    u = torch.rand(len(latents), generator=generator)
    t = TIMESTEP_SHIFT * u / (1 + (TIMESTEP_SHIFT - 1) * u)
    noise = torch.randn(latents.shape, generator=generator)
    mix = t.view(-1, 1, 1)
    return (1 - mix) * latents + mix * noise, t, noise - latents


# --- optimisation ------------------------------------------------------------

class Muon:
    """Momentum whose update is made orthogonal; matrices of one shape are treated together."""

    def __init__(self, parameters: list[torch.nn.Parameter], momentum: float = 0.95):
        self.groups: dict[tuple[int, int], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self.momentum = momentum
        self.buffers = {shape: torch.zeros(len(ps), *shape) for shape, ps in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, parameters in self.groups.items():
            gradient = torch.stack([p.grad for p in parameters])
            buffer = self.buffers[shape].lerp_(gradient, 1 - self.momentum)
            update = self.orthogonal(gradient.lerp_(buffer, self.momentum))
            scale = rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, direction in zip(parameters, update):
                parameter.add_(direction.to(parameter.dtype), alpha=-scale)

    @staticmethod
    def orthogonal(x: torch.Tensor) -> torch.Tensor:
        """Five Newton-Schulz steps towards the nearest orthogonal matrices."""
        wide = x.shape[1] <= x.shape[2]
        x = (x if wide else x.mT).bfloat16()
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x if wide else x.mT


def _split(model: Model):
    """Block matrices for Muon, everything else for AdamW."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        inside = "blocks." in name and "norm" not in name
        (matrices if inside and parameter.ndim == 2 else rest).append(parameter)
    return matrices, rest


def rate_at(step: int, steps: int) -> float:
    """Warm-up, a plateau, then a straight line down to nearly nothing."""
    return min((step + 1) / WARMUP, 1.0, max((steps - step) / (DECAY_PART * steps), 0.01))


def train(model: Model, data: Data, work: Path, seed: int, steps: int) -> dict[str, torch.Tensor]:
    """Trains (or goes on from the checkpoint in `work`) and returns the averaged weights."""
    matrices, rest = _split(model)
    muon = Muon(matrices)
    adam = torch.optim.AdamW(rest, lr=RATE_ADAM, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    names, weights = zip(*model.named_parameters())
    average = [w.detach().clone() for w in weights]
    work.mkdir(parents=True, exist_ok=True)
    start, file = 0, work / "state.pt"
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        muon.buffers, average, start = state["muon"], state["average"], state["step"]
        print("going on from step", start, flush=True)
    total = 0.0
    for step in range(start, steps):
        rng = random.Random(f"{seed} {step}")
        generator = torch.Generator().manual_seed(rng.randrange(2 ** 40))
        latents, clip, t5 = data.batch(rng, BATCH)
        noisy, t, velocity = disturb(latents, generator)
        loss = F.mse_loss(model(noisy, t, clip, t5), velocity)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        factor = rate_at(step, steps)
        adam.param_groups[0]["lr"] = RATE_ADAM * factor
        adam.step()
        muon.step(RATE_MUON * factor)
        with torch.no_grad():
            torch._foreach_lerp_(average, list(weights), 1 - min(AVERAGE, (step + 1) / (step + 10)))
        total += loss.item()
        if (step + 1) % 100 == 0:
            print(f"flux step {step + 1} loss {total / 100:.4f}", flush=True)
            total = 0.0
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps:
            fresh = file.with_suffix(".new")
            torch.save({"model": model.state_dict(), "adam": adam.state_dict(), "muon": muon.buffers,
                        "average": average, "names": names, "step": step + 1}, fresh)
            fresh.replace(file)
            data.refresh()
    return dict(zip(names, average))


def load_average(model: Model, work: Path) -> int:
    """Puts the averaged weights of the checkpoint into the model; returns its step."""
    state = torch.load(work / "state.pt")
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), state["average"]):
            parameter.copy_(value)
    return state["step"]


# --- saving ------------------------------------------------------------------

@torch.no_grad()
def save(model: Model, clip_folder: Path, folder: Path) -> None:
    """Writes transformer, text encoders and scheduler in bfloat16, shared embeddings spelled out."""
    model = copy.deepcopy(model)
    for table, alias in ((model.clip.get_input_embeddings(), vocabulary.clip_aliases(clip_folder)),
                         (model.t5.get_input_embeddings(), vocabulary.t5_aliases())):
        table.weight.copy_(table.weight[torch.tensor(alias)])
    model.bfloat16()
    model.transformer.save_pretrained(folder / "transformer")
    model.clip.save_pretrained(folder / "text_encoder")
    # Published checkpoints keep the CLIP tensors under this prefix.
    file = folder / "text_encoder" / "model.safetensors"
    save_file({f"text_model.{name}": value for name, value in load_file(file).items()}, file, {"format": "pt"})
    model.t5.save_pretrained(folder / "text_encoder_2")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "FluxPipeline", "_diffusers_version": "0.42.0",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "feature_extractor": [None, None], "image_encoder": [None, None],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    defaults = {"width": shapes.SIDE, "height": shapes.SIDE, "steps": 12, "guidance": 0,
                "max_sequence_length": T5_PADS[-1]}
    (folder / "latentd.json").write_text(json.dumps({"defaults": defaults}, indent=2) + "\n")
