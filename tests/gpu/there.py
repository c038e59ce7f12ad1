"""What a pack runs: there.py PACK.tar.xz. Standard library alone; PyTorch is that of the machine.

Rows come in the order of what they tell; each part has seconds of its own and cannot stop the others. The report is
written anew after every row, so that it is there whatever ends the run. Exit status: 1 when a row FAILED."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from math import prod
from pathlib import Path

import random_models
from machine import FAILED, LIMIT, NO_GPU, OK, SKIPPED, START, Daemon, Machine, Report, free_port, left

# --- parts -------------------------------------------------------------------


def machine_rows(m: Machine, r: Report) -> None:
    r.add("machine", f"{os.uname().sysname} {os.uname().release}, {os.cpu_count()} cores", OK, f"torch {m.version}")
    r.add("GPU", m.name or "none: what computes runs on the CPU at small sizes", OK if m.gpu else NO_GPU)
    r.add("libraries come from the pack, glibc, libstdc++ and PyTorch", *m.foreign_libraries())


MISSING = ("cannot open", "no family knows", "No such file")    # of a golden that the pack leaves out


def google_test(m: Machine, r: Report, row: str, program: str, chosen: str, seconds: float, gpu: bool = False,
                **environment) -> None:
    """`gpu`: of tests that skip themselves without one."""
    file, result = m.root / "tests" / program, m.root / "result.json"
    if not file.exists():
        return r.add(row, "not in the pack", SKIPPED)
    result.unlink(missing_ok=True)
    done = m.run(file, f"--gtest_filter={chosen}", f"--gtest_output=json:{result}", seconds=seconds,
                 **{"OMP_NUM_THREADS": "4" if m.gpu else "1"} | environment)
    if not result.exists():
        last = (re.findall(r"\[ RUN      \] (\S+)", done.stdout) or ["?"])[-1]
        return r.add(row, f"ended with status {done.returncode} in {last}; {done.stdout[-200:]}", FAILED)
    tests = [(f"{suite['name']}.{test['name']}", test) for suite in json.loads(result.read_text())["testsuites"]
             for test in suite["testsuite"]]
    failures = {name: test["failures"][0]["failure"] for name, test in tests if test.get("failures")}
    missing = {name for name, text in failures.items() if any(words in text for words in MISSING)}
    failed = [name for name in failures if name not in missing]
    skipped = sum(test["result"] == "SKIPPED" for _, test in tests)
    passed = len(tests) - len(failures) - skipped
    value = f"{passed} of {len(tests)} passed" + "".join(
        f", {count} {what}" for count, what in ((skipped, "skipped"), (len(missing), "not in the pack")) if count)
    if failed or (gpu and m.gpu and skipped):
        return r.add(row, f"{value}; {', '.join(failed)}"[:300], FAILED, (failures[failed[0]] if failed else "")[:200])
    r.add(row, value, NO_GPU if gpu and not m.gpu else OK if passed else SKIPPED)


def device_tests(m: Machine, r: Report) -> None:
    google_test(m, r, "the plug-in loads and says what is there", "cache_cuda_device_test", "-Cuda*DeviceTest.*", 60)
    google_test(m, r, "device tests (memory, order of copies, faults)", "cache_cuda_device_test", "CudaDeviceTest.*", 90,
                gpu=True)


RUNS = "All/FluxRunGolden.*:All/SdRunGolden.*:SdLoraGolden.*"
PARTS_OF_NETWORKS = ("All/FluxTransformerGolden.*:All/UNetGolden.*:All/VaeGolden.*:All/T5Golden.*:All/ClipGolden.*:"
                     "All/LoraGolden.*")


def goldens(m: Machine, r: Report) -> None:
    """Whole runs against diffusers', computed on the device."""
    for row, chosen, seconds in (("fp32", RUNS, 90), ("bf16", "All/PrecisionGolden.*bf16", 45), ("fp16", "All/PrecisionGolden.*fp16", 45)):
        row = f"goldens in {row} on {m.own_memory}: whole runs against diffusers'"
        attempt(r, row, lambda row=row, chosen=chosen, seconds=seconds: google_test(
            m, r, row, "golden_test", chosen, seconds, LATENTD_GOLDEN_DEVICE=m.own_memory + ("" if m.gpu else "=2GiB")))
    if not m.gpu:
        r.add("goldens in fp32, bf16 and fp16 on a GPU", "", NO_GPU)


