"""Builds the demo model from nothing: run the stages in order, or `all`.

    python train.py all --work SCRATCH --out ../models/shapes-flux --loras ../loras

Every stage leaves its result under --work and is skipped when that is already
there; the long ones keep checkpoints and go on from the last one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

SEEDS = {"vae": 1, "equalise": 2, "latents": 3, "flux": 4, "decoder": 5, "dusk": 6, "checker": 7}


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


STAGES = {"vae": stage_vae}


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
