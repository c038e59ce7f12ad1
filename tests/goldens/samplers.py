"""What diffusers' schedulers make of a network that is a formula: timesteps, levels, and x after every evaluation.

A case is a sampler, a scheduler_config.json, a number of steps and settings. Where diffusers lacks something
(ER-SDE; a schedule on a sampler) the few lines for it are here.

How exactly a case can be met depends on the case: some go down from σ = 4096 by differences of large numbers, and
processors round exp and log differently. So each case says how far diffusers itself moves when what it computes with
is wrong by a rounding (wobble), and the test takes its tolerance from that.
"""

from __future__ import annotations

import inspect
import json
import sys
import zlib
import types
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from diffusers import (DDIMScheduler, DDPMScheduler, DEISMultistepScheduler, DPMSolverMultistepScheduler,
                       DPMSolverSinglestepScheduler, EulerAncestralDiscreteScheduler, EulerDiscreteScheduler,
                       HeunDiscreteScheduler, KDPM2AncestralDiscreteScheduler, KDPM2DiscreteScheduler,
                       LCMScheduler, LMSDiscreteScheduler, PNDMScheduler, TCDScheduler, UniPCMultistepScheduler)
from diffusers.schedulers.scheduling_utils import AysSchedules

from cases import randn, save

sys.modules.setdefault("torchsde", types.ModuleType("torchsde"))    # only its Brownian tree, which is replaced
from diffusers.schedulers.scheduling_dpmsolver_sde import DPMSolverSDEScheduler  # noqa: E402

SHAPE = (1, 2, 3, 4)
BASE = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", num_train_timesteps=1000, steps_offset=1,
            clip_sample=False, set_alpha_to_one=False, skip_prk_steps=True)
