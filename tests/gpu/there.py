"""What a pack runs: there.py PACK.tar.xz. Standard library alone; PyTorch is that of the machine.

Rows come in the order of what they tell; each part has seconds of its own and cannot stop the others. The report is
written anew after every row, so that it is there whatever ends the run. Exit status: 1 when a row FAILED."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

LIMIT = float(os.environ.get("GPU_REPORT_LIMIT", 570))    # seconds in all
OK, FAILED, NO_GPU, SKIPPED = "ok", "FAILED", "needs a GPU", "not run"
START = time.monotonic()


def left() -> float:
    return LIMIT - (time.monotonic() - START)


class Report:
    def __init__(self, file: Path):
        self.file, self.rows = file, []
        self.write()

    def add(self, row: str, value: str = "", state: str = OK, beside: str = "") -> None:
        self.rows.append((row, value, beside, state))
        print(f"{time.monotonic() - START:5.0f} s  {state:12} {row}: {value} {beside}".rstrip(), flush=True)
        self.write()

    def write(self) -> None:
        lines = ["# latentd on this machine", "", "| row | value | beside | |", "|---|---|---|---|"]
        for row in self.rows:
            lines.append("| " + " | ".join(" ".join(str(c).replace("|", "/").split()) for c in row) + " |")
        lines += ["", f"{time.monotonic() - START:.0f} s of {LIMIT:.0f}."]
        self.file.write_text("\n".join(lines) + "\n")

    def failed(self) -> bool:
        return any(row[3] == FAILED for row in self.rows)


class Machine:
    """Where the pack lies, its environment, and the device that is tried."""

    def __init__(self, root: Path):
        self.root, self.torch, self.gpu, self.problem = root, "", False, ""
        found = subprocess.run([sys.executable, "-c", "import torch; print(torch.__path__[0]); print(torch.__version__); "
                                "print(torch.cuda.is_available()); print(torch.cuda.get_device_name(0) if "
                                "torch.cuda.is_available() else '')"], capture_output=True, text=True, timeout=120)
        if found.returncode != 0:
            raise RuntimeError(f"python3 has no torch: {found.stderr[-400:]}")
        self.torch, self.version, there, self.name = found.stdout.split("\n")[:4]
        self.gpu = there == "True"
        self.device = "cuda:0" if self.gpu else "cpu"
        site = Path(self.torch).parent
        libraries = [root / "lib", Path(self.torch) / "lib", *sorted(site.glob("nvidia/*/lib"))]
        # The pack's libraries are for its own programs alone: python3 keeps the environment that it has.
        self.environment = os.environ | {
            "LD_LIBRARY_PATH": ":".join([*map(str, libraries), os.environ.get("LD_LIBRARY_PATH", "")]),
            "LATENTD_GOLDENS": str(root / "goldens"), "OMP_WAIT_POLICY": "PASSIVE", "HOME": str(root)}

    def run(self, *command, seconds: float, **environment) -> subprocess.CompletedProcess:
        """The program's whole group ends with it, or with its time."""
        process = subprocess.Popen([str(c) for c in command], cwd=self.root, env=self.environment | environment,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                   start_new_session=True)
        try:
            output, _ = process.communicate(timeout=max(1.0, min(seconds, left())))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise TimeoutError(f"not done after {seconds:.0f} s; {output[-200:]}") from None
        return subprocess.CompletedProcess(command, process.returncode, output, "")


