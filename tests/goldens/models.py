"""The tiny random models: diffusers folders, and the same weights under native names.

All structural features of FLUX.1 at toy size: 2x2 packing, a VAE of four levels, pairwise different widths,
so that a mix-up fails on a shape. Every parameter is random, those that training starts at zero too.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import sentencepiece
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

T5_VOCABULARY = 320
BOS, EOS = "<|startoftext|>", "<|endoftext|>"
CORPUS = """a photo of a red house under the sun with trees and a blue car on the road
the quick brown fox jumps over the lazy dog while 123 456 7890 birds sing in the night
it's we'll they've I'm you're don't he'd painting, portrait; landscape! really? (yes) [no]
\u00e9t\u00e9 na\u00efve \u00c5ngstr\u00f6m \u00fcber stra\u00dfe ma\u00f1ana \u4f60\u597d\u4e16\u754c \u65e5\u672c\u8a9e \u30c6\u30b9\u30c8 \ud55c\uad6d\uc5b4
\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0442\u0435\u043a\u0441\u0442 \u03b1\u03b2\u03b3 \u0645\u0631\u062d\u0628\u0627 \U0001F600 \U0001F680 \U0001F469\u200d\U0001F469\u200d\U0001F467
highly detailed, masterpiece, best quality, 4k, 8k, trending on artstation"""


# --- weights -----------------------------------------------------------------

def randomise(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Normal weights that keep activations of order one; norm weights around one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.copy_((1.0 if name.endswith("weight") else 0.0) + 0.1 * noise)
        elif "embed_tokens" in name or "shared" in name or "embedding" in name or "relative_attention_bias" in name:
            parameter.copy_(0.5 * noise)
        else:
            fan_in = parameter[0].numel()
            parameter.copy_(0.9 * noise / fan_in ** 0.5)
    return module.eval().requires_grad_(False)


def transformer(guidance: bool, seed: int) -> FluxTransformer2DModel:
    return randomise(FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=2, num_single_layers=3, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=56, pooled_projection_dim=24, axes_dims_rope=(4, 6, 6),
        guidance_embeds=guidance), seed)


def wide_transformer(seed: int) -> FluxTransformer2DModel:
    """Heads and rotary axes as published, a third of the width, few blocks."""
    return randomise(FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=1, num_single_layers=2, attention_head_dim=128,
        num_attention_heads=8, joint_attention_dim=256, pooled_projection_dim=96, guidance_embeds=True), seed)


def vae(seed: int, **changes) -> AutoencoderKL:
    config = dict(in_channels=3, out_channels=3, latent_channels=16, sample_size=64,
                  down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
                  block_out_channels=(8, 16, 16, 16), layers_per_block=2, norm_num_groups=4,
                  use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1159)
    return randomise(AutoencoderKL(**(config | changes)), seed)


def clip(vocabulary: int, seed: int, **changes) -> CLIPTextModel:
    config = dict(vocab_size=vocabulary, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
                  num_attention_heads=3, max_position_embeddings=77, hidden_act="quick_gelu",
                  bos_token_id=vocabulary - 2, eos_token_id=vocabulary - 1, pad_token_id=vocabulary - 1)
    return randomise(CLIPTextModel(CLIPTextConfig(**(config | changes))), seed)


def t5(seed: int, **changes) -> T5EncoderModel:
    config = dict(vocab_size=T5_VOCABULARY + 100, d_model=56, d_kv=12, num_heads=4, d_ff=72, num_layers=3,
                  feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    return randomise(T5EncoderModel(T5Config(**(config | changes))), seed)


# --- tokenizers --------------------------------------------------------------

def byte_alphabet() -> list[str]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = [byte for byte in range(256) if byte not in plain]
    by_byte = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(spare)}
    return [by_byte[byte] for byte in range(256)]


def write_clip_tokenizer(folder: Path, merges: int = 300) -> int:
    """vocab.json and merges.txt, learned on the corpus; returns the vocabulary's size."""
    folder.mkdir(parents=True)
    alphabet = byte_alphabet()
    words = Counter(CORPUS.lower().split())
    split = {word: [alphabet[b] for b in word.encode()] for word in words}
    for parts in split.values():
        parts[-1] += "</w>"
    learned = []
    while len(learned) < merges:
        counts = Counter()
        for word, parts in split.items():
            for pair in zip(parts, parts[1:]):
                counts[pair] += words[word]
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        learned.append(best)
        for parts in split.values():
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i:i + 2] = ["".join(best)]
                i += 1
    tokens = [*alphabet, *(c + "</w>" for c in alphabet), *dict.fromkeys(a + b for a, b in learned), BOS, EOS]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(f"{a} {b}" for a, b in learned) + "\n")
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "unk_token": EOS}
    config = {**special, "model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(vocabulary)


def write_t5_tokenizer(folder: Path, normaliser: str = "nmt_nfkc") -> None:
    folder.mkdir(parents=True)
    words = CORPUS.split()
    sentences = [" ".join(words[i:] + words[:i]) for i in range(len(words))] * 5
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, model_type="unigram", vocab_size=T5_VOCABULARY,
        normalization_rule_name=normaliser, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False,
        character_coverage=0.99, num_threads=1, minloglevel=2)
    (folder / "spiece.model").write_bytes(model.getvalue())
    config = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "extra_ids": 100,
              "model_max_length": 512, "tokenizer_class": "T5Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


