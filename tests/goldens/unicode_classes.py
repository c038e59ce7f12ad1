"""What CLIP's tokenizer of transformers takes every code point for, and what it makes of capitals."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import CLIPTokenizer

import models


def tokenizer(folder: Path):
    models.write_clip_tokenizer(folder)
    return CLIPTokenizer.from_pretrained(folder).backend_tokenizer


def codes():
    yield from range(1, 0xD800)
    yield from range(0xE000, 0x110000)


def kind(backend, code: int) -> str:
    """L for a letter, N for a number, W for white space, O for what else there is: by how "a??a" is taken apart."""
    pieces = backend.pre_tokenizer.pre_tokenize_str("a" + 2 * chr(code) + "a")
    return {1: "L", 2: "W", 3: "O", 4: "N"}[len(pieces)]


def write_all(out: Path) -> None:
    backend = tokenizer(out / "text/tokenizer-unicode")
    starts, kinds, capitals, smalls, last = [], [], [], [], None
    for code in codes():
        this = kind(backend, code)
        if this != last:
            starts.append(code)
            kinds.append(this)
            last = this
        small = backend.normalizer.normalize_str(chr(code))
        if small not in (chr(code), " "):
            capitals.append(code)
            smalls.append(small)
    (out / "cases").mkdir(exist_ok=True)
    (out / "cases/unicode.json").write_text(json.dumps(
        {"starts": starts, "kinds": "".join(kinds), "capitals": capitals, "smalls": smalls}))
