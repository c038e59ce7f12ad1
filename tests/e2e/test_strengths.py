"""How strong a LoRA is: by part of the model, and by share of the steps."""

import io

import grpc
import numpy as np
import pytest
import torch
from conftest import DEMO, MODEL, Result, reason_of
from latentd.v1 import common_pb2, denoise_pb2
from PIL import Image
from safetensors.torch import load_file, save_file

AUTO, DIRECT, SIDECAR = 0, 2, 3
PROMPT = "a red circle on a blue background"
FILES = DEMO / "loras"


def ref(name, **strength):
    return common_pb2.LoraRef(name=name, **strength)


def picture(daemon, *refs, mode=AUTO, steps=4):
    result = Result()
    request = denoise_pb2.GenerateRequest(
        model=MODEL, loras=refs, patch_mode=mode,
        params=denoise_pb2.GenerateParams(prompt=PROMPT, seed=7, steps=steps))
    for response in daemon.denoise.Generate(request, timeout=120):
        result.add(response.event)
    return result


def pixels(result):
    return np.asarray(Image.open(io.BytesIO(result.pictures[0].data))).astype(int)


def with_diffusers(active, steps):
    """The same picture by diffusers and peft, with the LoRA switched on and off between steps."""
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(DEMO / "models" / MODEL, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(str(FILES / "dusk.safetensors"))
    switch = lambda step: pipe.enable_lora() if active(step / steps) else pipe.disable_lora()
    switch(0)

    def next_step(pipe, index, timestep, kwargs):
        switch(index + 1)
        return kwargs

    image = pipe(PROMPT, width=128, height=128, num_inference_steps=steps, guidance_scale=0.0, max_sequence_length=64,
                 generator=torch.Generator().manual_seed(7), callback_on_step_end=next_step).images[0]
    return np.asarray(image).astype(int)


@pytest.mark.parametrize("start,end", [(0, 0.5), (0.25, 1), (0.25, 0.75)])
def test_a_share_of_the_steps_is_what_diffusers_makes_of_it(daemon, start, end):
    steps = 8
    expected = with_diffusers(lambda progress: start <= progress < end, steps)
    plain, all_steps = (pixels(picture(daemon, *refs, steps=steps)) for refs in ((), (ref("dusk"),)))
    for mode in (DIRECT, SIDECAR):
        result = picture(daemon, ref("dusk", start=start, end=end), mode=mode, steps=steps)
        # The demo's weights are bf16, and so is what is merged into them; diffusers computes beside them in fp32.
        assert np.abs(pixels(result) - expected).max() <= (1 if mode == SIDECAR else 4)
        assert np.abs(pixels(result) - plain).max() > 8
        assert np.abs(pixels(result) - all_steps).max() > 8
        # Each tensor is counted once, however often it was patched.
        report = result.done.loras[0]
        assert report.direct_tensors + report.sidecar_tensors == sum(report.matched.values())
    daemon.expect_all_released()


def test_a_schedule_gives_the_same_bytes_however_memory_is(start):
    digests = set()
    for flags in ((), ("--devices", "sim:0=64MiB"), ("--devices", "sim:0=64MiB", "--residency", "stream")):
        daemon = start(*flags)
        for mode in (DIRECT, SIDECAR):
            refs = (ref("dusk", start=0.25, end=0.75), ref("checker", weight=0.5, end=0.5))
            digests.add((mode, picture(daemon, *refs, mode=mode).sha256))
        daemon.expect_all_released()
    assert len(digests) == 2  # one for each mode


def test_a_lora_is_held_while_it_does_not_apply(daemon):
    with_lora = daemon.session()
    with_lora.send(request_id="set", set_loras=denoise_pb2.SessionRequest.SetLoras(loras=[ref("dusk", start=0.9)]))
    next(with_lora.call)
    with_lora.start("a", steps=10)
    for _ in range(3):
        with_lora.until("step")
        locked = [r.key for r in daemon.stats().records if r.lock_count and "dusk" in r.key]
        assert locked
    with_lora.wait("a")
    with_lora.close()
    daemon.expect_all_released()


def test_a_block_weight_is_a_file_with_those_layers_scaled(start, tmp_path):
    tensors = load_file(FILES / "dusk.safetensors")
    scaled = "transformer.transformer_blocks.0."
    ups = {k: v for k, v in tensors.items() if k.startswith(scaled) and ("lora_B" in k or "lora_up" in k)}
    assert ups, sorted(tensors)[:4]
    # A power of two: the same numbers whether the factor is in the file or in the request.
    root = tmp_path / "loras"
    root.mkdir()
    save_file({**tensors, **{k: v * 0.5 for k, v in ups.items()}}, root / "half.safetensors")
    save_file({**tensors, **{k: torch.zeros_like(v) for k, v in ups.items()}}, root / "none.safetensors")
    daemon = start("--lora-roots", str(root), "--lora-roots", str(FILES))
    for mode in (DIRECT, SIDECAR):
        for file, factor in (("half", 0.5), ("none", 0)):
            by_request = picture(daemon, ref("dusk", block_weights={"transformer.transformer_blocks.0": factor}), mode=mode)
            by_file = picture(daemon, ref(file), mode=mode)
            if factor == 0 and mode == DIRECT:  # a weight that met a difference of zeros is the same weight
                assert by_request.sha256 == by_file.sha256
            assert np.abs(pixels(by_request) - pixels(by_file)).max() <= 1
        assert by_request.sha256 != picture(daemon, ref("dusk"), mode=mode).sha256


@pytest.mark.parametrize("strength,field", [
    (dict(start=0.5, end=0.5), "loras.start"),
    (dict(start=-0.1), "loras.start"),
    (dict(end=1.5), "loras.start"),
    (dict(start=float("nan")), "loras.start"),
    (dict(block_weights={"transformer": float("inf")}), "loras.block_weights"),
    (dict(block_weights={"transformer": 2000}), "loras.block_weights"),
    (dict(block_weights={"unet.down_blocks.0": 0.5}), "loras.block_weights"),
    (dict(block_weights={"transformer.transformer_block": 0.5}), "loras.block_weights"),
    (dict(block_weights={f"b{i}": 1.0 for i in range(1100)}), "loras.block_weights"),
])
def test_strengths_that_make_no_sense_name_the_field(daemon, strength, field):
    with pytest.raises(grpc.RpcError) as caught:
        picture(daemon, ref("dusk", **strength))
    reason = reason_of(caught.value)
    assert (reason.code, reason.reason, reason.fields) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", [field])
    daemon.expect_all_released()