def goldens_of_parts(m: Machine, r: Report) -> None:
    google_test(m, r, "goldens in fp32 on the CPU: parts of networks", "golden_test", PARTS_OF_NETWORKS, 60)


def scenario(m: Machine, r: Report) -> None:
    port = free_port()
    daemon = Daemon(m, "daemon", "--config", m.root / "deploy/demo/latentd.toml", "--upload-dir", m.root / "uploads",
                    "--listen", f"127.0.0.1:{port}", auto=True)
    try:
        info = daemon.must("info")
        chosen = re.search(r"^devices chosen +(.*)", info, re.M)
        devices = ", ".join(re.findall(r"^device\s+(.*)", info, re.M))
        r.add("devices = auto", f"{devices}; {chosen[1] if chosen else '?'}"[:200],
              OK if m.device in devices and chosen else FAILED)
        r.add("daemon: list", daemon.must("models").split("\n")[1].split()[0],
              OK if "dusk" in daemon.must("loras") else FAILED)
        plain = daemon.picture()
        again = daemon.picture()
        r.add("daemon: generate, twice the same bytes", hashlib.sha256(plain).hexdigest()[:16], OK if plain == again else FAILED)
        lora = daemon.picture("--lora", "dusk:0.8")
        back = daemon.picture()
        r.add("daemon: LoRA changes the picture and leaves nothing", hashlib.sha256(lora).hexdigest()[:16],
              OK if lora != plain and back == plain else FAILED)
        side, direct = (daemon.picture("--lora", "dusk:0.8", "--patch-mode", mode) for mode in ("sidecar", "direct"))
        r.add("daemon: LoRA beside the weights and merged", "both drawn", OK if side and direct else FAILED)
        attempt(r, "daemon: cancel", lambda: cancel(daemon, r))
        attempt(r, "daemon: grpcurl", lambda: grpcurl(m, daemon, port, r))
    finally:
        r.add("daemon: ends on SIGTERM", f"status {daemon.stop()}", OK if daemon.process.returncode == 0 else FAILED)


def grpcurl(m: Machine, daemon: Daemon, port: int, r: Report) -> None:
    """The examples of the READMEs, as printed but for port and socket."""
    blocks = [block for file in ("README.md", "proto/README.md")
              for block in re.findall(r"^```sh\n(.*?)^```", (m.root / file).read_text(), re.M | re.S) if "grpcurl" in block]
    failed = []
    for block in blocks:
        text = block.replace("127.0.0.1:7411", f"127.0.0.1:{port}").replace("/tmp/latentd-demo.sock", daemon.address.removeprefix("unix:"))
        done = m.run("bash", "-euo", "pipefail", "-c", text, seconds=30, PATH=f"{m.root / 'bin'}:{os.environ['PATH']}",
                     LD_LIBRARY_PATH=os.environ.get("LD_LIBRARY_PATH", ""))
        # The one that answers NOT_FOUND.
        if (done.returncode != 0) != ("CancelJob" in block):
            failed.append(f"{text.split('latentd.v1.')[-1].split()[0]}: {done.stdout[-120:]}")
    r.add("daemon: grpcurl, every example of the READMEs", f"{len(blocks) - len(failed)} of {len(blocks)}",
          FAILED if failed or not blocks else OK, "; ".join(failed)[:300])


