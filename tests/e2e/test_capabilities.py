"""What GetModel says that a model takes is what it takes: a client that knows no family by name gets along with it."""

import io
import os
from pathlib import Path

import grpc
import pytest
from PIL import Image

from conftest import DEMO, ROOT, denoise_pb2, model_pb2, reason_of

GOLDENS = Path(os.environ.get("LATENTD_GOLDENS", ROOT / "build/goldens"))
MODELS = ("tiny-dev", "tiny-schnell", "tiny-sd15", "tiny-sd15-inpaint", "tiny-sd15-lcm", "tiny-sd2", "tiny-sdxl",
          "tiny-refiner", "tiny-control")
ROLES = {"init": denoise_pb2.MEDIA_ROLE_INIT, "mask": denoise_pb2.MEDIA_ROLE_MASK,
         "control": denoise_pb2.MEDIA_ROLE_CONTROL}
TYPES = model_pb2.RequestFieldType
# Whose range depends on the sampler: eta is DDIM's and TCD's, and LCM has no more steps than its training list.
SAMPLERS_OWN = ("eta", "steps")


def picture(shade=90, size=(64, 64)):
    out = io.BytesIO()
    Image.new("RGB", size, (shade, shade, 20)).save(out, "PNG")
    return out.getvalue()


def described(daemon, name):
    return daemon.models.GetModel(model_pb2.GetModelRequest(name=name)).model


def params_for(model, **fields):
    """A request that gives the model all it needs, and nothing else."""
    params = denoise_pb2.GenerateParams(prompt="a b", seed=1, steps=8)
    for media in model.media:
        if media.required:
            params.inputs.add(role=ROLES[media.role], data=picture())
    if model.takes_latents and model.variant == "refiner":
        params.inputs.add(role=denoise_pb2.MEDIA_ROLE_INIT, data=picture())
    for path, value in fields.items():
        set_field(params, path.replace("__", "."), value)
    return params


def set_field(params, path, value):
    *steps, name = path.split(".")
    message = params
    if steps:  # of a picture, which goes into the list
        role = steps[0].removesuffix("_image")
        inputs = [i for i in params.inputs if i.role == ROLES[role]] or [params.inputs.add(role=ROLES[role], data=picture())]
        if role == "mask" and not any(i.role == ROLES["init"] for i in params.inputs):
            params.inputs.add(role=ROLES["init"], data=picture())
        message = inputs[0]
    kind = message.DESCRIPTOR.fields_by_name[name]
    if kind.enum_type:
        value = next(v.number for v in kind.enum_type.values if v.name.lower().endswith("_" + value))
    if kind.is_repeated if hasattr(kind, "is_repeated") else kind.label == kind.LABEL_REPEATED:
        getattr(message, name).append(value)
    else:
        setattr(message, name, value)


def refusal(daemon, model, params):
    """The field that a request for this model is refused for; None where it is planned."""
    try:
        daemon.denoise.Plan(denoise_pb2.PlanRequest(model=model, params=params))
    except grpc.RpcError as error:
        reason = reason_of(error)
        return reason.fields[0] if reason.fields else reason.reason
    return None


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    from conftest import Daemon
    daemon = Daemon(tmp_path_factory.mktemp("capabilities"), "--model-roots", str(GOLDENS), "--default-model", "tiny-dev")
    yield daemon
    daemon.stop()


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_taken_in_their_range_and_refused_outside(served, name):
    model = described(served, name)
    assert refusal(served, name, params_for(model)) is None
    for field in model.fields:
        if field.type not in (TYPES.REQUEST_FIELD_TYPE_INTEGER, TYPES.REQUEST_FIELD_TYPE_NUMBER):
            continue
        path = "params." + field.name
        whole = field.type == TYPES.REQUEST_FIELD_TYPE_INTEGER
        if field.HasField("max"):
            outside = field.max + (1 if whole else 0.01)
            assert refusal(served, name, params_for(model, **{field.name: int(outside) if whole else outside})) == path
        if field.HasField("min"):
            outside = field.min if field.above_min else field.min - (1 if whole else 0.01)
            assert refusal(served, name, params_for(model, **{field.name: int(outside) if whole else outside})) == path
        if field.HasField("min") and field.HasField("max") and field.name not in SAMPLERS_OWN:
            middle = (field.min + field.max) / 2
            middle = int(middle) // max(field.multiple, 1) * max(field.multiple, 1) if whole else middle
            assert refusal(served, name, params_for(model, **{field.name: middle})) is None, field.name
        if field.multiple > 1:
            value = int(field.usual_number) + field.multiple // 2
            assert refusal(served, name, params_for(model, **{field.name: value})) == path
        if field.HasField("usual_number"):
            usual = int(field.usual_number) if whole else field.usual_number
            assert refusal(served, name, params_for(model, **{field.name: usual})) is None, field.name