# --- native names ------------------------------------------------------------
# Written from the layout of Black Forest Labs' and CompVis' reference code, independently of the C++ tables.

def native_transformer(model: FluxTransformer2DModel) -> dict[str, torch.Tensor]:
    s, out = model.state_dict(), {}

    def put(native: str, *names: str, swap: bool = False) -> None:
        for suffix in ("weight", "bias"):
            parts = [s[f"{name}.{suffix}"] for name in names]
            value = torch.cat(parts)
            if swap:
                value = torch.cat(value.chunk(2)[::-1])
            out[f"{native}.{suffix}"] = value.contiguous()

    put("img_in", "x_embedder")
    put("txt_in", "context_embedder")
    embedders = {"time_in": "timestep_embedder", "vector_in": "text_embedder"}
    if model.config.guidance_embeds:
        embedders["guidance_in"] = "guidance_embedder"
    for native, name in embedders.items():
        put(native + ".in_layer", f"time_text_embed.{name}.linear_1")
        put(native + ".out_layer", f"time_text_embed.{name}.linear_2")
    for i in range(model.config.num_layers):
        n, d = f"double_blocks.{i}.", f"transformer_blocks.{i}."
        for side, norm, qkv, norms, proj, ff in (
                ("img", "norm1", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), "to_out.0", "ff"),
                ("txt", "norm1_context", ("add_q_proj", "add_k_proj", "add_v_proj"),
                 ("norm_added_q", "norm_added_k"), "to_add_out", "ff_context")):
            put(f"{n}{side}_mod.lin", f"{d}{norm}.linear")
            put(f"{n}{side}_attn.qkv", *(f"{d}attn.{x}" for x in qkv))
            for kind, name in zip(("query", "key"), norms):
                out[f"{n}{side}_attn.norm.{kind}_norm.scale"] = s[f"{d}attn.{name}.weight"]
            put(f"{n}{side}_attn.proj", f"{d}attn.{proj}")
            put(f"{n}{side}_mlp.0", f"{d}{ff}.net.0.proj")
            put(f"{n}{side}_mlp.2", f"{d}{ff}.net.2")
    for i in range(model.config.num_single_layers):
        n, d = f"single_blocks.{i}.", f"single_transformer_blocks.{i}."
        put(n + "modulation.lin", d + "norm.linear")
        put(n + "linear1", d + "attn.to_q", d + "attn.to_k", d + "attn.to_v", d + "proj_mlp")
        put(n + "linear2", d + "proj_out")
        out[n + "norm.query_norm.scale"] = s[d + "attn.norm_q.weight"]
        out[n + "norm.key_norm.scale"] = s[d + "attn.norm_k.weight"]
    put("final_layer.linear", "proj_out")
    put("final_layer.adaLN_modulation.1", "norm_out.linear", swap=True)
    return out


