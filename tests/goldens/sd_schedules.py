"""Whole runs with prompts that change between steps and prompts that are joined, as A1111 writes them. diffusers knows
neither: its UNet is wrapped, and answers each step with the prompts that are written out for it here, as A1111's loop
takes them: every change a step later than is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from cases import text
from sd_runs import run

Part = tuple[str, float]


def oracle(steps: list[list[Part]], negatives: list[str | None]):
    """By step: the joined prompts with their weights, and the unwanted one; None is zeros."""

    def patch(pipe) -> None:
        two, forward, seen = hasattr(pipe, "text_encoder_2"), pipe.unet.forward, []

        def encode(prompt: str | None) -> tuple[torch.Tensor, torch.Tensor | None]:
            result = pipe.encode_prompt(prompt or "", device="cpu", num_images_per_prompt=1,
                                        do_classifier_free_guidance=False)
            hidden, pooled = result[0], result[2] if two else None
            return (hidden, pooled) if prompt is not None else (0 * hidden, 0 * pooled)

        def wrapped(sample, timestep, encoder_hidden_states, added_cond_kwargs=None, **more):
            if not seen or seen[-1] != float(timestep):
                seen.append(float(timestep))
            (unwanted, *wanted) = [encode(prompt) for prompt in
                                   (negatives[len(seen) - 1], *(prompt for prompt, _ in steps[len(seen) - 1]))]
            predictions = []
            for hidden, pooled in (unwanted, *wanted):
                added = None
                if two:
                    added = {"text_embeds": pooled, "time_ids": added_cond_kwargs["time_ids"][:1]}
                predictions.append(forward(sample[:1], timestep, encoder_hidden_states=hidden, added_cond_kwargs=added,
                                           **more)[0])
            nothing = predictions[0]
            joined = nothing + sum(weight * (prediction - nothing) for prediction, (_, weight) in
                                   zip(predictions[1:], steps[len(seen) - 1]))
            return (torch.cat([nothing, joined]),)

        pipe.unet.forward = wrapped

    return patch


def write_all(out: Path) -> None:
    even, odd = dict(width=80, height=48), dict(width=72, height=56)
    init = np.random.default_rng(9).integers(0, 256, (100, 60, 3), dtype=np.uint8)

    def case(name: str, model: str, prompt: str, wanted: list[list[Part] | str], negative: str | None,
             negatives: list[str | None], **more) -> None:
        parts = [[(step, 1.0)] if isinstance(step, str) else step for step in wanted]
        run(out, name, model, prompt="a house", negative=negative, patch=oracle(parts, negatives), syntax="a1111",
            written={"prompt": text(prompt)}, **more)

    case("sd15-schedule", "tiny-sd15", "a [red:blue:2] house [on the road|at night]",
         ["a red house on the road", "a red house on the road", "a red house at night", "a blue house on the road"],
         "[blurry:night:0.5]", ["blurry", "blurry", "blurry", "night"], **even, steps=4, seeds=[81, 82])
    case("sd15-schedule-image", "tiny-sd15", "[a red:a blue:1] house", ["a red house", "a red house", "a blue house"],
         "blurry", ["blurry"] * 3, **odd, steps=6, strength=0.5, init=init, seeds=[83], sampler="ddim")
    joined = [("a red house", 1.2), ("a blue car on the road", 1.0), ("trees", -0.4)]
    case("sd15-joined", "tiny-sd15", "a red house :1.2 AND a blue car on the road AND trees :-0.4", [joined] * 3,
         "blurry", ["blurry"] * 3, **odd, steps=3, seeds=[84], guidance_rescale=0.5)
    case("sdxl-schedule-joined", "tiny-sdxl", "[a photo:birds:0.5] at night AND a [tree|blue car] :0.7",
         [[("a photo at night", 1.0), ("a tree", 0.7)], [("a photo at night", 1.0), ("a tree", 0.7)],
          [("a photo at night", 1.0), ("a blue car", 0.7)], [("birds at night", 1.0), ("a tree", 0.7)]],
         None, [None] * 4, **even, steps=4, seeds=[85], guidance=5.0)
