"""Pictures that say how they were made, and `latentctl replay`: 20 pictures of all kinds, drawn from a seeded list of
choices, come out byte for byte again; after a restart, with other memory; and what is another file is named.

The models are the tiny random ones of the golden tests. What is in a file is read by Pillow.
"""

import io
import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BIN, ROOT, Daemon, Result
from google.protobuf import json_format
from latentd.v1 import common_pb2, denoise_pb2
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file

GOLDENS = Path(os.environ.get("LATENTD_GOLDENS", ROOT / "build/goldens"))
PNG, JPEG, LATENTS, WEBP = 1, 2, 3, 4
COMPEL, A1111 = denoise_pb2.PROMPT_SYNTAX_COMPEL, denoise_pb2.PROMPT_SYNTAX_A1111
EXTENSIONS = {PNG: "png", JPEG: "jpg", WEBP: "webp"}
PICTURES = 20


def pair(name, rows, columns, rank=4):
    generator = torch.Generator().manual_seed(len(name))
    return {f"{name}.lora_down.weight": torch.randn(rank, columns, generator=generator) / 4,
            f"{name}.lora_up.weight": torch.randn(rows, rank, generator=generator) / 4,
            f"{name}.alpha": torch.tensor(2.0)}


def flux_pair():
    weights = {}
    for file in (GOLDENS / "tiny-dev/transformer").glob("*.safetensors"):
        weights |= load_file(file)
    name = "transformer_blocks.0.attn.to_q"
    rows, columns = weights[f"{name}.weight"].shape
    generator = torch.Generator().manual_seed(3)
    return {f"transformer.{name}.lora_A.weight": torch.randn(4, columns, generator=generator) / 4,
            f"transformer.{name}.lora_B.weight": torch.randn(rows, 4, generator=generator) / 4}


def picture(seed, size=(80, 72)) -> Image.Image:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    return small.resize(size, Image.Resampling.BICUBIC)


