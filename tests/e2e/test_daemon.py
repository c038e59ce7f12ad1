"""The process: start, stop, settings, logs, its client and its examples."""

import json
import re
import signal
import socket
import subprocess
import threading
import time

import grpc
import pytest

from conftest import BIN, BUILD, DEMO, LORAS, MODEL, ROOT, Daemon, cache_pb2, reason_of, server_pb2

GRPCURL = None


def ctl(daemon, *args, **kwargs):
    return subprocess.run([BIN / "latentctl", "--address", daemon.address, *args], capture_output=True, text=True,
                          timeout=120, **kwargs)


def test_sigterm_lets_a_job_finish(start):
    daemon = start("--drain-timeout", "60s")
    session = daemon.session(lora=LORAS[:1])
    session.start("j", steps=60)
    session.until("step")
    idle = daemon.session()
    daemon.process.send_signal(signal.SIGTERM)
    result = session.wait("j")
    assert result.done is not None
    for stream in (session, idle):
        with pytest.raises(grpc.RpcError) as caught:
            for _ in stream.call:
                pass
        assert reason_of(caught.value).reason == "SERVER_DRAINING"
    assert daemon.process.wait(timeout=30) == 0


def test_sigterm_cancels_what_is_not_done_in_time(start):
    daemon = start("--drain-timeout", "1s")
    session = daemon.session()
    session.start("j", steps=1000, width=256, height=256)
    session.until("step")
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(timeout=30) == 0


def test_what_is_pinned_does_not_hold_up_the_end(start):
    daemon = start("--devices", "sim:0=64MiB")
    for name in (MODEL, LORAS[0]):
        daemon.cache.LoadModel(cache_pb2.LoadModelRequest(name=name, device="sim:0", pin=True))
    assert daemon.stop() == 0
    assert "still held" not in daemon.log.read_text()


def test_check_and_print_config():
    run = lambda *flags: subprocess.run([BIN / "latentd", *flags], cwd=ROOT, capture_output=True, text=True)
    assert run("--config", "deploy/demo/latentd.toml", "--check").returncode == 0
    printed = run("--config", "deploy/demo/latentd.toml", "--max-sessions", "3", "--print-config").stdout
    assert re.search(r"^max_sessions = 3$", printed, re.M)
    bad = run("--config", "deploy/demo/latentd.toml", "--max-sessions", "none", "--check")
    assert bad.returncode == 78 and "max" in bad.stderr


