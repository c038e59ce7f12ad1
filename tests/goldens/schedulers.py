"""Every scheduler class of diffusers with every setting that it can save, in SD 1.5's pipeline and in SDXL's: x after
every evaluation of a short run on the network that is a formula (samplers.py).

Settings are those that a class's constructor takes, one at a time and in seeded combinations. What has no value in
VALUES ends the generator, so that a setting of a new version of diffusers is not left out. A case that diffusers does
not run, or whose numbers are not finite, says so.
"""

from __future__ import annotations

import inspect
import random
import warnings
import zlib
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import diffusers
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import DummyObject

from cases import save, text
from samplers import BASE, NOISY, SAMPLERS, SHAPE, BrownianNoise, DPMSolverSDEScheduler, Exact, Wrong, network

# The classes that SD models are saved with. All others are saved once, and expected to be refused.
SERVED = {cls.__name__ for cls, _, _ in SAMPLERS.values()} | {
    "DDIMParallelScheduler", "DDPMParallelScheduler", "EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"}
BETAS = [round(float(b) ** 2, 8) for b in torch.linspace(0.03, 0.11, 1000)]
VALUES = {
    "num_train_timesteps": [500], "beta_start": [0.0005], "beta_end": [0.015],
    "beta_schedule": ["linear", "squaredcos_cap_v2", "exp", "laplace", "sigmoid"], "trained_betas": [BETAS],
    "prediction_type": ["v_prediction", "sample", "flow_prediction"], "clip_sample": [True], "clip_sample_range": [0.5],
    "set_alpha_to_one": [True, False], "steps_offset": [0, 7], "thresholding": [True],
    "dynamic_thresholding_ratio": [0.7], "sample_max_value": [1.2], "timestep_spacing": ["leading", "linspace", "trailing"],
    "rescale_betas_zero_snr": [True],
    "variance_type": ["fixed_small_log", "fixed_large", "fixed_large_log", "learned", "learned_range"],
    "solver_order": [1, 2, 3, 4], "algorithm_type": ["dpmsolver", "dpmsolver++", "sde-dpmsolver", "sde-dpmsolver++", "deis"],
    "solver_type": ["midpoint", "heun", "logrho", "bh1", "bh2"], "lower_order_final": [True, False],
    "euler_at_final": [True], "use_karras_sigmas": [True], "use_exponential_sigmas": [True], "use_beta_sigmas": [True],
    "use_lu_lambdas": [True], "use_flow_sigmas": [True], "flow_shift": [3.0], "final_sigmas_type": ["zero", "sigma_min"],
    "lambda_min_clipped": [-2.0, -5.1], "use_dynamic_shifting": [True], "time_shift_type": ["exponential"],
    "predict_x0": [False], "disable_corrector": [[0], [1, 2]], "solver_p": [], "sigma_min": [0.05], "sigma_max": [10.0],
    "shift_terminal": [0.1], "interpolation_type": ["linear", "log_linear"], "timestep_type": ["discrete", "continuous"],
    "original_inference_steps": [25, 100], "timestep_scaling": [5.0], "noise_sampler_seed": [3],
    "skip_prk_steps": [True, False], "sigma_data": [1.0], "sigma_schedule": ["karras", "exponential"], "rho": [5.0]}
# Settings without which one says nothing.
WITH = {
    "clip_sample_range": [{"clip_sample": True}], "dynamic_thresholding_ratio": [{"thresholding": True}],
    "sample_max_value": [{"thresholding": True}], "predict_x0": [{"final_sigmas_type": "sigma_min"}, {}],
    "sigma_min": [{"use_karras_sigmas": True}, {"use_exponential_sigmas": True}, {"use_beta_sigmas": True}],
    "sigma_max": [{"use_karras_sigmas": True}, {"use_exponential_sigmas": True}, {"use_beta_sigmas": True}],
    "timestep_type": [{"prediction_type": "v_prediction"}], "flow_shift": [{"use_flow_sigmas": True}],
    "algorithm_type": [{}, {"final_sigmas_type": "sigma_min"}, {"final_sigmas_type": "sigma_min", "solver_order": 3},
                       {"solver_order": 3}, {"final_sigmas_type": "sigma_min", "solver_type": "heun"},
                       {"solver_order": 3, "solver_type": "heun"},
                       {"final_sigmas_type": "sigma_min", "solver_order": 3, "solver_type": "heun"}],
    "solver_order": [{}, {"final_sigmas_type": "sigma_min"}, {"lower_order_final": False, "final_sigmas_type": "sigma_min"},
                     {"predict_x0": False, "final_sigmas_type": "sigma_min", "solver_type": "bh1"}],
    "rescale_betas_zero_snr": [{}, {"prediction_type": "v_prediction"},
                               {"prediction_type": "v_prediction", "timestep_spacing": "trailing"}],
    "use_lu_lambdas": [{}, {"beta_schedule": "squaredcos_cap_v2"}],
    "use_karras_sigmas": [{}, {"final_sigmas_type": "sigma_min"}, {"beta_schedule": "squaredcos_cap_v2"},
                          {"timestep_spacing": "trailing"}],
    "interpolation_type": [{}, {"use_karras_sigmas": True}],
    "lambda_min_clipped": [{}, {"timestep_spacing": "leading"}, {"timestep_spacing": "trailing"}]}