def half_mask(size=(64, 64)) -> Image.Image:
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    pixels[:, size[0] // 2:] = 255
    return Image.fromarray(pixels)


def save(image: Image.Image, path: Path, **options) -> Path:
    image.save(path, **options)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    for name in ("loras", "embeddings", "inputs", "pictures"):
        (folder / name).mkdir()
    save_file(pair("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q", 16, 16),
              folder / "loras/unet.safetensors")
    save_file(pair("lora_te_text_model_encoder_layers_0_self_attn_q_proj", 24, 24), folder / "loras/te.safetensors")
    save_file({**pair("lora_te1_text_model_encoder_layers_0_mlp_fc1", 40, 24),
               **pair("lora_unet_input_blocks_4_1_proj_in", 32, 32)}, folder / "loras/sdxl.safetensors")
    save_file(flux_pair(), folder / "loras/flux.safetensors")
    generator = torch.Generator().manual_seed(1)
    save_file({"emb_params": torch.randn(3, 24, generator=generator)}, folder / "embeddings/cat.safetensors")
    save_file({"clip_l": torch.randn(2, 24, generator=generator), "clip_g": torch.randn(2, 40, generator=generator)},
              folder / "embeddings/catxl.safetensors")
    save(picture(1), folder / "inputs/init.png")
    save(picture(2, (64, 64)), folder / "inputs/other.png")
    save(half_mask(), folder / "inputs/mask.png")
    return folder


def flags(folder, *more):
    return ("--model-roots", str(GOLDENS), "--lora-roots", str(folder / "loras"),
            "--embedding-roots", str(folder / "embeddings"), *more)


@pytest.fixture
def running(folder):
    """running(flags…) → a daemon on this file's folders; one at a time."""
    daemons = []

    def make(*more):
        for daemon in daemons:
            if daemon.process.poll() is None:
                daemon.stop()
        daemons.append(Daemon(folder, *flags(folder, *more)))
        return daemons[-1]

    yield make
    for daemon in daemons:
        if daemon.process.poll() is None:
            daemon.stop()


def ctl(daemon, *args):
    return subprocess.run([BIN / "latentctl", "--address", daemon.address, *map(str, args)], capture_output=True,
                          text=True, timeout=120)


def draw(daemon, model, loras=(), mode=0, **params) -> Result:
    values = {"prompt": "a photo of a red house", "seed": 7, "steps": 3, "width": 64, "height": 64,
              "picture_metadata": True, **params}
    request = denoise_pb2.GenerateRequest(model=model, patch_mode=mode, loras=loras,
                                          params=denoise_pb2.GenerateParams(**values))
    result = Result()
    for response in daemon.denoise.Generate(request, timeout=120):
        result.add(response.event)
    assert result.done is not None
    return result


def case(number: int, folder: Path):
    """A picture of some kind: model, LoRAs, mode, parameters, and the flags that give its pictures again."""
    rng = random.Random(number)
    model = ["tiny-dev", "tiny-sd15", "tiny-sdxl", "tiny-sd15-inpaint", "tiny-schnell"][number % 5]
    flux, xl = model in ("tiny-dev", "tiny-schnell"), "xl" in model
    params = {"seed": rng.randrange(2**63, 2**64) if number % 4 == 0 else rng.randrange(1000),
              "steps": rng.randint(2, 4), "image_format": rng.choice([PNG, PNG, JPEG, WEBP])}
    words = ["a photo", "of a red house", "über dem Fluss, 夜", "\"quoted\", new\nline: <b>"]
    params["prompt"] = " ".join(rng.sample(words, rng.randint(1, 4)))
    inputs = []
    names = ["flux"] if flux else ["sdxl"] if xl else ["unet", "te"]
    loras = [common_pb2.LoraRef(name=n, weight=rng.choice([0.8, -0.25, 1 / 3])) for n in
             rng.sample(names, rng.randint(0, len(names)))]
    if loras and rng.random() < 0.5:
        loras[0].end = 0.7
        loras[0].block_weights["transformer" if flux else "unet" if loras[0].name != "te" else "text_encoder"] = 0.4
        loras[0].block_weights["text_encoder" if loras[0].name == "sdxl" else next(iter(loras[0].block_weights))] = 0.6
    mode = rng.choice([0, 1, 2, 3])
    if flux:
        if model == "tiny-dev" and rng.random() < 0.6:
            params |= {"negative_prompt": "fog", "true_cfg_scale": 1.7}
    else:
        params["sampler"] = rng.choice(["euler", "euler_a", "dpmpp_2m_k", "ddim", "lcm"])
        if rng.random() < 0.6:
            params["negative_prompt"] = "blurred"
        if rng.random() < 0.6:
            params["prompt"] += " <catxl>" if xl else " <cat>"
            params["prompt_syntax"] = rng.choice([COMPEL, 0])
        if rng.random() < 0.3:
            params |= {"prompt": "[a red house:a (blue:1.2) road:0.5]", "prompt_syntax": A1111}
        if rng.random() < 0.3:
            params["clip_skip"] = 1
    if "inpaint" in model or rng.random() < 0.5:
        file = folder / f"inputs/{rng.choice(['init', 'other'])}.png"
        params["init_image"] = denoise_pb2.InitImage(data=file.read_bytes(), strength=rng.choice([0.7, 1.0]))
        inputs += ["--image", file]
        if "inpaint" in model or (not flux and rng.random() < 0.5):
            params["mask_image"] = denoise_pb2.MaskImage(data=(folder / "inputs/mask.png").read_bytes(),
                                                         paste_back=rng.random() < 0.5)
            inputs += ["--mask", folder / "inputs/mask.png"]
    params["vae_tiling"] = rng.choice([0, 0, 2, 3])
    return model, loras, mode, params, inputs


def test_twenty_pictures_of_all_kinds_come_out_again(running, folder):
    cases = [case(n, folder) for n in range(PICTURES)]
    assert {c[0] for c in cases} == {"tiny-dev", "tiny-schnell", "tiny-sd15", "tiny-sdxl", "tiny-sd15-inpaint"}
    for what in (lambda c: c[1], lambda c: "<cat" in c[3]["prompt"], lambda c: "--image" in c[4],
                 lambda c: "--mask" in c[4], lambda c: c[3]["image_format"] == JPEG,
                 lambda c: c[3]["image_format"] == WEBP, lambda c: "true_cfg_scale" in c[3],
                 lambda c: c[3].get("prompt_syntax") == A1111, lambda c: c[3]["vae_tiling"] == 2):
        assert sum(1 for c in cases if what(c)) >= 2
    files = []
    daemon = running("--devices", "sim:0=256MiB")
    for number, (model, loras, mode, params, inputs) in enumerate(cases):
        result = draw(daemon, model, loras, mode, **params)
        file = folder / f"pictures/{number}.{EXTENSIONS[params['image_format']]}"
        file.write_bytes(result.pictures[0].data)
        files.append((file, inputs))
    assert len({file.read_bytes() for file, _ in files}) == PICTURES

    def all_equal(daemon, how):
        for file, inputs in files:
            run = ctl(daemon, "replay", file, *inputs)
            assert run.returncode == 0 and "equal, byte for byte" in run.stdout, (how, file, run.stdout, run.stderr)

    all_equal(daemon, "at once")
    all_equal(running("--devices", "sim:0=256MiB"), "after a restart")
    all_equal(running("--devices", "cpu"), "without a device of its own")
    streaming = running("--devices", "sim:0=40MiB", "--residency", "stream", "--ram-cap", "1GiB")
    all_equal(streaming, "streamed")


def text_of(data: bytes):
    """The record and A1111's text, by Pillow."""
    image = Image.open(io.BytesIO(data))
    if image.format == "PNG":
        return image.text["latentd"], image.text["parameters"]
    if image.format == "JPEG":
        comments = [value for name, value in image.applist if name == "COM"]
        record = "".join(c.decode("ascii").removeprefix("latentd:") for c in comments if c.startswith(b"latentd:"))
        assert image.info["comment"] == comments[-1]
        return record, image.info["comment"].decode()
    exif = image.getexif()
    comment = exif.get_ifd(0x8769)[0x9286]
    assert comment.startswith(b"UNICODE\0")
    return exif[0x010E], comment[8:].decode("utf-16-be")


@pytest.mark.parametrize("image_format", [PNG, JPEG, WEBP])
def test_the_file_has_a1111s_text_and_the_record(running, folder, image_format):
    daemon = running()
    lora = common_pb2.LoraRef(name="unet", weight=0.8)
    plain = draw(daemon, "tiny-sd15", [lora], image_format=image_format, picture_metadata=False)
    told = draw(daemon, "tiny-sd15", [lora], image_format=image_format, prompt="ein Fluß 夜 𝄞, <cat>", seed=2**64 - 1,
                negative_prompt="fog", sampler="dpmpp_2m_k", clip_skip=1, guidance=6.5, steps=3)
    assert b"fog" not in plain.pictures[0].data and plain.sha256 != told.sha256
    record, parameters = text_of(told.pictures[0].data)
    assert parameters == ("ein Fluß 夜 𝄞, <cat> <lora:unet:0.8>\nNegative prompt: fog\n"
                          "Steps: 3, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 6.5, "
                          "Seed: 18446744073709551615, Size: 64x64, Model: tiny-sd15, Clip skip: 2")
    message = json_format.Parse(record, denoise_pb2.PictureRecord())
    assert message.version == 1 and message.model == "tiny-sd15"
    assert [(r.lora.name, r.lora.weight) for r in message.loras] == [("unet", 0.8)] and message.loras[0].id
    assert [e.name for e in message.embeddings] == ["cat"]
    assert message.params.prompt == "ein Fluß 夜 𝄞, <cat>" and message.params.seed == 2**64 - 1
    assert json.dumps(json.loads(record), sort_keys=True, separators=(",", ":")) == record    # keys in order
    # The same pixels as without it.
    told_plain = draw(daemon, "tiny-sd15", [lora], image_format=image_format)
    assert np.array_equal(Image.open(io.BytesIO(told_plain.pictures[0].data)),
                          Image.open(io.BytesIO(plain.pictures[0].data)))


def test_long_prompts_fit_into_a_jpeg(running, folder, tmp_path):
    """A comment holds 65533 bytes; the record takes several."""
    daemon = running()
    prompt = "夜" * 20000
    for image_format, name in ((JPEG, "long.jpg"), (PNG, "long.png"), (WEBP, "long.webp")):
        result = draw(daemon, "tiny-sd15", image_format=image_format, prompt=prompt)
        file = tmp_path / name
        file.write_bytes(result.pictures[0].data)
        assert json.loads(text_of(file.read_bytes())[0] if image_format != JPEG else "".join(
            v.decode().removeprefix("latentd:") for n, v in Image.open(file).applist
            if n == "COM" and v.startswith(b"latentd:")))["params"]["prompt"] == prompt
        run = ctl(daemon, "replay", file)
        assert run.returncode == 0, (run.stdout, run.stderr)


def test_it_is_off_and_the_config_turns_it_on(running, folder):
    off = running()
    assert not Image.open(io.BytesIO(draw(off, "tiny-sd15", picture_metadata=None).pictures[0].data)).text
    on = running("--picture-metadata")
    assert Image.open(io.BytesIO(draw(on, "tiny-sd15", picture_metadata=None).pictures[0].data)).text["latentd"]
    assert not Image.open(io.BytesIO(draw(on, "tiny-sd15", picture_metadata=False).pictures[0].data)).text
    latents = draw(on, "tiny-sd15", image_format=LATENTS, picture_metadata=None)
    assert b"red house" not in latents.pictures[0].data


def test_pictures_of_one_job_come_out_one_by_one(running, folder, tmp_path):
    daemon = running()
    for model in ("tiny-sd15", "tiny-schnell"):
        result = draw(daemon, model, count=3, seed=40, preview_every=1)
        for i, made in enumerate(result.pictures):
            file = tmp_path / f"{model}-{i}.png"
            file.write_bytes(made.data)
            assert json.loads(Image.open(file).text["latentd"])["params"]["seed"] == str(40 + i)
            run = ctl(daemon, "replay", file, "-o", tmp_path / "again.png")
            assert run.returncode == 0, (run.stdout, run.stderr)
            assert (tmp_path / "again.png").read_bytes() == made.data


def test_latents_are_handed_over_again(running, folder, tmp_path):
    daemon = running()
    base = draw(daemon, "tiny-sdxl", steps=10, denoising_end=0.8, image_format=LATENTS)
    (tmp_path / "l.safetensors").write_bytes(base.pictures[0].data)
    refined = draw(daemon, "tiny-refiner", steps=10, denoising_start=0.8, init_latents=base.pictures[0].data)
    (tmp_path / "r.png").write_bytes(refined.pictures[0].data)
    run = ctl(daemon, "replay", tmp_path / "r.png", "--latents", tmp_path / "l.safetensors")
    assert run.returncode == 0, (run.stdout, run.stderr)
    assert "--latents" in ctl(daemon, "replay", tmp_path / "r.png").stderr


def test_what_is_not_as_it_was_is_named(running, folder, tmp_path):
    root = tmp_path / "roots"
    for name, kind in (("te", "loras"), ("cat", "embeddings")):
        (root / kind).mkdir(parents=True)
        shutil.copy(folder / f"{kind}/{name}.safetensors", root / f"{kind}/my_{name}.safetensors")
    shutil.copytree(GOLDENS / "tiny-sd15", root / "models/m")
    daemon = running("--model-roots", root / "models", "--lora-roots", root / "loras", "--embedding-roots",
                     root / "embeddings")
    init = (folder / "inputs/init.png").read_bytes()
    result = draw(daemon, "m", [common_pb2.LoraRef(name="my_te")], prompt="a <my_cat>",
                  init_image=denoise_pb2.InitImage(data=init, strength=0.8))
    file = tmp_path / "p.png"
    file.write_bytes(result.pictures[0].data)
    again = ("replay", file, "--image", folder / "inputs/init.png")
    assert ctl(daemon, *again).returncode == 0

    usage = ctl(daemon, "replay", file)
    assert usage.returncode == 2 and "--image" in usage.stderr
    many = ctl(daemon, *again, "--mask", folder / "inputs/mask.png")
    assert many.returncode == 2 and "--mask" in many.stderr
    other = ctl(daemon, "replay", file, "--image", folder / "inputs/other.png")
    assert other.returncode == 1 and "other.png: is another file than then" in other.stdout
    assert "not drawn" in other.stdout

    # The same weights in another file: the pixels are the same, and what the picture says is not.
    (root / "loras/new").write_bytes((root / "loras/my_te.safetensors").read_bytes())
    (root / "loras/new").rename(root / "loras/my_te.safetensors")
    moved = ctl(daemon, *again)
    assert moved.returncode == 1
    assert "LoRA my_te: is another file than then" in moved.stdout and "its pixels are equal" in moved.stdout
    assert "loras.my_te.id" in moved.stdout
    # Other weights.
    save_file(pair("lora_te_text_model_encoder_layers_0_self_attn_q_proj", 24, 24, rank=2), root / "loras/my_te.safetensors")
    changed = json.loads(ctl(daemon, "--json", *again).stdout)
    assert (changed["equal"], changed["drawn"], changed["changed"]) == (False, True, ["LoRA my_te"])
    assert changed["differing_pixels"] > 0
    # Nothing there.
    (root / "loras/my_te.safetensors").unlink()
    (root / "embeddings/my_cat.safetensors").unlink()
    shutil.rmtree(root / "models/m")
    gone = ctl(daemon, *again)
    assert gone.returncode == 1
    for what in ("model m", "LoRA my_te", "embedding my_cat"):
        assert f"{what}: is not there" in gone.stdout, gone.stdout


def test_files_without_a_record_are_refused(running, folder, tmp_path):
    daemon = running()
    file = tmp_path / "x.png"
    save(picture(1), file)
    run = ctl(daemon, "replay", file)
    assert run.returncode == 1 and "NO_RECORD" in run.stderr
    from PIL.PngImagePlugin import PngInfo
    for text in ("", "{", "[]", '{"version": 2}', '{"version": 1, "no_such_field": 1}', '{"version": 1, "params": 5}'):
        info = PngInfo()
        info.add_text("latentd", text)
        save(picture(1), file, pnginfo=info)
        run = ctl(daemon, "replay", file)
        assert run.returncode == 1 and "BAD_RECORD" in run.stderr, text
    assert ctl(daemon, "replay", tmp_path / "absent.png").returncode == 4


def test_a_tile_that_was_used_can_be_asked_for(running, folder):
    daemon = running()
    tiled = draw(daemon, "tiny-sd15", vae_tiling=3)
    tile = next(p.tile for p in tiled.done.phases if p.component == "vae")
    assert tile > 0
    assert draw(daemon, "tiny-sd15", decode_tile=tile, encode_tile=tile).sha256 != draw(daemon, "tiny-sd15").sha256
    record = json.loads(Image.open(io.BytesIO(tiled.pictures[0].data)).text["latentd"])
    assert record["params"]["decode_tile"] == tile and "vae_tiling" not in record["params"]
    import grpc
    with pytest.raises(grpc.RpcError) as caught:
        draw(daemon, "tiny-sd15", decode_tile=33)
    assert "params.decode_tile" in caught.value.details() and f"0, {tile}" in caught.value.details()
