"""Models on disk: broken ones, ones that change while they are served, single files, names."""

import os
import shutil

import grpc
import numpy as np
import pytest
from safetensors.numpy import save_file

from conftest import DEMO, Result, denoise_pb2, model_pb2, reason_of

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def served(start, tmp_path):
    """served(name…) → a daemon with copies of the demo model under these names, and the root they are in."""

    def make(*names, flags=()):
        root = tmp_path / "models"
        for name in names:
            shutil.copytree(DEMO / "models/shapes-flux", root / name)
        return start("--model-roots", str(root), "--default-model", names[0], *flags), root

    return make


def generate(daemon, model, **params):
    result = Result()
    for response in daemon.denoise.Generate(denoise_pb2.GenerateRequest(
            model=model, params=denoise_pb2.GenerateParams(**{"prompt": "a star", "seed": 3, "steps": 4, **params}))):
        result.add(response.event)
    return result


def error_of(daemon, model):
    with pytest.raises(grpc.RpcError) as caught:
        generate(daemon, model)
    return reason_of(caught.value)


def test_a_broken_weight_file_is_a_typed_error_and_other_models_go_on(served):
    daemon, root = served("good", "short", "missing", "strange")
    with open(root / "short" / TRANSFORMER, "r+b") as f:
        f.truncate(100_000)
    (root / "missing" / TRANSFORMER).unlink()
    save_file({"x": np.zeros(3, np.float32)}, root / "strange" / TRANSFORMER)
    assert error_of(daemon, "short").reason == "CORRUPT_FILE"
    assert error_of(daemon, "missing").reason == "FILE_NOT_FOUND"
    assert error_of(daemon, "strange").reason in ("WEIGHTS_MISMATCH", "UNSUPPORTED_MODEL")
    assert [m.name for m in daemon.models.ListModels(model_pb2.ListModelsRequest()).models] == ["good"]
    listed = daemon.models.ListModels(model_pb2.ListModelsRequest(include_problems=True)).models
    assert {m.name: bool(m.problem) for m in listed} == {"good": False, "short": True, "missing": True, "strange": True}
    generate(daemon, "good")
    daemon.expect_all_released()


def test_a_file_cut_short_while_it_is_served_ends_the_job_and_not_the_daemon(served):
    daemon, root = served("m", "other")
    generate(daemon, "m")
    os.truncate(root / "m" / TRANSFORMER, 8192)
    # A new session opens it anew.
    error = error_of(daemon, "m")
    assert error.code == grpc.StatusCode.DATA_LOSS
    assert error.reason == "CORRUPT_FILE"
    generate(daemon, "other")
    daemon.expect_all_released()


def test_a_replaced_file_is_another_record_and_a_running_job_keeps_the_old_one(served):
    daemon, root = served("m")
    before = generate(daemon, "m", steps=60).sha256
    call = daemon.denoise.Generate(denoise_pb2.GenerateRequest(
        model="m", params=denoise_pb2.GenerateParams(prompt="a star", seed=3, steps=60)))
    running = Result()
    for response in call:
        running.add(response.event)
        if response.event.WhichOneof("event") == "step":
            break
    old = {r.key.split(":")[0] for r in daemon.stats().records if r.kind == "transformer"}
    assert len(old) == 1
    copy = root / "m" / (TRANSFORMER + ".new")
    shutil.copy(root / "m" / TRANSFORMER, copy)
    os.replace(copy, root / "m" / TRANSFORMER)
    for response in call:
        running.add(response.event)
    assert running.sha256 == before
    assert generate(daemon, "m", steps=60).sha256 == before  # the same bytes in a new file
    # The old one goes once nobody has it any more.
    ids = {r.key.split(":")[0] for r in daemon.stats().records if r.kind == "transformer"}
    assert ids - old
    daemon.expect_all_released()


def test_a_single_file_needs_a_base_and_then_draws_the_same(served):
    daemon, root = served("m")
    shutil.copy(root / "m" / TRANSFORMER, root / "single.safetensors")
    error = error_of(daemon, "single")
    assert error.reason == "UNSUPPORTED_MODEL" and "base" in error.message
    (root / "single.json").write_text('{"base": "m"}')
    assert generate(daemon, "single").sha256 == generate(daemon, "m").sha256
    (root / "single.json").write_text('{"base": "nope"}')
    assert error_of(daemon, "single").reason == "MODEL_NOT_FOUND"


def test_a_link_out_of_the_root_is_not_found(served, tmp_path):
    daemon, root = served("m")
    outside = tmp_path / "outside"
    shutil.copytree(root / "m", outside)
    (root / "link").symlink_to(outside)
    assert error_of(daemon, "link").reason == "MODEL_NOT_FOUND"
    (root / "inside").symlink_to(root / "m")
    generate(daemon, "inside")