class Daemon:
    def __init__(self, machine: Machine, name: str, *flags: str, models: str = "deploy/demo/models", auto: bool = False):
        self.machine, folder = machine, Path(tempfile.mkdtemp(prefix="gr"))
        self.address, self.log = f"unix:{folder}/s", machine.root / f"{name}.log"
        devices = [] if auto or "--devices" in flags else ["--devices", machine.device]
        self.process = subprocess.Popen(
            [machine.root / "bin/latentd", "--listen", self.address, "--model-roots", machine.root / models,
             "--lora-roots", machine.root / "deploy/demo/loras", "--state-dir", "",
             *(["--default-model", "shapes-flux"] if models == "deploy/demo/models" else []), *devices, *flags],
            cwd=machine.root, env=machine.environment, stderr=self.log.open("wb"), stdout=subprocess.DEVNULL)
        atexit.register(self.stop)
        for _ in range(300):
            if self.process.poll() is not None or self.call("health", seconds=20).returncode == 0:
                break
            time.sleep(0.1)
        if self.process.poll() is not None:
            raise RuntimeError(f"the daemon ended: {self.log.read_text(errors='replace')[-400:]}")

    def call(self, *words, seconds: float = 60) -> subprocess.CompletedProcess:
        return self.machine.run(self.machine.root / "bin/latentctl", "--address", self.address, *words, seconds=seconds)

    def must(self, *words, seconds: float = 60) -> str:
        done = self.call(*words, seconds=seconds)
        if done.returncode != 0:
            raise RuntimeError(f"latentctl {words[0]}: {done.returncode}: {done.stdout[-300:]}")
        return done.stdout

    def picture(self, *words, seconds: float = 60, kind: str = "png") -> bytes:
        file = self.machine.root / f"picture-{random.random()}.{kind}"
        if kind == "latents":
            words = (*words, "--format", "latents")
        self.must("generate", "a red circle on a blue background", "--seed", "7", "-o", file, *words, seconds=seconds)
        data = file.read_bytes()
        file.unlink()
        return data

    def timings(self, *words, seconds: float) -> dict[str, float]:
        """What the server says of a job: seconds by phase, and `total`."""
        output = self.must("--json", "generate", "a red circle", "--seed", "7", "-o", "/dev/null", "--format", "png", *words,
                           seconds=seconds)
        events = [json.loads(line).get("event", {}) for line in output.splitlines() if line.startswith("{")]
        done = next(event["done"] for event in events if "done" in event)
        return {name.removesuffix("Ms"): float(ms) / 1e3 for name, ms in done["timings"].items()}

    def step(self, *words, seconds: float, few: int = 4, more: int = 12) -> tuple[float, float]:
        """Seconds of a step, as two runs that differ in their steps alone tell it (a device computes later than it is
        asked), and of decoding."""
        short = self.timings(*words, "-s", few, seconds=seconds)
        long = self.timings(*words, "-s", more, seconds=seconds)
        return (long["total"] - short["total"]) / (more - few), long["decode"]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


# --- parts -------------------------------------------------------------------

def machine_rows(m: Machine, r: Report) -> None:
    r.add("machine", f"{os.uname().sysname} {os.uname().release}, {os.cpu_count()} cores", OK, f"torch {m.version}")
    r.add("GPU", m.name or "none: what computes runs on the CPU at small sizes", OK if m.gpu else NO_GPU)


def google_test(m: Machine, r: Report, row: str, program: str, chosen: str, seconds: float, gpu: bool = False) -> None:
    file = m.root / "tests" / program
    if not file.exists():
        return r.add(row, "not in the pack", SKIPPED)
    done = m.run(file, f"--gtest_filter={chosen}", seconds=seconds, OMP_NUM_THREADS="4" if m.gpu else "1")
    numbers = {kind: int((re.search(rf"\[  {kind}  \] (\d+) test", done.stdout) or [0, 0])[1]) for kind in
               ("PASSED", "FAILED")}
    skipped = int((re.search(r"\[  SKIPPED \] (\d+) test", done.stdout) or [0, 0])[1])
    ran = int((re.search(r"Running (\d+) test", done.stdout) or [0, 0])[1])
    names = sorted(set(re.findall(r"\[  FAILED  \] ([\w.]+/?\w*)(?:,| \(| *\n)", done.stdout)))
    value = f"{numbers['PASSED']} passed, {skipped} skipped, of {ran}"
    if ran == 0 and done.returncode == 0:
        return r.add(row, "no such test in this build", SKIPPED)
    if done.returncode != 0:
        return r.add(row, f"{value}; status {done.returncode}; {', '.join(names)[:300] or done.stdout[-200:]}", FAILED)
    r.add(row, value, NO_GPU if gpu and not m.gpu else FAILED if gpu and skipped else OK)