COMBINATIONS = 12
SOURCES = {     # files that other samplers are asked of
    "DPMSolverMultistepScheduler": dict(solver_order=3, algorithm_type="sde-dpmsolver++", solver_type="heun",
                                        use_karras_sigmas=True, rescale_betas_zero_snr=True),
    "EulerDiscreteScheduler": dict(final_sigmas_type="sigma_min", timestep_spacing="trailing", sigma_min=0.1,
                                   use_karras_sigmas=True),
    "DDIMScheduler": dict(clip_sample=True, clip_sample_range=0.7, steps_offset=0, prediction_type="v_prediction"),
    "UniPCMultistepScheduler": dict(solver_order=3, solver_type="bh1", use_beta_sigmas=True, steps_offset=3),
    "LCMScheduler": dict(original_inference_steps=25, beta_schedule="linear"),
    "PNDMScheduler": dict(set_alpha_to_one=True)}
NAMES = {       # what a sampler's name says itself
    "dpmpp_2s": dict(solver_order=2, algorithm_type="dpmsolver++"),
    "dpmpp_2m": dict(solver_order=2, algorithm_type="dpmsolver++"),
    "dpmpp_3m": dict(solver_order=3, algorithm_type="dpmsolver++"),
    "dpmpp_2m_sde": dict(solver_order=2, algorithm_type="sde-dpmsolver++"),
    "deis": dict(algorithm_type="deis"), "pndm": dict(skip_prk_steps=True)}


def classes() -> dict[str, type]:
    found = {n: c for n, c in vars(diffusers).items() if n.endswith("Scheduler") and not isinstance(c, DummyObject)}
    for name in [n for n in dir(diffusers) if n.endswith("Scheduler")]:
        cls = getattr(diffusers, name)
        if not isinstance(cls, DummyObject) and issubclass(cls, SchedulerMixin) and hasattr(cls, "save_config"):
            found[name] = cls
    return dict(sorted((found | {"DPMSolverSDEScheduler": DPMSolverSDEScheduler}).items()))


