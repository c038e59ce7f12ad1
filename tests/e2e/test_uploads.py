"""LoRAs that clients send: what is kept, what is refused, and that nothing else stays."""

import base64
import hashlib
import json
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from safetensors.numpy import save

from conftest import BIN, DEMO, eventually, model_pb2, reason_of

DUSK = (DEMO / "loras/dusk.safetensors").read_bytes()
CHECKER = (DEMO / "loras/checker.safetensors").read_bytes()
STEP = 40_000


def header(name, data=DUSK, *, ttl=None, **fields):
    fields = {"name": name, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data), **fields}
    message = model_pb2.UploadLoraRequest.Header(**fields)
    if ttl is not None:
        message.ttl.FromMilliseconds(int(ttl * 1000))
    return model_pb2.UploadLoraRequest(header=message)


def chunk(offset, data):
    return model_pb2.UploadLoraRequest(chunk=model_pb2.UploadLoraRequest.Chunk(offset=offset, data=data))


def chunks(data, step=STEP):
    return [chunk(at, data[at:at + step]) for at in range(0, len(data), step)]


def upload(daemon, name, data=DUSK, **fields):
    return daemon.models.UploadLora(iter([header(name, data, **fields), *chunks(data)]), timeout=60)


def refused(daemon, *messages, timeout=60):
    with pytest.raises(grpc.RpcError) as caught:
        daemon.models.UploadLora(iter(messages), timeout=timeout)
    return reason_of(caught.value)


def delete(daemon, name):
    daemon.models.DeleteLora(model_pb2.DeleteLoraRequest(name=name), timeout=30)


def listed(daemon):
    return {lora.name: lora for lora in daemon.models.ListLoras(model_pb2.ListLorasRequest()).loras}


def stored(daemon):
    """Files in the upload folder, but for its lock."""
    root = daemon.folder / "uploads"
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.name != ".lock"}


class Slow:
    """An upload whose messages are sent one by one."""

    def __init__(self, daemon, *messages):
        self._queue = queue.Queue()
        for message in messages:
            self._queue.put(message)
        self.call = daemon.models.UploadLora.future(iter(self._queue.get, None), timeout=120)

    def send(self, *messages):
        for message in messages:
            self._queue.put(message)

    def half_close(self):
        self._queue.put(None)

    def reason(self):
        error = self.call.exception(timeout=60)
        self.half_close()
        assert error is not None
        return reason_of(error)


@pytest.fixture(autouse=True)
def nothing_stays(request):
    """Whatever a test did to the module's daemon, it ends with an empty folder and no promise."""
    yield
    if "daemon" not in request.fixturenames:
        return
    daemon = request.getfixturevalue("daemon")
    for name in listed(daemon):
        if name.startswith("uploads/"):
            delete(daemon, name)
    eventually(lambda: not stored(daemon))
    assert not list((daemon.folder / "uploads/.incoming").iterdir())
    assert not list((daemon.folder / "uploads/uploads").iterdir())
    daemon.expect_all_released()


def test_an_upload_draws_what_the_file_draws(daemon):
    response = upload(daemon, "alice/night", ttl=600)
    assert response.lora.name == "uploads/alice/night" and not response.existed
    assert response.lora == listed(daemon)["uploads/alice/night"]
    own = listed(daemon)["dusk"]
    assert (response.lora.format, response.lora.layers, response.lora.bytes) == (own.format, own.layers, own.bytes)
    assert 590 < response.lora.expire_time.ToSeconds() - time.time() < 610
    assert not own.HasField("expire_time")
    session = daemon.session(lora=("uploads/alice/night:0.8",))
    assert session.run("a").sha256 == daemon.generate(lora=("dusk:0.8",)).sha256
    session.close()
    inspected = daemon.models.InspectLora(model_pb2.InspectLoraRequest(name="uploads/alice/night", model="shapes-flux"))
    assert inspected.lora == response.lora and inspected.match.matched