def device_tests(m: Machine, r: Report) -> None:
    google_test(m, r, "the plug-in loads and says what is there", "cache_cuda_device_test", "-CudaDeviceTest.*", 60)
    google_test(m, r, "device tests (memory, order of copies, faults)", "cache_cuda_device_test", "CudaDeviceTest.*", 60,
                gpu=True)


def scenario(m: Machine, r: Report) -> None:
    daemon = Daemon(m, "daemon", auto=True)
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
        cancel(daemon, r)
        stats = json.loads(daemon.must("--json", "cache"))
        r.add("daemon: stats", f"keys {', '.join(sorted(stats))}"[:120])
    finally:
        r.add("daemon: ends on SIGTERM", f"status {daemon.stop()}", OK if daemon.process.returncode == 0 else FAILED)


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


GOLDENS = {"goldens in fp32: FLUX's parts and runs":
           "All/FluxTransformerGolden.*:All/FluxRunGolden.*:All/T5Golden.*:All/ClipGolden.*:-*emo*",
           "goldens in fp32: SD's parts and runs": "All/UNetGolden.*:All/SdRunGolden.*:All/VaeGolden.*:-*emo*"}


MISSING = ("cannot open", "no family knows", "No such file")    # a golden that was left out of the pack


def golden_rows(m: Machine, r: Report, row: str, chosen: str, seconds: float) -> None:
    """One process for each test: a golden that the pack left out ends its process. Compared on the CPU."""
    program, end = m.root / "tests/golden_test", time.monotonic() + seconds
    listed = m.run(program, "--gtest_list_tests", f"--gtest_filter={chosen}", seconds=30).stdout
    suite, names = "", []
    for line in listed.splitlines()[1:]:
        if line.startswith("  "):
            names.append(suite + line.split()[0])
        else:
            suite = line.split()[0] if line.split() else ""
    passed, missing, failed, late = 0, 0, [], 0
    for name in names:
        if time.monotonic() > end or left() < 10:
            late += 1
            continue
        done = m.run(program, f"--gtest_filter={name}", seconds=30, OMP_NUM_THREADS="1")
        if done.returncode == 0:
            passed += 1
        elif any(text in done.stdout for text in MISSING):
            missing += 1
        else:
            failed.append(name)
    if not names:
        return r.add(row, "no such test in this build", SKIPPED)
    value = f"{passed} of {len(names)} passed, {missing} not in the pack, {late} not reached"
    r.add(row, f"{value} {', '.join(failed)[:200]}".strip(), FAILED if failed else OK if passed else SKIPPED)


def goldens(m: Machine, r: Report) -> None:
    for row, chosen in GOLDENS.items():
        attempt(r, row, lambda row=row, chosen=chosen: golden_rows(m, r, row + ", on the CPU", chosen, 40))


def low_precision(m: Machine, r: Report) -> None:
    golden_rows(m, r, "goldens in bf16 and fp16, on the CPU", "*Bf16*:*LowPrecision*:*Fp16*:-*emo*", 30)