def native_vae(model: AutoencoderKL) -> dict[str, torch.Tensor]:
    levels, out = len(model.config.block_out_channels), {}
    for name, value in model.state_dict().items():
        for i in range(levels):
            name = name.replace(f"encoder.down_blocks.{i}.resnets.", f"encoder.down.{i}.block.")
            name = name.replace(f"encoder.down_blocks.{i}.downsamplers.0.", f"encoder.down.{i}.downsample.")
            name = name.replace(f"decoder.up_blocks.{i}.resnets.", f"decoder.up.{levels - 1 - i}.block.")
            name = name.replace(f"decoder.up_blocks.{i}.upsamplers.0.", f"decoder.up.{levels - 1 - i}.upsample.")
        name = name.replace("mid_block.resnets.0.", "mid.block_1.").replace("mid_block.resnets.1.", "mid.block_2.")
        if "attentions" in name:
            for ours, theirs in (("group_norm", "norm"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"),
                                 ("to_out.0", "proj_out")):
                name = name.replace(f"mid_block.attentions.0.{ours}.", f"mid.attn_1.{theirs}.")
            if value.ndim == 2:
                value = value[:, :, None, None]
        name = name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        out[name] = value.contiguous()
    return out


def old_attention_names(model: AutoencoderKL) -> dict[str, torch.Tensor]:
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    out = {}
    for name, value in model.state_dict().items():
        for new, was in old.items():
            name = name.replace(f"attentions.0.{new}.", f"attentions.0.{was}.")
        out[name] = value
    return out


def in_float8(model: FluxTransformer2DModel, scaled: bool) -> tuple[dict[str, torch.Tensor], FluxTransformer2DModel]:
    """A native file in 8-bit floats, and the model that it stands for. Scaled: matrices with a scale each, as ComfyUI
    writes them, everything else as it was; otherwise every tensor is cast."""
    state, out = {}, {}
    for name, value in model.state_dict().items():
        if scaled and value.ndim != 2:
            state[name] = value
            continue
        scale = value.abs().max() / 200 if scaled else torch.tensor(1.0)
        state[name] = (value / scale).to(torch.float8_e4m3fn).float() * scale
    as_float8 = FluxTransformer2DModel.from_config(model.config).eval()
    if scaled:      # the parts of a fused layer share a scale
        for parts in fused_parts(model):
            scale = max(model.state_dict()[p + ".weight"].abs().max() for p in parts) / 200
            for p in parts:
                value = model.state_dict()[p + ".weight"]
                state[p + ".weight"] = (value / scale).to(torch.float8_e4m3fn).float() * scale
    as_float8.load_state_dict(state)
    for name, value in native_transformer(as_float8).items():
        if scaled and value.ndim == 2:
            module = name.removesuffix(".weight")
            scale = native_transformer(model)[name].abs().max() / 200
            out[name] = (value / scale).to(torch.float8_e4m3fn)
            out[module + ".scale_weight"] = scale.reshape(1)
            assert torch.equal(out[name].float() * scale, value)
        else:
            out[name] = value if scaled else value.to(torch.float8_e4m3fn)
    if scaled:
        out["scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)
    return out, as_float8


def fused_parts(model: FluxTransformer2DModel) -> list[list[str]]:
    fused = []
    for i in range(model.config.num_layers):
        fused.append([f"transformer_blocks.{i}.attn.to_{x}" for x in "qkv"])
        fused.append([f"transformer_blocks.{i}.attn.add_{x}_proj" for x in "qkv"])
    for i in range(model.config.num_single_layers):
        block = f"single_transformer_blocks.{i}."
        fused.append([block + "attn.to_q", block + "attn.to_k", block + "attn.to_v", block + "proj_mlp"])
    return fused


# --- folders -----------------------------------------------------------------

def write_index(folder: Path) -> None:
    index = {"_class_name": "FluxPipeline", "_diffusers_version": "0.42.0",
             "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
             "text_encoder": ["transformers", "CLIPTextModel"], "text_encoder_2": ["transformers", "T5EncoderModel"],
             "tokenizer": ["transformers", "CLIPTokenizer"], "tokenizer_2": ["transformers", "T5TokenizerFast"],
             "transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"]}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))