def test_a_second_daemon_on_the_same_socket_is_refused(start):
    daemon = start()
    second = subprocess.run([BIN / "latentd", "--config", DEMO / "latentd.toml", "--listen", daemon.address],
                            cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert second.returncode != 0
    daemon.generate()


def test_prompts_are_not_logged(start):
    daemon = start("--log-format", "json")
    daemon.generate("a canary called xyzzy")
    daemon.fails(prompt="a canary called xyzzy", width=3)
    daemon.stop()
    log = daemon.log.read_text()
    assert "xyzzy" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    assert any("job done" in line["message"] for line in lines)


def test_limits_on_sessions_and_queues(start):
    daemon = start("--max-sessions", "2", "--max-queued-jobs-per-session", "2")
    first, second = daemon.session(), daemon.session()
    assert daemon.fails().reason == "TOO_MANY_SESSIONS"
    for i in range(5):
        first.start(f"j{i}", steps=1000)
    while True:
        response = first.next()
        if response.WhichOneof("response") == "error":
            break
    assert response.error.job_id in ("j2", "j3")
    first.close()
    second.close()
    daemon.generate()


def test_health_over_grpc(daemon):
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    stub = health_pb2_grpc.HealthStub(daemon.channel)
    for service in ("", "latentd.v1.DenoiseService"):
        assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == 1


def test_tcp_clients_beyond_the_descriptors_do_not_end_the_listener(start):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    daemon = start("--listen", f"127.0.0.1:{port}", "--max-connections", "20")
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for c in clients:
        c.close()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        grpc.channel_ready_future(channel).result(timeout=20)


# ---------------------------------------------------------------------------------------------- latentctl

def test_latentctl_draws_to_a_file(daemon, tmp_path):
    out = tmp_path / "x.png"
    run = ctl(daemon, "generate", "a green square on a white background", "--seed", "3", "--steps", "4", "-o", str(out))
    assert run.returncode == 0, run.stderr
    assert out.read_bytes()[:4] == b"\x89PNG"
    expected = daemon.generate("a green square on a white background", seed=3, steps=4)
    assert out.read_bytes() == expected.pictures[0].data


def test_latentctl_json_is_one_event_a_line(daemon):
    run = ctl(daemon, "--json", "generate", "a star", "--seed", "3", "--steps", "4", "--lora", f"{LORAS[0]}:0.5")
    assert run.returncode == 0, run.stderr
    events = [json.loads(line) for line in run.stdout.splitlines()]
    kinds = [next(iter(e["event"])) for e in events]
    assert kinds[0] == "queued" and kinds[-1] == "done" and kinds.count("step") == 4
    header = next(e["event"]["imageHeader"] for e in events if "imageHeader" in e["event"])
    assert header["sha256"] == daemon.generate("a star", seed=3, steps=4, lora=(f"{LORAS[0]}:0.5",)).sha256
    assert events[-1]["event"]["done"]["loras"][0]["name"] == LORAS[0]


def test_latentctl_shows_models_loras_cache_sessions_health(daemon):
    for command, text in ((("models",), MODEL), (("loras",), LORAS[0]), (("inspect-lora", LORAS[0]), "rank"),
                          (("cache",), "transformer"), (("sessions",), ""), (("health",), "SERVING"), (("info",), "flux")):
        run = ctl(daemon, *command)
        assert run.returncode == 0, (command, run.stderr)
        assert text.lower() in run.stdout.lower(), (command, run.stdout)


def test_latentctl_errors_say_what_to_do(daemon):
    run = ctl(daemon, "generate", "x", "--lora", "nope")
    assert run.returncode != 0 and "LORA_NOT_FOUND" in run.stderr and "ListLoras" in run.stderr
    dead = subprocess.run([BIN / "latentctl", "--address", "unix:/nonexistent.sock", "health"], capture_output=True)
    assert dead.returncode != 0


# ----------------------------------------------------------------------------------------------- examples

def shell_blocks(path):
    """The ```sh blocks of a file that use grpcurl."""
    blocks = re.findall(r"^```sh\n(.*?)^```", path.read_text(), re.M | re.S)
    return [b for b in blocks if "grpcurl" in b]


def test_every_rpc_has_a_grpcurl_example_that_works_as_printed(start, tmp_path):
    """Runs the examples of both READMEs against a daemon on the port that they print, and the demo's Unix socket, which
    is another path here; and checks that they cover every method that reflection lists."""
    import sys
    from pathlib import Path

    with socket.socket() as s:
        if s.connect_ex(("127.0.0.1", 7411)) == 0:
            pytest.fail("port 7411 is in use; the examples print it")
    daemon = start("--listen", "127.0.0.1:7411")
    bin_dir = Path(sys.executable).parent
    env = {"PATH": f"{bin_dir}:/usr/bin:/bin", "HOME": str(tmp_path)}
    blocks = shell_blocks(ROOT / "README.md") + shell_blocks(ROOT / "proto/README.md")
    assert blocks
    covered = set()
    for block in blocks:
        block = block.replace("/tmp/latentd-demo.sock", daemon.address.removeprefix("unix:"))
        run = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=ROOT, env=env, capture_output=True,
                             text=True, timeout=300)
        expects_error = "CancelJob" in block
        assert (run.returncode == 0) != expects_error, (block, run.stdout[-2000:], run.stderr)
        if expects_error:
            assert "NotFound" in run.stderr
        covered |= set(re.findall(r"latentd\.v1\.\w+[/.]\w+", block))
    covered = {c.replace("/", ".") for c in covered}
    listed = set()
    for service in ("DenoiseService", "ModelService", "CacheService", "ServerService"):
        run = subprocess.run([bin_dir / "grpcurl", "-plaintext", "127.0.0.1:7411", "list", f"latentd.v1.{service}"],
                             capture_output=True, text=True, check=True, env=env)
        listed |= set(run.stdout.split())
    assert len(listed) == 19
    assert listed <= covered, listed - covered
    # The health service is describable too.
    subprocess.run([bin_dir / "grpcurl", "-plaintext", "127.0.0.1:7411", "grpc.health.v1.Health/Check"], check=True,
                   capture_output=True, env=env)