def cancel(daemon: Daemon, r: Report) -> None:
    process = subprocess.Popen([daemon.machine.root / "bin/latentctl", "--address", daemon.address, "generate", "x",
                                "--steps", "500", "-W", "256", "-H", "256", "-o", "/dev/null", "--format", "png"],
                               env=daemon.machine.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(1)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    status = process.wait(timeout=30)
    while "denois" in (text := daemon.must("sessions").lower()) or "running" in text:
        if time.monotonic() - begin > 20:
            return r.add("daemon: cancel", "still running after 20 s", FAILED)
        time.sleep(0.02)
    r.add("daemon: cancel", f"{1000 * (time.monotonic() - begin):.0f} ms until it is gone", OK if status == 130 else FAILED,
          f"status {status}")


def floats(latents: bytes) -> list[float]:
    """Of a safetensors file, of fp32 tensors."""
    length = struct.unpack("<Q", latents[:8])[0]
    data = latents[8 + length:]
    return list(struct.unpack(f"<{len(data) // 4}f", data[:len(data) // 4 * 4]))


def agreement(m: Machine, r: Report) -> None:
    """Whole jobs of the daemon on the device against the CPU's, which the goldens hold to diffusers."""
    for compute in ("fp32", "auto"):
        there, cpu = (Daemon(m, f"agree-{device.split('=')[0]}-{compute}", "--devices", device, "--compute", compute, models="goldens")
                      for device in (m.own_memory + ("" if m.gpu else "=1GiB"), "cpu"))
        for model in ("tiny-dev", "tiny-sd15", "tiny-sdxl"):
            row = f"{model}: latents on {m.own_memory} against the CPU's, compute = {compute}"
            attempt(r, row, lambda row=row, model=model: compare(r, row, *(floats(d.picture(
                "--model", model, "--steps", "4", kind="latents")) for d in (there, cpu)),
                limit=1e-3 if compute == "fp32" else 0.2))
        there.stop(), cpu.stop()


def compare(r: Report, row: str, a: list[float], b: list[float], limit: float) -> None:
    worst, largest = max(abs(x - y) for x, y in zip(a, b, strict=True)), max(map(abs, b))
    r.add(row, f"{worst / largest:.1e} of the largest value", OK if worst <= limit * largest else FAILED)


def streaming(m: Machine, r: Report) -> None:
    whole = Daemon(m, "whole", "--devices", f"{m.own_memory}=1GiB")
    expected = whole.picture("--lora", "dusk:0.8", "--patch-mode", "sidecar")
    whole.stop()
    streamed = Daemon(m, "streamed", "--devices", f"{m.own_memory}=1GiB", "--residency", "stream")
    picture = streamed.picture("--lora", "dusk:0.8", "--patch-mode", "sidecar")
    count = streamed.streamed_locks()
    streamed.stop()
    r.add(f"streamed to {m.own_memory}: the same bytes as resident", f"{count} streamed locks",
          OK if picture == expected and count > 0 else FAILED)
    if not m.gpu:
        r.add("streamed to a GPU", "", NO_GPU)


def lost_device(m: Machine, r: Report) -> None:
    """Of a GPU, a process loses it by a broken kernel, which the daemon has none of: there, a pretended one is lost beside it."""
    google_test(m, r, "a GPU lost to a broken kernel: every call says so", "cache_cuda_device_test", "CudaLostDeviceTest.*", 60, gpu=True)
    row = f"a lost device (injected into sim:0 beside {m.device})"
    daemon = Daemon(m, "lost", "--devices", "sim:0=256MiB,lose_after=40", "--devices", m.device)
    try:
        # Several at once, so that both devices have some.
        jobs = [daemon.begin("generate", f"picture {i}", "--seed", i, "-o", "/dev/null", "--format", "png") for i in range(6)]
        outputs = [job.communicate(timeout=90)[0] for job in jobs]
        told = sum("DEVICE_LOST" in output or "sim:0 is lost" in output for output in outputs)
        drawn = sum(job.returncode == 0 for job in jobs)
        r.add(f"{row}: its jobs are told, the others go on", f"{told} told, {drawn} drawn, of {len(jobs)}",
              OK if told and drawn and told + drawn == len(jobs) else FAILED, "" if told else outputs[0][-100:])
        after = [daemon.call("generate", f"after {i}", "-o", "/dev/null", "--format", "png") for i in range(3)]
        r.add(f"{row}: later jobs avoid it", f"{sum(done.returncode == 0 for done in after)} of {len(after)} drawn",
              OK if all(done.returncode == 0 for done in after) else FAILED, after[-1].stdout[-80:] if after[-1].returncode else "")
    finally:
        daemon.stop()


def lock_bench(m: Machine, r: Report) -> None:
    if not (m.root / "tests/lock_bench").exists():
        return r.add("locks", "not in the pack", SKIPPED)
    done = m.run(m.root / "tests/lock_bench", seconds=40)
    figures = "; ".join(" ".join(line.split()) for line in done.stdout.strip().splitlines())
    r.add("locks (lock_bench)", figures[:300], OK if done.returncode == 0 else FAILED)


# --- benchmarks --------------------------------------------------------------

def beside(m: Machine, sizes: str, name: str) -> dict:
    """What PyTorch takes; see beside.py."""
    done = m.run(sys.executable, m.pack / "beside.py", m.root / "shapes.json", sizes, name, m.device, m.root / "python",
                 seconds=90, LD_LIBRARY_PATH=os.environ.get("LD_LIBRARY_PATH", ""))
    if done.returncode != 0:
        raise RuntimeError(f"PyTorch's side: {done.stdout[-300:]}")
    return json.loads(done.stdout.strip().split("\n")[-1])


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def bench(m: Machine, r: Report, sizes: str, name: str, what: dict) -> None:
    """A model of random weights: first picture, step, decoding, LoRA, streamed."""
    title = name if sizes == "full" else f"{name} scaled down"
    weights = {part: sum(2 * prod(size) for size in network["sizes"].values()) for part, network in what["networks"].items()}
    needed = sum(weights.values())
    folder = Path(tempfile.mkdtemp(prefix="gr", dir=random_models.place(needed, m.root)))
    atexit.register(shutil.rmtree, folder, True)
    try:
        begin = time.monotonic()
        model = name.replace(" ", "-")
        written = random_models.write_model(folder / model, m.root / what["small"], what, begin + min(120, left() / 2))
        lora = f"{sizes}-{model}"
        layers = random_models.write_lora(m.root / f"deploy/demo/loras/{lora}.safetensors", what, 16)
        r.add(f"{title}: random weights written", f"{written / 1e9:.3g} GB in {time.monotonic() - begin:.1f} s", OK, str(folder.parent))
        words = ("--model", model, "-W", what["side"], "-H", what["side"], *what["flags"])
        resident = attempt(r, f"{title}: resident", lambda: bench_resident(m, r, title, sizes, name, folder, words, lora, layers))
        attempt(r, f"{title}: streamed", lambda: bench_streamed(m, r, title, folder, words, weights[what["denoiser"]], resident))
    finally:
        shutil.rmtree(folder)


def bench_resident(m: Machine, r: Report, title: str, sizes: str, name: str, folder: Path, words: tuple, lora: str, layers: int) -> float:
    """Seconds of a step."""
    daemon = Daemon(m, f"{sizes}-{folder.name}", models=folder)
    try:
        first = daemon.timings(*words, "-s", 4, seconds=150)
        second = daemon.timings(*words, "-s", 4, seconds=60)
        r.add(f"{title}: first picture, four steps, nothing loaded", f"{first['total']:.2f} s", OK, f"the second {second['total']:.2f} s")
        step, decode = daemon.step(*words, seconds=90)
        try:
            theirs = beside(m, sizes, name)
            by = [f"{theirs['how']} in {theirs['type']} {ms(theirs[key])}, ratio {ours / theirs[key]:.2f}"
                  for key, ours in (("step", step), ("decode", decode))]
            by[0] += f" ({theirs['why'][-200:]})" if theirs["why"] else ""
        except Exception as error:    # the figure stands without it
            by = [f"{type(error).__name__}: {error}"[:200]] * 2
        r.add(f"{title}: step", ms(step), OK, by[0])
        r.add(f"{title}: VAE, decoding", ms(decode), OK, by[1])
        for mode, steps in (("sidecar", True), ("direct", False)):
            attempt(r, f"{title}: LoRA, {mode}", lambda: bench_lora(r, daemon, f"{title}: LoRA, {mode}", mode, words, lora, layers,
                                                                    second["total"], step if steps else None))
        return step
    finally:
        daemon.stop()


def bench_lora(r: Report, daemon: Daemon, row: str, mode: str, words: tuple, lora: str, layers: int, without: float,
               step: float | None) -> None:
    words = (*words, "--lora", f"{lora}:0.5", "--patch-mode", mode)
    first, second = (daemon.timings(*words, "-s", 4, seconds=60) for _ in range(2))
    r.add(f"{row}: switch to it, rank 16, {layers} layers", f"{first['total'] - second['total']:.3f} s more than the picture after it",
          OK, f"four steps {second['total']:.3f} s, without {without:.3f} s")
    if step is not None:
        patched, _ = daemon.step(*words, seconds=60)
        r.add(f"{row}: step", ms(patched), OK, f"{patched / step:.2f} of none")


def bench_streamed(m: Machine, r: Report, title: str, folder: Path, words: tuple, weights: int, resident: float | None) -> None:
    device = f"{m.own_memory}={'' if m.gpu else '8GiB'}".rstrip("=")
    modes = [("all blocks streamed", device, "stream")]
    # Beside weights, room for working memory; that of the models scaled down is larger than they are.
    cap = weights * 3 // 5 + (2 << 30)
    if cap < weights:
        modes.append((f"{m.own_memory} capped at {cap / 1e9:.3g} GB, its weights {weights / 1e9:.3g} GB", f"{m.own_memory}={cap >> 20}MiB", "auto"))
    for what, spec, residency in modes:
        daemon = Daemon(m, f"streamed-{residency}", "--devices", spec, "--residency", residency, models=folder)
        try:
            streamed, _ = daemon.step(*words, seconds=90, few=2, more=6)
            share = f"{streamed / resident:.2f} of resident" if resident else ""
            r.add(f"{title}: step, {what}", ms(streamed), OK, f"{share}; {daemon.streamed_locks()} streamed locks")
        finally:
            daemon.stop()


def benchmarks(m: Machine, r: Report) -> None:
    file = m.root / "shapes.json"
    if not file.exists():
        return r.add("benchmarks", "the models' shapes are not in the pack", SKIPPED)
    sizes = "full" if m.gpu else "scaled"
    for name, what in json.loads(file.read_text())[sizes].items():
        if not m.gpu:
            r.add(f"{name}: first picture, step, VAE, LoRA, streamed, beside diffusers", "", NO_GPU)
        attempt(r, name, lambda name=name, what=what: bench(m, r, sizes, name, what))


# --- the whole ---------------------------------------------------------------

def attempt(r: Report, row: str, part):
    """What the part returns; None where it failed."""
    if left() < 10:
        return r.add(row, "no time was left", SKIPPED)
    try:
        return part()
    except Exception as error:    # a part must not stop the others
        r.add(row, f"{type(error).__name__}: {error}"[:400], FAILED)
    return None


PARTS = {"machine": machine_rows, "device tests": device_tests, "goldens": goldens, "daemon": scenario, "streaming": streaming,
         "lost device": lost_device, "benchmarks": benchmarks, "jobs on the device": agreement,
         "goldens of parts": goldens_of_parts, "locks": lock_bench}


def main() -> int:
    out = Path(os.environ.get("OUT") or "build")
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out / "gpu-report.md")
    # A time limit of someone else's: the report is there already.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    root = Path(tempfile.mkdtemp(prefix="latentd-gpu-"))
    atexit.register(shutil.rmtree, root, True)
    try:
        with tarfile.open(sys.argv[1]) as tar:
            tar.extractall(root, filter="data")
        machine = Machine(root, Path(__file__).resolve().parent)
    except Exception as error:
        report.add("the pack and the machine's PyTorch", f"{type(error).__name__}: {error}"[:400], FAILED)
        return 1
    for name, part in PARTS.items():
        attempt(report, name, lambda part=part: part(machine, report))
    return 1 if report.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
