"""Files, names and bytes that are made to do harm: one costs its own request, and nobody else's."""

import json
import os
import re
import shutil
import socket
import struct

import grpc
import numpy as np
import pytest
from safetensors.numpy import save_file

from conftest import DEMO, LORAS, MODEL, Daemon, denoise_pb2, eventually, model_pb2, reason_of

SPIECE = "tokenizer_2/spiece.model"


@pytest.fixture
def served(start, tmp_path):
    """served(name…) → a daemon with copies of the demo model under these names, and the root they are in."""

    def make(*names):
        root = tmp_path / "models"
        for name in names:
            shutil.copytree(DEMO / "models/shapes-flux", root / name)
        return start("--model-roots", str(root), "--default-model", names[0], "--state-dir", str(tmp_path / "state")), root

    return make


def draw(daemon, model):
    list(daemon.denoise.Generate(denoise_pb2.GenerateRequest(
        model=model, params=denoise_pb2.GenerateParams(prompt="a star", seed=3, steps=2)), timeout=300))


def error_of(daemon, model):
    with pytest.raises(grpc.RpcError) as caught:
        draw(daemon, model)
    return reason_of(caught.value)


def log_with(daemon, text, within=10.0) -> str:
    """The log, once `text` is in it."""
    def log():
        return daemon.log.read_bytes().decode(errors="surrogateescape")

    eventually(lambda: text in log(), within, log)
    return log()


def test_broken_sentencepiece_models_are_refused_and_the_daemon_goes_on(served):
    daemon, root = served("good", "bad")
    draw(daemon, "good")
    rules = (DEMO / "../../tests/fuzz/corpus/spiece/rules.model").resolve().read_bytes()
    # Its table of normalisations, with other offsets: some lead out of it, some to where no text ever comes.
    blob = rules.index(struct.pack("<I", 1024)) + 4
    refused = 0
    for shift in range(12):
        units = bytearray(rules)
        for at in range(blob, blob + 1024, 4):
            units[at + 2] ^= 1 << shift % 8
            units[at + 1] ^= 0x80 >> shift // 2
        (root / "bad" / SPIECE).write_bytes(units)
        try:
            draw(daemon, "bad")
        except grpc.RpcError as error:
            assert reason_of(error).reason == "CORRUPT_FILE"
            refused += 1
    assert refused > 0
    draw(daemon, "good")
    daemon.expect_all_released()


def test_what_is_no_file_in_a_settings_files_place_hangs_nobody(served):
    names = ["good", "transformer/config.json", "scheduler/scheduler_config.json", SPIECE, "latentd.json", "vae/config.json"]
    daemon, root = served("good", *(f"m{i}" for i in range(1, len(names))))
    for i, name in enumerate(names[1:], 1):
        (root / f"m{i}" / name).unlink()
        os.mkfifo(root / f"m{i}" / name)
    for _ in range(3):  # more than there are workers
        for i in range(1, len(names)):
            assert error_of(daemon, f"m{i}").reason == "CORRUPT_FILE"
    listed = daemon.models.ListModels(model_pb2.ListModelsRequest(include_problems=True), timeout=300).models
    assert len(listed) == len(names)
    draw(daemon, "good")
    assert daemon.stop() == 0


@pytest.mark.parametrize("name", ["transformer/config.json", "model_index.json", "latentd.json"])
def test_settings_that_are_deep_or_huge_are_refused_and_the_daemon_goes_on(served, name):
    objects = "{" + ",".join(f'"k{i}":{{}}' for i in range(200_000)) + "}"  # 3 MB
    texts = ["[" * 4_000_000, '{"a":' * 500_000, objects,
             "[" + "0," * 2_000_000 + "0]", '{"a": "' + "x" * 70_000_000 + '"}', "\0" * 1000, ""]
    daemon, root = served("good", *(f"m{i}" for i in range(len(texts))))
    for i, text in enumerate(texts):
        (root / f"m{i}" / name).write_text(text)
    for i, text in enumerate(texts):
        try:
            draw(daemon, f"m{i}")
            assert name == "latentd.json" and text == objects  # keys that nobody knows do no harm
        except grpc.RpcError as error:
            assert reason_of(error).reason in ("CORRUPT_FILE", "UNSUPPORTED_MODEL"), (i, text[:20])
    assert len(daemon.models.ListModels(model_pb2.ListModelsRequest(include_problems=True), timeout=300).models) == len(texts) + 1
    draw(daemon, "good")
    daemon.expect_all_released()


def test_a_link_out_of_the_root_is_refused(served, tmp_path):
    daemon, root = served("good", "bad")
    shutil.copytree(root / "bad/vae", tmp_path / "vae")
    shutil.rmtree(root / "bad/vae")
    (root / "bad/vae").symlink_to(tmp_path / "vae")
    assert error_of(daemon, "bad").reason == "UNSAFE_FILE"
    (root / "bad/vae").unlink()
    (root / "bad/vae").symlink_to("../good/vae")
    draw(daemon, "bad")


