"""Forty files and folders as people have them under the roots: each is served, or says why not."""

import json
import os
import shutil
import subprocess

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import BIN, DEMO, denoise_pb2, model_pb2, reason_of

DEMO_MODEL = DEMO / "models/shapes-flux"
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
PARTS = {"text_encoder/model.safetensors": "text_encoders.clip_l.transformer.",
         "text_encoder_2/model.safetensors": "text_encoders.t5xxl.transformer.",
         "vae/diffusion_pytorch_model.safetensors": "vae."}
LORA = DEMO / "loras/dusk.safetensors"
OK = None


def change(path, edit):
    """Rewrites a .safetensors file."""
    tensors = load_file(path)
    save_file(edit(tensors) or tensors, path, {"format": "pt"})


def model(root, name, edit=None):
    shutil.copytree(DEMO_MODEL, root / name)
    if edit is not None:
        edit(root / name)
    return root / name


def single(root, name, tensors, ending=".safetensors"):
    save_file(tensors, root / f"{name}{ending}")
    (root / f"{name}.json").write_text('{"base": "plain"}')


def quantised(tensors):
    """As bitsandbytes leaves a linear layer."""
    name = "single_transformer_blocks.0.proj_mlp.weight"
    tensors[name] = torch.zeros(tensors[name].numel() // 2, 1, dtype=torch.uint8)
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.zeros(8, dtype=torch.uint8)
    tensors[f"{name}.absmax"] = torch.zeros(8)


def comfy(fmt):
    def edit(tensors):
        mark = json.dumps({"format": fmt}).encode()
        tensors["single_transformer_blocks.0.proj_mlp.comfy_quant"] = torch.tensor(list(mark), dtype=torch.uint8)
    return edit


def shards(folder):
    """Plain shards beside a whole variant and a stray file, which hold nonsense."""
    tensors = load_file(folder / TRANSFORMER)
    half = len(tensors) // 2
    names = sorted(tensors)
    parts = {"diffusion_pytorch_model-00001-of-00002.safetensors": names[:half],
             "diffusion_pytorch_model-00002-of-00002.safetensors": names[half:]}
    for file, part in parts.items():
        save_file({n: tensors[n] for n in part}, folder / "transformer" / file)
    (folder / TRANSFORMER).unlink()
    (folder / "transformer/diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {"total_size": float("nan")}, "weight_map": {n: f for f, part in parts.items() for n in part}}))
    for stray in ("diffusion_pytorch_model.non_ema.safetensors", "a.safetensors"):
        save_file({"x": torch.zeros(3)}, folder / "transformer" / stray)


def variant_shards(folder):
    shutil.move(folder / TRANSFORMER, folder / "transformer/diffusion_pytorch_model.fp16-00001-of-00001.safetensors")
    names = load_file(folder / "transformer/diffusion_pytorch_model.fp16-00001-of-00001.safetensors")
    (folder / "transformer/diffusion_pytorch_model.safetensors.index.fp16.json").write_text(json.dumps(
        {"weight_map": {n: "diffusion_pytorch_model.fp16-00001-of-00001.safetensors" for n in names}}))


def extras(folder):
    def edit(tensors):
        tensors["loss.logvar"] = torch.zeros(2)
        tensors["model_ema.decay"] = torch.zeros(1)
        tensors["some.counter"] = torch.zeros(1, dtype=torch.int64)
        for name in list(tensors)[:3]:
            tensors[name] = tensors[name].double()
    change(folder / TRANSFORMER, edit)


def hub(root):
    """A hub's cache: files by their contents, and links to them."""
    home = root / "models--acme--shapes"
    for file in sorted(p for p in DEMO_MODEL.rglob("*") if p.is_file()):
        blob = home / "blobs" / f"{len(list(home.glob('blobs/*'))):040x}"
        link = home / "snapshots/0123abcd" / file.relative_to(DEMO_MODEL)
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (home / "refs").mkdir()
    (home / "refs/main").write_text("0123abcd")


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def models(root, outside):
    """What lies under a model root, and what is said of each: None where it is served."""
    tensors = load_file(DEMO_MODEL / TRANSFORMER)
    model(root, "plain")
    model(root, "with space, [brackets] (v1)")
    model(root, "猫 🐈")
    model(root, "x" * 255)
    hub(root)
    (root / "link").symlink_to(root / "plain")
    model(root, "shards", shards)
    model(root, "variant", variant_shards)
    model(root, "extras", extras)
    single(root, "single", tensors)
    single(root, "CAPS", tensors, ".SAFETENSORS")
    states = {name: OK for name in ("plain", "with space, [brackets] (v1)", "猫 🐈", "x" * 255,
                                    "models--acme--shapes/snapshots/0123abcd", "link", "shards", "variant", "extras",
                                    "single", "CAPS")}
    # A base that draws nothing, and a file that has all of its own.
    model(root, "blank", lambda f: [change(f / part, lambda t: {n: v * 0 for n, v in t.items()}) for part in PARTS])
    whole = {f"model.diffusion_model.{n}": v for n, v in tensors.items()}
    for part, prefix in PARTS.items():
        whole |= {prefix + n: v for n, v in load_file(DEMO_MODEL / part).items()}
    save_file(whole, root / "all-in-one.safetensors")
    (root / "all-in-one.json").write_text('{"base": "blank"}')
    states |= {"blank": OK, "all-in-one": OK}
    shutil.copytree(DEMO_MODEL, outside / "elsewhere")
    (root / "out").symlink_to(outside / "elsewhere")
    states["out"] = "follow_links"
    (root / "gone").symlink_to(root / "nothing")
    states["gone"] = "link to nothing"
    model(root, "linked-part", lambda f: (shutil.rmtree(f / "vae"), (f / "vae").symlink_to(outside / "elsewhere/vae")))
    states["linked-part"] = "follow_links"
    model(root, "cut", lambda f: os.truncate(f / TRANSFORMER, 100_000))
    states["cut"] = "cut short"
    model(root, "two-strays", lambda f: [shutil.copy(f / TRANSFORMER, f / "transformer" / n)
                                         for n in ("b.safetensors", "c.safetensors")] and (f / TRANSFORMER).unlink())
    states["two-strays"] = "b.safetensors, c.safetensors"
    model(root, "pickled", lambda f: (f / TRANSFORMER).rename(f / "transformer/diffusion_pytorch_model.bin"))
    states["pickled"] = "pickle"
    model(root, "unknown-tensor", lambda f: change(f / TRANSFORMER, lambda t: t.update(
        {"transformer_blocks.0.attn.to_q.lora_magic": torch.zeros(2)})))
    states["unknown-tensor"] = "lora_magic"
    model(root, "nf4", lambda f: change(f / TRANSFORMER, quantised))
    states["nf4"] = "bitsandbytes' NF4"
    model(root, "nvfp4", lambda f: change(f / TRANSFORMER, comfy("nvfp4")))
    states["nvfp4"] = "ComfyUI's nvfp4"
    model(root, "comfy-fp8", lambda f: change(f / TRANSFORMER, comfy("float8_e4m3fn")))
    states["comfy-fp8"] = OK
    model(root, "sd3", lambda f: edit_json(f / "model_index.json", _class_name="StableDiffusion3Pipeline"))
    states["sd3"] = "StableDiffusion3Pipeline is not supported; use SDXL or FLUX.1"
    model(root, "no-index", lambda f: (f / "model_index.json").unlink())
    states["no-index"] = "no model_index.json"
    save_file(tensors, root / "no-sidecar.safetensors")
    states["no-sidecar.safetensors"] = "no-sidecar.json"
    single(root, "a-lora", load_file(LORA))
    states["a-lora"] = "lora_roots"
    (root / "old.ckpt").write_bytes(b"PK\x03\x04")
    states["old.ckpt"] = "pickle"
    (root / "quant.gguf").write_bytes(b"GGUF\x03")
    states["quant.gguf"] = "GGUF"
    return states


def files(root, good, outside):
    """What lies under a root of LoRAs or embeddings."""
    def put(name):
        shutil.copy(good, root / name)

    states = {}
    for name in ("good", "a, b [c] (d)", "Ünï-猫", "y" * (255 - len(".safetensors"))):
        put(f"{name}.safetensors")
        states[name] = OK
    put("SHOUT.SAFETENSORS")
    states["SHOUT"] = OK
    (root / "linked.safetensors").symlink_to(root / "good.safetensors")
    states["linked"] = OK
    shutil.copy(good, outside / good.name)
    (root / "out.safetensors").symlink_to(outside / good.name)
    states["out.safetensors"] = "follow_links"
    for name, data, why in (("empty", b"", "is empty"), ("page", b"<!DOCTYPE html><html>", "web page"),
                            ("lfs", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS")):
        (root / f"{name}.safetensors").write_bytes(data)
        states[name] = why
    (root / "bad\nname.safetensors").write_bytes(b"x")
    states["bad\\nname.safetensors"] = "control characters"
    (root / "old.pt").write_bytes(b"\x80\x02}q\x00.")
    states["old.pt"] = "pickle"
    (root / "half.safetensors.part").write_bytes(b"")
    states["half.safetensors.part"] = "did not end"
    return states


@pytest.fixture
def awkward(start, tmp_path):
    roots = {}
    for kind in ("models", "loras", "embeddings"):
        roots[kind] = tmp_path / kind
        roots[kind].mkdir()
        (tmp_path / f"outside-{kind}").mkdir()
    save_file({"emb_params": torch.zeros(2, 768)}, tmp_path / "word.safetensors")
    states = {"models": models(roots["models"], tmp_path / "outside-models"),
              "loras": files(roots["loras"], LORA, tmp_path / "outside-loras"),
              "embeddings": files(roots["embeddings"], tmp_path / "word.safetensors", tmp_path / "outside-embeddings")}
    daemon = start("--model-roots", str(roots["models"]), "--lora-roots", str(roots["loras"]), "--embedding-roots",
                   str(roots["embeddings"]), "--default-model", "plain")
    return daemon, states, roots


def test_each_is_served_or_says_why_not(awkward):
    daemon, states, _ = awkward
    assert sum(len(of_kind) for of_kind in states.values()) > 40
    for kind, expected in states.items():
        run = subprocess.run([BIN / "latentctl", "--address", daemon.address, kind], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        print(run.stdout)
        run = subprocess.run([BIN / "latentctl", "--address", daemon.address, "--json", kind], capture_output=True, text=True,
                             timeout=120)
        listed = {item["name"]: item["problem"] for item in json.loads(run.stdout)[kind]}
        assert set(listed) == set(expected), kind
        for name, problem in expected.items():
            assert (listed[name] == "") if problem is OK else (problem in listed[name]), (kind, name, listed[name])
    log = daemon.log.read_text()
    for name in ("old.ckpt", "half.safetensors.part", "no-index"):
        assert f"{name} is not served" in log


def test_what_is_listed_as_served_draws_and_the_rest_is_refused_alike(awkward):
    daemon, states, _ = awkward
    request = lambda name: denoise_pb2.GenerateRequest(  # noqa: E731
        model=name, params=denoise_pb2.GenerateParams(prompt="a star", seed=3, steps=1))
    plain = None
    for name, problem in states["models"].items():
        if name == "blank":
            continue
        if problem is OK:
            header = next(r.event.image_header for r in daemon.denoise.Generate(request(name))
                          if r.event.WhichOneof("event") == "image_header")
            plain = plain or header.sha256
            if name != "extras":  # some weights of it are in another type
                assert header.sha256 == plain, name
        else:
            with pytest.raises(grpc.RpcError) as caught:
                list(daemon.denoise.Generate(request(name)))
            assert reason_of(caught.value).reason
    shown = daemon.models.GetModel(model_pb2.GetModelRequest(name="extras")).model
    assert [(u.component, u.count, sorted(u.samples)) for u in shown.unused] == [
        ("transformer", 3, ["loss.logvar", "model_ema.decay", "some.counter"])]
    events = [r.event for r in daemon.denoise.Generate(request("all-in-one"))]
    file = "models/all-in-one.safetensors"
    assert dict(events[-1].done.sources) == {
        "text_encoder": f"{file}: text_encoders.clip_l.transformer.",
        "text_encoder_2": f"{file}: text_encoders.t5xxl.transformer.",
        "transformer": f"{file}: model.diffusion_model.", "vae": f"{file}: vae."}
    shown = daemon.models.GetModel(model_pb2.GetModelRequest(name="single")).model
    assert {c.name: c.source for c in shown.components}["vae"] == "vae/diffusion_pytorch_model.safetensors"
    daemon.expect_all_released()


def test_without_the_flag_only_what_can_be_used_is_listed(awkward):
    daemon, states, _ = awkward
    listed = daemon.models.ListModels(model_pb2.ListModelsRequest()).models
    assert {m.name for m in listed} == {name for name, problem in states["models"].items() if problem is OK}
    assert all(m.family for m in listed)


def test_links_out_of_the_roots_are_followed_when_the_config_says_so(awkward, start):
    _, _, roots = awkward
    daemon = start("--model-roots", str(roots["models"]), "--lora-roots", str(roots["loras"]), "--default-model", "plain",
                   "--follow-links")
    assert {"out", "linked-part"} <= {m.name for m in daemon.models.ListModels(model_pb2.ListModelsRequest()).models}
    assert "out" in {lora.name for lora in daemon.models.ListLoras(model_pb2.ListLorasRequest()).loras}