def test_the_same_file_again_needs_no_data_and_lives_longer(daemon):
    first = upload(daemon, "x", ttl=60)
    again = daemon.models.UploadLora(iter([header("x", ttl=600)]), timeout=30)
    assert again.existed and again.lora.id == first.lora.id
    assert again.lora.expire_time.ToSeconds() > first.lora.expire_time.ToSeconds() + 500
    assert daemon.models.UploadLora(iter([header("uploads/x", ttl=5)])).lora.expire_time == again.lora.expire_time
    # With all of its data it is the same.
    assert upload(daemon, "x").existed


def test_another_file_of_that_name_needs_replace(daemon):
    upload(daemon, "x")
    error = refused(daemon, header("x", CHECKER), *chunks(CHECKER))
    assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "UPLOAD_EXISTS")
    before = daemon.generate(lora=("uploads/x",)).sha256
    assert before == daemon.generate(lora=("dusk",)).sha256
    assert not upload(daemon, "x", CHECKER, replace=True).existed
    assert daemon.generate(lora=("uploads/x",)).sha256 == daemon.generate(lora=("checker",)).sha256 != before


def test_what_came_must_be_what_the_header_says(daemon):
    wrong = bytes([DUSK[0] ^ 1]) + DUSK[1:]
    error = refused(daemon, header("x"), *chunks(wrong))
    assert (error.code, error.reason) == (grpc.StatusCode.DATA_LOSS, "UPLOAD_CORRUPT")
    assert error.details["expected"] == hashlib.sha256(DUSK).hexdigest()
    assert error.details["actual"] == hashlib.sha256(wrong).hexdigest()
    error = refused(daemon, header("x"), *chunks(DUSK)[:-1])
    assert (error.code, error.reason) == (grpc.StatusCode.DATA_LOSS, "UPLOAD_CORRUPT")
    assert error.details["size"] == str(len(DUSK))
    assert not stored(daemon)