def weight_file(path, header: dict, data: bytes = b""):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_one_strange_file_takes_the_list_from_nobody(start, tmp_path):
    root = tmp_path / "loras"
    root.mkdir()
    weight_file(root / "overflow.safetensors", {
        "x.lora_A.weight": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]},
        "x.lora_B.weight": {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}})
    weight_file(root / "zero.safetensors", {
        "x.lora_A.weight": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]},
        "x.lora_B.weight": {"dtype": "F32", "shape": [4, 0], "data_offsets": [0, 0]}})
    (root / "garbage.safetensors").write_bytes(os.urandom(100))
    os.mkfifo(root / "fifo.safetensors")
    textual = tmp_path / "embeddings"
    textual.mkdir()
    save_file({"emb_params": np.zeros((2, 768), np.float32)}, textual / "sound.safetensors")
    weight_file(textual / "overflow.safetensors",
              {"emb_params": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}})
    (textual / "garbage.safetensors").write_bytes(os.urandom(100))
    os.mkfifo(textual / "fifo.safetensors")
    daemon = start("--lora-roots", str(root), "--lora-roots", str(DEMO / "loras"), "--embedding-roots", str(textual))
    listed = {lora.name: lora for lora in daemon.models.ListLoras(model_pb2.ListLorasRequest(), timeout=300).loras}
    assert set(LORAS) <= set(listed)
    assert all(listed[name].format for name in LORAS)
    assert {"overflow", "zero", "garbage"} <= set(listed)
    assert "fifo" not in listed
    for name in ("overflow", "garbage"):
        assert listed[name].problem
    embeddings = {e.name: e for e in daemon.models.ListEmbeddings(model_pb2.ListEmbeddingsRequest(), timeout=300).embeddings}
    assert embeddings["overflow"].problem and embeddings["garbage"].problem
    assert not embeddings["sound"].problem and embeddings["sound"].tokens == 2
    with pytest.raises(grpc.RpcError) as caught:
        daemon.models.InspectLora(model_pb2.InspectLoraRequest(name="overflow"))
    assert reason_of(caught.value).reason == "CORRUPT_FILE"


def test_texts_of_a_file_are_cut_between_characters(start, tmp_path):
    root = tmp_path / "loras"
    root.mkdir()
    rows = {"transformer.single_transformer_blocks.0.proj_out.lora_A.weight": np.zeros((1, 4), np.float32),
            "transformer.single_transformer_blocks.0.proj_out.lora_B.weight": np.zeros((4, 1), np.float32)}
    for shift in range(4):
        long = "x" * shift + "\u65e5" * 400
        save_file(rows, root / f"long{shift}.safetensors", metadata={"note": long, long[:600]: "key"})
    daemon = start("--lora-roots", str(root))
    for shift in range(4):  # an answer that is no UTF-8 cannot be parsed
        answer = daemon.models.InspectLora(model_pb2.InspectLoraRequest(name=f"long{shift}"))
        note = answer.metadata["note"]
        assert note.endswith("\u65e5…") and 500 < len(note.encode()) <= 515


def test_names_of_jobs_forge_no_lines_and_no_fields(start):
    daemon = start()
    session = daemon.session()
    for job in ["a session=forged reason=DONE", "b\u009b2J\u202e", 'c" job="d', "plain-1"]:
        session.start(job, steps=1)
        session.wait(job)
    session.close()
    log = log_with(daemon, "job=plain-1 ")
    assert 'job="a session=forged reason=DONE" ' in log
    assert 'job="b\\u009b2J\\u202e" ' in log
    assert 'job="c\\" job=\\"d" ' in log
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", log)


def headers_frame(stream: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    """HTTP/2 HEADERS that end the stream, written out without compression (RFC 7541, 6.2.2)."""
    block = b"".join(b"\x00" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in headers)
    return struct.pack(">I", len(block))[1:] + b"\x01\x05" + struct.pack(">I", stream) + block


def test_grpcs_own_log_is_lines_of_the_log(start):
    daemon = start()
    for status in (b"200\n2026-01-01T00:00:00.000Z info    forged", b"\x1b[2J\x1b]0;title\x07"):
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(10)
            s.connect(daemon.address.removeprefix("unix:"))
            s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            s.sendall(headers_frame(1, [
                (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"x"),
                (b":status", status), (b"content-type", b"application/grpc"), (b"te", b"trailers")]))
            try:
                while s.recv(4096):
                    pass
            except (TimeoutError, ConnectionError):
                pass
    daemon.generate(steps=1)
    log = log_with(daemon, "grpc at=")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", log)
    for line in log.splitlines():
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (trace|debug|info|warning|error) ", line), line
    assert not any(line.endswith("info    forged") and "grpc at=" not in line for line in log.splitlines())


@pytest.mark.parametrize("what", ["folder", "fifo", "version", "garbage", "sparse", "types"])
def test_garbage_for_state_never_keeps_the_daemon_from_starting(start, tmp_path, what):
    state = tmp_path / "state"
    state.mkdir()
    file = state / "measurements.json"
    if what == "folder":
        (file / "x").mkdir(parents=True)
    elif what == "fifo":
        os.mkfifo(file)
    elif what == "sparse":
        file.write_text("{")
        os.truncate(file, 1 << 30)
    else:
        file.write_text({"version": '{"version": "1"}', "garbage": "\x00\x9b", "types": '{"version": 1, "phases": [1]}'}[what])
    daemon = start("--state-dir", str(state))
    daemon.generate(steps=1)
    log_with(daemon, "nothing that was measured before is known")
    assert daemon.stop() == 0
    assert isinstance(json.loads(file.read_text())["version"], int)
    assert file.with_name("measurements.json.broken").exists()


def test_the_process_is_called_latentd(daemon: Daemon):
    folder = f"/proc/{daemon.process.pid}"
    with open(f"{folder}/comm") as f:
        assert f.read() == "latentd\n"
    assert MODEL  # it serves
    names = {open(f"{folder}/task/{task}/comm").read().strip() for task in os.listdir(f"{folder}/task")}
    assert "exe" not in names
