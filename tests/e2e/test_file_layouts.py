"""Every layout in which diffusers and transformers save a model's weights, and those of checkpoints in one file, draw the
picture of the folder that they were made from. Saved by these libraries, not listed by hand."""

import importlib
import itertools
import json
import os
import shutil
import sys
from pathlib import Path

import grpc
import pytest
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from conftest import ROOT, denoise_pb2, model_pb2, reason_of

GOLDENS = Path(os.environ.get("LATENTD_GOLDENS", ROOT / "build/goldens"))
MODELS = {"flux": "tiny-dev", "sd15": "tiny-sd15", "sdxl": "tiny-sdxl"}
PARTS = ("transformer", "unet", "vae", "text_encoder", "text_encoder_2")


def golden_script(name):
    """A module of tests/goldens: where the names of checkpoints in one file are."""
    sys.path.insert(0, str(ROOT / "tests/goldens"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def parts_of(pipeline):
    return {name: getattr(pipeline, name) for name in PARTS if getattr(pipeline, name, None) is not None}


def nonsense(folder, source):
    """The files of `source` with zeros for weights, laid into `folder` where it has none of that name."""
    for file in source.rglob("*.safetensors*"):
        target = folder / file.relative_to(source)
        if target.exists():
            continue
        if file.suffix == ".safetensors":
            save_file({n: t * 0 for n, t in load_file(file).items()}, target)
        else:
            shutil.copy(file, target)


def folders(pipeline, golden, root):
    """Folders of `root` that draw what `golden` does, by name."""
    shutil.copytree(golden, root / "golden")
    names = ["golden"]

    def save(name, variant, size):
        # Tokenizers and settings as they were: what is tested is where weights lie.
        shutil.copytree(golden, root / name, ignore=shutil.ignore_patterns("*.safetensors*"))
        for part, module in parts_of(pipeline).items():
            module.save_pretrained(root / name / part, variant=variant, max_shard_size=size)
        return root / name

    sizes = {"whole": "10GB", "shards": "60KB"}
    for variant, size in itertools.product((None, "fp16", "non_ema"), sizes):
        name = f"{variant or 'plain'}-{size}"
        saved = save(name, variant, sizes[size])
        assert (len(list(saved.rglob("*-of-*.safetensors"))) > 1) == (size == "shards")
        names.append(name)
    # Of two in one folder the one that diffusers reads; the other's weights are zeros.
    for (first, a), (second, b) in itertools.product(itertools.product(("plain", "fp16"), sizes), repeat=2):
        if first != "plain" or second == "plain":
            continue
        name = f"{first}-{a}-beside-{second}-{b}"
        shutil.copytree(root / f"{first}-{a}", root / name)
        nonsense(root / name, root / f"{second}-{b}")
        names.append(name)
    # Indexes of a variant by transformers' name and by diffusers' name.
    shutil.copytree(root / "fp16-shards", root / "other-index")
    renamed = 0
    for index in list((root / "other-index").rglob("*.index*.json")):
        stem = index.name.split(".")[0]
        names_of = {f"{stem}.safetensors.index.fp16.json", f"{stem}.fp16.safetensors.index.json"}
        other = next(iter(names_of - {index.name}))
        index.rename(index.with_name(other))
        renamed += 1
    assert renamed > 0
    return names + ["other-index"]


def checkpoints(kind, pipeline, root):
    """Checkpoints in one file that draw what golden does, with `base` lending what they lack."""
    models, sd = golden_script("models"), golden_script("sd_models")
    files = {}
    if kind == "flux":
        native = models.native_transformer(pipeline.transformer)
        files["native"] = native
        files["comfy"] = {f"model.diffusion_model.{n}": t for n, t in native.items()}
        files["diffusers-names"] = pipeline.transformer.state_dict()
        encoders = {f"text_encoders.clip_l.transformer.{n}": t
                    for n, t in sd.transformers_clip(pipeline.text_encoder).items()}
        encoders |= {f"text_encoders.t5xxl.transformer.{n}": t
                     for n, t in pipeline.text_encoder_2.state_dict().items() if n != "encoder.embed_tokens.weight"}
        vae = {f"vae.{n}": t for n, t in models.native_vae(pipeline.vae).items()}
        files["all-in-one"] = files["comfy"] | encoders | vae
    else:
        whole = sd.checkpoint(pipeline.unet, pipeline.vae, pipeline.text_encoder, getattr(pipeline, "text_encoder_2", None))
        files["compvis"] = whole
        files["unet"] = {n: t for n, t in whole.items() if n.startswith("model.diffusion_model.")}
        files["without-vae"] = {n: t for n, t in whole.items() if not n.startswith("first_stage_model.")}
    for name, tensors in files.items():
        save_file({n: t.detach().contiguous().clone() for n, t in tensors.items()}, root / f"{name}.safetensors",
                  {"format": "pt"})
        (root / f"{name}.json").write_text(json.dumps({"base": "golden"}))
    return list(files)


def draw(daemon, model):
    header = None
    for response in daemon.denoise.Generate(denoise_pb2.GenerateRequest(
            model=model, params=denoise_pb2.GenerateParams(prompt="a b", seed=3, steps=2, width=64, height=64))):
        if response.event.WhichOneof("event") == "image_header":
            header = response.event.image_header
    return header.sha256


@pytest.mark.parametrize("kind", MODELS)
def test_every_layout_draws_the_same(start, tmp_path, kind):
    root = tmp_path / "models"
    root.mkdir()
    golden = GOLDENS / MODELS[kind]
    pipeline = DiffusionPipeline.from_pretrained(golden)
    names = folders(pipeline, golden, root) + checkpoints(kind, pipeline, root)
    # What diffusers saves without safetensors is a pickle.
    shutil.copytree(golden, root / "pickled", ignore=shutil.ignore_patterns("*.safetensors*"))
    for part, module in parts_of(pipeline).items():
        if part in ("transformer", "unet", "vae"):
            module.save_pretrained(root / "pickled" / part, safe_serialization=False)
        else:
            module.save_pretrained(root / "pickled" / part)
    daemon = start("--model-roots", str(root), "--default-model", "golden")
    listed = {m.name: m.problem for m in daemon.models.ListModels(model_pb2.ListModelsRequest(include_problems=True)).models}
    assert set(listed) == set(names) | {"pickled"}
    assert {n: p for n, p in listed.items() if n != "pickled" and p} == {}
    pictures = {name: draw(daemon, name) for name in names}
    assert {n for n, p in pictures.items() if p != pictures["golden"]} == set()
    assert "pickle" in listed["pickled"]
    with pytest.raises(grpc.RpcError) as caught:
        draw(daemon, "pickled")
    assert reason_of(caught.value).reason == "UNSAFE_FILE"
