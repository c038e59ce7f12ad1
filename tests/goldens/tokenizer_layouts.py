"""Folders of tokenizers in every layout that transformers has written, each with the ids that transformers gives.

Version 5 writes tokenizer.json and a config, whatever legacy_format says; what version 4 wrote is written here as it did:
vocabulary files of the slow class with special_tokens_map.json, added_tokens.json or added_tokens_decoder, and the files
of the fast one beside them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import AddedToken, CLIPTokenizer, T5TokenizerFast

from cases import TEXTS
from models import BOS, EOS

ADDED = ["a <cat> b<cat>", "My<Dog>s and <dog>s", "x <left> y", "x <right>  y", "wordy word words", "U+16 \U00010D50\ua7da\U00016D70 \u1c89",
         "vt\x0bhere \x0b there", "\U000105C0\U000105D0 \U0001E5F1\U0001E5F2"]


def flags(content: str, **changes) -> dict:
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False} | changes


def clip_folders(out: Path, source: Path) -> list[Path]:
    folders = []
    size = len(json.loads((source / "vocab.json").read_text()))

    def folder(name: str, files=("vocab.json", "merges.txt"), **texts) -> Path:
        target = out / f"clip-{name}"
        target.mkdir(parents=True)
        for file in files:
            shutil.copy(source / file, target / file)
        for file, value in texts.items():
            (target / f"{file}.json").write_text(json.dumps(value))
        folders.append(target)
        return target

    config = {"model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    folder("plain", tokenizer_config=config)
    folder("map", tokenizer_config=config, special_tokens_map={
        "bos_token": flags(BOS, normalized=True), "eos_token": flags(EOS, normalized=True), "pad_token": "!", "unk_token": EOS})
    folder("added", tokenizer_config=config, added_tokens={"<cat>": size, "<Dog>": size + 1},
           special_tokens_map={"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "unk_token": EOS})
    folder("decoder", tokenizer_config=config | {"pad_token": "!", "added_tokens_decoder": {
        str(size - 2): flags(BOS, special=True), str(size - 1): flags(EOS, special=True),
        str(size): flags("<cat>", normalized=True), str(size + 1): flags("<left>", lstrip=True, special=True),
        str(size + 2): flags("<right>", rstrip=True, special=True), str(size + 3): flags("word", single_word=True)}})
    for legacy in (False, True):
        tokenizer = CLIPTokenizer.from_pretrained(source)
        tokenizer.add_tokens([AddedToken("<cat>", normalized=True), AddedToken("<left>", lstrip=True, normalized=False),
                              AddedToken("<right>", rstrip=True, normalized=False), "<Dog>",
                              AddedToken("word", single_word=True, normalized=False)])
        target = out / f"clip-fast-{legacy}"
        tokenizer.save_pretrained(target, legacy_format=legacy)
        folders.append(target)
    return folders


def t5_folders(out: Path, source: Path) -> list[Path]:
    folders = []

    def folder(name: str, **texts) -> None:
        target = out / f"t5-{name}"
        target.mkdir(parents=True)
        shutil.copy(source / "spiece.model", target)
        for file, value in texts.items():
            (target / f"{file}.json").write_text(json.dumps(value))
        folders.append(target)

    config = {"extra_ids": 100, "model_max_length": 512, "tokenizer_class": "T5Tokenizer"}
    folder("map", tokenizer_config=config,
           special_tokens_map={"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    for legacy in (False, True):
        target = out / f"t5-fast-{legacy}"
        T5TokenizerFast.from_pretrained(source).save_pretrained(target, legacy_format=legacy)
        folders.append(target)
    return folders


def write_all(out: Path) -> None:
    texts = TEXTS + ADDED
    source = out / "tiny-dev"
    for kind, cls, folders, length in (
            ("clip", CLIPTokenizer, clip_folders(out / "tokenizers", source / "tokenizer"), 77),
            ("t5", T5TokenizerFast, t5_folders(out / "tokenizers", source / "tokenizer_2")
             + t5_folders(out / "tokenizers/identity", out / "text/tokenizer-identity"), 128)):
        case = {"length": length, "texts": texts, "folders": []}
        for folder in folders:
            tokenizer = cls.from_pretrained(folder)
            ids = [tokenizer(value, padding="max_length", truncation=True, max_length=length).input_ids for value in texts]
            case["folders"].append({"folder": str(folder.relative_to(out)), "ids": ids})
        (out / "cases").mkdir(exist_ok=True)
        (out / f"cases/tokenizer-layouts-{kind}.json").write_text(json.dumps(case))
