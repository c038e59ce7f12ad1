"""Procedural pictures and the captions that describe them.

Everything the demo model knows about the world is defined here: ten colours,
eight shapes, where and how big they may be, and three kinds of picture (one
object, two objects, a small scene).  `sample` draws one (caption, image) pair.
"""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass

from PIL import Image, ImageChops, ImageDraw

SIDE = 128          # picture side in pixels
OVERSAMPLE = 3      # drawn this much larger, then box-reduced

COLOURS = {
    "red": (220, 30, 35),
    "orange": (250, 140, 20),
    "yellow": (250, 225, 50),
    "green": (40, 165, 60),
    "blue": (35, 80, 215),
    "purple": (130, 50, 170),
    "pink": (250, 140, 190),
    "brown": (125, 75, 35),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "heart", "diamond")
RADIUS = {"small": 24.0, "": 35.0, "big": 48.0}
PLACES = {
    "": (0, 0),
    "in the middle": (0, 0),
    "on the left": (-1, 0),
    "on the right": (1, 0),
    "at the top": (0, -1),
    "at the bottom": (0, 1),
}
JITTER_POSITION = 3.0   # pixels, each way
JITTER_RADIUS = 0.05    # fraction, each way

# Words a caption may use in place of the ones the grammar produces.  The
# tokenizers give them the same embedding, so they need no training of their own.
SYNONYMS = {
    "an": "a",
    "large": "big", "huge": "big", "giant": "big",
    "little": "small", "tiny": "small",
    "violet": "purple",
    "center": "middle", "centre": "middle",
    "plus": "cross",
    "disc": "circle", "disk": "circle",
    "over": "above", "under": "below",
    "backdrop": "background",
    "evening": "sunset", "dusk": "sunset",
    "daytime": "day", "nighttime": "night",
}

SKY = {"in the day": (140, 200, 245), "at night": (22, 26, 66), "at sunset": (246, 152, 96)}
GROUND = {"in the day": (96, 180, 80), "at night": (28, 66, 44), "at sunset": (120, 120, 52)}


@dataclass(frozen=True)
class Thing:
    """One shape on the canvas; x, y and r are in pixels of the final picture."""

    shape: str
    colour: str
    x: float
    y: float
    r: float


def held_out(colour: str, shape: str, background: str) -> bool:
    """True for the tenth of all (colour, shape, background) triples kept for evaluation."""
    return zlib.crc32(f"{colour} {shape} on {background}".encode()) % 10 == 0


# --- drawing -----------------------------------------------------------------

def _heart() -> list[tuple[float, float]]:
    points = []
    for i in range(72):
        a = 2 * math.pi * i / 72
        x = 16 * math.sin(a) ** 3
        y = 13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)
        points.append((x / 16.5, (-y - 2.4) / 15.0))
    return points


def _star() -> list[tuple[float, float]]:
    points = []
    for i in range(10):
        a = -math.pi / 2 + math.pi * i / 5
        radius = 1.06 if i % 2 == 0 else 0.45
        points.append((radius * math.cos(a), radius * math.sin(a) + 0.05))
    return points


_ARM = 0.33
POLYGONS = {
    "square": [(-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84)],
    "triangle": [(0.0, -0.92), (1.0, 0.80), (-1.0, 0.80)],
    "star": _star(),
    "cross": [(-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM),
              (_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM)],
    "heart": _heart(),
    "diamond": [(0.0, -1.0), (0.72, 0.0), (0.0, 1.0), (-0.72, 0.0)],
}


def shape_mask(shape: str, x: float, y: float, r: float, scale: int = OVERSAMPLE) -> Image.Image:
    """The shape's coverage as an 8-bit mask, `scale` times larger than the picture."""
    mask = Image.new("L", (SIDE * scale, SIDE * scale), 0)
    draw = ImageDraw.Draw(mask)
    x, y, r = x * scale, y * scale, r * scale

    def disc(radius: float, value: int) -> None:
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=value)

    if shape == "circle":
        disc(0.95 * r, 255)
    elif shape == "ring":
        disc(0.97 * r, 255)
        disc(0.56 * r, 0)
    else:
        draw.polygon([(x + r * px, y + r * py) for px, py in POLYGONS[shape]], fill=255)
    return mask


def render(background: str, things: list[Thing], style: str | None = None) -> Image.Image:
    """Draws shapes over a flat background (or, in the "checker" style, a chequered one)."""
    canvas = Image.new("RGB", (SIDE * OVERSAMPLE,) * 2, COLOURS[background])
    if style == "checker":
        _chequer(canvas, COLOURS[background])
    for thing in things:
        canvas.paste(COLOURS[thing.colour], mask=shape_mask(thing.shape, thing.x, thing.y, thing.r))
    return canvas.reduce(OVERSAMPLE)


