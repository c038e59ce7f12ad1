"""What compel makes of prompts: how it reads them, and their embeddings by a tiny CLIP; and what A1111 would make of
some, by a script of its published rules.

Every call of the encoder is written down with its ids and mask, so that whoever asks for the same windows gets the
same hidden states.
"""

from __future__ import annotations

from pathlib import Path

import torch
from compel import Compel, ReturnedEmbeddingsType
from compel.prompt_parser import Blend, PromptParser
from transformers import CLIPTextModel, CLIPTokenizer

from cases import save, text

LONG = "A red house under the sun, by the sea. Its garden is full of old trees; birds sing in them: it is spring. " * 3
RUN_ON = "house tree garden bird spring water stone light shadow " * 12
SYLLABLES = "supercalifragilistic" * 12

PARSED = [
    "", "  ", "a photo of a red house", "red++ house", "red- house--, tree", "(red house)1.3 by the sea", "(a b)+ c",
    "(a b)++ (c d)-", "((red)1.5 house)0.5", "((a)+ b)+ (c (d)0)1.2", "\\(a b\\) c", "a \\(b\\)++ c", "(a \\) b)1.2",
    "\"quoted words\" here", "\"quoted words\"1.4 here", "\"say \\\"hi\\\" now\"+", "well-lit up-close 3.5 mm f/1.8",
    "a,b,c , d,,e", "(a, b. c)1.1", "(unbalanced", "closed) too", "((half)1.2", "() empty ()1.2 \"\"", ":-) (: ^_^ (=)",
    "a + b - c = d", "c++ code", "word+- x", "(x)1.2tail", "(x) 1.2", "(x).5 (y)2.", "a.attend(1.2) (b c).attend(++)",
    "<lora:name:0.8> a cat", "<my-trigger> statue, (of <other>)1.2", "tab\there\nnew line", "(multi\nline)1.2",
    "(\"a cat\", \"a dog\").blend(0.7, 0.3)", "(\"a cat\",\"a dog\").blend(1,2,no_normalize)",
    "(\"red+ cat\", (dog in snow), bird).blend(1, -0.5, 2)", "(\"a\", \"b\").blend()", "(\"a = b\", \"c (\").blend(1, 1)",
    "(\"a cat\", \"a dog\").and()", "(\"a cat\", \"(a dog)1.2 runs\").and(1, 0.5)", "(\"\", \"a\").and()", "(a, b)", "(a, b).c",
    "na\u00efve (caf\u00e9)1.2 \u4f60\u597d++", "(a)0 b", "(((((a)1.1)1.1)1.1)1.1)1.1", "a (b)-1.5 (c)+1.5",
    "\"\\\"", "\"\\\"= b \"c d\"+",
]

ENCODED = [
    ("plain", "a photo of a red house under the sun"), ("empty", ""), ("more", "a (red house)1.4 under the sun+++"),
    ("less", "a (red)0.5 house under the (sun)0.9"), ("gone", "a red house (under the sun)0, by the sea"),
    ("nested", "((a red)1.5 house (in the (garden)0.5)1.2)0.8"), ("both", "(sun)1.6 moon (stars)0.3 \"old tree\"--"),
    ("blend", "(\"a red house\", \"an (old)1.3 tree\", bird).blend(0.7, 0.3, 0.5)"),
    ("blend_as_it_is", "(\"a red house\", \"an old (tree)0.4\").blend(1, -0.2, no_normalize)"),
    ("conjunction", "(\"a red house\", \"an (old)0.5 tree+\").and()"),
    ("weighted_conjunction", "(\"a red house\", \"" + LONG + "\", bird).and(1, 0.6, 1.3)"),
    ("long", LONG), ("long_weighted", LONG + "(with a dog)1.3 (in the sea. and a cat)0.4 " + LONG),
    ("run_on", RUN_ON + "(end)1.2"), ("run_on_less", "start (" + RUN_ON + ")0.7 end"), ("syllables", SYLLABLES),
    ("uneven_blend", "(\"" + LONG + "\", \"a red house\").blend(0.4, 0.6)"), ("cut_less", "(" + RUN_ON + ")0.7 end"),
]


BREAK = "BREAK"
# A prompt in A1111's syntax, and the same as texts with their weights.
A1111 = [
    ("a photo of a red house", [("a photo of a red house", 1)]), ("", [("", 1)]),
    ("a (red house:1.4) under (the sun)", [("a ", 1), ("red house", 1.4), (" under ", 1), ("the sun", 1.1)]),
    ("a ((red)) [house], \\(by\\) the sea", [("a ", 1), ("red", 1.1 * 1.1), (" ", 1), ("house", 1 / 1.1),
                                           (", (by) the sea", 1)]),
    ("a house BREAK (a tree:0.6) BREAK BREAK sun", [("a house", 1), BREAK, ("a tree", 0.6), BREAK, BREAK, ("sun", 1)]),
    ("BREAK sun", [("", 1), BREAK, ("sun", 1)]), ("(all of it:0.3)", [("all of it", 0.3)]),
    (LONG + "(in the sea:1.3)" + LONG, [(LONG, 1), ("in the sea", 1.3), (LONG, 1)]),
    (RUN_ON + "(end:1.2)", [(RUN_ON, 1), ("end", 1.2)]), (RUN_ON[:290] + "a, b" + RUN_ON, [(RUN_ON[:290] + "a, b" + RUN_ON, 1)]),
    (SYLLABLES, [(SYLLABLES, 1)]),
]


