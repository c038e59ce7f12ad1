"""latentd's side of the benchmarks: the program latentd_bench, and the daemon itself."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path


class Bench:
    """latentd_bench, or a program that knows some of its commands, one command at a time; latentd_bench.cc says what
    there is."""

    def __init__(self, *program: Path | str):
        self.process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, *words) -> dict:
        self.process.stdin.write("\t".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"latentd_bench ended at: {' '.join(map(str, words))}")
        return json.loads(answer)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class NoopDaemon:
    """A daemon whose network does nothing, in a process of its own."""

    def __init__(self, program: Path, weights: Path, folder: Path):
        self.address = f"unix:{folder}/noop.sock"
        self.process = subprocess.Popen([program, "noop-daemon", self.address, weights], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline() != "ready\n":
            raise RuntimeError("the no-op daemon did not start")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def peak_memory(bin: Path, models: Path, model: str) -> dict[str, int]:
    """Peak resident bytes of a fresh daemon that ran one job; and what it had at the end, by kind."""
    with tempfile.TemporaryDirectory() as temporary:    # a socket's path must be short
        folder = Path(temporary)
        address, config = f"unix:{folder}/latentd.sock", folder / "latentd.toml"
        config.write_text(f'listen = ["{address}"]\nmodel_roots = ["{models}"]\nthreads_per_device = 1\n'
                          'ram_cap = "4GiB"\nlog_level = "error"\n')
        daemon = subprocess.Popen([bin / "latentd", "--config", config])
        ctl = [bin / "latentctl", "--address", address]
        try:
            for _ in range(200):
                if subprocess.run([*ctl, "health"], capture_output=True).returncode == 0:
                    break
                time.sleep(0.05)
            subprocess.run([*ctl, "generate", "a red circle", "--model", model, "--steps", "2", "--seed", "1",
                            "-o", folder / "picture.png"], check=True, capture_output=True)
            status = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
            return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in status
                    if line.startswith(("VmHWM", "RssAnon", "RssFile"))}
        finally:
            daemon.terminate()
            daemon.wait(timeout=60)