def floats(latents: bytes) -> list[float]:
    """Of a safetensors file, of fp32 tensors."""
    length = struct.unpack("<Q", latents[:8])[0]
    data = latents[8 + length:]
    return list(struct.unpack(f"<{len(data) // 4}f", data[:len(data) // 4 * 4]))


def agreement(m: Machine, r: Report) -> None:
    """Whole runs on the device against the CPU's, which the goldens hold to diffusers."""
    if not m.gpu:
        return r.add("whole runs on the GPU against the CPU's", "", NO_GPU)
    for compute in ("fp32", "auto"):
        flags = ("--compute", compute)
        try:
            there, cpu = (Daemon(m, f"agree-{device}", "--devices", device, *flags, models="goldens")
                          for device in (m.device, "cpu"))
        except RuntimeError:
            if compute == "auto":
                return r.add("whole runs in the GPU's own compute type", "this build has no key `compute`", SKIPPED)
            flags = ()
            there, cpu = (Daemon(m, f"agree-{device}", "--devices", device, models="goldens") for device in (m.device, "cpu"))
        for model in ("tiny-dev", "tiny-sd15", "tiny-sdxl"):
            row = f"{model}: latents on the GPU against the CPU's, {compute}"
            attempt(r, row, lambda row=row, model=model: compare(r, row, *(floats(d.picture(
                "--model", model, "--steps", "4", kind="latents")) for d in (there, cpu)),
                limit=1e-2 if compute == "fp32" else 0.2))
        there.stop(), cpu.stop()


def compare(r: Report, row: str, a: list[float], b: list[float], limit: float) -> None:
    worst, largest = max(abs(x - y) for x, y in zip(a, b, strict=True)), max(map(abs, b))
    r.add(row, f"{worst / largest:.1e} of the largest value", OK if worst <= limit * largest else FAILED)


def streaming(m: Machine, r: Report) -> None:
    device = "cuda:0" if m.gpu else "sim:0"
    whole = Daemon(m, "whole", "--devices", f"{device}=1GiB")
    expected = whole.picture("--lora", "dusk:0.8", "--patch-mode", "sidecar")
    whole.stop()
    streamed = Daemon(m, "streamed", "--devices", f"{device}=64MiB", "--residency", "stream")
    picture = streamed.picture("--lora", "dusk:0.8", "--patch-mode", "sidecar")
    stats = json.loads(streamed.must("--json", "cache"))
    text = json.dumps(stats)
    count = re.search(r'"streamed_?[lL]ocks": "?(\d+)', text)
    streamed.stop()
    r.add(f"streamed to {device} with a small cap: the same bytes", f"{count[1] if count else 0} streamed locks",
          OK if picture == expected and count and int(count[1]) > 0 else FAILED)
    if not m.gpu:
        r.add("streamed to a GPU", "", NO_GPU)


def lost_device(m: Machine, r: Report) -> None:
    daemon = Daemon(m, "lost", "--devices", "sim:0=256MiB,lose_after=40", "--devices", m.device)
    seen = ""
    for i in range(12):
        done = daemon.call("generate", f"picture {i}", "--seed", str(i), "-o", "/dev/null", "--format", "png", seconds=60)
        if done.returncode != 0:
            seen = done.stdout
        if "DEVICE_LOST" in seen or "lost" in daemon.log.read_text(errors="replace").lower():
            break
    after = daemon.call("generate", "after", "-o", "/dev/null", "--format", "png")
    lost = "DEVICE_LOST" in seen or "lost" in daemon.log.read_text(errors="replace").lower()
    r.add(f"a lost device (injected into sim:0): {m.device} goes on", "lost and told" if lost else "the loss was not seen",
          OK if after.returncode == 0 and lost else FAILED, (after.stdout[-80:] if after.returncode else ""))
    daemon.stop()


def lock_bench(m: Machine, r: Report) -> None:
    if not (m.root / "tests/lock_bench").exists():
        return r.add("locks", "not in the pack", SKIPPED)
    done = m.run(m.root / "tests/lock_bench", seconds=40)
    r.add("locks (lock_bench)", done.stdout.strip()[:160], OK if done.returncode == 0 else FAILED)


# --- benchmarks --------------------------------------------------------------

BESIDE = """
import json, sys, time, torch
import torch.nn.functional as F
sizes, tokens, device = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
kind = torch.bfloat16 if device != "cpu" else torch.float32
layers = [(torch.randn(o, i, device=device, dtype=kind) / i ** 0.5) for o, i in sizes]
rows = {i: torch.randn(tokens, i, device=device, dtype=kind) for _, i in sizes}
q = torch.randn(1, int(sys.argv[4]), tokens, int(sys.argv[5]), device=device, dtype=kind)
def step():
    for w in layers: F.linear(rows[w.shape[1]], w)
    for _ in range(int(sys.argv[6])): F.scaled_dot_product_attention(q, q, q)
    if device != "cpu": torch.cuda.synchronize()
times = []
with torch.inference_mode():
    for _ in range(5):
        t = time.monotonic(); step(); times.append(time.monotonic() - t)
print(min(times))
"""

DIFFUSERS = """
import json, sys, time, torch, diffusers
what, side = json.loads(open(sys.argv[1]).read())[sys.argv[2]], int(sys.argv[3])
name, net = next((n, w) for n, w in what["networks"].items() if n != "vae")
c = net["config"]
with torch.device("cuda"):
    torch.set_default_dtype(torch.bfloat16)
    m = getattr(diffusers, c["_class_name"]).from_config(c).eval()
    vae = diffusers.AutoencoderKL.from_config(what["networks"]["vae"]["config"]).eval()
    h, t, text = side // 8, torch.tensor([0.5]), 512
    if name == "transformer":
        n = (h // 2) ** 2
        args = dict(hidden_states=torch.randn(1, n, c["in_channels"]), timestep=t, guidance=t,
                    pooled_projections=torch.randn(1, c["pooled_projection_dim"]),
                    encoder_hidden_states=torch.randn(1, text, c["joint_attention_dim"]),
                    txt_ids=torch.zeros(text, 3), img_ids=torch.zeros(n, 3))
    else:
        args = dict(sample=torch.randn(2, 4, h, h), timestep=t[0], encoder_hidden_states=torch.randn(2, 77, c["cross_attention_dim"]))
        if c.get("addition_embed_type"):
            ids = c["addition_time_embed_dim"] * 6
            args["added_cond_kwargs"] = dict(text_embeds=torch.randn(2, c["projection_class_embeddings_input_dim"] - ids),
                                             time_ids=torch.zeros(2, 6))
    z = torch.randn(1, c["in_channels"] // 4 if name == "transformer" else 4, h, h)
def fastest(f, n):
    times = []
    for _ in range(n):
        torch.cuda.synchronize(); s = time.monotonic(); f(); torch.cuda.synchronize(); times.append(time.monotonic() - s)
    return min(times)
with torch.inference_mode():
    print(json.dumps([fastest(lambda: m(**args), 6), fastest(lambda: vae.decode(z), 3)]))
"""


def write_weights(file: Path, sizes: dict[str, list[int]]) -> int:
    """Random bf16 weights with which activations keep their order of magnitude, from one block of noise."""
    import array
    noise = array.array("H", (((random.getrandbits(1) << 15) | (random.randint(118, 126) << 7) | random.getrandbits(7))
                              for _ in range(1 << 20))).tobytes()
    header, offset = {}, 0
    for name, size in sizes.items():
        count = 1
        for n in size:
            count *= n
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [offset, offset + 2 * count]}
        offset += 2 * count
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, size in sizes.items():
            begin, end = header[name]["data_offsets"]
            if len(size) == 1:
                value = 0x3F80 if name.endswith("weight") else 0    # 1.0 or 0
                out.write(struct.pack("<H", value) * size[0])
                continue
            # The noise is below 1 (2⁻⁹ … 2⁻¹): its exponent goes down with the row's length.
            row = 1
            for n in size[1:]:
                row *= n
            shift = max(0, (row.bit_length() - 1) // 2 - 2)
            block = scaled(noise, shift)
            for at in range(begin, end, len(block)):
                out.write(block[:min(len(block), end - at)])
    return offset


SCALED: dict[int, bytes] = {}


def scaled(noise: bytes, shift: int) -> bytes:
    if shift not in SCALED:
        import array
        values = array.array("H", noise)
        SCALED[shift] = array.array("H", (v - (shift << 7) for v in values)).tobytes()
    return SCALED[shift]


def full_model(m: Machine, name: str, what: dict) -> str:
    folder = m.root / "full" / name.replace(" ", "-")
    shutil.copytree(m.root / what["small"], folder, ignore=lambda path, names: [n for n in names if n in what["networks"]])
    for part, network in what["networks"].items():
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(network["config"]))
        write_weights(folder / part / "diffusion_pytorch_model.safetensors", network["sizes"])
    return folder.name


def write_lora(m: Machine, name: str, what: dict) -> str:
    part = next(n for n in what["networks"] if n != "vae")
    prefix = "transformer" if part == "transformer" else "unet"
    sizes = {}
    for key, size in what["networks"][part]["sizes"].items():
        if len(size) == 2 and key.endswith(".weight") and "attn" in key:
            layer = key.removesuffix(".weight")
            sizes[f"{prefix}.{layer}.lora_A.weight"], sizes[f"{prefix}.{layer}.lora_B.weight"] = [16, size[1]], [size[0], 16]
    lora = "full-" + name.replace(" ", "-")
    write_weights(m.root / f"deploy/demo/loras/{lora}.safetensors", sizes)
    return lora


def beside_diffusers(m: Machine, name: str, side: int) -> tuple[float, float] | None:
    done = m.run(sys.executable, "-c", DIFFUSERS, m.root / "shapes.json", name, side, seconds=60,
                 LD_LIBRARY_PATH=os.environ.get("LD_LIBRARY_PATH", ""))
    return tuple(json.loads(done.stdout.strip().split("\n")[-1])) if done.returncode == 0 else None


def beside_torch(m: Machine, sizes: list, tokens: int, heads: int, width: int, blocks: int) -> float | None:
    """All linear layers and attentions of a transformer, one after the other: less than a step has."""
    done = m.run(sys.executable, "-c", BESIDE, json.dumps(sizes), tokens, m.device, heads, width, blocks, seconds=60,
                 LD_LIBRARY_PATH=os.environ.get("LD_LIBRARY_PATH", ""))
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-300:])
    return float(done.stdout.strip().split("\n")[-1])


