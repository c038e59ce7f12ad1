"""What one client on TCP can do to the daemon and to others: hostile uses of HTTP/2, of requests and of connections.

Each attack runs for a few seconds. Meanwhile calls are served, the memory stays near that of an idle daemon, and all is
back soon after. Times are printed (pytest -s), not judged.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import threading
import time

import grpc
import pytest

from conftest import BIN, LORAS, MODEL, cache_pb2, cache_pb2_grpc, common_pb2, denoise_pb2, denoise_pb2_grpc
from conftest import eventually, loras, model_pb2, model_pb2_grpc, reason_of, reason_of_status, server_pb2, server_pb2_grpc
from raw_http2 import (ACK, CONTINUATION, DATA, END_HEADERS, HEADERS, PING, RESET, SETTINGS, Connection, frame, message,
                       request_headers)

MIB = 1 << 20
ATTACK_SECONDS = 3
GENERATE = "/latentd.v1.DenoiseService/Generate"
SESSION = "/latentd.v1.DenoiseService/Session"
LIST_SESSIONS = "/latentd.v1.ServerService/ListSessions"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_on_tcp(start, *flags):
    port = free_port()
    daemon = start("--listen", f"127.0.0.1:{port}", "--ram-cap", "256MiB", *flags)
    daemon.tcp = ("127.0.0.1", port)
    daemon.generate()
    return daemon


def rss(daemon) -> int:
    with open(f"/proc/{daemon.process.pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def tcp_channel(daemon):
    return grpc.insecure_channel("%s:%d" % daemon.tcp, options=[
        ("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1)])


class Watch:
    """Reads the daemon's memory, and calls it as a client that behaves, while an attack goes on."""

    def __init__(self, daemon, attack):
        self.daemon = daemon
        self.idle = self.peak = rss(daemon)
        self.calls = 0
        self.slowest = 0.0
        self.problem = None
        self.stopping = False
        self.name = attack
        self.threads = [threading.Thread(target=self._measure), threading.Thread(target=self._call)]

    def _measure(self):
        while not self.stopping:
            self.peak = max(self.peak, rss(self.daemon))
            time.sleep(0.02)

    def _call(self):
        try:
            with tcp_channel(self.daemon) as channel:
                over_tcp = server_pb2_grpc.ServerServiceStub(channel)
                while not self.stopping:
                    for stub in (self.daemon.server, over_tcp):
                        began = time.monotonic()
                        stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=30, wait_for_ready=True)
                        self.slowest = max(self.slowest, time.monotonic() - began)
                        self.calls += 1
                    time.sleep(0.05)
        except grpc.RpcError as error:
            self.problem = error

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error):
        # Who is served while the attack goes on was served at least once after it began.
        self.stopping = True
        for thread in self.threads:
            thread.join()
        print(f"\n{self.name}: +{(self.peak - self.idle) / MIB:.0f} MiB, {self.calls} calls, "
              f"slowest {self.slowest * 1000:.0f} ms")
        if error[0] is None:
            assert self.problem is None, self.problem
            assert self.calls >= 2
            assert self.peak - self.idle < 256 * MIB

    def expect_recovery(self):
        """Everything is as before: descriptors, sessions, and most of the memory."""
        began = time.monotonic()
        eventually(lambda: rss(self.daemon) - self.idle <= 96 * MIB, 30, lambda: rss(self.daemon) - self.idle)
        self.daemon.expect_all_released(within=30)
        self.daemon.generate()
        print(f"{self.name}: back after {time.monotonic() - began:.1f} s")