BAD = {
    "beyond the size": ([header("x"), *chunks(DUSK), chunk(len(DUSK), b"x")], "chunk.data"),
    "across the size": ([header("x"), *chunks(DUSK)[:-1], chunk(len(DUSK) // STEP * STEP, b"x" * STEP)], "chunk.data"),
    "a gap": ([header("x"), chunk(0, b"abc"), chunk(4, b"d")], "chunk.offset"),
    "once more": ([header("x"), chunk(0, b"abc"), chunk(0, b"abc")], "chunk.offset"),
    "not from the start": ([header("x"), chunk(5, b"abc")], "chunk.offset"),
    "negative": ([header("x"), chunk(-1, b"abc")], "chunk.offset"),
    "nothing in it": ([header("x"), chunk(0, b"")], "chunk.data"),
    "a large chunk": ([header("x", bytes(3 << 20)), chunk(0, bytes((1 << 20) + 1))], "chunk.data"),
    "two headers": ([header("x"), header("x")], "header"),
    "empty message": ([header("x"), model_pb2.UploadLoraRequest()], "request"),
    "no sum": ([header("x", sha256="")], "header.sha256"),
    "sum is a path": ([header("x", sha256="../" * 21 + "x")], "header.sha256"),
    "no size": ([header("x", size=0)], "header.size"),
    "negative size": ([header("x", size=-1)], "header.size"),
    "ttl of nothing": ([header("x", ttl=0)], "header.ttl"),
    "negative ttl": ([header("x", ttl=-1)], "header.ttl"),
    "ttl beyond the server's": ([header("x", ttl=3601)], "header.ttl"),
    **{f"name {name!r}": ([header(name), *chunks(DUSK)], "header.name")
       for name in ("", "..", "../dusk", "a/../../dusk", "/etc/x", "uploads/../dusk", ".x", "a//b", "a\0b", "ä", "a\\b",
                    "x.safetensors", "y" * 121, "a/b/c/d/e/f/g")},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_messages_name_their_field_and_nothing_stays(daemon, case):
    messages, field = BAD[case]
    error = refused(daemon, *messages)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"), error
    assert error.fields == [field], error
    assert not stored(daemon)


def test_a_file_that_is_too_large_is_refused_before_it_is_sent(daemon):
    error = refused(daemon, header("x", size=(64 << 20) + 1))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UPLOAD_TOO_LARGE")
    assert error.details["limit"] == str(64 << 20) and error.fields == ["header.size"]


def test_the_header_comes_first(daemon):
    assert refused(daemon, chunk(0, b"x")).reason == "NO_HEADER"
    assert refused(daemon).reason == "NO_HEADER"


def pair(name="transformer.transformer_blocks.0.attn.to_q", value=0.1):
    return {f"{name}.lora_A.weight": np.full((2, 128), value, np.float32),
            f"{name}.lora_B.weight": np.full((128, 2), value, np.float32)}


def test_a_file_that_no_session_could_use_is_refused_as_a_session_would(daemon):
    files = {
        "text": (b"not a weight file at all", "CORRUPT_FILE"),
        "cut": (DUSK[:-1], "CORRUPT_FILE"),
        "length": (b"\xff" * 8, "CORRUPT_FILE"),
        "zip": (b"PK\x03\x04" + bytes(200), "UNSAFE_FILE"),
        "pickle": (b"\x80\x02}q\x00." + bytes(200), "UNSAFE_FILE"),
        "none": (save({"x": np.ones(2, np.float32)}), "INVALID_LORA"),
        "nan": (save(pair(value=np.nan)), "INVALID_LORA"),
        "mystery": (save({**pair(), "transformer.transformer_blocks.0.attn.to_q.mystery": np.ones((2, 2), np.float32)}),
                    "UNSUPPORTED_LORA"),
    }
    for name, (data, reason) in files.items():
        error = refused(daemon, header(name, data), *chunks(data))
        assert error.reason == reason, (name, error)
        assert name in error.message and str(daemon.folder) not in error.message and "incoming" not in error.message
        assert f"uploads/{name}" not in listed(daemon)
        assert not stored(daemon)
    upload(daemon, "good", save(pair()))


def test_a_name_of_the_servers_own_is_safe(start, tmp_path):
    root = tmp_path / "loras"
    (root / "uploads").mkdir(parents=True)
    (root / "uploads/mine.safetensors").write_bytes(CHECKER)
    daemon = start("--lora-roots", str(root))
    error = refused(daemon, header("mine", replace=True), *chunks(DUSK))
    assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "NAME_TAKEN")
    with pytest.raises(grpc.RpcError) as caught:
        delete(daemon, "uploads/mine")
    assert reason_of(caught.value).reason == "NOT_AN_UPLOAD"
    assert (root / "uploads/mine.safetensors").read_bytes() == CHECKER


def test_only_uploads_can_be_deleted(daemon):
    upload(daemon, "x")
    for name, code, reason in (("dusk", grpc.StatusCode.FAILED_PRECONDITION, "NOT_AN_UPLOAD"),
                               ("x", grpc.StatusCode.NOT_FOUND, "LORA_NOT_FOUND"),
                               ("uploads/../../loras/dusk", grpc.StatusCode.NOT_FOUND, "LORA_NOT_FOUND"),
                               ("", grpc.StatusCode.NOT_FOUND, "LORA_NOT_FOUND")):
        with pytest.raises(grpc.RpcError) as caught:
            delete(daemon, name)
        error = reason_of(caught.value)
        assert (error.code, error.reason) == (code, reason), error
    delete(daemon, "uploads/x")
    assert "uploads/x" not in listed(daemon) and not stored(daemon)
    assert daemon.fails(lora=("uploads/x",)).reason == "LORA_NOT_FOUND"


def test_an_upload_that_is_being_placed_is_an_upload_to_who_deletes_it(daemon):
    done = threading.Event()

    def place():
        try:
            for _ in range(300):
                upload(daemon, "placed")
        finally:
            done.set()

    placing = threading.Thread(target=place)
    placing.start()
    reasons = set()
    while not done.is_set():
        try:
            delete(daemon, "uploads/placed")
            reasons.add("OK")
        except grpc.RpcError as error:
            reasons.add(reason_of(error).reason)
    placing.join()
    assert reasons == {"OK", "LORA_NOT_FOUND"}


def test_a_session_keeps_what_it_holds_when_it_is_replaced_or_deleted(daemon):
    upload(daemon, "x")
    session = daemon.session(lora=("uploads/x",))
    expected = session.run("a").sha256
    upload(daemon, "x", CHECKER, replace=True)
    assert session.run("b").sha256 == expected
    other = daemon.session(lora=("uploads/x",))
    changed = other.run("a").sha256
    assert changed == daemon.generate(lora=("checker",)).sha256 != expected
    delete(daemon, "uploads/x")
    assert session.run("c", seed=8).sha256 == daemon.generate(lora=("dusk",), seed=8).sha256
    assert other.run("b").sha256 == changed
    session.close()
    other.close()
    assert not [r.key for r in daemon.stats().records if "uploads/x" in r.key]


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_an_upload_expires_and_a_session_keeps_it(daemon, mode):
    upload(daemon, f"short{mode}", ttl=1.5)
    upload(daemon, "long")
    session = daemon.session(lora=(f"uploads/short{mode}",), mode=mode)
    eventually(lambda: f"uploads/short{mode}" not in listed(daemon))
    assert stored(daemon) == {"uploads/long.safetensors", "uploads/.long.json"}
    assert session.run("a").sha256 == daemon.generate(lora=("dusk",), mode=mode).sha256
    session.close()
    assert daemon.fails(lora=(f"uploads/short{mode}",)).reason == "LORA_NOT_FOUND"


def test_a_cancelled_upload_leaves_nothing(daemon):
    for sent in (0, 1, 2, len(chunks(DUSK))):
        slow = Slow(daemon, header("x"), *chunks(DUSK)[:sent])
        eventually(lambda: list((daemon.folder / "uploads/.incoming").iterdir()))
        assert "uploads/x" not in listed(daemon)
        slow.call.cancel()
        slow.half_close()
        eventually(lambda: not list((daemon.folder / "uploads/.incoming").iterdir()))
        assert not stored(daemon)
    daemon.expect_all_released()


def test_a_deadline_leaves_nothing(daemon):
    messages = queue.Queue()
    messages.put(header("x"))
    with pytest.raises(grpc.RpcError) as caught:
        daemon.models.UploadLora(iter(messages.get, None), timeout=1)
    messages.put(None)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: not list((daemon.folder / "uploads/.incoming").iterdir()))


def test_a_killed_client_leaves_nothing(daemon):
    code = ("import sys, grpc; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
            "from test_uploads import *; import time\n"
            "stub = __import__('latentd.v1.model_pb2_grpc', fromlist=['x']).ModelServiceStub("
            "grpc.insecure_channel(sys.argv[3]))\n"
            "def messages():\n"
            "    yield header('x'); yield chunks(DUSK)[0]; print('sent', flush=True); time.sleep(60)\n"
            "stub.UploadLora(messages())\n")
    here = str(Path(__file__).parent)
    client = subprocess.Popen([sys.executable, "-c", code, here, here, daemon.address], stdout=subprocess.PIPE)
    assert client.stdout.readline() == b"sent\n"
    eventually(lambda: list((daemon.folder / "uploads/.incoming").iterdir()))
    client.kill()
    client.wait()
    eventually(lambda: not list((daemon.folder / "uploads/.incoming").iterdir()))


def test_a_silent_upload_ends(start):
    daemon = start("--upload-idle-timeout", "1s")
    silent = Slow(daemon)
    halfway = Slow(daemon, header("x"), chunks(DUSK)[0])
    for slow in (silent, halfway):
        error = slow.reason()
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "UPLOAD_STALLED")
    assert not stored(daemon)
    upload(daemon, "x")


def test_uploads_beyond_the_bound_are_refused_and_the_others_go_on(start):
    daemon = start("--max-uploads", "2")
    first, second = (Slow(daemon, header(name), chunks(DUSK)[0]) for name in "ab")
    eventually(lambda: len(list((daemon.folder / "uploads/.incoming").iterdir())) == 2)
    error = refused(daemon, header("c"), *chunks(DUSK))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_UPLOADS")
    assert error.details["limit"] == "2"
    for slow in (first, second):
        slow.send(*chunks(DUSK)[1:])
        slow.half_close()
        slow.call.result(timeout=60)
    upload(daemon, "c")
    assert {"uploads/a", "uploads/b", "uploads/c"} <= set(listed(daemon))


def test_many_clients_at_once(start):
    daemon = start("--max-uploads", "4")
    outcomes = []

    def client(i):
        for k in range(4):
            data = DUSK if (i + k) % 2 else CHECKER
            try:
                outcomes.append(upload(daemon, f"n{k}", data, replace=True).lora.name)
            except grpc.RpcError as error:
                assert reason_of(error).reason == "TOO_MANY_UPLOADS", error

    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes
    for name in {n for n in listed(daemon) if n.startswith("uploads/")}:
        data = (daemon.folder / "uploads" / f"{name}.safetensors").read_bytes()
        assert data in (DUSK, CHECKER)
        assert upload(daemon, name, data).existed
    assert not list((daemon.folder / "uploads/.incoming").iterdir())
    daemon.expect_all_released()


def test_all_uploads_together_keep_to_the_quota(start):
    daemon = start("--upload-max-bytes", str(len(CHECKER)), "--upload-total-bytes", str(len(CHECKER) + 1000))
    upload(daemon, "a", CHECKER)
    error = refused(daemon, header("b"), *chunks(DUSK))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "UPLOADS_FULL")
    delete(daemon, "uploads/a")
    upload(daemon, "b")


