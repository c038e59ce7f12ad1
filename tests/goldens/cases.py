"""What diffusers, transformers, tokenizers and Pillow make of the tiny models.

Each case is one safetensors file: inputs, intermediate values, results; settings in its metadata.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from diffusers import (AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxImg2ImgPipeline, FluxPipeline,
                       FluxTransformer2DModel)
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

import models

TEXTS = [
    "", " ", "a photo of a red house under the sun", "  leading,   and trailing  ", "tab\there\nnew\r\nline",
    "It's WE'LL they've I'M you're DON'T he'd 's 't'", "1234567890 3.14 \u00bd \u2460 \u0664\u0665",
    "\u00e9t\u00e9 na\u00efve \u00c5NGSTR\u00d6M stra\u00dfe \u0130stanbul \u01c5", "e\u0301te\u0301 A\u030angstro\u0308m",
    "\u4f60\u597d\u4e16\u754c \u65e5\u672c\u8a9e \u30c6\u30b9\u30c8 \ud55c\uad6d\uc5b4", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001F600 \U0001F469\u200d\U0001F469\u200d\U0001F467 \U0001F1E9\U0001F1EA", "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u03b1\u03b2\u03b3 \u0645\u0631\u062d\u0628\u0627",
    "!!!---((a))--- ...'s!'", "\u00a0no\u2003break\u3000space\u200bzero", "\ufb01ne \uff41\uff42\uff43 \u2167 \u00b2",
    "a <|endoftext|> b <|startoftext|>c", "A <|ENDOFTEXT|>!! B", "foo</s>bar <pad> <unk> <extra_id_0> <extra_id_99>x",
    "null\x00byte and \x01 control \x85 \x1c", "supercalifragilisticexpialidocious" * 4,
    "masterpiece, best quality, highly detailed, " * 12, "\u2028line\u2029separators", "\U00010400\U0001D400 \ufffd",
]


def text(value: str) -> torch.Tensor:
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def save(out: Path, name: str, tensors: dict[str, torch.Tensor], **settings) -> None:
    file = out / "cases" / f"{name}.safetensors"
    file.parent.mkdir(exist_ok=True)
    save_file({k: v.detach().contiguous().clone() for k, v in tensors.items()}, file,
              {k: str(v) for k, v in settings.items()})


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- parts -------------------------------------------------------------------

def tokenizers(out: Path) -> None:
    clip = CLIPTokenizer.from_pretrained(out / "tiny-dev/tokenizer")
    t5 = {name: T5TokenizerFast.from_pretrained(folder) for name, folder in (
        ("t5", out / "tiny-dev/tokenizer_2"), ("t5_identity", out / "text/tokenizer-identity"))}
    tensors = {}

    def ids(tokenizer, value, length):
        return torch.tensor(tokenizer(value, padding="max_length", truncation=True, max_length=length).input_ids)

    for i, value in enumerate(TEXTS):
        tensors[f"text.{i}"] = text(value)
        tensors[f"clip.{i}"] = ids(clip, value, 77)
        for name, tokenizer in t5.items():
            tensors[f"{name}.{i}"] = ids(tokenizer, value, 128)
            tensors[f"{name}_short.{i}"] = ids(tokenizer, value, 7)
    save(out, "tokenizers", tensors, count=len(TEXTS))


def text_encoders(out: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, folder in (("clip-dev", "tiny-dev/text_encoder"), ("clip-eos2", "tiny-schnell/text_encoder"),
                         ("clip-gelu", "text/clip-gelu")):
        model = CLIPTextModel.from_pretrained(out / folder).float().eval()
        size = model.config.vocab_size
        tensors = {}
        for i, length in enumerate((5, 40, 77)):
            ids = torch.randint(0, size - 2, (1, length), generator=generator)
            ids[0, 0], ids[0, length // 2:] = size - 2, size - 1
            output = model(ids)
            tensors |= {f"ids.{i}": ids[0], f"hidden.{i}": output.last_hidden_state, f"pooled.{i}": output.pooler_output}
        save(out, name, tensors, count=3, folder=folder)
    for name, folder in (("t5-gated", "tiny-dev/text_encoder_2"), ("t5-embed-tokens", "tiny-schnell/text_encoder_2"),
                         ("t5-relu", "text/t5-relu")):
        model = t5_encoder(out / folder)
        tensors = {}
        for i, length in enumerate((1, 13, 45, 300)):
            ids = torch.randint(0, model.config.vocab_size, (1, length), generator=generator)
            tensors |= {f"ids.{i}": ids[0], f"hidden.{i}": model(ids).last_hidden_state}
        save(out, name, tensors, count=4, folder=folder)


def t5_encoder(folder: Path, dtype: torch.dtype = torch.float32) -> T5EncoderModel:
    """from_pretrained, whichever of its two names the embedding has."""
    from safetensors.torch import load_file
    from transformers import T5Config
    model = T5EncoderModel(T5Config.from_pretrained(folder))
    state = load_file(folder / "model.safetensors")
    if "shared.weight" not in state:
        state["shared.weight"] = state.pop("encoder.embed_tokens.weight")
    model.load_state_dict(state, strict=False)
    return model.to(dtype).eval()


def autoencoders(out: Path) -> None:
    for folder in sorted((out / "vae").iterdir()):
        reference = out / "vae/plain" if folder.name in ("ldm", "old-names") else folder
        model = AutoencoderKL.from_pretrained(reference).eval()
        picture = randn(2, 1, 3, 48, 80).clamp(-1, 1)
        posterior = model.encode(picture).latent_dist
        latents = randn(3, 1, model.config.latent_channels, 6, 10)
        save(out, f"vae-{folder.name}", {
            "picture": picture, "mean": posterior.mean, "std": posterior.std,
            "latents": latents, "decoded": model.decode(latents).sample}, folder=f"vae/{folder.name}")
    tiled_autoencoder(out)


def tiled_autoencoder(out: Path) -> None:
    """Sizes with whole tiles, cut ones, and ones that only the overlap reaches."""
    model = AutoencoderKL.from_pretrained(out / "vae/plain").eval()
    scale = 2 ** (len(model.config.block_out_channels) - 1)
    tensors = {}
    cases = [(8, 24, 24), (8, 13, 30), (4, 9, 7), (16, 12, 40)]  # tile, height, width in latents
    for i, (tile, height, width) in enumerate(cases):
        model.enable_tiling()
        model.tile_latent_min_size, model.tile_sample_min_size = tile, tile * scale
        picture = randn(5 + i, 1, 3, height * scale, width * scale).clamp(-1, 1)
        posterior = model.encode(picture).latent_dist
        latents = randn(9 + i, 1, model.config.latent_channels, height, width)
        tensors |= {f"tile.{i}": torch.tensor(tile * scale), f"picture.{i}": picture, f"mean.{i}": posterior.mean,
                    f"std.{i}": posterior.std, f"latents.{i}": latents, f"decoded.{i}": model.decode(latents).sample}
    save(out, "vae-tiled", tensors, count=len(cases), folder="vae/plain")


def resizing(out: Path) -> None:
    rng = np.random.default_rng(4)
    tensors = {}
    sizes = [((37, 53), (80, 48)), ((200, 120), (48, 80)), ((64, 64), (64, 64)), ((5, 3), (96, 96)),
             ((64, 100), (64, 32)), ((100, 64), (32, 64)), ((1, 1), (16, 16))]
    for i, (source, target) in enumerate(sizes):
        pixels = rng.integers(0, 256, (source[1], source[0], 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize(target, Image.Resampling.LANCZOS)
        tensors |= {f"from.{i}": torch.from_numpy(pixels), f"to.{i}": torch.from_numpy(np.array(image))}
    save(out, "resize", tensors, count=len(sizes))


def noise(out: Path) -> None:
    tensors = {}
    for seed in (0, 1, 42, 2 ** 32 + 7, 2 ** 63 + 11, 2 ** 64 - 1):
        generator = torch.Generator().manual_seed(seed)
        tensors[f"first.{seed}"] = torch.randn((1, 16, 6, 10), generator=generator)
        tensors[f"second.{seed}"] = torch.randn((1, 16, 6, 10), generator=generator)
    save(out, "noise", tensors, capability=torch.backends.cpu.get_cpu_capability())


SCHEDULES = {
    "static-1": dict(shift=1.0), "static-3": dict(shift=3.0),
    "dynamic": dict(use_dynamic_shifting=True, shift=3.0),
    "dynamic-linear": dict(use_dynamic_shifting=True, time_shift_type="linear"),
    "dynamic-terminal": dict(use_dynamic_shifting=True, shift_terminal=0.02, base_shift=0.5, max_shift=0.9,
                             max_image_seq_len=8192),
    "static-terminal": dict(shift=2.0, shift_terminal=0.1),
}


def schedules(out: Path) -> None:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift
    for name, config in SCHEDULES.items():
        scheduler = FlowMatchEulerDiscreteScheduler(**config)
        scheduler.save_pretrained(out / "schedulers" / name)
        c, tensors = scheduler.config, {}
        for steps in (1, 2, 4, 9, 20, 30):
            if steps == 1 and c.shift_terminal:
                continue    # 0/0 in diffusers
            for tokens in (15, 256, 4096):
                mu = calculate_shift(tokens, c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)
                scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
                x = randn(steps, 4, 8)
                key = f"{steps}.{tokens}"
                tensors |= {f"sigmas.{key}": scheduler.sigmas, f"start.{key}": x}
                for t in scheduler.timesteps:
                    x = scheduler.step(-0.7 * x + 0.3 * torch.sin(t), t, x).prev_sample
                tensors[f"end.{key}"] = x
        save(out, f"schedule-{name}", tensors)


# --- transformer -------------------------------------------------------------

def image_ids(rows: int, columns: int) -> torch.Tensor:
    return FluxPipeline._prepare_latent_image_ids(1, rows, columns, "cpu", torch.float32)


def transformer_call(out: Path, name: str, model: FluxTransformer2DModel, rows: int, columns: int, length: int,
                     **settings) -> None:
    """One call with everything that its blocks saw and gave."""
    config, seen, hooks = model.config, {}, []
    for kind, blocks in (("double", model.transformer_blocks), ("single", model.single_transformer_blocks)):
        for i, block in enumerate(blocks):
            def hook(_, args, kwargs, output, key=f"{kind}.{i}"):
                seen[key + ".in.text"], seen[key + ".in.image"] = kwargs["encoder_hidden_states"], kwargs["hidden_states"]
                seen[key + ".out.text"], seen[key + ".out.image"] = output
            hooks.append(block.register_forward_hook(hook, with_kwargs=True))
    hooks.append(model.time_text_embed.register_forward_hook(lambda _, args, output: seen.update(temb=output)))
    guidance, sigma = 2.7, 0.6180339887
    inputs = {"x": randn(5, 1, rows * columns, config.in_channels), "t5": randn(6, 1, length, config.joint_attention_dim),
              "pooled": randn(7, 1, config.pooled_projection_dim)}
    t = torch.tensor([sigma], dtype=torch.float32) * 1000
    velocity = model(hidden_states=inputs["x"], encoder_hidden_states=inputs["t5"], pooled_projections=inputs["pooled"],
                     timestep=t / 1000, guidance=torch.tensor([guidance]) if config.guidance_embeds else None,
                     img_ids=image_ids(rows, columns), txt_ids=torch.zeros(length, 3), return_dict=False)[0]
    for hook in hooks:
        hook.remove()
    save(out, name, inputs | seen | {"velocity": velocity}, rows=rows, columns=columns, sigma=sigma, guidance=guidance,
         **settings)


def transformers(out: Path) -> None:
    transformer_call(out, "transformer-dev", FluxTransformer2DModel.from_pretrained(out / "tiny-dev/transformer"), 3, 5, 13)
    transformer_call(out, "transformer-schnell", FluxTransformer2DModel.from_pretrained(out / "tiny-schnell/transformer"),
                     4, 7, 45)
    for name, scaled in (("fp8", False), ("fp8-scaled", True)):
        transformer_call(out, f"transformer-{name}", models.in_float8(models.transformer(True, 100), scaled)[1], 3, 5, 13)
    wide = models.wide_transformer(300).bfloat16().float()
    transformer_call(out, "transformer-wide", wide, 12, 9, 77)


# --- whole runs --------------------------------------------------------------

def pipeline(folder: Path) -> FluxPipeline:
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=AutoencoderKL.from_pretrained(folder / "vae").float().eval(),
        text_encoder=CLIPTextModel.from_pretrained(folder / "text_encoder").float().eval(),
        tokenizer=CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        text_encoder_2=t5_encoder(folder / "text_encoder_2"),
        tokenizer_2=T5TokenizerFast.from_pretrained(folder / "tokenizer_2"),
        transformer=FluxTransformer2DModel.from_pretrained(folder / "transformer").float().eval())


def run(out: Path, name: str, folder: Path, **arguments) -> None:
    run_with(pipeline(folder), out, name, folder, **arguments)


def run_with(pipe: FluxPipeline, out: Path, name: str, folder: Path, *, prompt: str, width: int, height: int,
             steps: int, seeds: list[int], length: int, guidance: float = 0.0, negative: str | None = None,
             true_cfg_scale: float = 1.0, init: np.ndarray | None = None, strength: float = 1.0,
             second: str | None = None, negative_second: str | None = None) -> None:
    """Whole runs, one per seed: conditioning, latents after every step, pictures."""
    pipe.set_progress_bar_config(disable=True)
    tensors = {"prompt": text(prompt)}
    embeds, pooled, _ = pipe.encode_prompt(prompt=prompt, prompt_2=second, max_sequence_length=length)
    tensors |= {"t5": embeds, "pooled": pooled}
    for i, seed in enumerate(seeds):
        steps_seen = []

        def after_step(_, index, t, values):
            latents = pipe._unpack_latents(values["latents"], height, width, pipe.vae_scale_factor)
            steps_seen.append(latents.clone())
            return {}

        arguments = dict(prompt=prompt, width=width, height=height, num_inference_steps=steps, guidance_scale=guidance,
                         max_sequence_length=length, true_cfg_scale=true_cfg_scale, negative_prompt=negative,
                         prompt_2=second, negative_prompt_2=negative_second,
                         generator=[torch.Generator().manual_seed(seed)], output_type="np",
                         callback_on_step_end=after_step)
        if init is not None:
            image = FluxImg2ImgPipeline(**pipe.components)
            image.set_progress_bar_config(disable=True)
            result = image(image=Image.fromarray(init), strength=strength, **arguments).images[0]
            tensors["init_image"] = torch.from_numpy(init)
        else:
            result = pipe(**arguments).images[0]
        for k, latents in enumerate(steps_seen):
            tensors[f"latents.{i}.{k + 1}"] = latents
        tensors[f"image.{i}"] = torch.from_numpy(result)
        tensors[f"pixels.{i}"] = torch.from_numpy((result * 255).round().astype("uint8"))
        tensors[f"seed.{i}"] = torch.tensor([seed])
    for key, value in (("negative", negative), ("second", second), ("negative_second", negative_second)):
        if value is not None:
            tensors[key] = text(value)
    save(out, name, tensors, folder=folder, width=width, height=height, steps=steps, length=length, guidance=guidance,
         true_cfg_scale=true_cfg_scale, strength=strength, count=len(seeds))


def runs(out: Path) -> None:
    prompt = "a photo of a red house, \u00e9t\u00e9 \U0001F680"
    size = dict(width=80, height=48)
    run(out, "run-dev", out / "tiny-dev", prompt=prompt, **size, steps=4, seeds=[11, 12], length=45, guidance=3.5)
    run(out, "run-schnell", out / "tiny-schnell", prompt=prompt, **size, steps=3, seeds=[2 ** 40 + 1], length=13)
    run(out, "run-true-cfg", out / "tiny-dev", prompt=prompt, **size, steps=3, seeds=[5], length=20, guidance=1.5,
        negative="blurry, night", true_cfg_scale=4.0)
    # Of an empty second prompt the first one is used; with nothing to go away from, nothing is guided.
    run(out, "run-second", out / "tiny-dev", prompt=prompt, **size, steps=2, seeds=[6], length=20, guidance=1.5,
        second="a blue road at night", negative="blurry, night", negative_second="", true_cfg_scale=4.0)
    run(out, "run-second-negative", out / "tiny-dev", prompt=prompt, **size, steps=2, seeds=[6], length=20, guidance=1.5,
        second="", negative="", negative_second="fog", true_cfg_scale=4.0)
    run(out, "run-unguided", out / "tiny-dev", prompt=prompt, **size, steps=2, seeds=[7], length=20, guidance=1.5,
        true_cfg_scale=4.0)
    init = np.random.default_rng(6).integers(0, 256, (100, 60, 3), dtype=np.uint8)
    run(out, "run-img2img", out / "tiny-dev", prompt=prompt, **size, steps=7, seeds=[21, 22], length=16, guidance=3.5,
        init=init, strength=0.6)
    run(out, "run-bf16", out / "tiny-bf16", prompt=prompt, **size, steps=3, seeds=[31], length=16, guidance=3.5)


def demo_runs(out: Path, folder: Path) -> None:
    defaults = json.loads((folder / "latentd.json").read_text())["defaults"] if (folder / "latentd.json").exists() else {}
    common = dict(width=defaults.get("width", 128), height=defaults.get("height", 128), steps=defaults.get("steps", 12),
                  length=defaults.get("max_sequence_length", 64), guidance=defaults.get("guidance", 0))
    run(out, "demo-run", folder.resolve(), prompt="a red circle above a blue square", seeds=[1, 2], **common)
    init = np.full((96, 96, 3), 200, dtype=np.uint8)
    init[20:60, 30:70] = (220, 30, 30)
    run(out, "demo-img2img", folder.resolve(), prompt="a green triangle", seeds=[3], init=init, strength=0.7, **common)


def write_all(out: Path, demo: Path | None) -> None:
    tokenizers(out)
    text_encoders(out)
    autoencoders(out)
    resizing(out)
    noise(out)
    schedules(out)
    transformers(out)
    runs(out)
    if demo is not None:
        demo_runs(out, demo)