@contextmanager
def unprepared(cls):
    """Some prepare a thousand steps when they are made, which takes long and is done again for a run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "num_inference_steps" in inspect.signature(getattr(cls, "set_timesteps", lambda: 0)).parameters:
            with patch.object(cls, "set_timesteps", lambda self, *_: setattr(self, "sigmas", torch.zeros(1))):
                yield
        else:
            yield


def parameters(cls) -> list[str]:
    kinds = inspect.signature(cls.__init__).parameters
    return [n for n, p in kinds.items() if n != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def settings(cls) -> list[dict]:
    """What a class is made with: nothing, SD's, and SD's with changes."""
    known = parameters(cls)
    usual = {k: v for k, v in (BASE | dict(timestep_spacing="leading")).items() if k in known}
    result = [("nothing", {}), ("usual", usual)]
    for name in known:
        for more in WITH.get(name, [{}]):
            if not set(more) <= set(known):
                continue
            for value in VALUES[name]:
                shown = "betas" if name == "trained_betas" else value
                result.append((" ".join([f"{name}={shown}", *(f"{k}={v}" for k, v in more.items())]),
                               usual | more | {name: value}))
    rng = random.Random(zlib.crc32(cls.__name__.encode()))
    for _ in range(COMBINATIONS):
        chosen = {n: rng.choice(VALUES[n]) for n in rng.sample(known, min(5, len(known)))
                  if VALUES[n] and n not in ("trained_betas", "use_flow_sigmas", "shift_terminal")}
        result.append((" ".join(f"{k}={v}" for k, v in chosen.items()), usual | chosen))
    return result


def in_pipeline(scheduler, family: str):
    """What a pipeline makes of its scheduler's settings."""
    parts = dict(vae=None, text_encoder=None, tokenizer=None, unet=None, scheduler=scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if family == "sd15":
            return StableDiffusionPipeline(**parts, safety_checker=None, feature_extractor=None,
                                           requires_safety_checker=False).scheduler
        return StableDiffusionXLPipeline(**parts, text_encoder_2=None, tokenizer_2=None, add_watermarker=False).scheduler


def trajectory(scheduler, steps: int, strength: float | None, rounding: Exact) -> dict[str, torch.Tensor]:
    scheduler.set_timesteps(steps)
    rounding.levels(scheduler)
    generator = torch.Generator().manual_seed(steps)
    first, picture, noise = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    begin = 0 if strength is None else steps - int(steps * strength)
    timesteps = scheduler.timesteps[begin * scheduler.order:]
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin * scheduler.order)
    if isinstance(scheduler, DPMSolverSDEScheduler) and scheduler.config.noise_sampler_seed is None:
        scheduler.noise_sampler = BrownianNoise(generator)
    x = first * scheduler.init_noise_sigma if strength is None else scheduler.add_noise(picture, noise, timesteps[:1])
    more = {"generator": generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
    seen = []
    for t in timesteps:
        output = rounding.number(network(scheduler.scale_model_input(x, t), t))
        x = scheduler.step(output, t, x, **more, return_dict=False)[0]
        seen.append(x)
    return {"x": torch.stack(seen).float(), "first": first, "picture": picture, "noise": noise}


class Cases:
    def __init__(self, out: Path):
        self.out, self.folders, self.rows, self.tensors = out / "sd-schedulers", 0, [], {}

    def folder(self, scheduler) -> int:
        self.folders += 1
        scheduler.save_config(self.out / str(self.folders) / "scheduler")
        return self.folders

    def add(self, cls, folder: int, family: str, label: str, sampler: str, make, steps: int, strength: float | None):
        """One run; `make` gives a new scheduler."""
        index, state = len(self.rows), "runs"

        def once(rounding: Exact) -> dict[str, torch.Tensor]:
            with unprepared(cls):
                scheduler = make()
            return trajectory(in_pipeline(scheduler, family), steps, strength, rounding)

        try:
            exact = once(Exact())
            if not exact["x"].isfinite().all():
                state = "not finite"
        except Exception as e:  # noqa: BLE001: whatever it is, diffusers does not run this
            state = type(e).__name__
        if state == "runs":
            wrong = once(Wrong(index))["x"]
            change = (wrong - exact["x"]).double().abs().flatten(1).amax(1)
            exact["wobble"] = (change / exact["x"].double().abs().flatten(1).amax(1)).max()
            self.tensors |= {f"{index}.{k}": v for k, v in exact.items()}
        self.rows.append("|".join(map(str, (cls.__name__, folder, family, label, sampler, steps, strength or "", state))))


def write_all(out: Path) -> None:
    cases, known = Cases(out), classes()
    for name, cls in known.items():
        for i, (label, values) in enumerate(settings(cls) if name in SERVED else [("nothing", {})]):
            try:
                with unprepared(cls):
                    folder = cases.folder(cls(**values))
            except Exception:  # noqa: BLE001: cannot be made, so it cannot be saved
                continue
            if name not in SERVED:
                cases.rows.append("|".join((name, str(folder), "sdxl", label, "", "7", "", "refused")))
                continue
            config = cls.load_config(cases.out / str(folder) / "scheduler")
            make = lambda cls=cls, config=config: cls.from_config(config)
            # From noise and from a picture; with enough steps where few are treated otherwise.
            runs = [(7, None), (17 if "lower_order_final" in parameters(cls) else 9, 0.6)]
            for family, (steps, strength) in zip(("sd15", "sdxl"), runs if i % 2 else runs[::-1]):
                cases.add(cls, folder, family, label, "", make, steps, strength)
    for name, values in SOURCES.items():
        usual = {k: v for k, v in BASE.items() if k in parameters(known[name])}
        folder = cases.folder(known[name](**usual | values))
        source = known[name].from_pretrained(cases.out / str(folder) / "scheduler")
        own = {"DPMSolverMultistepScheduler": "dpmpp_2m_sde"}.get(
            name, next(n for n, (c, _, _) in SAMPLERS.items() if c.__name__ == name))
        for sampler, (cls, _, _) in SAMPLERS.items():
            if sampler in (own, "er_sde"):
                continue
            make = lambda cls=cls, sampler=sampler: cls.from_config(source.config, **NAMES.get(sampler, {}))
            for family, steps, strength in (("sd15", 7, None), ("sdxl", 9, 0.6)):
                cases.add(cls, folder, family, "from " + name, sampler, make, steps, strength)
    save(out, "sd-schedulers", cases.tensors | {"cases": text(";".join(cases.rows))})