MODELS = {
    "leading": dict(timestep_spacing="leading"),
    "linspace": dict(timestep_spacing="linspace"),
    "trailing": dict(timestep_spacing="trailing"),
    "absent": {},
    "v": dict(timestep_spacing="leading", prediction_type="v_prediction"),
    "v-zero-snr": dict(timestep_spacing="trailing", prediction_type="v_prediction", rescale_betas_zero_snr=True),
    "sample": dict(timestep_spacing="trailing", prediction_type="sample"),
    "linear": dict(timestep_spacing="leading", beta_schedule="linear", beta_start=0.0001, beta_end=0.02,
                   set_alpha_to_one=True),
    "cosine": dict(timestep_spacing="linspace", beta_schedule="squaredcos_cap_v2"),
}
K, DPM, DDIM = ("karras", "exponential", "beta"), ("karras", "exponential", "beta"), ()
SAMPLERS = {    # class, its settings, schedules
    "euler": (EulerDiscreteScheduler, {}, K), "euler_a": (EulerAncestralDiscreteScheduler, {}, ("karras",)),
    "lms": (LMSDiscreteScheduler, {}, K), "heun": (HeunDiscreteScheduler, {}, K),
    "kdpm_2": (KDPM2DiscreteScheduler, {}, K), "kdpm_2_a": (KDPM2AncestralDiscreteScheduler, {}, K),
    "dpmpp_sde": (DPMSolverSDEScheduler, {}, K), "dpmpp_2s": (DPMSolverSinglestepScheduler, {}, DPM),
    "dpmpp_2m": (DPMSolverMultistepScheduler, {}, DPM),
    "dpmpp_3m": (DPMSolverMultistepScheduler, {"solver_order": 3}, DPM),
    "dpmpp_2m_sde": (DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++"}, DPM),
    "deis": (DEISMultistepScheduler, {}, DPM), "unipc": (UniPCMultistepScheduler, {}, DPM),
    "er_sde": (DPMSolverMultistepScheduler, {}, DPM), "ddim": (DDIMScheduler, {}, DDIM),
    "ddpm": (DDPMScheduler, {}, DDIM), "pndm": (PNDMScheduler, {}, DDIM), "lcm": (LCMScheduler, {}, DDIM),
    "tcd": (TCDScheduler, {}, DDIM),
}
NOISY = {"euler_a", "kdpm_2_a", "dpmpp_2m_sde", "ddpm", "lcm", "tcd"}
TWICE = {"heun", "kdpm_2", "kdpm_2_a", "dpmpp_sde"}
ABSENT = {      # not implemented in diffusers, or not a number there (σ of 20000)
    "sample": {"euler_a", "kdpm_2", "kdpm_2_a", "dpmpp_sde", "pndm"},
    "cosine": {"euler_a", "kdpm_2_a"}}


ROUNDING = 2.0 ** -22   # of an fp32 number, times a normal deviate: a few units in the last place
TRIALS = 2


def network(x: torch.Tensor, t: float) -> torch.Tensor:
    return 0.6 * x + 0.3 * float(np.sin(float(t)))


class Exact:
    """Leaves numbers as they are."""

    def number(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def levels(self, scheduler) -> None:
        pass


class Wrong(Exact):
    """Makes every number that it is shown wrong by a few roundings, each by its own."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def number(self, x: torch.Tensor) -> torch.Tensor:
        draws = torch.randn(x.shape, generator=self.generator, dtype=torch.float64)
        return (x * (1 + ROUNDING * draws)).to(x.dtype)

    def levels(self, scheduler) -> None:
        """The tables that a scheduler computes its coefficients from."""
        for name in ("sigmas", "sigmas_interpol", "sigmas_up", "sigmas_down", "alpha_t", "sigma_t", "lambda_t"):
            if isinstance(getattr(scheduler, name, None), torch.Tensor):
                setattr(scheduler, name, self.number(getattr(scheduler, name)))
        if hasattr(scheduler, "alphas_cumprod"):
            scheduler.alphas_cumprod = self.number(scheduler.alphas_cumprod).clamp(max=1)


def ays(table: str, steps: int) -> np.ndarray:
    """The published levels and their interpolation; without the 0 at the end."""
    known = np.array(AysSchedules[f"StableDiffusion{table}Sigmas"])
    known[-1] = 0.029
    points = np.linspace(0, 10, steps + 1)
    return np.exp(np.interp(points, np.arange(11), np.log(known)))[:-1]


class BrownianNoise:
    """Noise of a Brownian motion over σ that is looked at in the middle and at the end of a step."""

    def __init__(self, generator: torch.Generator):
        self.generator, self.first = generator, None

    def __call__(self, a, b):
        draw, a, b = torch.randn(SHAPE, generator=self.generator), float(a), float(b)
        if self.first is None:
            self.first = draw * (a - b) ** 0.5, b
            return draw
        walked, middle = self.first
        self.first = None
        return (walked + draw * (middle - b) ** 0.5) / (a - b) ** 0.5


class ErSde:
    """Order 3 as in the paper's appendix, in float64, x scaled back to picture + λ·noise."""

    def __init__(self, scheduler, generator):
        self.s, self.generator, self.d, self.lam = scheduler.sigmas.double().numpy(), generator, [], []
        self.prediction = scheduler.config.prediction_type

    def step(self, i: int, output: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.s[i], self.s[i + 1]
        root = (a * a + 1) ** 0.5
        y, out = x.double() * root, output.double()
        x0 = {"epsilon": y - a * out, "v_prediction": (x.double() - a * out) / root, "sample": out}[self.prediction]
        self.d.append(x0)
        self.lam.append(a)
        if b == 0:
            return x0.float(), x0.float()
        f = lambda v: v * (np.exp(v ** 0.3) + 10)
        y = f(b) / f(a) * y + (1 - f(b) / f(a)) * x0
        grid = b + np.arange(100) * (a - b) / 100
        weight = (a - b) / 100 / f(grid)
        slope = lambda k: (self.d[k] - self.d[k - 1]) / (self.lam[k] - self.lam[k - 1])
        n = len(self.d) - 1
        if n >= 1:
            y = y + (b - a + f(b) * weight.sum()) * slope(n)
        if n >= 2:
            curve = (slope(n) - slope(n - 1)) / ((self.lam[n] - self.lam[n - 2]) / 2)
            y = y + ((b - a) ** 2 / 2 + f(b) * (weight * (grid - a)).sum()) * curve
        noise = torch.randn(SHAPE, generator=self.generator).double()
        y = y + noise * (b * b - a * a * (f(b) / f(a)) ** 2) ** 0.5
        return (y / (b * b + 1) ** 0.5).float(), x0.float()


def make(name: str, model: str, schedule: str, steps: int, table: str):
    cls, extra, _ = SAMPLERS[name]
    config = BASE | MODELS[model] | extra
    if schedule == "trailing":
        config["timestep_spacing"] = "trailing"
    if schedule in K and "use_karras_sigmas" in inspect.signature(cls).parameters:
        config[f"use_{schedule}_sigmas"] = True
    known = inspect.signature(cls).parameters
    # Some prepare a thousand steps when they are made, which takes long and is done again below.
    with patch.object(cls, "set_timesteps", lambda self, *_: setattr(self, "sigmas", torch.zeros(1))):
        scheduler = cls(**{k: v for k, v in config.items() if k in known})
    scheduler.set_timesteps(steps)
    if schedule == "ays":
        other = make("euler", model, "", steps, table)
        other.set_timesteps(sigmas=[*ays(table, steps), 0.0])
        scheduler.sigmas, timesteps = other.sigmas, other.timesteps
        scheduler.timesteps = timesteps if name in ("euler", "euler_a") else timesteps.round().long()
    elif schedule in K and name == "euler_a":
        other = make("euler", model, schedule, steps, table)
        scheduler.sigmas, scheduler.timesteps = other.sigmas, other.timesteps
    return scheduler


def window(name: str, scheduler, steps: int, strength, start, end) -> tuple[list, int, int]:
    """The evaluations' timesteps, and which of them are run: as StableDiffusionXLImg2ImgPipeline counts them."""
    t = scheduler.timesteps
    if start is None:
        begin = (steps - min(int(steps * strength), steps)) * (2 if name in TWICE else 1)
    else:
        count = int((t < round(1000 - start * 1000)).sum())
        if name in TWICE and count % 2 == 0:
            count += 1
        begin = len(t) - count
    stop = len(t)
    if end is not None:
        stop = begin + int((t[begin:] >= round(1000 - end * 1000)).sum())
    return list(t), begin, stop


def level(name: str, scheduler, i: int, t) -> float:
    if not hasattr(scheduler, "sigmas"):
        bar = scheduler.alphas_cumprod[int(t)]
        return float(((1 - bar) / bar) ** 0.5) if bar > 0 else 4096.0
    if name in TWICE and not scheduler.state_in_first_order:
        if name == "kdpm_2":
            return float(scheduler.sigmas_interpol[i])
        if name == "kdpm_2_a":
            return float(scheduler.sigmas_interpol[i - 1])
        if name == "dpmpp_sde":
            return float(scheduler.mid_point_sigma)
    return float(scheduler.sigmas[i])


def run(name: str, model: str, steps: int, schedule: str = "", strength: float = 1.0, start: float | None = None,
        end: float | None = None, eta: float | None = None, table: str = "",
        rounding: Exact = Exact()) -> dict[str, torch.Tensor]:
    scheduler = make(name, model, schedule, steps, table)
    rounding.levels(scheduler)
    generator = torch.Generator().manual_seed(steps)
    timesteps, begin, stop = window(name, scheduler, steps, strength, start, end)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    solver = ErSde(scheduler, generator) if name == "er_sde" else None
    if name == "dpmpp_sde":
        scheduler.noise_sampler = BrownianNoise(generator)
    first, picture, noise = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    scale = float(scheduler.init_noise_sigma)
    known = inspect.signature(scheduler.step).parameters
    noised = lambda t: scheduler.add_noise(picture, noise, torch.stack([torch.as_tensor(t)]))
    x = first * scale if begin == 0 and strength == 1 and start is None else noised(timesteps[begin])
    seen = {"start": [noised(timesteps[begin])], "x": [], "prediction": [], "noised": [], "sigmas": []}
    for i in range(begin, stop):
        t = timesteps[i]
        scaled = scheduler.scale_model_input(x, t)
        seen["sigmas"].append(torch.tensor(level(name, scheduler, i, t)))
        output = rounding.number(network(scaled, t))
        if solver:
            x, prediction = solver.step(i, output, x)
            scheduler._step_index = i + 1
        else:
            options = {"generator": generator} if name in NOISY or eta else {}
            if eta is not None:
                options["eta"] = eta
            result = scheduler.step(output, t, x, **{k: v for k, v in options.items() if k in known})
            x, prediction = result.prev_sample, result.get("pred_original_sample", result.get("denoised"))
        seen["x"].append(x)
        if prediction is not None:
            seen["prediction"].append(prediction)
        seen["noised"].append(noised(timesteps[i + 1]) if i + 1 < len(timesteps) else picture)
    tensors = {k: torch.stack(v) for k, v in seen.items() if v}
    return tensors | {"timesteps": torch.tensor([float(t) for t in timesteps[begin:stop]], dtype=torch.float64),
                      "first": first, "picture": picture, "noise": noise, "scale": torch.tensor(scale)}


def wobble(name: str, case: dict, exact: dict[str, torch.Tensor]) -> float:
    """The largest relative change of any evaluation's results, over a few runs that are wrong by roundings."""
    worst = 0.0
    for trial in range(TRIALS):
        seed = zlib.crc32(f"{name} {case} {trial}".encode())
        wrong = run(name, **case, rounding=Wrong(seed))
        for key in ("start", "x", "prediction", "noised"):
            if key in exact:
                change = (wrong[key].double() - exact[key].double()).abs().flatten(1).amax(1)
                worst = max(worst, float((change / exact[key].double().abs().flatten(1).amax(1)).max()))
    return worst


def cases(name: str) -> list[dict]:
    result = []
    for model in MODELS:
        if name not in ABSENT.get(model, ()):
            result += [dict(model=model, steps=n) for n in (4, 20, 30)]
    result += [dict(model="leading", steps=n) for n in (1, 2, 9)]
    for schedule in SAMPLERS[name][2]:
        result += [dict(model="leading", steps=n, schedule=schedule) for n in (1, 4, 20)]
        result += [dict(model="v", steps=9, schedule=schedule),
                   dict(model="leading", steps=20, schedule=schedule, strength=0.6)]
    if name in ("euler", "euler_a", "dpmpp_2m", "unipc"):
        result += [dict(model="leading", steps=n, schedule="ays", table=t) for n in (4, 10, 20) for t in ("", "XL")]
    if name not in ("lcm", "tcd", "dpmpp_2s"):
        result.append(dict(model="leading", steps=9, schedule="trailing"))
    for settings in (dict(strength=0.6), dict(strength=0.35), dict(end=0.8), dict(start=0.8), dict(start=0.5, end=0.9)):
        result += [dict(model="leading", steps=n) | settings for n in (9, 20)]
    if name in ("ddim", "tcd"):
        result += [dict(model="leading", steps=n, eta=eta) for n in (4, 20) for eta in (0.5, 1.0)]
    return result


def write_all(out: Path) -> None:
    folder = out / "noise-schedules"
    folder.mkdir(exist_ok=True)
    for model, config in MODELS.items():
        (folder / f"{model}.json").write_text(json.dumps(BASE | config))
    for name in SAMPLERS:
        tensors, rows = {}, []
        for i, case in enumerate(cases(name)):
            exact = run(name, **case)
            exact["wobble"] = torch.tensor(wobble(name, case, exact), dtype=torch.float64)
            tensors |= {f"{i}.{k}": v for k, v in exact.items()}
            rows.append(",".join(f"{k}={v}" for k, v in case.items()))
        save(out, f"sampler-{name}", tensors, cases=";".join(rows))
    guidance(out)


def guidance(out: Path) -> None:
    from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import rescale_noise_cfg
    positive, negative = randn(1, 3, 4, 5, 6) * 2, randn(2, 3, 4, 5, 6)
    guided = negative + 7.5 * (positive - negative)
    save(out, "guidance", {"positive": positive, "negative": negative, "guided": guided,
                           "rescaled": rescale_noise_cfg(guided, positive, guidance_rescale=0.7)})
