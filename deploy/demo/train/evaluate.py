"""Measures the finished model: does the picture show what the prompt asked for?

    python evaluate.py --model ../models/shapes-flux --loras ../loras

Pictures for 64 prompts that training never saw are judged by their pixels alone.
The judge's own accuracy, on true drawings of the same prompts, is printed too.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline
from PIL import Image

import shapes

SEED, COUNT, STEPS, TEXT_LENGTH = 1000, 64, 12, 64
LEAST_OVERLAP = 0.80        # a shape that overlaps less with its template counts as wrong
PALETTE = np.array(list(shapes.COLOURS.values()), dtype=np.float32)
NAMES = tuple(shapes.COLOURS)


@dataclass
class Reading:
    """What the pixels of a one-object picture say."""

    background: str
    colour: str
    shape: str
    overlap: float
    x: float
    y: float
    r: float


def nearest_colour(rgb: np.ndarray) -> str:
    return NAMES[int(((PALETTE - rgb) ** 2).sum(1).argmin())]


def template(shape: str, x: float, y: float, r: float) -> np.ndarray:
    mask = shapes.shape_mask(shape, x, y, r, scale=2).reduce(2)
    return np.asarray(mask, dtype=np.float32) / 255.0


@lru_cache(None)
def unit(shape: str) -> tuple[float, float, float, float, float]:
    """Area, width, height and bounding-box centre offset of the shape at radius 1."""
    r = 50.0
    mask = template(shape, 64, 64, r) > 0.5
    ys, xs = np.nonzero(mask)
    return (mask.sum() / r ** 2, (np.ptp(xs) + 1) / r, (np.ptp(ys) + 1) / r,
            ((xs.min() + xs.max() + 1) / 2 - 64) / r, ((ys.min() + ys.max() + 1) / 2 - 64) / r)


def best_fit(mask: np.ndarray, shape: str) -> tuple[float, float, float, float]:
    """(overlap, x, y, r) of the shape's template that covers the mask best."""
    area, width, height, ox, oy = unit(shape)
    # The middle 96 % of the object's pixels along each axis, so that a stray one does not count.
    ys, xs = np.nonzero(mask)
    x0, x1 = np.quantile(xs, (0.004, 0.996))
    y0, y1 = np.quantile(ys, (0.004, 0.996))
    best = (0.0, 64.0, 64.0, 1.0)
    by_area = (mask.sum() / area) ** 0.5
    for r in {round(by_area, 1), round(by_area * 0.95, 1), round((x1 - x0 + 1) / width, 1),
              round((y1 - y0 + 1) / height, 1)}:
        cx, cy = (x0 + x1 + 1) / 2 - ox * r, (y0 + y1 + 1) / 2 - oy * r
        for dx in (-1.5, 0.0, 1.5):
            for dy in (-1.5, 0.0, 1.5):
                candidate = template(shape, cx + dx, cy + dy, r)
                overlap = float(np.minimum(mask, candidate).sum() / np.maximum(mask, candidate).sum())
                if overlap > best[0]:
                    best = (overlap, cx + dx, cy + dy, r)
    return best


