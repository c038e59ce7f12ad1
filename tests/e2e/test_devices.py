"""Which devices the daemon takes when its config names none."""

import subprocess

from conftest import BIN, server_pb2


def test_without_devices_it_takes_every_gpu_or_the_cpu_and_says_so(start):
    daemon = start(default_devices=True)
    info = daemon.server.GetServerInfo(server_pb2.GetServerInfoRequest())
    kinds = {device.kind for device in info.devices}
    assert kinds in ({"cpu"}, {"cuda"})
    assert info.device_choice.startswith("auto: the CPU" if kinds == {"cpu"} else "auto: every GPU")
    assert info.device_choice in daemon.log.read_text()


def test_devices_that_are_named_are_those(start):
    daemon = start("--devices", "sim:0=64MiB")
    info = daemon.server.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert [device.name for device in info.devices] == ["sim:0"]
    assert info.device_choice == "as configured"


def test_latentctl_info_says_which_and_why(start):
    daemon = start(default_devices=True)
    text = subprocess.run([BIN / "latentctl", "--address", daemon.address, "info"], capture_output=True, text=True, check=True).stdout
    chosen = next(line for line in text.splitlines() if line.startswith("devices chosen"))
    assert "auto: " in chosen


def test_a_gpu_that_is_not_there_is_named_in_the_error(tmp_path):
    run = subprocess.run([BIN / "latentd", "--devices", "cuda:GPU-no-such-one", "--listen", f"unix:{tmp_path}/s", "--state-dir", ""],
                         capture_output=True, text=True, timeout=60)
    assert run.returncode == 78 and "cuda:GPU-no-such-one: no GPU has a UUID that begins so" in run.stderr
