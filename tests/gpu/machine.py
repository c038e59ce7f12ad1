"""The machine that a pack runs on, its report, and the daemon there. Standard library alone."""

from __future__ import annotations

import atexit
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
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
    """Where the pack lies, its environment, and the device that is tried. `root`: unpacked; `pack`: as it came."""

    def __init__(self, root: Path, pack: Path):
        self.root, self.pack = root, pack
        found = subprocess.run([sys.executable, "-c", "import torch; print(torch.__path__[0]); print(torch.__version__); "
                                "print(torch.cuda.is_available()); print(torch.cuda.get_device_name(0) if "
                                "torch.cuda.is_available() else '')"], capture_output=True, text=True, timeout=120)
        if found.returncode != 0:
            raise RuntimeError(f"python3 has no torch: {found.stderr[-400:]}")
        self.torch, self.version, there, self.name = found.stdout.split("\n")[:4]
        self.gpu = there == "True"
        self.device = "cuda:0" if self.gpu else "cpu"
        # What weights are copied to: on a CPU nothing is, so a pretended device stands in.
        self.own_memory = "cuda:0" if self.gpu else "sim:0"
        self.site = Path(self.torch).parent
        libraries = [root / "lib", Path(self.torch) / "lib", *sorted(self.site.glob("nvidia/*/lib"))]
        # The pack's libraries are for its own programs alone: python3 keeps the environment that it has.
        self.environment = os.environ | {
            "LD_LIBRARY_PATH": ":".join([*map(str, libraries), os.environ.get("LD_LIBRARY_PATH", "")]),
            "LATENTD_GOLDENS": str(root / "goldens"), "OMP_WAIT_POLICY": "PASSIVE", "HOME": str(root)}

    def foreign_libraries(self) -> tuple[str, str]:
        """Value and state of a row: libraries of the programs that are neither the pack's, nor PyTorch's, nor those of a
        C++ program anywhere."""
        own = {"linux-vdso", "ld-linux-x86-64", "libc", "libm", "libdl", "librt", "libpthread", "libutil", "libresolv", "libstdc++", "libgcc_s"}
        counts, strange = {"pack": 0, "PyTorch": 0, "machine": 0}, set()
        for program in [self.root / "bin/latentd", self.root / "bin/latentctl", *(self.root / "tests").iterdir()]:
            listed = subprocess.run([program], env=self.environment | {"LD_TRACE_LOADED_OBJECTS": "1"}, capture_output=True,
                                    text=True, timeout=30).stdout
            for name, _, path in (line.strip().partition(" => ") for line in listed.splitlines()):
                path = path or name
                if path.startswith(str(self.root)):
                    counts["pack"] += 1
                elif path.startswith(str(self.site)):
                    counts["PyTorch"] += 1
                elif Path(name.split()[0]).name.split(".so")[0] in own:
                    counts["machine"] += 1
                else:
                    strange.add(f"{name.split()[0]} {path.split(' (')[0]}")
        text = ", ".join(f"{count} of {where}" for where, count in counts.items())
        return f"{text}; besides: {', '.join(sorted(strange)) or 'none'}"[:300], FAILED if strange or not counts["pack"] else OK

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


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Daemon:
    def __init__(self, machine: Machine, name: str, *flags: str, models: str | Path = "deploy/demo/models", auto: bool = False):
        self.machine, folder = machine, Path(tempfile.mkdtemp(prefix="gr"))
        atexit.register(shutil.rmtree, folder, True)
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

    def begin(self, *words) -> subprocess.Popen:
        """latentctl beside others; the caller waits for it."""
        return subprocess.Popen([self.machine.root / "bin/latentctl", "--address", self.address, *map(str, words)],
                                env=self.machine.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def streamed_locks(self) -> int:
        found = re.search(r'"streamed_?[lL]ocks": "?(\d+)', json.dumps(json.loads(self.must("--json", "cache"))))
        return int(found[1]) if found else 0

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