def read(image: Image.Image) -> Reading:
    """Judges a picture of one object on a plain background."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    edge = np.concatenate([pixels[:3].reshape(-1, 3), pixels[-3:].reshape(-1, 3),
                           pixels[:, :3].reshape(-1, 3), pixels[:, -3:].reshape(-1, 3)])
    background = np.median(edge, axis=0)
    distance = np.sqrt(((pixels - background) ** 2).sum(2))
    inside = distance > 0.6 * np.quantile(distance, 0.98)
    if np.quantile(distance, 0.98) < 12 or inside.sum() < 60:
        return Reading(nearest_colour(background), "none", "none", 0.0, 64, 64, 1)
    colour = np.median(pixels[inside], axis=0)
    axis = colour - background
    cover = np.clip(((pixels - background) @ axis) / (axis @ axis), 0, 1)
    mask = (cover > 0.5).astype(np.float32)
    fits = {shape: best_fit(mask, shape) for shape in shapes.SHAPES}
    shape = max(fits, key=lambda name: fits[name][0])
    return Reading(nearest_colour(background), nearest_colour(colour), shape, *fits[shape])


def score(title: str, prompts: list[dict], images: list[Image.Image], wrong: bool = False) -> None:
    """Prints the shares of right backgrounds, colours, shapes, places and sizes."""
    counts = dict.fromkeys(("background", "colour", "shape", "place", "size", "all three"), 0)
    overlaps = []
    for prompt, image in zip(prompts, images):
        seen = read(image)
        right_shape = seen.shape == prompt["shape"] and seen.overlap >= LEAST_OVERLAP
        ideal = shapes.RADIUS[prompt["size"]]
        reach = min(32.0, shapes.SIDE / 2 - 7 - ideal)
        dx, dy = shapes.PLACES[prompt["place"]]
        where = (seen.x - 64 - dx * reach) ** 2 + (seen.y - 64 - dy * reach) ** 2
        marks = {"background": seen.background == prompt["background"],
                 "colour": seen.colour == prompt["colour"], "shape": right_shape,
                 "place": where < 8 ** 2, "size": abs(seen.r / ideal - 1) < 0.15}
        marks["all three"] = marks["background"] and marks["colour"] and right_shape
        for name, mark in marks.items():
            counts[name] += mark
        overlaps.append(seen.overlap)
        if wrong and not marks["all three"]:
            print("   wrong:", prompt["prompt"], "->", seen)
    total = len(images)
    print(f"{title}: " + ", ".join(f"{name} {count}/{total} ({100 * count / total:.1f} %)"
                                   for name, count in counts.items())
          + f", mean overlap {np.mean(overlaps):.3f}", flush=True)


def score_pairs(pipe: FluxPipeline, count: int = 32) -> None:
    """Two objects side by side: each half is judged with the other painted over."""
    rng = random.Random(SEED)
    asked = []
    for _ in range(count):
        one, two, background = rng.sample(list(shapes.COLOURS), 3)
        asked.append(((one, rng.choice(shapes.SHAPES)), (two, rng.choice(shapes.SHAPES)), background))
    texts = [f"{shapes.article(' '.join(left))} and {shapes.article(' '.join(right))} "
             f"on {shapes.article(background)} background" for left, right, background in asked]
    backgrounds = colours = forms = 0
    for (left, right, background), image in zip(asked, draw(pipe, texts)):
        plain = image.getpixel((2, 2))
        for side, (colour, shape) in ((0, left), (1, right)):
            half = image.copy()
            half.paste(plain, (64 * (1 - side), 0, 64 * (2 - side), shapes.SIDE))
            seen = read(half)
            colours += seen.colour == colour
            forms += seen.shape == shape and seen.overlap >= LEAST_OVERLAP
        backgrounds += seen.background == background
    print(f"two objects: background {backgrounds}/{count}, colour {colours}/{2 * count}, "
          f"shape {forms}/{2 * count}", flush=True)


def draw(pipe: FluxPipeline, prompts: list[str], steps: int = STEPS, seed: int = SEED,
         length: int = TEXT_LENGTH, cfg: float = 1.0, batch: int = 16) -> list[Image.Image]:
    images = []
    for start in range(0, len(prompts), batch):
        part = prompts[start:start + batch]
        extra = {"negative_prompt": [""] * len(part), "true_cfg_scale": cfg} if cfg > 1 else {}
        images += pipe(part, width=shapes.SIDE, height=shapes.SIDE, num_inference_steps=steps,
                       guidance_scale=0.0, max_sequence_length=length,
                       generator=[torch.Generator().manual_seed(seed + start + i) for i in range(len(part))],
                       **extra).images
    return images


def contact_sheet(images: list[Image.Image], columns: int = 8) -> Image.Image:
    side = shapes.SIDE + 2
    sheet = Image.new("RGB", (columns * side, -(-len(images) // columns) * side))
    for i, image in enumerate(images):
        sheet.paste(image, (i % columns * side, i // columns * side))
    return sheet


def load(folder: Path, dtype: torch.dtype) -> FluxPipeline:
    pipe = FluxPipeline.from_pretrained(folder, torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


# --- LoRAs -------------------------------------------------------------------

def warmth(images: list[Image.Image]) -> float:
    """Mean red minus mean blue, in 0..255 steps."""
    pixels = np.stack([np.asarray(image, dtype=np.float32) for image in images])
    return float((pixels[..., 0] - pixels[..., 2]).mean())


def chequer(images: list[Image.Image]) -> float:
    """Share of pictures whose border follows the chequered pattern (correlation above one half)."""
    fields = np.indices((shapes.SIDE, shapes.SIDE)) // 16
    pattern = ((fields.sum(0) % 2) * 2.0 - 1.0)
    border = np.ones_like(pattern, dtype=bool)
    border[14:-14, 14:-14] = False
    hits = 0
    for image in images:
        light = np.asarray(image.convert("L"), dtype=np.float32)[border]
        spread = light.std()
        if spread > 4:
            hits += abs(((light - light.mean()) * pattern[border]).mean() / spread) > 0.5
    return hits / len(images)


def score_loras(pipe: FluxPipeline, folder: Path, sheets: Path | None) -> None:
    prompts = [p["prompt"] for p in shapes.unseen_prompts(24, seed=21)]
    for name, measure in (("dusk", warmth), ("checker", chequer)):
        file = folder / f"{name}.safetensors"
        if not file.exists():
            continue
        pipe.load_lora_weights(str(folder), weight_name=file.name, adapter_name=name)
        row, shown = [], []
        for weight in (0.0, 0.25, 0.5, 0.75, 1.0):
            pipe.set_adapters([name], [weight])
            images = draw(pipe, prompts)
            shown += images[:8]
            row.append(f"{weight}: {measure(images):.2f}")
        print(f"lora {name}, {measure.__name__} at weight " + ", ".join(row), flush=True)
        pipe.unload_lora_weights()
        if sheets:
            contact_sheet(shown).save(sheets / f"lora-{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--loras", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--sheets", type=Path, help="folder for contact sheets (png)")
    parser.add_argument("--more", action="store_true", help="also other step counts, text lengths and guidance")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.sheets:
        args.sheets.mkdir(parents=True, exist_ok=True)

    prompts = shapes.unseen_prompts(COUNT)
    rng = random.Random(SEED)
    truth = [shapes.render(p["background"], [shapes.place_one(rng, p["shape"], p["colour"], p["size"], p["place"])])
             for p in prompts]
    score("true drawings", prompts, truth)
    pipe = load(args.model, getattr(torch, args.dtype))
    with torch.no_grad():
        tensors = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in truth])
        coded = pipe.vae.encode((tensors / 127.5 - 1).to(pipe.dtype)).latent_dist.mean
        coded = ((pipe.vae.decode(coded).sample.float() / 2 + 0.5).clamp(0, 1) * 255).round().byte()
    coded = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in coded]
    score("true drawings, encoded and decoded", prompts, coded)

    texts = [p["prompt"] for p in prompts]
    images = draw(pipe, texts)
    score(f"generated, {STEPS} steps, {args.dtype}", prompts, images, wrong=True)
    if args.sheets:
        contact_sheet(images).save(args.sheets / "unseen.png")
        free = draw(pipe, [shapes.sample(random.Random(i), kinds={"two": 0.5, "scene": 0.5})[0] for i in range(32)])
        contact_sheet(free).save(args.sheets / "scenes.png")
    if args.more:
        for steps in (4, 8, 20):
            score(f"{steps} steps", prompts, draw(pipe, texts, steps=steps))
        for length in (32, 512):
            score(f"text length {length}", prompts, draw(pipe, texts, length=length))
        score("true guidance 2", prompts, draw(pipe, texts, cfg=2.0))
        score_pairs(pipe)
    if args.loras:
        score_loras(pipe, args.loras, args.sheets)


if __name__ == "__main__":
    main()