def _chequer(canvas: Image.Image, colour: tuple[int, int, int]) -> None:
    """Every second 16-pixel field of the background a good deal darker, or lighter if it is dark."""
    bright = sum(colour) / 3 > 70
    other = tuple(int(c * 0.55) if bright else int(c + 0.45 * (255 - c)) for c in colour)
    draw, step = ImageDraw.Draw(canvas), 16 * OVERSAMPLE
    for row in range(SIDE // 16):
        for column in range(SIDE // 16):
            if (row + column) % 2:
                x, y = column * step, row * step
                draw.rectangle((x, y, x + step - 1, y + step - 1), fill=other)


def dusk(image: Image.Image, strength: float) -> Image.Image:
    """A warm evening tint: light and colour shift towards amber, in proportion to `strength`."""
    red, green, blue = image.split()
    grey = image.convert("L")
    warm = Image.merge("RGB", (
        ImageChops.blend(red, grey.point(lambda v: min(255, int(70 + v * 0.73))), 0.55),
        ImageChops.blend(green, grey.point(lambda v: int(28 + v * 0.60)), 0.55),
        ImageChops.blend(blue, grey.point(lambda v: int(18 + v * 0.30)), 0.55),
    ))
    return Image.blend(image, warm, strength)


# --- captions and layout -----------------------------------------------------

def _join(*words: str) -> str:
    return " ".join(word for word in words if word)


def article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def _colours(rng: random.Random, count: int) -> list[str]:
    return rng.sample(list(COLOURS), count)


def place_one(rng: random.Random, shape: str, colour: str, size: str, place: str) -> Thing:
    """Where a single object of that size and place goes, with a little jitter."""
    r = RADIUS[size] * rng.uniform(1 - JITTER_RADIUS, 1 + JITTER_RADIUS)
    reach = min(32.0, SIDE / 2 - 7 - RADIUS[size])
    dx, dy = PLACES[place]
    x = SIDE / 2 + dx * reach + rng.uniform(-JITTER_POSITION, JITTER_POSITION)
    y = SIDE / 2 + dy * reach + rng.uniform(-JITTER_POSITION, JITTER_POSITION)
    return Thing(shape, colour, x, y, r)


def one_object(rng: random.Random):
    """(caption, background, things) of a picture with one shape."""
    shape = rng.choice(SHAPES)
    while True:
        colour, background = _colours(rng, 2)
        if not held_out(colour, shape, background):
            break
    size = rng.choices(("", "small", "big"), (5, 2, 3))[0]
    place = rng.choices(tuple(PLACES), (10, 1, 1.5, 1.5, 1.5, 1.5))[0]
    what = _join(size, colour, shape)
    form = rng.random()
    if form < 0.80:
        caption = _join(article(what), place, "on", article(background), "background")
    elif form < 0.85:
        caption = _join(article(what), place, "on", background)
    elif form < 0.90:
        caption = _join(article(what), place) + f", {background} background"
    elif form < 0.94:
        caption = _join(what, place, "on", background, "background")
    elif colour != "white" and not held_out(colour, shape, "white"):
        background, caption = "white", _join(article(what), place)
    else:
        caption = _join(what, place) + f", {background} background"
    return caption, background, [place_one(rng, shape, colour, size, place)]


def two_objects(rng: random.Random):
    """(caption, background, things) of a picture with two shapes."""
    while True:
        first, second, background = _colours(rng, 3)
        shapes = rng.choice(SHAPES), rng.choice(SHAPES)
        if not (held_out(first, shapes[0], background) or held_out(second, shapes[1], background)):
            break

    def thing(index: int, x: float, y: float, r: float) -> Thing:
        return Thing(shapes[index], (first, second)[index],
                     x + rng.uniform(-2, 2), y + rng.uniform(-2, 2), r * rng.uniform(0.96, 1.04))

    one, two = article(f"{first} {shapes[0]}"), article(f"{second} {shapes[1]}")
    end = _join("on", article(background), "background")
    form = rng.random()
    if form < 0.55:
        caption = _join(one, "and", two, end)
        things = [thing(0, 34, 64, 26), thing(1, 94, 64, 26)]
    elif form < 0.70:
        caption = _join(one, "above", two, end)
        things = [thing(0, 64, 34, 26), thing(1, 64, 94, 26)]
    elif form < 0.80:
        caption = _join(one, "below", two, end)
        things = [thing(0, 64, 94, 26), thing(1, 64, 34, 26)]
    elif form < 0.90:
        caption = _join(one, "to the left of", two, end)
        things = [thing(0, 34, 64, 26), thing(1, 94, 64, 26)]
    else:
        caption = _join(one, "to the right of", two, end)
        things = [thing(0, 94, 64, 26), thing(1, 34, 64, 26)]
    return caption, background, things


def scene(rng: random.Random):
    """(caption, image) of a house, a tree or both under sun or moon."""
    light = rng.choice(tuple(SKY))
    wall, roof = _colours(rng, 2)
    with_house = rng.random() < 0.8
    with_tree = rng.random() < 0.5 or not with_house
    when = rng.random()
    said = light
    if when < 0.15:
        said = {"in the day": "under the sun", "at night": "under the moon", "at sunset": "at sunset"}[light]
    if with_house:
        subject = _join(article(wall), "house")
        if rng.random() < 0.8:
            subject = _join(subject, "with", article(roof), "roof")
        else:
            roof = "brown" if wall != "brown" else "red"
        if with_tree:
            subject = _join(subject, "and a tree")
    else:
        subject = "a tree"
    return _join(subject, said), _draw_scene(rng, light, wall, roof, with_house, with_tree)


def _draw_scene(rng, light, wall, roof, with_house, with_tree) -> Image.Image:
    k = OVERSAMPLE
    canvas = Image.new("RGB", (SIDE * k, SIDE * k), SKY[light])
    draw = ImageDraw.Draw(canvas)

    def box(x0, y0, x1, y1, fill):
        draw.rectangle((x0 * k, y0 * k, x1 * k - 1, y1 * k - 1), fill=fill)

    def disc(x, y, r, fill):
        draw.ellipse(((x - r) * k, (y - r) * k, (x + r) * k, (y + r) * k), fill=fill)

    shift = rng.uniform(-3, 3)
    if light == "in the day":
        disc(104 + shift, 22, 12, (255, 230, 70))
    elif light == "at night":
        disc(104 + shift, 22, 12, (240, 240, 220))
        disc(98 + shift, 19, 11, SKY[light])
    else:
        disc(106 + shift, 86, 17, (226, 66, 40))
    box(0, 92, SIDE, SIDE, GROUND[light])

    if with_house:
        x = (44 if with_tree else 54) + rng.uniform(-3, 3)
        box(x - 27, 58, x + 27, 108, COLOURS[wall])
        draw.polygon([((x - 34) * k, 58 * k), ((x + 34) * k, 58 * k), (x * k, 26 * k)], fill=COLOURS[roof])
        frame = (90, 55, 30) if wall != "brown" else (40, 24, 14)
        box(x - 6, 84, x + 8, 108, frame)
        pane = (255, 236, 140) if light != "in the day" else (205, 232, 250)
        box(x - 21, 66, x - 9, 78, pane)
        box(x + 10, 66, x + 22, 78, pane)
    if with_tree:
        x = (98 if with_house else 52) + rng.uniform(-3, 3)
        box(x - 4, 80, x + 4, 112, (104, 66, 34))
        crown = {"in the day": (34, 130, 52), "at night": (18, 84, 48), "at sunset": (78, 110, 40)}[light]
        disc(x, 66, 20, crown)
    return canvas.reduce(k)


def typed(rng: random.Random, caption: str) -> str:
    """The caption as somebody might type it: other articles, a full stop, an idle word."""
    if rng.random() < 0.06:
        idle = "".join(rng.choice("abcdefghijklmnoprstuvwy") for _ in range(rng.randint(3, 7)))
        words = caption.split(" ")
        words.insert(1 if words[0] in ("a", "an") else 0, idle)
        caption = " ".join(words)
    if rng.random() < 0.05:
        caption = rng.choice(("a picture of ", "a drawing of ", "a photo of ", "draw ")) + caption
    if rng.random() < 0.05:
        caption += "."
    return caption


KINDS = {"one": 0.62, "two": 0.26, "scene": 0.12}


def sample(rng: random.Random, style: str | None = None, strength: float = 1.0,
           kinds: dict[str, float] = KINDS) -> tuple[str, Image.Image]:
    """One training pair.  `style` is None, "checker" or "dusk" (the last with a strength)."""
    kind = rng.choices(tuple(kinds), tuple(kinds.values()))[0]
    if kind == "scene":
        caption, image = scene(rng)
    else:
        caption, background, things = (one_object if kind == "one" else two_objects)(rng)
        image = render(background, things, style)
    if style == "dusk":
        image = dusk(image, strength)
    return typed(rng, caption), image


def unseen_prompts(count: int, seed: int = 7) -> list[dict]:
    """One-object prompts from the held-out triples, with what each of them asks for."""
    rng = random.Random(seed)
    triples = [(c, s, b) for c in COLOURS for s in SHAPES for b in COLOURS if c != b and held_out(c, s, b)]
    rng.shuffle(triples)
    prompts = []
    for i in range(count):
        colour, shape, background = triples[i % len(triples)]
        size = rng.choices(("", "small", "big"), (5, 2, 3))[0]
        place = rng.choices(tuple(PLACES), (10, 1, 1.5, 1.5, 1.5, 1.5))[0]
        text = _join(article(_join(size, colour, shape)), place, "on", article(background), "background")
        if i % 4 == 3:
            text = text[0].upper() + text[1:]
        prompts.append({"prompt": text, "colour": colour, "shape": shape, "background": background,
                        "size": size, "place": place})
    return prompts