def test_memory_that_is_taken_refuses_an_upload_and_does_not_hang(start):
    daemon = start("--ram-cap", "1MiB")
    error = refused(daemon, header("x"), *chunks(DUSK))
    assert error.reason in ("MODEL_EXCEEDS_BUDGET", "BUDGET_EXHAUSTED")
    assert not stored(daemon)


def wide(value, layers=3):
    """A LoRA of 1 MiB a layer."""
    return save({f"transformer.transformer_blocks.{i}.attn.to_q.lora_{k}.weight": np.full(shape, value, np.float32)
                 for i in range(layers) for k, shape in (("A", (1024, 128)), ("B", (128, 1024)))})


def test_where_memory_is_taken_names_and_shapes_are_checked(start):
    """The values are looked at by the session that uses it."""
    daemon = start("--ram-cap", "4200KiB")
    assert refused(daemon, header("nan", wide(np.nan)), *chunks(wide(np.nan))).reason == "INVALID_LORA"
    other = Slow(daemon, header("x"), chunks(DUSK)[0])
    eventually(lambda: daemon.stats().ram_budget.reserved_bytes == 2 << 20)
    upload(daemon, "nan", wide(np.nan))
    assert refused(daemon, header("bad", b"nonsense"), chunk(0, b"nonsense")).reason == "CORRUPT_FILE"
    error = refused(daemon, header("large", wide(0.1, 5)), *chunks(wide(0.1, 5)))
    assert error.reason == "MODEL_EXCEEDS_BUDGET"
    other.half_close()
    assert other.reason().reason == "UPLOAD_CORRUPT"
    daemon.expect_all_released()


