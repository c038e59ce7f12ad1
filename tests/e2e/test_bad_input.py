"""Whatever is wrong with a request is said with the field's name; daemon and session live on."""

import io
import json
import math
import struct

import grpc
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save, save_file

from conftest import DEMO, LORAS, MODEL, Result, common_pb2, denoise_pb2, model_pb2, reason_of, reason_of_status

A = LORAS[0]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def png(width, height, noise=False):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8) if noise else \
        np.zeros((height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0 if noise else 6)
    return file.getvalue()


BAD = {
    "width is no multiple of 16": ({"width": 100}, "params.width"),
    "height is zero": ({"height": 0}, "params.height"),
    "height is negative": ({"height": -16}, "params.height"),
    "picture too large": ({"width": 4096, "height": 4096}, "params.height"),
    "no steps": ({"steps": 0}, "params.steps"),
    "a million steps": ({"steps": 1_000_000}, "params.steps"),
    "guidance is NaN": ({"guidance": math.nan}, "params.guidance"),
    "guidance is infinite": ({"guidance": math.inf}, "params.guidance"),
    "true CFG is NaN": ({"true_cfg_scale": math.nan}, "params.true_cfg_scale"),
    "shift is negative": ({"shift": -1.0}, "params.shift"),
    "unknown sampler": ({"sampler": "magic"}, "params.sampler"),
    "no tokens": ({"max_sequence_length": 0}, "params.max_sequence_length"),
    "no pictures": ({"count": 0}, "params.count"),
    "a billion pictures": ({"count": 1_000_000_000}, "params.count"),
    "5 MB prompt": ({"prompt": "a" * 5_000_000}, "params.prompt"),
    "5 MB negative prompt": ({"negative_prompt": "a" * 5_000_000, "true_cfg_scale": 2.0}, "params.negative_prompt"),
    "negative preview interval": ({"preview_every": -1}, "params.preview_every"),
    "empty init image": ({"init_image": {}}, "params.init_image.data"),
    "init image is no picture": ({"init_image": {"data": b"GIF89a..."}}, "params.init_image.data"),
    "init image cut short": ({"init_image": {"data": png(64, 64, True)[:5000]}}, "params.init_image.data"),
    "33 MB init image": ({"init_image": {"data": b"\x89PNG\r\n\x1a\n" + bytes(33 << 20)}}, "params.init_image.data"),
    "init image with too many pixels": ({"init_image": {"data": png(30000, 3000)}}, "params.init_image.data"),
    "strength above one": ({"init_image": {"data": png(16, 16), "strength": 1.5}}, "params.init_image.strength"),
    "strength zero": ({"init_image": {"data": png(16, 16), "strength": 0.0}}, "params.init_image.strength"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_parameters_name_their_field(daemon, case):
    params, field = BAD[case]
    error = daemon.fails(**params)
    assert error.code == INVALID, error
    assert error.fields == [field], error
    assert field.split(".")[-1] in error.message
    daemon.expect_all_released()


def test_a_session_lives_on_after_every_bad_job(daemon):
    session = daemon.session(lora=(A,))
    expected = session.run("first").sha256
    for i, (params, field) in enumerate(BAD.values()):
        session.start(f"bad-{i}", **params)
        last = session.wait(f"bad-{i}").events[-1]
        assert last.WhichOneof("event") == "failed"
        assert reason_of_status(last.failed.status).fields == [field]
    assert session.run("last").sha256 == expected
    session.close()
    daemon.expect_all_released()


def generate(daemon, **request):
    with pytest.raises(grpc.RpcError) as caught:
        for _ in daemon.denoise.Generate(denoise_pb2.GenerateRequest(
                **{"model": MODEL, "params": denoise_pb2.GenerateParams(prompt="x", steps=1), **request})):
            pass
    daemon.expect_all_released()
    return reason_of(caught.value)


@pytest.mark.parametrize("name", ["nope", "../models/shapes-flux", "/etc/passwd", "a\0b", ".", "..", "shapes-flux/",
                                  "x" * 500, "shapes-flux/vae", "ＳＨＡＰＥＳ"])
def test_unknown_models_and_loras(daemon, name):
    error = generate(daemon, model=name)
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    error = generate(daemon, loras=[common_pb2.LoraRef(name=name)])
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "LORA_NOT_FOUND")
    assert str(DEMO) not in error.message


@pytest.mark.parametrize("kind", ["Models", "Loras", "Embeddings"])
def test_a_page_that_cannot_be_names_its_field(daemon, kind):
    call, message = getattr(daemon.models, f"List{kind}"), getattr(model_pb2, f"List{kind}Request")
    for fields, field in (({"page_size": -1}, "page_size"), ({"page_token": "../x"}, "page_token"),
                          ({"page_token": "a\0b"}, "page_token")):
        with pytest.raises(grpc.RpcError) as caught:
            call(message(**fields))
        error = reason_of(caught.value)
        assert (error.code, error.fields) == (INVALID, [field]), error


def test_lists_come_in_pages(daemon):
    names, token = [], ""
    while token or not names:
        page = daemon.models.ListLoras(model_pb2.ListLorasRequest(page_size=1, page_token=token))
        names += [lora.name for lora in page.loras]
        token = page.next_page_token
    assert len(LORAS) > 1 and names == LORAS
    # A token is a name, whether there is one of that name or not.
    rest = daemon.models.ListLoras(model_pb2.ListLorasRequest(page_token=LORAS[0] + "-"))
    assert [lora.name for lora in rest.loras] == LORAS[1:]
    rest = daemon.models.ListLoras(model_pb2.ListLorasRequest(page_size=2000, page_token="zzz"))
    assert not rest.loras and not rest.next_page_token
    assert [m.name for m in daemon.models.ListModels(model_pb2.ListModelsRequest(page_size=1)).models] == [MODEL]


@pytest.mark.parametrize("weight", [math.nan, math.inf, 1e9])
def test_lora_weights_must_be_sane(daemon, weight):
    error = generate(daemon, loras=[common_pb2.LoraRef(name=A, weight=weight)])
    assert (error.code, error.fields) == (INVALID, ["loras.weight"])


def test_a_lora_given_twice(daemon):
    error = generate(daemon, loras=[common_pb2.LoraRef(name=A), common_pb2.LoraRef(name=A)])
    assert (error.code, error.fields) == (INVALID, ["loras.name"])


def header(entries: dict, data: bytes = b"", length=None) -> bytes:
    text = json.dumps(entries).encode() if isinstance(entries, dict) else entries
    return struct.pack("<Q", len(text) if length is None else length) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "empty": b"",
    "seven-bytes": b"\0" * 7,
    "length-2-64": b"\xff" * 8,
    "length-beyond-the-file": header({}, length=1000),
    "length-100mb": header({}, length=100_000_001),
    "no-json": header(b"{" * 64),
    "nested": header(b"[" * 100_000),
    "cut-short": header({"a": F32}, b"\0" * 4),
    "too-long": header({"a": F32}, b"\0" * 12),
    "overlap": header({"a": F32, "b": F32}, b"\0" * 8),
    "gap": header({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, b"\0" * 20),
    "reversed": header({"a": {**F32, "data_offsets": [8, 0]}}, b"\0" * 8),
    "shape-overflows": header({"a": {**F32, "shape": [2**62, 2**62]}}, b"\0" * 8),
    "negative-shape": header({"a": {**F32, "shape": [-2]}}, b"\0" * 8),
    "unknown-dtype": header({"a": {**F32, "dtype": "Q9"}}, b"\0" * 8),
    "twice": header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"\0" * 8),
    "lying-shape": header({"a": {**F32, "shape": [3]}}, b"\0" * 8),
}


@pytest.fixture
def with_loras(start, tmp_path):
    """with_loras({name: bytes}) → a daemon that also has these files as LoRAs."""

    def make(files):
        root = tmp_path / "loras"
        root.mkdir()
        for name, data in files.items():
            (root / f"{name}.safetensors").write_bytes(data)
        return start("--lora-roots", str(root), "--lora-roots", "deploy/demo/loras")

    return make


def test_broken_files_are_typed_errors(with_loras):
    daemon = with_loras(BROKEN)
    for name in BROKEN:
        error = generate(daemon, loras=[common_pb2.LoraRef(name=name)])
        assert (error.code, error.reason) == (grpc.StatusCode.DATA_LOSS, "CORRUPT_FILE"), (name, error)
        assert name in error.message
    daemon.generate(lora=(A,))


def lora(**tensors):
    return save({k.replace("__", "."): v for k, v in tensors.items()})


def pair(name, rank=2, n_in=128, n_out=128, value=0.1):
    return {f"{name}.lora_A.weight": np.full((rank, n_in), value, np.float32),
            f"{name}.lora_B.weight": np.full((n_out, rank), value, np.float32)}


def test_loras_that_do_not_fit(with_loras):
    q = "transformer.transformer_blocks.0.attn.to_q"
    files = {
        "sd15": save(pair("unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q", n_in=320, n_out=320)),
        "wide": save(pair(q, n_in=3072, n_out=3072)),
        "nan": save(pair(q, value=np.nan)),
        "rank": save(pair(q, rank=20_000, n_in=1, n_out=1)),
        "half": save({f"{q}.lora_A.weight": np.ones((2, 128), np.float32)}),
        "uneven": save({**pair(q), f"{q}.lora_B.weight": np.ones((128, 3), np.float32)}),
        "loha": save({f"{q}.hada_w1_a": np.ones((2, 2), np.float32)}),
        "dora": save({**pair(q), f"{q}.dora_scale": np.full((1, 128), np.inf, np.float32)}),
        "lokr": save({f"{q}.lokr_w1": np.ones((3, 3), np.float32), f"{q}.lokr_w2": np.ones((3, 3), np.float32)}),
        "oft": save({f"{q}.oft_blocks": np.zeros((9, 8, 8), np.float32)}),
        "mixed": save({**pair(q), f"{q}.mystery": np.ones((2, 2), np.float32)}),
        "modulation": save({**pair(q), "double_blocks.0.img_mod.lin.diff_m": np.ones(32, np.float32)}),
        "nothing": save({"x": np.ones((2, 2), np.float32)}),
        "pickle": b"PK\x03\x04" + b"\0" * 64,
    }
    daemon = with_loras(files)
    expected = {
        "sd15": "LORA_MISMATCH", "wide": "LORA_MISMATCH", "nan": "INVALID_LORA", "rank": "INVALID_LORA",
        "half": "INVALID_LORA", "uneven": "INVALID_LORA", "loha": "INVALID_LORA", "dora": "INVALID_LORA",
        "lokr": "LORA_MISMATCH", "oft": "LORA_MISMATCH", "mixed": "UNSUPPORTED_LORA",
        "modulation": "UNSUPPORTED_LORA", "nothing": "INVALID_LORA",
        "pickle": "UNSAFE_FILE",
    }
    for name, reason in expected.items():
        error = generate(daemon, loras=[common_pb2.LoraRef(name=name)])
        assert error.reason == reason, (name, error)
        assert name in error.message or name == "pickle"
        with pytest.raises(grpc.RpcError) as caught:
            daemon.models.InspectLora(model_pb2.InspectLoraRequest(name=name, model=MODEL))
        assert reason_of(caught.value).reason == reason
    daemon.generate(lora=(A,))
    daemon.expect_all_released()


def test_the_first_message_must_be_open(daemon):
    call = daemon.denoise.Session(iter([denoise_pb2.SessionRequest(close={})]))
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert reason_of(caught.value).reason == "NOT_OPEN"


def test_messages_that_make_no_sense_leave_the_session_open(daemon):
    session = daemon.session()
    session.send(request_id="again", open=denoise_pb2.SessionRequest.Open(model=MODEL))
    assert reason_of_status(session.next().error.status).reason == "ALREADY_OPEN"
    session.send(request_id="empty")
    assert reason_of_status(session.next().error.status).reason == "INVALID_FIELD"
    session.send(request_id="c", cancel={"job_id": "nope"})
    assert reason_of_status(session.next().error.status).reason == "JOB_NOT_FOUND"
    session.start("same", steps=200)
    session.start("same", steps=200)
    while True:
        response = session.next()
        if response.WhichOneof("response") == "error":
            break
    assert reason_of_status(response.error.status).fields == ["job_id"]
    session.close()


def test_previews_come_as_small_jpegs(daemon):
    previews = [e.preview for e in daemon.generate(steps=6, preview_every=2).events if e.WhichOneof("event") == "preview"]
    for preview in previews:
        image = Image.open(io.BytesIO(preview.data))
        assert image.format == "JPEG" and image.size == (preview.width, preview.height)
    assert len(previews) == 2  # after steps 2 and 4; the last step gives the picture


def test_a_preview_shows_what_the_picture_will_be(daemon):
    result = daemon.generate("a big red circle on a blue background", steps=12, preview_every=8)
    preview = next(e.preview for e in result.events if e.WhichOneof("event") == "preview")
    small = np.asarray(Image.open(io.BytesIO(preview.data)).convert("RGB")).astype(float)
    picture = Image.open(io.BytesIO(result.pictures[0].data)).convert("RGB").resize(small.shape[1::-1], Image.BOX)
    assert np.abs(small - np.asarray(picture)).mean() < 40


def test_img2img_starts_from_the_picture(daemon):
    file = io.BytesIO()
    Image.new("RGB", (200, 120), (250, 20, 20)).save(file, "JPEG")
    weak = daemon.generate("", steps=10, init_image={"data": file.getvalue(), "strength": 0.1})
    pixels = np.asarray(Image.open(io.BytesIO(weak.pictures[0].data)).convert("RGB")).reshape(-1, 3).mean(0)
    assert pixels[0] > 150 and pixels[1] < 90 and pixels[2] < 90
    assert not weak.done.params.init_image.data
    assert [e.step.count for e in weak.events if e.WhichOneof("event") == "step"] == [1]
