"""stable-diffusion.cpp's side: a picture with SD 1.5, by its Python binding, which this program needs and the rest of
the benchmarks does not. One step and one decoding per size after one of each for warming up; a step is a wanted and an
unwanted pass, as guidance takes them. One line of JSON: milliseconds on the wall by size, and the peak of bytes.

    sd_cpp_reference.py FOLDER THREADS SIDE…
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

from stable_diffusion_cpp import StableDiffusion


def main() -> None:
    folder, threads, *sides = sys.argv[1:]
    answer = os.dup(1)
    os.dup2(2, 1)    # the library writes to standard output
    model = StableDiffusion(model_path=folder, n_threads=int(threads), vae_decode_only=True, verbose=False)
    times = {"step": {}, "decode": {}}

    def picture(side: int) -> tuple[float, float]:
        """Milliseconds of the step, and of what comes after it."""
        marks = []
        model.generate_image(prompt="a house", negative_prompt="a tree", width=side, height=side, sample_steps=1,
                             cfg_scale=7.0, seed=1, sample_method="euler",
                             progress_callback=lambda *_: marks.append(time.perf_counter()))
        return 1000 * (marks[-1] - marks[0]), 1000 * (time.perf_counter() - marks[-1])

    picture(int(sides[0]))
    for side in sides:
        times["step"][side], times["decode"][side] = picture(int(side))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    os.write(answer, (json.dumps(times | {"peak": peak}) + "\n").encode())


if __name__ == "__main__":
    main()
