"""Writes the two tokenizers: CLIP byte-pair files and a SentencePiece unigram model.

Both know every word of the caption grammar as one token.  Spellings that mean
the same (synonyms, capitals) and pieces without a meaning (letters, parts of
words) share an embedding: `aliases` maps each such token to the one that is
trained, and the rows are copied when the encoders are saved.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2 as spm

import shapes

GRAMMAR = """a on in at to the of and with above below left right top bottom middle background
house roof tree day night sunset under sun moon picture drawing photo draw"""
WORDS = tuple(dict.fromkeys([*GRAMMAR.split(), *shapes.COLOURS, *shapes.SHAPES, "big", "small",
                             *shapes.SYNONYMS]))
MARKS = (",", ".")
CLIP_LENGTH, T5_LENGTH = 77, 512
BOS, EOS = "<|startoftext|>", "<|endoftext|>"


# --- CLIP --------------------------------------------------------------------

def byte_alphabet() -> list[str]:
    """The printable stand-ins for the 256 bytes, in the order CLIP's vocabulary lists them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(spare))]


def byte_pairs(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Merges, most frequent pair first, until every word has become one token."""
    split = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges = []
    while any(len(parts) > 1 for parts in split):
        counts = Counter(pair for parts in split for pair in zip(parts, parts[1:]))
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        for parts in split:
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i:i + 2] = ["".join(best)]
                i += 1
    return merges


def write_clip(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    merges = byte_pairs(WORDS)
    alphabet = byte_alphabet()
    tokens = [*alphabet, *(c + "</w>" for c in alphabet), *(a + b for a, b in merges), BOS, EOS]
    assert len(set(tokens)) == len(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "unk_token": EOS}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")
    config = {**special, "add_prefix_space": False, "do_lower_case": True, "errors": "replace",
              "model_max_length": CLIP_LENGTH, "tokenizer_class": "CLIPTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def clip_aliases(folder: Path) -> list[int]:
    """For every CLIP token id the id whose embedding it shares."""
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    meant = {word + "</w>": shapes.SYNONYMS.get(word, word) + "</w>" for word in WORDS}
    meant |= {mark + "</w>": mark + "</w>" for mark in MARKS} | {BOS: BOS, EOS: EOS}
    filler = vocab["x</w>"]
    return [vocab[meant[token]] if token in meant else filler
            for token in sorted(vocab, key=vocab.get)]


# --- T5 ----------------------------------------------------------------------

def _spellings(word: str) -> list[str]:
    return list(dict.fromkeys([word, word.capitalize(), word.upper()]))


def t5_pieces() -> list[str]:
    words = ["\u2581" + spelling for word in WORDS for spelling in _spellings(word)]
    singles = ["\u2581", *(chr(c) for c in range(33, 127))]
    return ["<pad>", "</s>", "<unk>", *words, *singles]


def write_t5(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = spm.ModelProto()
    kinds = spm.ModelProto.SentencePiece
    for piece in t5_pieces():
        entry = model.pieces.add(piece=piece)
        if piece in ("<pad>", "</s>"):
            entry.type, entry.score = kinds.CONTROL, 0.0
        elif piece == "<unk>":
            entry.type, entry.score = kinds.UNKNOWN, 0.0
        else:
            # Whole words are cheap, single characters dear: a word never falls apart.
            entry.type, entry.score = kinds.NORMAL, -5.0 if len(piece) > 1 else -20.0
    trainer = model.trainer_spec
    trainer.model_type = trainer.UNIGRAM
    trainer.vocab_size = len(model.pieces)
    trainer.pad_id, trainer.eos_id, trainer.unk_id, trainer.bos_id = 0, 1, 2, -1
    trainer.pad_piece, trainer.eos_piece, trainer.unk_piece = "<pad>", "</s>", "<unk>"
    normaliser = model.normalizer_spec
    normaliser.name = "identity"
    normaliser.add_dummy_prefix = True
    normaliser.remove_extra_whitespaces = True
    normaliser.escape_whitespaces = True
    (folder / "spiece.model").write_bytes(model.SerializeToString())
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")
    config = {**special, "extra_ids": 0, "model_max_length": T5_LENGTH, "tokenizer_class": "T5Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def t5_aliases() -> list[int]:
    """For every T5 token id the id whose embedding it shares."""
    pieces = t5_pieces()
    index = {piece: i for i, piece in enumerate(pieces)}
    meant = {"\u2581" + spelling: "\u2581" + shapes.SYNONYMS.get(word, word)
             for word in WORDS for spelling in _spellings(word)}
    meant |= {mark: mark for mark in MARKS} | {"<pad>": "<pad>", "</s>": "</s>"}
    return [index[meant.get(piece, "x")] for piece in pieces]
