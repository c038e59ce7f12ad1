"""SD 1.5 and SDXL through the daemon: every sampler, hand-over to the refiner, inpainting, LoRAs, wrong requests.

The models are the tiny random ones of the golden tests, where the numbers are compared with diffusers.
"""

import io
import os
import re
import shutil
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from conftest import ROOT, Daemon, Result, reason_of
from latentd.v1 import common_pb2, denoise_pb2, model_pb2, server_pb2
from PIL import Image
from safetensors.numpy import load
from safetensors.torch import save_file

GOLDENS = Path(os.environ.get("LATENTD_GOLDENS", ROOT / "build/goldens"))
DIRECT, SIDECAR = 2, 3
KOHYA = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"


def png(seed=1, size=(64, 64), grey=False) -> bytes:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    if grey:
        pixels[:] = 0
        pixels[:, size[0] // 2:] = 255
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def pair(name, rows, columns, rank=4, kernel=()):
    generator = torch.Generator().manual_seed(len(name))
    return {f"{name}.lora_down.weight": torch.randn(rank, columns, *kernel, generator=generator) / 4,
            f"{name}.lora_up.weight": torch.randn(rows, rank, *(1 for _ in kernel), generator=generator) / 4,
            f"{name}.alpha": torch.tensor(2.0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd")
    (folder / "loras").mkdir()
    save_file(pair(KOHYA, 16, 16), folder / "loras/unet.safetensors")
    save_file(pair("lora_unet_down_blocks_0_resnets_0_conv1", 16, 16, kernel=(3, 3)), folder / "loras/locon.safetensors")
    save_file(pair("lora_te_text_model_encoder_layers_0_self_attn_q_proj", 24, 24), folder / "loras/te.safetensors")
    save_file({**pair("lora_te1_text_model_encoder_layers_0_mlp_fc1", 40, 24),
               **pair("lora_te2_text_model_encoder_layers_0_mlp_fc1", 56, 40),
               **pair("lora_unet_input_blocks_4_1_proj_in", 32, 32)}, folder / "loras/sdxl.safetensors")
    return folder


@pytest.fixture(scope="module")
def daemon(folder):
    daemon = Daemon(folder, "--model-roots", str(GOLDENS), "--lora-roots", str(folder / "loras"),
                    "--devices", "sim:0=256MiB")
    yield daemon
    assert daemon.stop() == 0


def draw(daemon, model, *refs, mode=0, **params) -> Result:
    result = Result()
    values = {"prompt": "a photo of a red house", "seed": 7, "steps": 4, "width": 64, "height": 64, **params}
    request = denoise_pb2.GenerateRequest(
        model=model, patch_mode=mode, loras=[common_pb2.LoraRef(name=r) if isinstance(r, str) else r for r in refs],
        params=denoise_pb2.GenerateParams(**values))
    for response in daemon.denoise.Generate(request, timeout=120):
        result.add(response.event)
    assert result.done is not None
    return result


def fails(daemon, model, *refs, **params):
    with pytest.raises(grpc.RpcError) as caught:
        draw(daemon, model, *refs, **params)
    daemon.expect_all_released()
    return reason_of(caught.value)


def samplers(daemon) -> list[str]:
    return list(daemon.server.GetServerInfo(server_pb2.GetServerInfoRequest()).samplers)


def test_every_sampler_draws_the_same_twice_and_leaves_no_trace_of_a_lora(daemon):
    """None → LoRA → none, on each sampler: bit-equal where the request is equal."""
    names = samplers(daemon)
    assert len(names) >= 31
    pictures = {}
    for sampler in names:
        plain = draw(daemon, "tiny-sd15", sampler=sampler)
        with_lora = draw(daemon, "tiny-sd15", "unet", sampler=sampler)
        again = draw(daemon, "tiny-sd15", sampler=sampler)
        assert plain.sha256 == again.sha256, sampler
        assert plain.sha256 != with_lora.sha256, sampler
        assert draw(daemon, "tiny-sd15", "unet", sampler=sampler).sha256 == with_lora.sha256, sampler
        pictures[sampler] = plain.sha256
    assert len(set(pictures.values())) > len(names) * 3 // 4    # some agree on four steps
    daemon.expect_all_released()


@pytest.mark.parametrize("model,sampler", [("tiny-sd15", "euler_a"), ("tiny-sdxl", "dpmpp_2m_sde_k"), ("tiny-sdxl", "ddim")])
def test_three_at_once_are_three_singles(daemon, model, sampler):
    batch = draw(daemon, model, sampler=sampler, count=3, seed=20)
    singles = [draw(daemon, model, sampler=sampler, seed=20 + i).sha256 for i in range(3)]
    assert [p.sha256 for p in batch.pictures] == singles and len(set(singles)) == 3


def test_loras_on_every_component(daemon):
    plain = {m: draw(daemon, m).sha256 for m in ("tiny-sd15", "tiny-sdxl")}
    for model, lora, matched in (("tiny-sd15", "unet", {"unet": 1}), ("tiny-sd15", "locon", {"unet": 1}),
                                 ("tiny-sd15", "te", {"text_encoder": 1}),
                                 ("tiny-sdxl", "sdxl", {"text_encoder": 1, "text_encoder_2": 1, "unet": 1})):
        for mode in (DIRECT, SIDECAR):
            result = draw(daemon, model, lora, mode=mode)
            assert dict(result.done.loras[0].matched) == matched
            report, layers = result.done.loras[0], sum(matched.values())
            assert report.unmatched_count == 0
            assert (report.direct_tensors, report.sidecar_tensors) == ((layers, 0) if mode == DIRECT else (0, layers))
            assert result.sha256 != plain[model]
        assert draw(daemon, model).sha256 == plain[model]
    daemon.expect_all_released()


def test_streamed_networks_draw_the_same_bytes(daemon, folder):
    init = denoise_pb2.InitImage(data=png(3), strength=0.7)
    (folder / "streamed").mkdir()
    streamed = Daemon(folder / "streamed", "--model-roots", str(GOLDENS), "--lora-roots", str(folder / "loras"),
                      "--devices", "sim:0=256MiB", "--residency", "stream")
    for model, loras in (("tiny-sd15", ["unet", "locon", "te"]), ("tiny-sdxl", ["sdxl"]), ("tiny-refiner", [])):
        for mode in (DIRECT, SIDECAR) if loras else (0,):
            results = [draw(d, model, *loras, mode=mode, init_image=init) for d in (daemon, streamed)]
            assert results[0].sha256 == results[1].sha256, (model, mode)
            for component in {p.component for p in results[1].done.phases}:
                phase = next(p for p in results[1].done.phases if p.component == component)
                assert phase.resident_bytes < phase.full_bytes, (model, component)
    streamed.expect_all_released()
    assert streamed.stop() == 0


def test_prompts_change_from_step_to_step(daemon):
    def drawn(prompt, **more):
        return draw(daemon, "tiny-sdxl", prompt=prompt, prompt_syntax=denoise_pb2.PROMPT_SYNTAX_A1111, steps=4, seed=5,
                    **more).sha256

    house, road = drawn("a red house"), drawn("a blue road")
    mixed = drawn("[a red house:a blue road:2]")
    assert len({house, road, mixed}) == 3
    assert drawn("[a red house:a blue road:0.5]") == mixed == drawn("a [red:blue:2] [house:road:.5]")
    assert drawn("[a red house:a blue road:4]") == house and drawn("[a red house:a blue road:0]") == road
    turns = drawn("[a red house|a blue road]")
    assert turns not in (house, road, mixed) and turns == drawn("a [red|blue] [house|road]")
    assert drawn("[a red house:a blue road:2]", negative_prompt="[tree:fog:1]") != mixed
    joined = drawn("a red house AND a blue road :0.5")
    assert joined not in (house, road, mixed) and joined == drawn("a red house :1 AND a blue road :.5")
    assert (drawn("a red house"), drawn("[a red house:a blue road:2]")) == (house, mixed)    # encoded texts are kept
    daemon.expect_all_released()


def test_the_refiner_takes_over(daemon):
    base = draw(daemon, "tiny-sdxl", steps=10, denoising_end=0.8, image_format=denoise_pb2.IMAGE_FORMAT_LATENTS)
    latents = base.pictures[0].data
    assert load(latents)["latents"].shape == (4, 8, 8)
    assert [e.image_header.mime for e in base.events if e.HasField("image_header")] == ["application/x-safetensors"]
    refined = draw(daemon, "tiny-refiner", steps=10, denoising_start=0.8, init_latents=latents)
    assert 1 <= sum(e.HasField("step") for e in refined.events) < 10
    picture = Image.open(io.BytesIO(refined.pictures[0].data))
    assert picture.size == (64, 64)
    assert not refined.done.params.init_latents
    # As a picture of its own, and with another end.
    assert draw(daemon, "tiny-sdxl", steps=10).sha256 != refined.sha256


def test_inpainting_keeps_what_is_black(daemon):
    init, mask = denoise_pb2.InitImage(data=png(3), strength=1), denoise_pb2.MaskImage(data=png(1, grey=True))
    for model in ("tiny-sd15", "tiny-sd15-inpaint", "tiny-sdxl"):
        one = draw(daemon, model, init_image=init, mask_image=mask, seed=1)
        other = draw(daemon, model, init_image=init, mask_image=mask, seed=2)
        assert one.sha256 != other.sha256
        assert one.done.params.HasField("mask_image") and not one.done.params.mask_image.data
    soft = denoise_pb2.MaskImage(data=png(1, grey=True), gradient=True)
    assert draw(daemon, "tiny-sd15", init_image=init, mask_image=soft).pictures


def test_prompt_syntax_is_asked_for(daemon):
    """Weights count where the request says so, and are text elsewhere."""
    text = "a (red)++ house"
    pictures = {draw(daemon, "tiny-sd15", prompt=text, prompt_syntax=syntax).sha256
                for syntax in (denoise_pb2.PROMPT_SYNTAX_PLAIN, denoise_pb2.PROMPT_SYNTAX_COMPEL)}
    assert len(pictures) == 2
    assert draw(daemon, "tiny-sd15", prompt="a red house", prompt_syntax=denoise_pb2.PROMPT_SYNTAX_COMPEL).sha256 == \
        draw(daemon, "tiny-sd15", prompt="a red house").sha256


def test_one_file_is_the_folder(start, tmp_path):
    """A checkpoint in one file gives the picture of the folder that it was made of."""
    root = tmp_path / "models"
    root.mkdir()
    for name in ("tiny-sd15", "tiny-sdxl"):
        shutil.copytree(GOLDENS / name, root / name)
        shutil.copy(GOLDENS / f"single/{name}.safetensors", root / f"{name}-file.safetensors")
        (root / f"{name}-file.json").write_text('{"base": "%s"}' % name)
    daemon = start("--model-roots", str(root))
    for name in ("tiny-sd15", "tiny-sdxl"):
        assert draw(daemon, name).sha256 == draw(daemon, f"{name}-file").sha256
        listed = daemon.models.GetModel(model_pb2.GetModelRequest(name=f"{name}-file")).model
        assert listed.family == ("sd15" if "sd15" in name else "sdxl")


INIT = denoise_pb2.InitImage(data=png(3))
MASK = denoise_pb2.MaskImage(data=png(1))
WRONG = [
    ("tiny-sd15", dict(mask_image=MASK), "params.mask_image"),
    ("tiny-sd15", dict(init_image=INIT, mask_image=denoise_pb2.MaskImage()), "params.mask_image.data"),
    ("tiny-sd15", dict(init_image=INIT, mask_image=denoise_pb2.MaskImage(data=b"x")), "params.mask_image.data"),
    ("tiny-sd15-inpaint", dict(), "params.mask_image"),
    ("tiny-refiner", dict(), "params.init_image"),
    ("tiny-sd15", dict(sampler="euler_b"), "params.sampler"),
    ("tiny-sd15", dict(schedule="linear"), "params.schedule"),
    ("tiny-sd15", dict(sampler="lcm", schedule="karras"), "params.schedule"),
    ("tiny-sd15", dict(guidance_list=[1.0] * 9), "params.guidance_list"),
    ("tiny-sd15", dict(guidance_list=[-1.0]), "params.guidance_list"),
    ("tiny-sd15", dict(guidance=float("nan")), "params.guidance"),
    ("tiny-sd15", dict(guidance_rescale=1.5), "params.guidance_rescale"),
    ("tiny-sd15", dict(true_cfg_scale=3.0), "params.true_cfg_scale"),
    ("tiny-sd15", dict(clip_skip=40), "params.clip_skip"),
    ("tiny-sd15", dict(clip_skip=-1), "params.clip_skip"),
    ("tiny-sd15", dict(width=65), "params.width"),
    ("tiny-sd15", dict(shift=3.0), "params.shift"),
    ("tiny-sd15", dict(eta=2.0, sampler="ddim"), "params.eta"),
    ("tiny-sd15", dict(prompt_2="x"), "params.prompt_2"),
    ("tiny-sd15", dict(aesthetic_score=5.0), "params.aesthetic_score"),
    ("tiny-sdxl", dict(aesthetic_score=5.0), "params.aesthetic_score"),
    ("tiny-sdxl", dict(denoising_end=1.5), "params.denoising_end"),
    ("tiny-sdxl", dict(denoising_start=0.5), "params.denoising_start"),
    ("tiny-sdxl", dict(init_latents=b"not a file"), "params.init_latents"),
    ("tiny-sdxl", dict(init_latents=b"x", init_image=INIT), "params.init_latents"),
    ("tiny-sdxl", dict(original_size=denoise_pb2.Size(width=-1, height=5)), "params.original_size"),
    ("tiny-sd15", dict(prompt="a AND b", prompt_syntax=denoise_pb2.PROMPT_SYNTAX_A1111, guidance=1), "params.guidance"),
    ("tiny-sd15", dict(prompt="a :101 AND b", prompt_syntax=denoise_pb2.PROMPT_SYNTAX_A1111), "params.prompt"),
    ("tiny-sd15", dict(prompt="a <lora:dusk:0.8>", prompt_syntax=denoise_pb2.PROMPT_SYNTAX_A1111), "params.prompt"),
    ("tiny-sd15", dict(prompt="a [%s]" % "|".join(map(str, range(65))), prompt_syntax=denoise_pb2.PROMPT_SYNTAX_A1111,
                       steps=66), "params.prompt"),
    ("tiny-sdxl", dict(prompt="a AND b", prompt_2="c", prompt_syntax=denoise_pb2.PROMPT_SYNTAX_A1111), "params.prompt_2"),
    ("tiny-sd15", dict(prompt='("a", "b").blend(1)', prompt_syntax=denoise_pb2.PROMPT_SYNTAX_COMPEL), "params.prompt"),
    ("tiny-sd15", dict(init_image=denoise_pb2.InitImage(data=png(3), strength=0.0)), "params.init_image.strength"),
    ("tiny-sd15", dict(init_image=denoise_pb2.InitImage(data=png(3), strength=0.01)), "params.init_image.strength"),
    ("tiny-sd15", dict(decode_tile=7), "params.decode_tile"),
    ("tiny-sd15", dict(encode_tile=-1), "params.encode_tile"),
    ("tiny-sd15", dict(denoise_tiles=denoise_pb2.DenoiseTiles(width=20)), "params.denoise_tiles"),
    ("tiny-sd15", dict(denoise_tiles=denoise_pb2.DenoiseTiles(overlap=600)), "params.denoise_tiles"),
    ("tiny-sd15", dict(control_image=denoise_pb2.ControlImage(data=png(3))), "params.control_image"),
]


@pytest.mark.parametrize("model,params,field", WRONG, ids=lambda v: v if isinstance(v, str) else "")
def test_wrong_requests_name_the_field(daemon, model, params, field):
    error = fails(daemon, model, **params)
    assert (error.code, error.reason, error.fields) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", [field]), error
    assert re.findall(r"params[.\w]*:", error.message) == [f"{field}:"], error    # once, under one name


def test_loras_of_another_family_are_refused(daemon):
    assert fails(daemon, "tiny-sdxl", "unet").reason == "LORA_MISMATCH"


def test_fields_of_other_families_are_refused(start):
    """FLUX.1 does not drop what it cannot do."""
    daemon = start()
    for params, field in ((dict(clip_skip=1), "params.clip_skip"), (dict(schedule="karras"), "params.schedule"),
                          (dict(mask_image=MASK, init_image=INIT), "params.mask_image")):
        assert daemon.fails(**params).fields == [field]