def test_a_full_disk_is_said_and_leaves_nothing(start):
    daemon = start()
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    error = refused(daemon, header("x"), *chunks(DUSK))
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "DISK_FULL")
    assert not stored(daemon) and not list((daemon.folder / "uploads/.incoming").iterdir())
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    upload(daemon, "x")


def test_a_message_beyond_the_servers_limit_leaves_nothing(daemon):
    with pytest.raises(grpc.RpcError):
        daemon.models.UploadLora(iter([header("x"), chunk(0, bytes(50 << 20))]), timeout=60)
    eventually(lambda: not list((daemon.folder / "uploads/.incoming").iterdir()))
    assert not stored(daemon)
    upload(daemon, "x")


def test_a_restart_keeps_files_and_their_time(start):
    daemon = start()
    folder = daemon.folder / "uploads"
    expires = upload(daemon, "alice/x", ttl=600).lora.expire_time
    upload(daemon, "short", ttl=1)
    half = Slow(daemon, header("half"), chunks(DUSK)[0])
    eventually(lambda: list((folder / ".incoming").iterdir()))
    daemon.process.kill()
    daemon.process.wait()
    half.half_close()
    assert list((folder / ".incoming").iterdir())
    time.sleep(1)
    again = start("--upload-dir", str(folder))
    assert listed(again)["uploads/alice/x"].expire_time == expires
    assert "uploads/short" not in listed(again)
    assert not list((folder / ".incoming").iterdir())
    assert again.models.UploadLora(iter([header("alice/x")])).existed
    assert again.generate(lora=("uploads/alice/x",)).sha256 == again.generate(lora=("dusk",)).sha256


