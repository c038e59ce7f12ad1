"""A LoRA of several layer types: some of its tensors are merged and some computed beside, in one overlay."""

import numpy as np
import pytest
from conftest import LORAS, MODEL
from latentd.v1 import denoise_pb2, model_pb2
from safetensors.numpy import save

AUTO, DIRECT, SIDECAR = 0, 2, 3
SIZE = 128  # the demo model's width


def mixed() -> bytes:
    """LoRA with a bias, DoRA and LoKr, one layer each."""
    rng = np.random.default_rng(5)
    block = "transformer.transformer_blocks.0.attn."

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32) / 4

    def low_rank(name):
        return {f"{block}{name}.lora_A.weight": normal(4, SIZE), f"{block}{name}.lora_B.weight": normal(SIZE, 4)}

    return save({
        **low_rank("to_k"), f"{block}to_k.lora_B.bias": normal(SIZE),
        **low_rank("to_q"), f"{block}to_q.lora_magnitude_vector": np.abs(normal(SIZE)) + 0.5,
        f"{block}to_v.lokr_w1": normal(8, 8), f"{block}to_v.lokr_w2": normal(SIZE // 8, SIZE // 8),
    })


@pytest.fixture
def with_mixed(start, tmp_path):
    root = tmp_path / "loras"
    root.mkdir()
    (root / "mixed.safetensors").write_bytes(mixed())
    return lambda *flags: start("--lora-roots", str(root), "--lora-roots", "deploy/demo/loras", *flags)


def test_each_tensor_meets_its_patch_as_its_kind_allows(with_mixed):
    daemon = with_mixed()
    plain = daemon.generate().sha256
    pictures = set()
    for mode, direct, sidecar in ((AUTO, 3, 1), (SIDECAR, 3, 1), (DIRECT, 4, 0)):
        result = daemon.generate(lora=("mixed:0.8",), mode=mode)
        report = result.done.loras[0]
        assert (report.direct_tensors, report.sidecar_tensors) == (direct, sidecar)
        assert (report.layers_in_file, report.unmatched_count) == (3, 0)
        pictures.add(result.sha256)
    assert plain not in pictures
    assert daemon.generate().sha256 == plain
    daemon.expect_all_released()


def test_the_picture_is_the_same_wherever_the_weights_are(with_mixed):
    pictures = {mode: set() for mode in (AUTO, DIRECT)}
    for flags in ((), ("--devices", "sim:0=256MiB"), ("--devices", "sim:0=256MiB", "--residency", "stream")):
        daemon = with_mixed(*flags)
        for mode, seen in pictures.items():
            for stack in (("mixed", LORAS[0]), (LORAS[0], "mixed")):
                seen.add(daemon.generate(lora=stack, mode=mode).sha256)
        daemon.expect_all_released()
        daemon.stop()
    assert [len(seen) for seen in pictures.values()] == [1, 1]


def test_a_plan_knows_what_is_merged_and_what_is_beside(with_mixed):
    daemon = with_mixed("--devices", "sim:0=256MiB")
    daemon.generate(lora=("mixed",))
    merged = [r for r in daemon.stats().records if r.kind == "merged"]
    assert len(merged) == 1
    request = denoise_pb2.PlanRequest(model=MODEL, params=denoise_pb2.GenerateParams(prompt="a star", steps=2))
    request.loras.add(name="mixed")
    plan = daemon.denoise.Plan(request)
    assert plan.fits and not [load for load in plan.loads if load.kind == "merged"]  # it is there already


def test_inspection_counts_the_types(with_mixed):
    daemon = with_mixed()
    answer = daemon.models.InspectLora(model_pb2.InspectLoraRequest(name="mixed", model=MODEL))
    assert dict(answer.layers_by_type) == {"LoRA+bias": 1, "LoRA+DoRA": 1, "LoKr": 1}
    assert dict(answer.layers_by_rank) == {4: 2}
    assert dict(answer.match.matched) == {"transformer": 3}
    listed = {lora.name: lora for lora in daemon.models.ListLoras(model_pb2.ListLorasRequest()).loras}
    assert listed[LORAS[0]].family == "FLUX.1"
    assert listed["mixed"].layers == 3
