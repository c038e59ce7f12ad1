"""The real daemon over real sockets: fixtures that start it, and a small client."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("LATENTD_BUILD", ROOT / "build/release"))
BIN = BUILD / "bin"
DEMO = ROOT / "deploy/demo"
MODEL = "shapes-flux"
LORAS = sorted(p.stem for p in (DEMO / "loras").glob("*.safetensors"))


def _stubs() -> Path:
    """Python messages and stubs of proto/, made anew when a .proto changed."""
    sources = sorted((ROOT / "proto/latentd/v1").glob("*.proto"))
    stamp = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()
    out = BUILD / "e2e_stubs"
    if not (out / "stamp").exists() or (out / "stamp").read_text() != stamp:
        import google.rpc

        google_root = Path(list(google.rpc.__path__)[0]).parents[1]
        out.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", f"-I{google_root}",
             f"--python_out={out}", f"--grpc_python_out={out}", *map(str, sources)],
            check=True)
        (out / "stamp").write_text(stamp)
    return out


sys.path.insert(0, str(_stubs()))

import grpc  # noqa: E402
from google.rpc import error_details_pb2  # noqa: E402
from grpc_status import rpc_status  # noqa: E402
from latentd.v1 import (cache_pb2, cache_pb2_grpc, common_pb2, denoise_pb2, denoise_pb2_grpc,  # noqa: E402
                        model_pb2, model_pb2_grpc, server_pb2, server_pb2_grpc)


@dataclass
class Picture:
    data: bytes
    sha256: str
    seed: int


@dataclass
class Result:
    """What came of one job."""
    pictures: list[Picture] = field(default_factory=list)
    events: list = field(default_factory=list)
    done: object = None

    @property
    def sha256(self) -> str:
        return self.pictures[0].sha256

    def add(self, event) -> None:
        kind = event.WhichOneof("event")
        self.events.append(event)
        if kind == "image_header":
            self.pictures.append(Picture(b"", event.image_header.sha256, event.image_header.seed))
        elif kind == "image_chunk":
            assert len(event.image_chunk.data) <= 1 << 20
            self.pictures[event.image_chunk.index].data += event.image_chunk.data
        elif kind == "done":
            self.done = event.done
            for picture in self.pictures:
                assert hashlib.sha256(picture.data).hexdigest() == picture.sha256


@dataclass
class Reason:
    """An error as a client sees it."""
    code: grpc.StatusCode
    reason: str
    message: str
    details: dict
    fields: list[str]


def reason_of(error: grpc.RpcError) -> Reason:
    status = rpc_status.from_call(error)
    assert status is not None, f"no details: {error.code()} {error.details()}"
    return _reason(error.code(), status)


def _reason(code, status) -> Reason:
    infos, fields = [], []
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(info):
            infos.append(info)
        elif detail.Unpack(bad):
            fields += [v.field for v in bad.field_violations]
    assert len(infos) == 1, "exactly one ErrorInfo"
    assert infos[0].domain == "latentd"
    return Reason(code, infos[0].reason, status.message, dict(infos[0].metadata), fields)


def reason_of_status(status) -> Reason:
    """Of a google.rpc.Status inside of a message."""
    return _reason(status.code, status)


def loras(*specs: str):
    """"dusk:0.5" → LoraRef."""
    refs = []
    for spec in specs:
        name, _, weight = spec.partition(":")
        refs.append(common_pb2.LoraRef(name=name, weight=float(weight) if weight else None))
    return refs


class Daemon:
    """A latentd of its own, on a Unix socket. Without `--devices` it computes on the CPU, whatever the machine has: tests
    compare bytes and memory."""

    def __init__(self, folder: Path, *flags: str, default_devices: bool = False):
        self.folder = folder
        self.address = f"unix:{folder}/latentd.sock"
        self.log = folder / "latentd.log"
        if "--devices" not in flags and not default_devices:
            flags = (*flags, "--devices", "cpu")
        self.process = subprocess.Popen(
            [BIN / "latentd", "--config", DEMO / "latentd.toml", "--listen", self.address, "--threads-per-device", "1",
             "--upload-dir", folder / "uploads", *flags],
            cwd=ROOT, stderr=self.log.open("ab"), stdout=subprocess.DEVNULL)
        self.channel = grpc.insecure_channel(self.address, options=[
            ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)])
        try:
            grpc.channel_ready_future(self.channel).result(timeout=30)
        except grpc.FutureTimeoutError:
            self.process.kill()
            raise RuntimeError(self.log.read_text()) from None
        self.denoise = denoise_pb2_grpc.DenoiseServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)
        self.cache = cache_pb2_grpc.CacheServiceStub(self.channel)
        self.server = server_pb2_grpc.ServerServiceStub(self.channel)

    def stop(self) -> int:
        self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def generate(self, prompt="a red circle on a blue background", *, lora=(), mode=0, timeout=120, **params) -> Result:
        request = denoise_pb2.GenerateRequest(
            model=MODEL, loras=loras(*lora), patch_mode=mode,
            params=denoise_pb2.GenerateParams(**{"prompt": prompt, "seed": 7, "steps": 4, **params}))
        result = Result()
        for response in self.denoise.Generate(request, timeout=timeout):
            result.add(response.event)
        assert result.done is not None
        return result

    def fails(self, **kwargs) -> Reason:
        with pytest.raises(grpc.RpcError) as caught:
            self.generate(**kwargs)
        return reason_of(caught.value)

    def stats(self):
        return self.cache.GetCacheStats(cache_pb2.GetCacheStatsRequest())

    def sessions(self):
        return list(self.server.ListSessions(server_pb2.ListSessionsRequest()).sessions)

    def session(self, *, lora=(), mode=0, **open_args) -> "Session":
        return Session(self, loras(*lora), mode, **open_args)

    def expect_all_released(self, within=20.0) -> None:
        """No session, no lock, and the budget is the sum of the records."""
        deadline = time.monotonic() + within
        while True:
            stats, sessions = self.stats(), self.sessions()
            locked = [r.key for r in stats.records if r.lock_count]
            budget = stats.ram_budget
            ok = (not locked and not sessions and budget.reserved_bytes == 0
                  and budget.in_use_bytes == sum(r.bytes for r in stats.records)
                  and stats.unaccounted_bytes == 0 and stats.leaving_bytes == 0
                  and all(d.reserved_bytes == 0 for d in stats.devices))
            if ok:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind: locked={locked} sessions={sessions} budget={budget}")
            time.sleep(0.02)


class Session:
    """A bidirectional stream, driven one message at a time."""

    def __init__(self, daemon: Daemon, lora_refs, mode, timeout=300, **open_args):
        import queue

        self._requests = queue.Queue()
        self.call = daemon.denoise.Session(iter(self._requests.get, None), timeout=timeout)
        self.send(request_id="open", open=denoise_pb2.SessionRequest.Open(
            model=MODEL, loras=lora_refs, patch_mode=mode, **open_args))
        response = next(self.call)
        assert response.WhichOneof("response") == "opened", response
        self.opened = response.opened

    def send(self, **message) -> None:
        self._requests.put(denoise_pb2.SessionRequest(**message))

    def start(self, job_id: str, prompt="a red circle on a blue background", **params) -> None:
        self.send(request_id=job_id, denoise=denoise_pb2.SessionRequest.Denoise(
            job_id=job_id, params=denoise_pb2.GenerateParams(**{"prompt": prompt, "seed": 7, "steps": 4, **params})))

    def next(self):
        return next(self.call)

    def until(self, kind: str):
        """The first event of that kind; a failed job is an error."""
        for response in self.call:
            event = response.job_event.event
            if event.WhichOneof("event") == kind:
                return event
            if event.WhichOneof("event") == "failed" or response.WhichOneof("response") == "error":
                raise AssertionError(response)
        raise AssertionError("the stream ended")

    def wait(self, job_id: str) -> Result:
        """Events of a job until its last one; the last is in events[-1]."""
        result = Result()
        for response in self.call:
            if response.WhichOneof("response") == "error":
                raise AssertionError(response)
            if response.job_event.job_id != job_id:
                continue
            result.add(response.job_event.event)
            if response.job_event.event.WhichOneof("event") in ("done", "failed", "cancelled"):
                return result
        raise AssertionError("the stream ended")

    def run(self, job_id: str, **params) -> Result:
        self.start(job_id, **params)
        result = self.wait(job_id)
        assert result.done is not None, result.events[-1]
        return result

    def set_loras(self, *specs: str, mode=0):
        self.send(request_id="set", set_loras=denoise_pb2.SessionRequest.SetLoras(loras=loras(*specs), patch_mode=mode))
        return next(self.call)

    def half_close(self) -> None:
        self._requests.put(None)

    def close(self) -> None:
        self.send(request_id="close", close=denoise_pb2.SessionRequest.Close())
        last = None
        for last in self.call:
            pass
        assert last.WhichOneof("response") == "closed"


def eventually(condition, within=20.0, why=lambda: "") -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """One daemon for all tests of a file."""
    d = Daemon(tmp_path_factory.mktemp("latentd"))
    yield d
    assert d.stop() == 0, d.log.read_text()


@pytest.fixture
def start(tmp_path):
    """start(flags…) → a daemon of this test alone."""
    running = []

    def make(*flags: str, **options) -> Daemon:
        folder = tmp_path / f"d{len(running)}"
        folder.mkdir()
        running.append(Daemon(folder, *flags, **options))
        return running[-1]

    yield make
    for d in running:
        if d.process.poll() is None:
            d.stop()
