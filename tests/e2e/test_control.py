"""Control LoRAs: they bring a picture to draw after, and room for it in the model's input."""

import io

import grpc
import numpy as np
import pytest
from conftest import reason_of
from latentd.v1 import common_pb2, denoise_pb2, model_pb2
from PIL import Image
from safetensors.numpy import save_file

SIZE = 128  # the demo model's width
DIRECT, SIDECAR = 2, 3


def png(seed=1) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    from conftest import Daemon

    root = tmp_path_factory.mktemp("control")
    rng = np.random.default_rng(3)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32) / 4

    (root / "loras").mkdir()
    save_file({"img_in.lora_A.weight": normal(4, 128), "img_in.lora_B.weight": normal(SIZE, 4),
               "img_in.lora_B.bias": normal(SIZE),
               "double_blocks.0.img_attn.norm.query_norm.scale": np.ones(32, np.float32)},
              root / "loras/edges.safetensors")
    save_file({"img_in.lora_A.weight": normal(4, 192), "img_in.lora_B.weight": normal(SIZE, 4)},
              root / "loras/three.safetensors")
    daemon = Daemon(root, "--lora-roots", str(root / "loras"), "--lora-roots", "deploy/demo/loras",
                    "--devices", "sim:0=64MiB")
    yield daemon
    assert daemon.stop() == 0


def control(seed=1):
    return denoise_pb2.ControlImage(data=png(seed))


def test_the_picture_follows_the_control_image(daemon):
    plain = daemon.generate().sha256
    for mode in (DIRECT, SIDECAR):
        one = daemon.generate(lora=("edges",), mode=mode, control_image=control(1))
        other = daemon.generate(lora=("edges", "dusk:0.5"), mode=mode, control_image=control(2))
        again = daemon.generate(lora=("edges",), mode=mode, control_image=control(1))
        assert one.sha256 == again.sha256
        assert len({plain, one.sha256, other.sha256}) == 3
        assert one.done.params.HasField("control_image") and not one.done.params.control_image.data
        assert one.done.loras[0].unmatched_count == 0
    assert daemon.generate().sha256 == plain
    daemon.expect_all_released()


def test_with_an_init_image_too(daemon):
    init = denoise_pb2.InitImage(data=png(5), strength=0.5)
    pictures = {daemon.generate(lora=("edges",), control_image=control(1), init_image=init).sha256,
                daemon.generate(lora=("edges",), control_image=control(2), init_image=init).sha256,
                daemon.generate(lora=("edges",), control_image=control(1)).sha256}
    assert len(pictures) == 3


def test_a_control_lora_for_a_share_of_the_steps(daemon):
    """Where it does not apply, the model's own input is fed."""
    request = denoise_pb2.GenerateRequest(
        model="shapes-flux", loras=[common_pb2.LoraRef(name="edges", end=0.5)],
        params=denoise_pb2.GenerateParams(prompt="x", seed=7, steps=4, control_image=control(1)))
    events = [r.event.WhichOneof("event") for r in daemon.denoise.Generate(request, timeout=60)]
    assert events[-1] == "done"


def test_inspection_says_what_it_is(daemon):
    answer = daemon.models.InspectLora(model_pb2.InspectLoraRequest(name="edges", model="shapes-flux"))
    assert dict(answer.layers_by_type) == {"LoRA+bias": 1, "set scale": 1}
    assert dict(answer.layers_by_target) == {"denoiser": 2}
    assert dict(answer.match.matched) == {"transformer": 2}


@pytest.mark.parametrize("loras,params,field", [
    (("edges",), {}, "params.control_image"),
    ((), dict(control_image=control()), "params.control_image"),
    (("dusk",), dict(control_image=control()), "params.control_image"),
    (("three",), dict(control_image=control()), "loras"),
    (("edges",), dict(control_image=denoise_pb2.ControlImage()), "params.control_image.data"),
    (("edges",), dict(control_image=denoise_pb2.ControlImage(data=b"GIF89a")), "params.control_image.data"),
])
def test_what_does_not_go_together_names_the_field(daemon, loras, params, field):
    error = daemon.fails(lora=loras, **params)
    assert (error.code, error.reason, error.fields) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", [field])
    daemon.expect_all_released()


def test_plan_with_a_control_image(daemon):
    request = denoise_pb2.PlanRequest(
        model="shapes-flux", loras=[common_pb2.LoraRef(name="edges")],
        params=denoise_pb2.GenerateParams(prompt="x", control_image=control()))
    plan = daemon.denoise.Plan(request)
    assert plan.fits and "vae" in [p.component for p in plan.phases]
    with pytest.raises(grpc.RpcError) as caught:
        daemon.denoise.Plan(denoise_pb2.PlanRequest(
            model="shapes-flux", params=denoise_pb2.GenerateParams(prompt="x", control_image=control())))
    assert reason_of(caught.value).fields == ["params.control_image"]
