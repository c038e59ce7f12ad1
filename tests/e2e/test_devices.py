"""Which devices the daemon takes when its config names none."""

from conftest import server_pb2


def test_without_devices_it_takes_every_gpu_or_the_cpu_and_says_so(start):
    daemon = start()
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
