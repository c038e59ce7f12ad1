"""All benchmarks, and one table. Started by run.sh.

Both sides of a ratio are measured in turns, so that a busy machine hurts both alike. Steps and changes of LoRAs
run on one thread where nothing else is said, and are measured in CPU time, the rest on the wall. The ratio is
that of the fastest measurements; that of the medians stands beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import diffusers  # noqa: E402
import torch  # noqa: E402

import models  # noqa: E402
from attack_bench import attacks  # noqa: E402
from latentd_side import Bench, NoopDaemon, peak_memory  # noqa: E402
from models import Shape  # noqa: E402
from reference import Diffusers  # noqa: E402
from report import Row, Table, progress  # noqa: E402
from sd_bench import SD15, SDXL, SdBenchmarks  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "deploy/demo"
DEFAULTS = json.loads((DEMO / "models/shapes-flux/latentd.json").read_text())["defaults"]
MB = 1 << 20

TINY = Shape(heads=3, double=2, single=4, head_channels=32, axes=(8, 12, 12))  # 1.3 M: calls, not arithmetic
TINY_TOKENS = 16
MIDDLE = Shape(heads=6, double=1, single=5)    # 69 M parameters
BIG = Shape(heads=10, double=1, single=3)      # 142 M
GIGABYTE = Shape(heads=10, double=3, single=13)    # half a milliard parameters, as bf16
MIDDLE_SIDE, MIDDLE_TOKENS, MIDDLE_STEPS = 256, 64, 4    # 256 picture tokens, 64 text tokens
PARTS = ["locks", "overhead", "attacks", "demo", "middle", "loras", "files", "sd", "sdxl"]
TOLERANCE = 1e-3                               # of whole runs, as in the golden tests


class Benchmarks:
    def __init__(self, build: Path, work: Path):
        self.work, self.bin, self.program = work, build / "bin", build / "tests/latentd_bench"
        self.table = Table()
        self.bench = Bench(self.program)

    def close(self) -> None:
        self.bench.close()

    # --- steps ---------------------------------------------------------------

    def run_steps(self, sides: dict, side: int, steps: int, rounds: int) -> dict[str, list[list[float]]]:
        """Runs of `steps` steps of each side, in turns, after one for warming up: milliseconds of every step, the
        first with what a run prepares in it. A side is a model of diffusers, the key of one of latentd's, or
        such a key with a set of LoRAs to compute beside it, "" for none: both in the same memory."""
        runs = {name: [] for name in sides}
        clock = "cpu" if torch.get_num_threads() == 1 else "wall"
        gc.collect()
        gc.disable()
        for i in range(rounds + 1):
            for name, what in sides.items():
                if isinstance(what, Diffusers):
                    what.begin(steps)
                    ms = what.step(steps)
                else:
                    key, loras = what if isinstance(what, tuple) else (what, None)
                    if loras is not None:
                        self.bench(*(("lora", key, "sidecar", 1, loras) if loras else ("no-lora", key)))
                    self.bench("begin", key, side, steps)
                    ms = self.bench("step", key, steps)[clock]
                if i > 0:
                    runs[name].append(ms)
        gc.enable()
        return runs

    def check_same(self, reference: Diffusers, key: str, tolerance: float = TOLERANCE) -> None:
        """The two have drawn the same picture; otherwise there is nothing to compare."""
        ours, theirs = torch.tensor(self.bench("latents", key)["latents"]), reference.result()
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        progress(f"  {key}: results differ by {error:.1e}")
        if not error <= tolerance:
            raise RuntimeError(f"{key}: not the same result as diffusers: {error}")

    def demo_steps(self, model: Path, inputs: Path) -> None:
        as_fp32 = self.work / "demo-fp32"
        models.convert_model(as_fp32, model, torch.float32)
        self.bench("open", "demo", as_fp32, inputs)
        self.bench("open", "demo-stored", model, inputs)
        reference = Diffusers(model, inputs)
        sides = {"reference": reference, "ours": "demo", "stored": "demo-stored"}
        t = self.run_steps(sides, DEFAULTS["width"], DEFAULTS["steps"], rounds=20)
        self.check_same(reference, "demo")
        self.check_same(reference, "demo-stored")
        self.table.compare_runs("step, demo model, fp32 against diffusers", t["ours"], t["reference"], 0.40)
        self.table.compare_runs("step, demo model as it is stored (bf16) against diffusers in fp32", t["stored"],
                                t["reference"])
        self.bench("close", "demo")
        self.lora_switches("demo model", "demo-stored", reference,
                           sorted((DEMO / "loras").glob("*.safetensors"))[:2], rounds=12, block=10)
        self.lora_steps("demo model", "demo-stored", model, inputs, DEFAULTS["width"], DEFAULTS["steps"], rounds=12)
        self.bench("close", "demo-stored")

    def tiny_steps(self, folder: Path, inputs: Path, name: str) -> None:
        self.bench("open", "tiny", folder, inputs)
        reference = Diffusers(folder, inputs)
        t = self.run_steps({"reference": reference, "ours": "tiny"}, DEFAULTS["width"], DEFAULTS["steps"], rounds=20)
        self.check_same(reference, "tiny")
        self.table.compare_runs(f"step, {name}, fp32 against diffusers", t["ours"], t["reference"], 0.40)
        self.bench("close", "tiny")

    def middle_steps(self, folder: Path, inputs: Path) -> None:
        stored_bf16 = self.work / "middle-bf16"
        models.convert_model(stored_bf16, folder, torch.bfloat16)
        self.bench("open", "middle", folder, inputs)
        self.bench("open", "middle-bf16", stored_bf16, inputs)
        reference = Diffusers(folder, inputs)
        sides = {"reference": reference, "ours": "middle", "bf16": "middle-bf16"}
        t = self.run_steps(sides, MIDDLE_SIDE, MIDDLE_STEPS, rounds=6)
        self.check_same(reference, "middle")
        self.table.compare_runs("step, 69-M model, fp32 against diffusers", t["ours"], t["reference"], 0.95)
        self.table.compare_runs("step, 69-M model, stored as bf16 against stored as fp32", t["bf16"], t["ours"], 1.15)

        torch.set_num_threads(2)
        self.bench("threads", 2)
        del sides["bf16"]
        t = self.run_steps(sides, MIDDLE_SIDE, MIDDLE_STEPS, rounds=3)
        self.table.compare_runs("step, 69-M model, fp32 against diffusers, 2 threads", t["ours"], t["reference"])
        torch.set_num_threads(1)
        self.bench("threads", 1)
        self.bench("close", "middle-bf16")

        loras = [self.work / f"rank16-{name}.safetensors" for name in "ab"]
        for i, lora in enumerate(loras):
            models.write_lora(lora, folder, rank=16, seed=10 + i)
        self.lora_switches("69-M model, rank 16", "middle", reference, loras, rounds=5, block=4)
        self.lora_steps("69-M model", "middle", folder, inputs, MIDDLE_SIDE, MIDDLE_STEPS, rounds=4, count=1, limit=1.10)
        # Their arithmetic alone is a tenth of so narrow a model's; the limit for three is the 1-GB model's.
        self.lora_steps("69-M model", "middle", folder, inputs, MIDDLE_SIDE, MIDDLE_STEPS, rounds=4, count=3)
        self.bench("close", "middle")

    def streaming(self, folder: Path, inputs: Path) -> None:
        """Blocks come over a bus on which a pass's copies take 0.8 of the time of its computing."""
        self.bench("open", "resident", folder, inputs)
        self.bench("open", "streamed", folder, inputs)
        self.bench("to-device", "resident", "resident", 0)

        def steps(key: str) -> list[float]:
            self.bench("begin", key, MIDDLE_SIDE, MIDDLE_STEPS)
            return self.bench("step", key, MIDDLE_STEPS)["wall"][1:]

        steps("resident")
        compute = statistics.median(steps("resident") + steps("resident")) / 1000
        copied = self.bench("to-device", "streamed", "streamed", 1e15)["bytes"]
        bandwidth = copied / (0.8 * compute)
        self.bench("to-device", "streamed", "streamed", bandwidth)
        times = {"resident": [], "streamed": []}
        for _ in range(7):
            for key, ms in times.items():
                ms += steps(key)
        same = self.bench("latents", "streamed") == self.bench("latents", "resident")
        if not same:
            raise RuntimeError("streamed and resident runs differ")
        progress(f"  {copied / MB:.0f} MiB per pass at {bandwidth / MB:.0f} MiB/s, copies take "
                 f"{copied / bandwidth * 1000:.0f} ms of {compute * 1000:.0f} ms")
        self.table.compare("step, 69-M model, all blocks streamed with a ring of 2, copies 0.8 of computing, against "
                           "resident (wall)", times["streamed"], times["resident"], 1.15)
        for key in times:
            self.bench("close", key)

    # --- LoRAs ---------------------------------------------------------------

    def lora_switches(self, name: str, key: str, reference: Diffusers, files: list[Path], rounds: int,
                      block: int) -> None:
        """One LoRA in place of another, both in memory: ours as records, peft's as files in the page cache or as
        tensors, whichever is faster."""
        tensors = [models.load_file(f) for f in files]
        times = {way: [] for way in ("sidecar", "direct", "file", "tensors", "hotswap", "choose")}

        def ours(mode: str) -> None:
            times[mode] += self.bench("lora", key, mode, block, *files)["cpu"][1:]

        for i in range(rounds):
            ours("sidecar")
            for k, file in enumerate(files):
                file_ms = reference.replace(str(file), low_memory=True)
                tensors_ms = reference.replace(dict(tensors[k]), low_memory=True)
                if i > 0:
                    times["file"].append(file_ms)
                    times["tensors"].append(tensors_ms)
            ours("direct")
        one = tensors[0]
        other = {k: v + 1e-3 for k, v in one.items()}
        reference.drop_loras()
        reference.replace(dict(one), low_memory=True)
        for _ in range(rounds):
            ours("sidecar")
            times["hotswap"] += [reference.hotswap(dict(other)), reference.hotswap(dict(one))]
        first = reference.adapter
        reference.transformer.load_lora_adapter(dict(other), prefix="transformer", adapter_name="second")
        for _ in range(rounds):
            ours("sidecar")
            times["choose"] += [reference.choose("second"), reference.choose(first)]
        reference.drop_loras()
        self.bench("no-lora", key)
        fastest = min(times["file"], times["tensors"], key=min)
        self.table.compare(f"change of LoRA, {name}, sidecar against peft", times["sidecar"], fastest, 0.05)
        self.table.compare(f"change of LoRA, {name}, direct against peft", times["direct"], fastest)
        self.table.compare(f"change of LoRA, {name}, sidecar against peft's hotswap (same layers and rank)",
                           times["sidecar"], times["hotswap"])
        self.table.compare(f"change of LoRA, {name}, sidecar against set_adapters of two that the network has",
                           times["sidecar"], times["choose"])

    def lora_steps(self, name: str, key: str, folder: Path, inputs: Path, side: int, steps: int, rounds: int,
                   count: int = 1, limit: float | None = None) -> None:
        loras = [self.work / f"{key}-rank16-{i}.safetensors" for i in range(count)]
        for i, lora in enumerate(loras):
            models.write_lora(lora, folder, rank=16, seed=20 + i)
        reference = Diffusers(folder, inputs)
        reference.stack(loras)
        sides = {"reference": reference, "base": (key, ""), "lora": (key, "+".join(map(str, loras)))}
        t = self.run_steps(sides, side, steps, rounds)
        self.check_same(reference, key)
        self.bench("no-lora", key)
        what = "a LoRA" if count == 1 else f"{count} LoRAs"
        self.table.compare_runs(f"step, {name} with {what} of rank 16 on all layers, sidecar against none", t["lora"],
                                t["base"], limit)
        self.table.compare_runs(f"step, {name} with {what} of rank 16, sidecar against diffusers and peft", t["lora"],
                                t["reference"])

    def lora_sets(self, name: str, folder: Path, inputs: Path, switch_ms: float, rounds: int,
                  merge_limit: float | None = None) -> None:
        """Changes of resident sets on a model as it is stored, and what merging costs, in milliseconds."""
        loras = [self.work / f"{folder.name}-set-{i}.safetensors" for i in range(2)]
        for i, lora in enumerate(loras):
            models.write_lora(lora, folder, rank=16, seed=30 + i)
        self.bench("threads", 1)
        self.bench("open", "sets", folder, inputs)
        reference = Diffusers(folder, inputs)
        times = {way: [] for way in ("sidecar", "merge", "hit", "copy", "peft", "fuse")}
        for _ in range(rounds):
            times["sidecar"] += self.bench("lora", "sets", "sidecar", 8, *loras)["cpu"][2:]
            self.bench("no-lora", "sets")
            for lora in loras:    # into memory that was given back before, as the copies are
                times["merge"] += self.bench("lora", "sets", "direct", 1, lora)["cpu"]
                self.bench("no-lora", "sets")
            times["copy"] += self.bench("copy-weights", "sets", 2)["cpu"]
            times["hit"] += self.bench("lora", "sets", "merged", 8, *loras)["cpu"][2:]
            self.bench("no-lora", "sets")
            times["peft"] += [reference.replace(str(lora), low_memory=True) for lora in loras]
            times["fuse"].append(reference.fuse())
            reference.drop_loras()
        self.bench("close", "sets")
        for what, way, beside, limit in (
                (f"change of a resident LoRA of rank 16 on all layers, {name}, sidecar", "sidecar", "peft", switch_ms),
                (f"the same as merged weights that are in memory, {name}", "hit", "fuse", 1.0)):
            self.table.add(Row(f"{what} against {limit:.0f} ms (peft: {min(times[beside]):.0f} ms)",
                               f"{min(times[way]):.2f} ms", f"{limit:.0f} ms", min(times[way]) / limit,
                               statistics.median(times[way]) / limit, 1.0))
        self.table.compare(f"first merge of that LoRA, {name}, against a copy of the same weights to new memory",
                           times["merge"], times["copy"], merge_limit)
        self.table.compare(f"first merge of that LoRA, {name}, against peft's fuse_lora in fp32", times["merge"],
                           times["fuse"])

    # --- files and memory ----------------------------------------------------

    def locks(self) -> None:
        """Locks of resident records; lock_bench prints name and figure, a line each."""
        output = subprocess.run([self.program.with_name("lock_bench")], capture_output=True, text=True, check=False).stdout
        for name, value, unit, limit in re.findall(r"^(.+?)\s{2,}([\d.]+) (\S+) \(limit (\d+)\)", output, re.M):
            value, limit = float(value), float(limit)
            self.table.add(Row(f"cache: {name}", f"{value:.0f} {unit}", f"{limit:.0f} {unit}", value / limit, None, 1.0,
                               at_least=unit == "locks/s"))

    def loads(self, aligned: Path, shifted: Path) -> None:
        for what, folder in (("tensors at multiples of 16 bytes", aligned), ("tensors at 8 modulo 16", shifted)):
            times = [self.bench("load", folder) for _ in range(9)][1:]
            gb = times[0]["bytes"] / 1e9
            ours, plain = [t["load"] for t in times], min(([t[w] for t in times] for w in ("mmap", "pread")), key=min)
            way = "mapped" if min(plain) == min(t["mmap"] for t in times) else "pread"
            self.table.add(Row(f"load of {gb:.2g} GB, {what}, until every byte was looked at, against a plain read "
                               f"({way})", f"{gb / min(ours) * 1000:.2f} GB/s", f"{gb / min(plain) * 1000:.2f} GB/s",
                               min(plain) / min(ours), sorted(plain)[len(plain) // 2] / sorted(ours)[len(ours) // 2],
                               0.9, at_least=True))

    def memory(self, folders: dict[str, Path]) -> None:
        for what, folder in folders.items():
            weights = sum(f.stat().st_size for f in folder.rglob("*.safetensors"))
            memory = peak_memory(self.bin, folder.parent, folder.name)
            allowed = 1.05 * weights + 300 * MB
            progress(f"  {what}: {({k: round(v / MB) for k, v in memory.items()})} MiB")
            self.table.add(Row(f"peak RSS of the daemon after a job, {weights / MB:.0f} MiB of weights, {what}, "
                               "against 1.05 × weights + 300 MiB", f"{memory['VmHWM'] / MB:.0f} MiB",
                               f"{allowed / MB:.0f} MiB", memory["VmHWM"] / allowed, None, 1.0))

    def overhead(self) -> None:
        """Calls of 1001 steps and of one, in turns: what a step adds to a call."""
        weights, steps = self.work / "noop.safetensors", 1001
        models.write_noop_weights(weights)
        with tempfile.TemporaryDirectory() as folder:    # a socket's path must be short
            daemon = NoopDaemon(self.program, weights, Path(folder))
            calls = [[self.bench("noop", daemon.address, n)["ms"] for n in (1, steps)] for _ in range(25)][1:]
            daemon.close()
        short, long = zip(*calls)
        us = 1000 * (min(long) - min(short)) / (steps - 1)
        median = 1000 * (statistics.median(long) - statistics.median(short)) / (steps - 1)
        self.table.add(Row("daemon's overhead per step (network that does nothing, Unix socket) against 100 µs",
                           f"{us:.1f} µs", "100 µs", us / 100, median / 100, 1.0))
        self.table.add(Row("daemon's overhead per call of one step, same", f"{min(short):.2f} ms", "1 ms", min(short),
                           statistics.median(short), None))


def processor() -> str:
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else "unknown processor"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--work", type=Path, default=ROOT / "build/bench", help="emptied, filled, removed at the end")
    parser.add_argument("--only", nargs="*", choices=PARTS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()

    work = args.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    wanted = args.only or PARTS
    benchmarks = Benchmarks(args.build.resolve(), work)
    demo = DEMO / "models/shapes-flux"
    try:
        if "locks" in wanted:
            benchmarks.locks()
        if "overhead" in wanted:
            progress("== overhead")
            benchmarks.overhead()
        if "attacks" in wanted:
            attacks(ROOT, args.build.resolve(), benchmarks.table)
        if "demo" in wanted:
            progress("== demo model")
            inputs = work / "demo-inputs.safetensors"
            models.write_inputs(inputs, demo, DEFAULTS["width"], DEFAULTS["max_sequence_length"])
            benchmarks.demo_steps(demo, inputs)
            count = models.write_model(work / "models/tiny", demo, TINY)
            models.write_inputs(work / "tiny-inputs.safetensors", work / "models/tiny", DEFAULTS["width"], TINY_TOKENS)
            benchmarks.tiny_steps(work / "models/tiny", work / "tiny-inputs.safetensors",
                                  f"tiny random model ({count / 1e6:.1f} M, {TINY_TOKENS} text tokens)")
        if "middle" in wanted:
            folder = work / "models/middle"
            count = models.write_model(folder, demo, MIDDLE)
            progress(f"== 69-M model ({count / 1e6:.1f} M)")
            models.write_inputs(work / "middle-inputs.safetensors", folder, MIDDLE_SIDE, MIDDLE_TOKENS)
            benchmarks.middle_steps(folder, work / "middle-inputs.safetensors")
            benchmarks.streaming(folder, work / "middle-inputs.safetensors")
            benchmarks.memory({"bf16": work / "middle-bf16"})
            shutil.rmtree(folder)
            shutil.rmtree(work / "middle-bf16")
        if "loras" in wanted:
            count = models.write_model(work / "models/tiny-loras", demo, TINY)
            models.write_inputs(work / "tiny-loras-inputs.safetensors", work / "models/tiny-loras", DEFAULTS["width"],
                                TINY_TOKENS)
            progress(f"== LoRAs, tiny model ({count / 1e6:.1f} M)")
            benchmarks.lora_sets("tiny random model", work / "models/tiny-loras", work / "tiny-loras-inputs.safetensors",
                                 switch_ms=5, rounds=6)
            folder = work / "models/gigabyte"
            count = models.write_model(folder, demo, GIGABYTE, torch.bfloat16)
            progress(f"== LoRAs, 1-GB model ({count / 1e6:.1f} M)")
            models.write_inputs(work / "gigabyte-inputs.safetensors", folder, MIDDLE_SIDE, MIDDLE_TOKENS)
            benchmarks.lora_sets("1-GB random FLUX.1 in bf16", folder, work / "gigabyte-inputs.safetensors", switch_ms=20,
                                 rounds=3, merge_limit=2.0)
            benchmarks.bench("open", "gigabyte", folder, work / "gigabyte-inputs.safetensors")
            for loras, limit in ((1, 1.10), (3, 1.15)):
                benchmarks.lora_steps("1-GB random FLUX.1 in bf16", "gigabyte", folder, work / "gigabyte-inputs.safetensors",
                                      MIDDLE_SIDE, steps=3, rounds=3, count=loras, limit=limit)
            shutil.rmtree(folder)
        if "files" in wanted:
            big, shifted = work / "models/big", work / "models/big-shifted"
            count = models.write_model(big, demo, BIG)
            progress(f"== files ({count / 1e6:.1f} M)")
            models.shift_model(shifted, big)
            benchmarks.loads(big, shifted)
            benchmarks.memory({"fp32": big, "fp32 at 8 modulo 16": shifted})
        sd = SdBenchmarks(benchmarks.program, work, benchmarks.table)
        if "sd" in wanted:
            sd.run("SD 1.5", SD15, torch.float32, {"512²": 0.9}, rounds=3, together=True)
            sd.loras("SD 1.5", SD15, "256²", rounds=3, limit=1.10)
            sd.vae({"512²": 0.85}, rounds=3)
            sd.sd_cpp()
            shutil.rmtree(work / "sd-1.5")
        if "sdxl" in wanted:
            sd.run("SDXL", SDXL, torch.bfloat16, {}, rounds=2, together=False)
    finally:
        benchmarks.close()
        shutil.rmtree(work, ignore_errors=True)

    missed = sum(not row.ok for row in benchmarks.table.rows)
    print(benchmarks.table.markdown())
    limits = sum(row.limit is not None for row in benchmarks.table.rows)
    print(f"\n{missed} of {limits} limits missed. Ratios are of the fastest measurements. Steps and changes of LoRAs "
          f"are CPU time on one thread where nothing else is said, the rest is wall time; "
          f"torch {torch.__version__}, {processor()}.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
