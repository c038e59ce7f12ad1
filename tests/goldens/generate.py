"""Writes tiny random models and what diffusers makes of them, for the golden tests.

    python generate.py --out build/goldens [--demo deploy/demo/models/shapes-flux]

Nothing is done when the folder already holds the output of these very scripts. All numbers are CPU fp32,
one thread. Versions that the numbers come from stand in OUT/stamp.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def stamp(demo: Path | None) -> str:
    from importlib.metadata import version
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    if demo is not None:
        for file in sorted([*demo.rglob("*"), *(demo.parents[1] / "loras").glob("*")]):
            if file.is_file():
                digest.update(f"{file.relative_to(demo.parents[1])} {file.stat().st_size}".encode())
                digest.update(file.read_bytes())
    packages = ("torch", "diffusers", "transformers", "tokenizers", "sentencepiece", "peft", "pillow", "scipy", "compel", "pyparsing")
    return "\n".join([digest.hexdigest(), *(f"{p} {version(p)}" for p in packages)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--demo", type=Path)
    args = parser.parse_args()
    demo = args.demo if args.demo and (args.demo / "model_index.json").exists() else None

    wanted, file = stamp(demo), args.out / "stamp"
    if file.exists() and file.read_text() == wanted:
        print("goldens are up to date")
        return

    import torch
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    import diffusers
    import transformers
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    import adapters
    import cases
    import control
    import embeddings
    import layers
    import loras
    import models
    import precision
    import prompts
    import samplers
    import schedulers
    import sd_cases
    import sd_loras
    import sd_models
    import sd_runs
    import sd_variants
    import sd_schedules
    import sd_tiles
    import tokenizer_layouts
    import unicode_classes

    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    models.build_all(args.out)
    sd_models.build_all(args.out)
    sd_variants.build_all(args.out)
    cases.write_all(args.out, demo)
    loras.write_all(args.out, demo)
    control.write_all(args.out)
    layers.write_all(args.out)
    prompts.write_all(args.out)
    sd_cases.write_all(args.out)
    sd_runs.write_all(args.out)
    sd_variants.write_all(args.out)
    sd_schedules.write_all(args.out)
    sd_loras.write_all(args.out)
    adapters.write_all(args.out)
    sd_tiles.write_all(args.out)
    embeddings.write_all(args.out)
    samplers.write_all(args.out)
    schedulers.write_all(args.out)
    tokenizer_layouts.write_all(args.out)
    unicode_classes.write_all(args.out)
    precision.build_all(args.out)
    file.write_text(wanted)


if __name__ == "__main__":
    main()