def beside_text(m: Machine, name: str, what: dict, step: float) -> tuple[str, str]:
    """Beside a step, and beside decoding."""
    reference = beside_diffusers(m, name, what["side"])
    if reference is not None:
        return f"diffusers {reference[0] * 1e3:.0f} ms, ratio {step / reference[0]:.2f}", f"diffusers {reference[1] * 1e3:.0f} ms"
    if "transformer" not in what["networks"]:
        return "no diffusers there", "no diffusers there"
    config = what["networks"]["transformer"]["config"]
    sizes = [s for s in what["networks"]["transformer"]["sizes"].values() if len(s) == 2]
    plain = beside_torch(m, sizes, (what["side"] // 16) ** 2 + 512, config["num_attention_heads"],
                         config["attention_head_dim"], config["num_layers"] + config["num_single_layers"])
    return f"torch's linears and SDPA {plain * 1e3:.0f} ms, ratio {step / plain:.2f}", "no diffusers there"


def full_bench(m: Machine, r: Report, name: str, what: dict) -> None:
    begin = time.monotonic()
    model, lora = full_model(m, name, what), write_lora(m, name, what)
    r.add(f"{name}: random weights written", f"{time.monotonic() - begin:.0f} s")
    size = ("-W", str(what["side"]), "-H", str(what["side"]), "--model", model)
    daemon = Daemon(m, model, models="full")
    try:
        first = daemon.timings(*size, "-s", 4, seconds=120)
        r.add(f"{name}: first picture, four steps, cold", f"{first['total']:.1f} s")
        step, decode = daemon.step(*size, seconds=90)
        by_step, by_decode = beside_text(m, name, what, step)
        r.add(f"{name}: step, {what['side']}²", f"{step * 1e3:.0f} ms", OK, by_step)
        r.add(f"{name}: VAE, decoding", f"{decode * 1e3:.0f} ms", OK, by_decode)
        patched = (*size, "--lora", f"{lora}:0.5", "--patch-mode", "sidecar")
        switch, before = daemon.timings(*patched, "-s", 4, seconds=60), daemon.timings(*size, "-s", 4, seconds=60)
        r.add(f"{name}: four steps, first with a LoRA", f"{switch['total']:.2f} s", OK, f"without {before['total']:.2f} s")
        with_lora, _ = daemon.step(*patched, seconds=60)
        r.add(f"{name}: step with a LoRA of rank 16", f"{with_lora * 1e3:.0f} ms", OK, f"{with_lora / step:.2f} of none")
    finally:
        daemon.stop()
    total = sum(2 * prod(s) for s in next(w for n, w in what["networks"].items() if n != "vae")["sizes"].values())
    daemon = Daemon(m, model + "-streamed", "--devices", f"{m.device}={total * 3 // 5 >> 20}MiB", models="full")
    try:
        streamed, _ = daemon.step(*size, seconds=60, few=2, more=6)
        r.add(f"{name}: step, device capped at 0.6 of the weights", f"{streamed * 1e3:.0f} ms", OK, f"{streamed / step:.2f} of resident")
    finally:
        daemon.stop()
        shutil.rmtree(m.root / "full" / model)


def prod(size: list[int]) -> int:
    count = 1
    for n in size:
        count *= n
    return count


def small_bench(m: Machine, r: Report) -> None:
    daemon = Daemon(m, "small")
    first = daemon.timings("-s", 4, seconds=60)
    r.add("demo model: first picture, four steps, cold", f"{first['total'] * 1e3:.0f} ms")
    step, decode = daemon.step(seconds=60)
    r.add("demo model: step", f"{step * 1e3:.1f} ms")
    r.add("demo model: VAE, decoding", f"{decode * 1e3:.0f} ms")
    with_lora, _ = daemon.step("--lora", "dusk:0.8", "--patch-mode", "sidecar", seconds=60)
    r.add("demo model: step with a LoRA", f"{with_lora * 1e3:.1f} ms", OK, f"{with_lora / step:.2f} of none")
    daemon.stop()
    plain = beside_torch(m, [[384, 384]] * 12 + [[1536, 384], [384, 1536]] * 4, 320, 3, 128, 4)
    r.add("plain torch modules can be measured beside it", f"{plain * 1e3:.1f} ms for 20 linears and 4 SDPA")


def benchmarks(m: Machine, r: Report) -> None:
    attempt(r, "demo model", lambda: small_bench(m, r))
    shapes = m.root / "shapes.json"
    models = json.loads(shapes.read_text()) if shapes.exists() else {}
    for name in ("FLUX.1-dev", "SDXL", "SD 1.5"):
        if not m.gpu:
            r.add(f"{name} at full size: step, VAE, LoRA, streamed, first picture", "", NO_GPU)
        elif name not in models:
            r.add(f"{name} at full size", "its shapes are not in the pack", SKIPPED)
        else:
            attempt(r, f"{name} at full size", lambda name=name: full_bench(m, r, name, models[name]))


# --- the whole ---------------------------------------------------------------

def attempt(r: Report, row: str, part) -> None:
    if left() < 10:
        return r.add(row, "no time was left", SKIPPED)
    try:
        part()
    except Exception as error:    # a part must not stop the others
        r.add(row, f"{type(error).__name__}: {error}"[:400], FAILED)


PARTS = {"machine": machine_rows, "device tests": device_tests, "daemon": scenario, "runs on the device": agreement,
         "streaming": streaming, "bf16": low_precision, "lost device": lost_device, "benchmarks": benchmarks,
         "goldens": goldens, "locks": lock_bench}


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
        machine = Machine(root)
    except Exception as error:
        report.add("the pack and the machine's PyTorch", f"{type(error).__name__}: {error}"[:400], FAILED)
        return 1
    for name, part in PARTS.items():
        attempt(report, name, lambda part=part: part(machine, report))
    return 1 if report.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