def until(seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield


def attack(*workers):
    """Runs each to its end, in threads."""
    threads = [threading.Thread(target=w) for w in workers]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    from conftest import Daemon
    port = free_port()
    d = Daemon(tmp_path_factory.mktemp("latentd"), "--listen", f"127.0.0.1:{port}", "--ram-cap", "256MiB",
               "--request-timeout", "2s")
    d.tcp = ("127.0.0.1", port)
    d.generate()
    yield d
    assert d.stop() == 0, d.log.read_text()


# ------------------------------------------------------------------------------------------------------ HTTP/2

def test_calls_that_are_reset_at_once(daemon):
    def worker():
        for _ in until(ATTACK_SECONDS):
            c = Connection(daemon.tcp)
            for _ in range(200):
                burst = b""
                for _ in range(100):
                    stream, c.next_stream = c.next_stream, c.next_stream + 2
                    burst += frame(HEADERS, END_HEADERS, stream, request_headers(SESSION))
                    burst += frame(RESET, 0, stream, struct.pack(">I", 8))
                if not c.send(burst):
                    break
            c.close()

    with Watch(daemon, "rapid reset") as watch:
        attack(*[worker] * 4)
    watch.expect_recovery()


def test_pings_whose_answers_are_not_read(daemon):
    def worker():
        c = Connection(daemon.tcp)
        flood = frame(PING, 0, 0, b"12345678") * 4000
        for _ in until(ATTACK_SECONDS):
            if not c.send(flood):
                c.close()
                c = Connection(daemon.tcp)
        c.close()

    with Watch(daemon, "PING flood") as watch:
        attack(*[worker] * 4)
    watch.expect_recovery()


def test_settings_and_empty_data(daemon):
    def settings():
        c = Connection(daemon.tcp)
        for _ in until(ATTACK_SECONDS):
            if not c.send(frame(SETTINGS, 0, 0) * 4000):
                break
        c.close()

    def empty():
        c = Connection(daemon.tcp)
        stream = c.open(SESSION)
        for _ in until(ATTACK_SECONDS):
            if not c.send(frame(DATA, 0, stream) * 4000):
                break
        c.close()

    with Watch(daemon, "SETTINGS and empty DATA") as watch:
        attack(settings, empty)
    watch.expect_recovery()


def test_headers_that_do_not_end(daemon):
    def worker():
        for _ in until(ATTACK_SECONDS):
            c = Connection(daemon.tcp)
            c.send(frame(HEADERS, 0, 1, request_headers(SESSION)))
            for _ in range(1000):
                if not c.send(frame(CONTINUATION, 0, 1, b"x" * 16000)):
                    break
            c.close()

    with Watch(daemon, "CONTINUATION") as watch:
        attack(*[worker] * 2)
    watch.expect_recovery()


def test_calls_that_never_say_what_they_want(daemon):
    connections = []
    with Watch(daemon, "streams that never open") as watch:
        for _ in range(50):
            c = Connection(daemon.tcp)
            for _ in range(120):
                c.open(SESSION)
            connections.append(c)
        # Each is refused: at once, or when its time is over.
        assert not connections[0].closed(within=4)
        assert b"no request came" in connections[0].received
    for c in connections:
        c.close()
    watch.expect_recovery()


def test_a_stream_without_open_hears_why(daemon):
    with tcp_channel(daemon) as channel:
        never = threading.Event()

        def silent():
            never.wait(60)
            yield from ()

        with pytest.raises(grpc.RpcError) as caught:
            for _ in denoise_pb2_grpc.DenoiseServiceStub(channel).Session(silent(), timeout=30):
                pass
        never.set()
    assert reason_of(caught.value).reason == "NO_REQUEST"
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_more_sessions_than_128_on_one_connection(start):
    daemon = start_on_tcp(start, "--max-sessions", "140")
    sessions = [daemon.session(timeout=60) for _ in range(140)]
    refused = daemon.fails(timeout=30)
    assert refused.reason == "TOO_MANY_SESSIONS"
    for s in sessions:
        s.half_close()
    for s in sessions:
        for _ in s.call:
            pass
    daemon.expect_all_released()


# ----------------------------------------------------------------------------------------------------- memory

def test_messages_that_are_not_finished(daemon):
    connections = []
    with Watch(daemon, "unfinished messages") as watch:
        def worker():
            c = Connection(daemon.tcp)
            connections.append(c)
            stream = c.open(GENERATE)
            c.send(frame(DATA, 0, stream, message(47 * MIB)))
            for _ in range(46 * 64):
                if not c.send(frame(DATA, 0, stream, b"x" * 16384)):
                    return

        attack(*[worker] * 20)
    for c in connections:
        c.close()
    watch.expect_recovery()


def test_small_pieces_of_messages(daemon):
    connections = []
    with Watch(daemon, "crumbs") as watch:
        def worker():
            c = Connection(daemon.tcp)
            connections.append(c)
            streams = [c.open(GENERATE) for _ in range(100)]
            for s in streams:
                c.send(frame(DATA, 0, s, message(10 * MIB)))
            for _ in until(ATTACK_SECONDS):
                if not c.send(b"".join(frame(DATA, 0, s, b"x") for s in streams)):
                    return

        attack(*[worker] * 8)
    for c in connections:
        c.close()
    watch.expect_recovery()


def test_a_prompt_is_measured_at_the_door(daemon):
    session = daemon.session()
    with Watch(daemon, "45-MB prompts") as watch:
        for i in range(16):
            session.start(f"j{i}", prompt="x" * (45 * MIB))
        for i in range(16):
            response = session.next()
            assert reason_of_status(response.job_event.event.failed.status).fields == ["params.prompt"]
    session.close()
    watch.expect_recovery()


def test_fields_that_nobody_knows_are_dropped(daemon):
    # Field 1000, as bytes.
    unknown = b"\xc2\x3e" + b"\x80\x80\x80\x14" + b"x" * (40 * MIB)
    session = daemon.session()
    with Watch(daemon, "unknown fields") as watch:
        for i in range(12):
            params = denoise_pb2.GenerateParams(prompt="x", seed=1, steps=50)
            params.MergeFromString(unknown)
            session.send(request_id=str(i), denoise=denoise_pb2.SessionRequest.Denoise(job_id=f"j{i}", params=params))
            while True:
                event = session.next()
                if event.request_id == str(i):
                    break
    session.close()
    watch.expect_recovery()


def test_references_of_sessions_are_bounded(daemon):
    refs = [common_pb2.LoraRef(name="x" * 400_000) for _ in range(64)]
    many = [common_pb2.LoraRef(name=LORAS[0], block_weights={f"transformer.{'y' * 100}.{i}": 1.0 for i in range(1024)})]
    with Watch(daemon, "set_loras") as watch:
        session = daemon.session()
        for i in range(40):
            session.send(request_id=str(i), set_loras=denoise_pb2.SessionRequest.SetLoras(loras=refs))
        for i in range(40):
            response = session.next()
            assert reason_of_status(response.error.status).fields == ["loras.name"]
        for i in range(200):
            session.send(request_id=str(i), set_loras=denoise_pb2.SessionRequest.SetLoras(loras=many))
        for i in range(200):
            assert session.next().WhichOneof("response") == "error"
        session.close()
    watch.expect_recovery()


def test_answers_that_are_not_read(daemon):
    """No window for what the server sends: SETTINGS_INITIAL_WINDOW_SIZE = 0."""
    sessions = [daemon.session(lora=LORAS) for _ in range(40)]
    connections = []
    with Watch(daemon, "answers not read") as watch:
        def worker():
            c = Connection(daemon.tcp, settings=struct.pack(">HI", 4, 0))
            connections.append(c)
            for _ in range(120):
                stream = c.open(LIST_SESSIONS)
                c.send(frame(DATA, 1, stream, message(0)))

        attack(*[worker] * 30)
        time.sleep(2)
    for s in sessions:
        s.close()
    for c in connections:
        c.close()
    watch.expect_recovery()


def test_a_client_that_does_not_read_its_pictures_is_ended(start):
    """It takes the first 100 bytes of each answer, and keeps the connection."""
    daemon = start_on_tcp(start, "--reader-timeout", "1s", "--max-unread-bytes", "64KiB")

    def generate(c, count):
        request = denoise_pb2.GenerateRequest(model=MODEL, params=denoise_pb2.GenerateParams(
            prompt="a red circle", seed=7, steps=2, width=256, height=256, count=count)).SerializeToString()
        c.send(frame(DATA, 1, c.open(GENERATE), message(len(request)) + request))

    def promised():
        return daemon.stats().ram_budget.reserved_bytes

    c = Connection(daemon.tcp, settings=struct.pack(">HI", 4, 100))
    generate(c, 1)      # the job is done, and its picture waits
    eventually(lambda: daemon.log.read_text().count("job done") == 2 and promised() > 0, 60, daemon.log.read_text)
    eventually(lambda: promised() == 0, 60, daemon.log.read_text)
    generate(c, 16)     # the job waits for its reader
    eventually(lambda: "reason=CLIENT_STALLED" in daemon.log.read_text(), 60, daemon.log.read_text)
    daemon.expect_all_released()
    assert not c.closed(0.1), "others may use the connection"
    c.close()


# ------------------------------------------------------------------------------------------------ connections

def test_silent_connections_keep_nobody_out(daemon):
    silent = []
    with Watch(daemon, "silent connections") as watch:
        for _ in range(600):
            with contextlib.suppress(OSError):
                silent.append(socket.create_connection(daemon.tcp, timeout=5))
        time.sleep(1)
        daemon.generate()
    for s in silent:
        s.close()
    watch.expect_recovery()


# ---------------------------------------------------------------------------------------------- administration

def administration(channel):
    cache, models = cache_pb2_grpc.CacheServiceStub(channel), model_pb2_grpc.ModelServiceStub(channel)
    yield "SetCap", lambda: cache.SetCap(cache_pb2.SetCapRequest(budget="ram", cap_bytes=256 * MIB))
    yield "TrimCache", lambda: cache.TrimCache(cache_pb2.TrimCacheRequest(bytes=1))
    yield "DropModel", lambda: cache.DropModel(cache_pb2.DropModelRequest(name=MODEL))
    yield "UnloadModel", lambda: cache.UnloadModel(cache_pb2.UnloadModelRequest(name=MODEL))
    yield "DeleteLora", lambda: models.DeleteLora(model_pb2.DeleteLoraRequest(name="uploads/nobodys"))


def test_administration_is_for_the_unix_socket(daemon):
    with tcp_channel(daemon) as channel:
        for name, call in administration(channel):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            reason = reason_of(caught.value)
            assert (reason.code, reason.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_REQUIRES_LOCAL"), name
            assert name in reason.message and "Unix socket" in reason.message
    for name, call in administration(daemon.channel):
        if name != "DeleteLora":
            call()
            continue
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert reason_of(caught.value).reason == "LORA_NOT_FOUND"


def test_administration_over_tcp_is_the_operators_choice(start):
    daemon = start_on_tcp(start, "--admin-over-tcp")
    with tcp_channel(daemon) as channel:
        for name, call in administration(channel):
            if name != "DeleteLora":
                call()


def test_an_upload_over_tcp_replaces_no_other(daemon, tmp_path):
    from conftest import DEMO
    tcp = "%s:%d" % daemon.tcp
    put = lambda address, file, *more: subprocess.run(
        [BIN / "latentctl", "--address", address, "upload", DEMO / f"loras/{file}.safetensors", "--name", "bob/x", *more],
        capture_output=True, text=True, timeout=60)
    assert put(tcp, LORAS[0]).returncode == 0
    refused = put(tcp, LORAS[1], "--replace")
    assert refused.returncode != 0 and "ADMIN_REQUIRES_LOCAL" in refused.stderr, refused
    assert put(tcp, LORAS[0], "--replace").returncode == 0  # the same file
    assert put(daemon.address, LORAS[1], "--replace").returncode == 0


def test_sessions_are_listed_in_pages(daemon):
    sessions = [daemon.session() for _ in range(5)]
    names, token = [], ""
    while True:
        page = daemon.server.ListSessions(server_pb2.ListSessionsRequest(page_size=2, page_token=token))
        assert len(page.sessions) <= 2
        names += [s.session for s in page.sessions]
        token = page.next_page_token
        if not token:
            break
    assert names == [s.opened.session for s in sessions]
    with pytest.raises(grpc.RpcError) as caught:
        daemon.server.ListSessions(server_pb2.ListSessionsRequest(page_token="x"))
    assert reason_of(caught.value).fields == ["page_token"]
    for s in sessions:
        s.close()