def rename(file: Path, change) -> None:
    tensors = load_file(file)
    save_file({change(name): value for name, value in tensors.items()}, file, {"format": "pt"})


def build_folder(folder: Path, guidance: bool, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """One diffusers folder. The two variants differ in how their files are named and cut, too."""
    folder.mkdir()
    write_index(folder)
    vocabulary = write_clip_tokenizer(folder / "tokenizer")
    write_t5_tokenizer(folder / "tokenizer_2")
    flux = transformer(guidance, seed).to(dtype)
    flux.save_pretrained(folder / "transformer", max_shard_size="300KB" if guidance else "10GB")
    clip(vocabulary, seed + 1, **({} if guidance else {"eos_token_id": 2})).to(dtype).save_pretrained(folder / "text_encoder")
    t5(seed + 2).to(dtype).save_pretrained(folder / "text_encoder_2")
    vae(seed + 3).to(dtype).save_pretrained(folder / "vae")
    if guidance:
        rename(folder / "text_encoder" / "model.safetensors", lambda name: "text_model." + name)
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    else:
        rename(folder / "text_encoder_2" / "model.safetensors",
               lambda name: name.replace("shared.weight", "encoder.embed_tokens.weight"))
        scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.save_pretrained(folder / "scheduler")


def build_all(out: Path) -> None:
    build_folder(out / "tiny-dev", True, 100)
    build_folder(out / "tiny-schnell", False, 200)
    build_folder(out / "tiny-bf16", True, 100, torch.bfloat16)

    native = out / "native"
    native.mkdir()
    save_file(native_transformer(transformer(True, 100)), native / "dev.safetensors")
    prefixed = {"model.diffusion_model." + k: v for k, v in native_transformer(transformer(False, 200)).items()}
    save_file(prefixed, native / "schnell.safetensors")
    save_file(transformer(True, 100).state_dict(), native / "dev-diffusers-names.safetensors")
    wide = {k: v.bfloat16() for k, v in native_transformer(wide_transformer(300)).items()}
    save_file(wide, native / "wide-bf16.safetensors")

    for name, scaled in (("fp8", False), ("fp8-scaled", True)):
        save_file(in_float8(transformer(True, 100), scaled)[0], native / f"{name}.safetensors")

    for name, model, tensors in (
            ("plain", vae(103), None),
            ("ldm", vae(103), native_vae),
            ("old-names", vae(103), old_attention_names),
            ("quant", vae(400, use_quant_conv=True, use_post_quant_conv=True, latent_channels=4, shift_factor=None,
                          scaling_factor=0.18215), None),
            ("no-attention", vae(401, mid_block_add_attention=False, layers_per_block=1,
                                 block_out_channels=(4, 8, 12, 16), norm_num_groups=2), None)):
        folder = out / "vae" / name
        model.save_pretrained(folder)
        if tensors is not None:
            (folder / "diffusion_pytorch_model.safetensors").unlink()
            save_file(tensors(model), folder / "ae.safetensors")

    vocabulary = len(json.loads((out / "tiny-dev/tokenizer/vocab.json").read_text()))
    clip(vocabulary, 500, hidden_act="gelu", hidden_size=32, num_attention_heads=4).save_pretrained(out / "text/clip-gelu")
    t5(501, feed_forward_proj="relu", d_model=40).save_pretrained(out / "text/t5-relu")
    write_t5_tokenizer(out / "text/tokenizer-identity", "identity")