@pytest.mark.parametrize("name", MODELS)
def test_choices_are_taken_and_others_are_not(served, name):
    model = described(served, name)
    for field in model.fields:
        if not field.choices or field.type != TYPES.REQUEST_FIELD_TYPE_TEXT:
            continue
        refused = {c: refusal(served, name, params_for(model, **{field.name: c})) for c in field.choices}
        if field.name == "sampler":
            # Some samplers need more steps than one, or other schedules: none is unknown.
            assert set(refused.values()) <= {None}, refused
        assert refusal(served, name, params_for(model, **{field.name: "no such"})) == "params." + field.name


@pytest.mark.parametrize("name", MODELS)
def test_fields_that_are_not_listed_are_refused_by_name(served, name):
    model = described(served, name)
    known = {field.name for field in model.fields}
    one = {"prompt_2": "x", "negative_prompt_2": "x", "prompt_syntax": "compel", "clip_skip": 1, "max_sequence_length": 8,
           "true_cfg_scale": 2.0, "guidance_rescale": 0.5, "guidance_list": 2.0, "schedule": "karras", "shift": 2.0, "eta": 0.5,
           "denoising_start": 0.5, "denoising_end": 0.5, "aesthetic_score": 5.0, "negative_aesthetic_score": 2.0}
    unknown = {f: v for f, v in one.items() if f not in known}
    for field, value in unknown.items():
        assert refusal(served, name, params_for(model, **{field: value})) == "params." + field
    roles = {media.role for media in model.media}
    for role in set(ROLES) - roles:
        params = params_for(model)
        params.inputs.add(role=ROLES[role], data=picture())
        assert refusal(served, name, params) in (f"params.{role}_image", "params.mask_image"), role
    for role in (denoise_pb2.MEDIA_ROLE_REFERENCE, denoise_pb2.MEDIA_ROLE_FIRST_FRAME, denoise_pb2.MEDIA_ROLE_LAST_FRAME):
        params = params_for(model)
        params.inputs.add(role=role, data=picture())
        assert refusal(served, name, params) == "params.inputs[0]"


def drawn(daemon, **params):
    header = None
    for reply in daemon.denoise.Generate(denoise_pb2.GenerateRequest(
            model="tiny-sd15", params=denoise_pb2.GenerateParams(prompt="a b", seed=1, steps=3, width=64, height=64, **params))):
        if reply.event.WhichOneof("event") == "image_header":
            header = reply.event.image_header
        if reply.event.WhichOneof("event") == "done":
            return header.sha256, reply.event.done.params


def test_pictures_in_the_list_are_those_of_the_fields(served):
    init, mask = picture(200), picture(255)
    by_fields, _ = drawn(served, init_image=denoise_pb2.InitImage(data=init, strength=0.6),
                         mask_image=denoise_pb2.MaskImage(data=mask, paste_back=True))
    by_list, echo = drawn(served, inputs=[
        denoise_pb2.Input(role=denoise_pb2.MEDIA_ROLE_MASK, data=mask, paste_back=True),
        denoise_pb2.Input(role=denoise_pb2.MEDIA_ROLE_INIT, data=init, strength=0.6)])
    assert by_list == by_fields
    assert echo.init_image.strength == 0.6 and echo.mask_image.paste_back and not echo.inputs
    with pytest.raises(grpc.RpcError) as caught:
        drawn(served, init_image=denoise_pb2.InitImage(data=init),
              inputs=[denoise_pb2.Input(role=denoise_pb2.MEDIA_ROLE_MASK, data=mask)])
    assert reason_of(caught.value).fields == ["params.inputs"]
    with pytest.raises(grpc.RpcError) as caught:
        drawn(served, inputs=[denoise_pb2.Input(role=denoise_pb2.MEDIA_ROLE_INIT, data=init) for _ in range(2)])
    assert reason_of(caught.value).fields == ["params.inputs[0]"]
    served.expect_all_released()