def test_uploads_end_with_the_server(start):
    daemon = start()
    slow = Slow(daemon, header("x"), chunks(DUSK)[0])
    eventually(lambda: list((daemon.folder / "uploads/.incoming").iterdir()))
    daemon.process.send_signal(signal.SIGTERM)
    assert slow.reason().reason == "SERVER_DRAINING"
    assert daemon.process.wait(timeout=30) == 0
    assert not stored(daemon)


def test_uploads_are_off_without_a_folder(start):
    daemon = start("--upload-dir", "")
    error = refused(daemon, header("x"), *chunks(DUSK))
    assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "UPLOADS_OFF")
    assert "upload_dir" in error.message
    with pytest.raises(grpc.RpcError) as caught:
        delete(daemon, "uploads/x")
    assert reason_of(caught.value).reason == "UPLOADS_OFF"


def test_two_servers_do_not_share_a_folder(start):
    daemon = start()
    second = subprocess.run(
        [BIN / "latentd", "--listen", f"unix:{daemon.folder}/second.sock", "--upload-dir", daemon.folder / "uploads"],
        capture_output=True, text=True, timeout=30)
    assert second.returncode == 1 and "used by another server" in second.stderr + second.stdout
    upload(daemon, "x")


def test_grpcurl_can_upload_and_delete(daemon, tmp_path):
    grpcurl = [Path(sys.executable).parent / "grpcurl", "-plaintext"]
    target = daemon.address
    messages = [{"header": {"name": "curl", "sha256": hashlib.sha256(DUSK).hexdigest(), "size": str(len(DUSK)),
                            "ttl": "600s"}}]
    messages += [{"chunk": {"offset": str(at), "data": base64.b64encode(DUSK[at:at + STEP]).decode()}}
                 for at in range(0, len(DUSK), STEP)]

    def call(method, text):
        return subprocess.run([*grpcurl, "-unix", "-d", "@", target.removeprefix("unix:"),
                               f"latentd.v1.ModelService/{method}"], input=text, capture_output=True, text=True, timeout=60)

    text = "\n".join(map(json.dumps, messages))
    run = call("UploadLora", text)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["lora"]["name"] == "uploads/curl"
    run = call("UploadLora", text)  # the server answers after the header
    assert run.returncode == 0 and json.loads(run.stdout)["existed"], run.stderr
    assert call("DeleteLora", '{"name": "uploads/curl"}').returncode == 0
    run = call("DeleteLora", '{"name": "dusk"}')
    assert run.returncode != 0 and "NOT_AN_UPLOAD" in run.stderr


def test_latentctl_uploads_and_deletes(daemon, tmp_path):
    def ctl(*args):
        return subprocess.run([BIN / "latentctl", "--address", daemon.address, *args], capture_output=True, text=True,
                              timeout=60)

    large = wide(0.01, layers=2)
    assert len(large) > 2 << 20
    (tmp_path / "wide.safetensors").write_bytes(large)
    run = ctl("upload", str(tmp_path / "wide.safetensors"), "--ttl", "10m")
    assert run.returncode == 0 and run.stdout.startswith("uploads/wide: 2.00 MiB, 2 layers, until 20"), run
    assert "already" in ctl("upload", str(tmp_path / "wide.safetensors")).stdout
    run = ctl("upload", str(DEMO / "loras/dusk.safetensors"), "--name", "wide")
    assert run.returncode == 1 and "UPLOAD_EXISTS" in run.stderr
    assert ctl("upload", str(DEMO / "loras/dusk.safetensors"), "--name", "wide", "--replace").returncode == 0
    assert "uploads/wide" in ctl("loras").stdout
    assert ctl("delete", "uploads/wide").stdout == "deleted uploads/wide\n"
    assert "NOT_AN_UPLOAD" in ctl("delete", "dusk").stderr