def described(prompt: str) -> str:
    """Parts, texts and fragments, a line each."""
    lines, parsed = [], PromptParser().parse_conjunction(prompt)
    for part, weight in zip(parsed.prompts, parsed.weights):
        blend = isinstance(part, Blend)
        lines.append(f"part {weight:.6g} {int(part.normalize_weights) if blend else 1}")
        for item, share in zip(part.prompts if blend else [part], part.weights if blend else [1]):
            lines.append(f"text {share:.6g}")
            lines += [f"{fragment.weight:.6g} {fragment.text}" for fragment in item.children]
    return "\n".join(lines)


def write_all(out: Path) -> None:
    tensors = {}
    for i, prompt in enumerate(PARSED):
        tensors |= {f"prompt.{i}": text(prompt + "\0"), f"parsed.{i}": text(described(prompt))}
    save(out, "prompts-parsed", tensors, count=len(PARSED))

    tokenizer = CLIPTokenizer.from_pretrained(out / "tiny-dev/tokenizer")
    encoder = CLIPTextModel.from_pretrained(out / "tiny-dev/text_encoder").float().eval()
    for mode, truncate in (("windows", False), ("truncated", True)):
        compel = Compel(tokenizer, encoder, truncate_long_prompts=truncate,
                        returned_embeddings_type=ReturnedEmbeddingsType.LAST_HIDDEN_STATES_NORMALIZED)
        provider, calls, tensors = compel.conditioning_provider, {}, {}
        encode = provider._encode_token_ids_to_embeddings

        def noted(ids, mask=None):
            seen = torch.ones_like(ids) if mask is None else mask
            hidden = encode(ids, mask)
            calls[(*ids[0].tolist(), *seen[0].tolist())] = hidden
            return hidden

        provider._encode_token_ids_to_embeddings = noted
        for name, prompt in ENCODED:
            tensors |= {f"prompt.{name}": text(prompt + "\0"), f"embedding.{name}": compel(prompt),
                        f"pooled.{name}": torch.tensor(provider.get_token_ids([prompt], padding="max_length",
                                                                              truncation_override=True)[0])}
        pair = [compel.build_conditioning_tensor(ENCODED[i][1]) for i in (0, 11)]
        tensors |= {f"padded.{i}": t for i, t in enumerate(compel.pad_conditioning_tensors_to_same_length(pair))}
        tensors |= {"call_keys": torch.tensor(list(calls)), "call_hidden": torch.cat(list(calls.values()))}
        save(out, f"prompts-{mode}", tensors, names=",".join(name for name, _ in ENCODED))

    calls, tensors = {}, {}
    for i, (prompt, fragments) in enumerate(A1111):
        chunks = []
        for ids, weights in a1111_chunks(tokenizer, fragments):
            hidden = encoder(torch.tensor([ids])).last_hidden_state
            calls[(*ids, *(1 for _ in ids))] = hidden
            before = hidden.mean()
            hidden = hidden * torch.tensor(weights)[None, :, None]
            chunks.append(hidden * (before / hidden.mean()))
        tensors |= {f"prompt.{i}": text(prompt + "\0"), f"embedding.{i}": torch.cat(chunks, 1)}
    tensors |= {"call_keys": torch.tensor(list(calls)), "call_hidden": torch.cat(list(calls.values()))}
    save(out, "prompts-a1111", tensors, count=len(A1111))


def a1111_chunks(tokenizer: CLIPTokenizer, fragments: list) -> list[tuple[list[int], list[float]]]:
    """Chunks of 75 tokens between their begin and end. A full chunk gives what comes after its last comma to the next
    one, if that are fewer than 20 tokens and no comma is next."""
    length, comma = tokenizer.model_max_length - 2, tokenizer.convert_tokens_to_ids(",</w>")
    chunks, now, last_comma = [], [], -1

    def close() -> None:
        nonlocal now, last_comma
        chunks.append(now)
        now, last_comma = [], -1

    for fragment in fragments:
        if fragment == BREAK:
            close()
            continue
        for token in tokenizer(fragment[0], add_special_tokens=False).input_ids:
            if token == comma:
                last_comma = len(now)
            elif len(now) == length and last_comma != -1 and length - last_comma <= 20:
                rest = now[last_comma + 1:]
                del now[last_comma + 1:]
                close()
                now = rest
            if len(now) == length:
                close()
            now.append((token, fragment[1]))
    if now or not chunks:
        close()
    result = []
    for chunk in chunks:
        padding = length - len(chunk)
        ids = [tokenizer.bos_token_id, *(t for t, _ in chunk), tokenizer.eos_token_id, *[tokenizer.pad_token_id] * padding]
        result.append((ids, [1.0, *(w for _, w in chunk), *[1.0] * (padding + 1)]))
    return result
