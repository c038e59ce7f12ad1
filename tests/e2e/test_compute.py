"""What networks compute in: by the config, said by reports, and part of what encoded prompts are kept under."""

import io
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import BIN, server_pb2

# LibTorch may be told to use less than there is.
HAS_BF16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text() and not os.environ.get("ATEN_CPU_CAPABILITY")


def pixels(result):
    return np.asarray(Image.open(io.BytesIO(result.pictures[0].data)), dtype=float)


def compute_of(done):
    return {(phase.component, phase.compute) for phase in done.phases if not phase.cached}


def test_cpus_compute_in_fp32_unless_asked(start):
    daemon = start()  # on the CPU, since nothing is said of devices and there is no GPU
    assert [d.compute for d in daemon.server.GetServerInfo(server_pb2.GetServerInfoRequest()).devices] == ["fp32"]
    assert {compute for _, compute in compute_of(daemon.generate(steps=2, seed=3).done)} == {"fp32"}


@pytest.mark.skipif(not HAS_BF16, reason="this CPU has no bf16")
def test_bf16_by_the_config_gives_nearly_the_picture_again_and_again(start, tmp_path):
    exact = start().generate(steps=4, seed=3)
    low = start("--compute", "bf16")
    first, again = (low.generate(steps=4, seed=3) for _ in range(2))
    assert {compute for _, compute in compute_of(first.done)} == {"bf16"}
    assert first.sha256 == again.sha256 != exact.sha256
    assert any(phase.cached for phase in again.done.phases)
    near = abs(pixels(first) - pixels(exact)).mean()
    assert near < 8, "the same picture, but for rounding"
    info = subprocess.run([BIN / "latentctl", "--address", low.address, "info"], capture_output=True, text=True, timeout=60)
    assert "bf16" in next(line for line in info.stdout.splitlines() if line.startswith("device"))
    # LoRAs, too: beside the weights and merged.
    for mode in (1, 2):
        assert low.generate(steps=2, seed=3, lora=("dusk:0.8",), mode=mode).done.loras[0].matched
    low.expect_all_released()


def test_whose_products_a_cpu_uses_is_said_and_kept(start):
    """Pictures of the two libraries differ by rounding, those of one not at all."""
    pictures = {}
    for gemm in ("mkl", "onednn"):
        daemon = start("--cpu-gemm", gemm)
        assert [d.gemm for d in daemon.server.GetServerInfo(server_pb2.GetServerInfoRequest()).devices] == [gemm]
        run = daemon.generate(steps=2, seed=3, lora=("dusk:0.8",))
        assert {phase.gemm for phase in run.done.phases} == {gemm}
        assert daemon.generate(steps=2, seed=3, lora=("dusk:0.8",)).sha256 == run.sha256
        pictures[gemm] = pixels(run)
        daemon.expect_all_released()
    assert abs(pictures["mkl"] - pictures["onednn"]).max() <= 1


@pytest.mark.parametrize("compute", ["fp16"] + ([] if HAS_BF16 else ["bf16"]))
def test_what_a_cpu_cannot_do_is_an_error_at_the_start(tmp_path, compute):
    run = subprocess.run([BIN / "latentd", "--compute", compute, "--devices", "cpu", "--listen", f"unix:{tmp_path}/d.sock"],
                         capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    assert f"compute = {compute} on cpu" in run.stderr
