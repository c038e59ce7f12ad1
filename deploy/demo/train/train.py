"""Builds the demo model from nothing: run the stages in order, or `all`.

    python train.py all --work SCRATCH

Every stage leaves its result under --work and is skipped when that is already
there; the long ones keep checkpoints and go on from the last one.
"""

from __future__ import annotations

import argparse
import random
import shutil
from pathlib import Path

import torch

SEEDS = {"vae": 1, "equalise": 2, "latents": 3, "flux": 4, "decoder": 5, "dusk": 6, "checker": 7}
PICTURES, PER_FILE = 14000, 1000
FLUX_STEPS = 7100
DECODER_STEPS = 1500
STYLE_PICTURES = 1000


def stage_vae(work: Path) -> None:
    """Encoder and decoder together; the encoder is final afterwards."""
    import vae
    if (work / "vae" / "config.json").exists():
        return
    model = vae.create(SEEDS["vae"])
    vae.train_joint(model, SEEDS["vae"])
    print("psnr", vae.psnr(model), flush=True)
    vae.equalise(model, SEEDS["equalise"])
    print("psnr after rescaling", vae.psnr(model), flush=True)
    vae.save(model, work / "vae")


def stage_tokenizers(work: Path) -> None:
    import vocabulary
    vocabulary.write_clip(work / "tokenizer")
    vocabulary.write_t5(work / "tokenizer_2")


def stage_latents(work: Path) -> None:
    """Draws, captions and encodes the training pictures, a file at a time."""
    import shapes
    import vae
    model = vae.load(work / "vae")
    for index in range(PICTURES // PER_FILE):
        file = work / "latents" / f"{index:03}.pt"
        if not file.exists():
            write_latents(model, file, f"{SEEDS['latents']} {index}", PER_FILE, shapes.sample)


def write_latents(model, file: Path, seed: str, count: int, draw) -> None:
    """Caches `count` pictures made by draw(rng) -> (caption, image)."""
    import vae
    rng = random.Random(seed)
    latents, captions = [], []
    for _ in range(count // 20):
        texts, images = zip(*(draw(rng) for _ in range(20)))
        captions += texts
        latents.append(vae.encode_pictures(model, list(images)))
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    torch.save({"latents": torch.cat(latents), "captions": captions}, fresh)
    fresh.replace(file)


def stage_flux(work: Path) -> None:
    """Transformer and text encoders; the long stage."""
    import flux
    model = flux.create(SEEDS["flux"], work / "tokenizer")
    data = flux.Data(work / "latents", flux.Captions(work / "tokenizer", work / "tokenizer_2"))
    flux.train(model, data, work / "flux", SEEDS["flux"], FLUX_STEPS)


def stage_decoder(work: Path) -> None:
    """A sharper decoder for the same latents; may run beside the flux stage."""
    import vae
    if (work / "vae-sharp" / "config.json").exists():
        return
    model = vae.load(work / "vae")
    vae.train_decoder(model, SEEDS["decoder"], DECODER_STEPS)
    print("psnr", vae.psnr(model), flush=True)
    vae.save(model, work / "vae-sharp")


def stage_export(work: Path) -> None:
    """Writes the servable folder (under work/export) from whatever has been trained so far."""
    import flux
    import vae
    folder = work / "export"
    model = flux.create(SEEDS["flux"], work / "tokenizer")
    print("step", flux.load_average(model, work / "flux"))
    flux.save(model, work / "tokenizer", folder)
    sharp = work / "vae-sharp"
    vae.save(vae.load(sharp if sharp.exists() else work / "vae").bfloat16(), folder / "vae")
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(work / name, folder / name, dirs_exist_ok=True)


def stage_loras(work: Path) -> None:
    """Both adapters (under work/loras), on the exported weights."""
    import lora
    import vae
    encoder = vae.load(work / "vae")
    for name, style in lora.STYLES.items():
        for weight in style.weights:
            file = work / "styles" / name / f"{weight}" / "000.pt"
            if not file.exists():
                count = STYLE_PICTURES // len(style.weights)
                write_latents(encoder, file, f"{SEEDS[name]} {weight}", count, style.draw(weight))
        lora.train(style, work / "export", work / "styles" / name, SEEDS[name],
                   work / "loras" / f"{name}.safetensors")


def stage_install(work: Path) -> None:
    """Puts the exported folder and the adapters where the demo expects them."""
    here = Path(__file__).resolve().parent.parent
    for source, target in ((work / "export", here / "models" / "shapes-flux"), (work / "loras", here / "loras")):
        fresh, old = target.with_name(target.name + ".new"), target.with_name(target.name + ".old")
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.copytree(source, fresh)
        for file in fresh.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        shutil.rmtree(old, ignore_errors=True)


STAGES = {"tokenizers": stage_tokenizers, "vae": stage_vae, "latents": stage_latents, "flux": stage_flux,
          "decoder": stage_decoder, "export": stage_export, "loras": stage_loras, "install": stage_install}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    for name in STAGES if args.stage == "all" else [args.stage]:
        STAGES[name](args.work)


if __name__ == "__main__":
    main()
