"""Textual inversions through the daemon: how prompts name them, what pictures they give, what they hold in memory,
and what is refused.

The models are the tiny random ones of the golden tests, where the numbers are compared with diffusers.
"""

import io
import json
import os
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from conftest import BIN, ROOT, Daemon, Result, reason_of
from latentd.v1 import cache_pb2, denoise_pb2, model_pb2, server_pb2
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

GOLDENS = Path(os.environ.get("LATENTD_GOLDENS", ROOT / "build/goldens"))
PLAIN, COMPEL, A1111 = (denoise_pb2.PROMPT_SYNTAX_PLAIN, denoise_pb2.PROMPT_SYNTAX_COMPEL,
                        denoise_pb2.PROMPT_SYNTAX_A1111)
WORDS = "red house"    # a token each


def vocabulary(model: str, number: str = "") -> torch.Tensor:
    tensors = load_file(GOLDENS / model / f"text_encoder{number}/model.safetensors")
    return next(v for k, v in tensors.items() if k.endswith("token_embedding.weight"))


def rows(model: str, number: str = "") -> torch.Tensor:
    """The vocabulary's vectors of WORDS."""
    from transformers import CLIPTokenizer
    ids = CLIPTokenizer.from_pretrained(GOLDENS / model / f"tokenizer{number}")(WORDS, add_special_tokens=False).input_ids
    assert len(ids) == 2
    return vocabulary(model, number)[ids].clone()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("embeddings")
    for folder in ("words", "pets", "wild", "golden"):
        (root / folder).mkdir()
    save_file({"emb_params": rows("tiny-sd15")}, root / "words/redhouse.safetensors")
    save_file({"<red>": rows("tiny-sd15")[0].clone()}, root / "one.v1-x.safetensors")
    save_file({"clip_l": rows("tiny-sdxl"), "clip_g": rows("tiny-sdxl", "_2")}, root / "words/redhousexl.safetensors")
    # The refiner has a vocabulary of its own.
    save_file({"clip_l": rows("tiny-sdxl"), "clip_g": rows("tiny-refiner", "_2")}, root / "redhousexl-2.safetensors")
    for name in ("pets/fox", "wild/fox"):
        save_file({"x": torch.ones(2, 24)}, root / f"{name}.safetensors")
    save_file({"x": torch.full((3, 24), float("nan"))}, root / "nan.safetensors")
    save_file({"x": torch.zeros(76, 24)}, root / "many.safetensors")
    save_file({"x": torch.zeros(2, 768)}, root / "real15.safetensors")
    torch.save({"string_to_param": {"*": torch.zeros(2, 24)}}, root / "pickle.safetensors")
    (root / "torn.safetensors").write_bytes((root / "nan.safetensors").read_bytes()[:-4])
    for name in ("cat", "night", "dot", "catxl", "nightxl"):
        shutil.copy(GOLDENS / f"embeddings/{name}.safetensors", root / f"golden/{name}.safetensors")
    return root


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, root, loras):
    daemon = Daemon(tmp_path_factory.mktemp("d"), "--model-roots", str(GOLDENS), "--model-roots", "deploy/demo/models",
                    "--embedding-roots", str(root), "--lora-roots", str(loras), "--devices", "sim:0=256MiB")
    yield daemon
    assert daemon.stop() == 0


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    """A LoRA that brings two textual inversions, one of which is for other encoders."""
    folder = tmp_path_factory.mktemp("loras")
    layer = "lora_unet_mid_block_attentions_0_proj_in"
    width = load_file(GOLDENS / "tiny-sd15/unet/diffusion_pytorch_model.safetensors")["mid_block.attentions.0.proj_in.weight"]
    save_file({f"{layer}.lora_down.weight": torch.ones(2, *width.shape[1:]),
               f"{layer}.lora_up.weight": torch.ones(width.shape[0], 2, *(1,) * (width.dim() - 2)),
               "lora_unet_no_such_layer.lora_down.weight": torch.ones(2, 8),
               "lora_unet_no_such_layer.lora_up.weight": torch.ones(8, 2),
               "bundle_emb.sks.string_to_param.*": rows("tiny-sd15"), "bundle_emb.far.clip_g": torch.ones(2, 8)},
              folder / "brings.safetensors")
    (folder / "page.safetensors").write_text("<!DOCTYPE html><title>401</title>")
    return folder


def request(model, **params):
    values = {"prompt": f"a photo of a {WORDS}", "seed": 7, "steps": 3, "width": 64, "height": 64, **params}
    return denoise_pb2.GenerateRequest(model=model, params=denoise_pb2.GenerateParams(**values))


def draw(daemon, model, **params) -> Result:
    result = Result()
    for response in daemon.denoise.Generate(request(model, **params), timeout=120):
        result.add(response.event)
    assert result.done is not None
    return result


def fails(daemon, model, **params):
    with pytest.raises(grpc.RpcError) as caught:
        draw(daemon, model, **params)
    daemon.expect_all_released()
    return reason_of(caught.value)


def records(daemon) -> dict:
    return {r.key.split("@")[0]: r for r in daemon.stats().records if r.kind == "embedding"}


NAMED = [
    ("<redhouse>", PLAIN, WORDS, PLAIN),
    ("<words/redhouse>", PLAIN, WORDS, PLAIN),
    ("embedding:redhouse", PLAIN, WORDS, PLAIN),
    ("blue<redhouse>tree", PLAIN, f"blue {WORDS} tree", PLAIN),
    ("<one.v1-x> house", PLAIN, WORDS, PLAIN),
    ("(<redhouse>)1.3 by <redhouse>--", COMPEL, f"({WORDS})1.3 by ({WORDS})--", COMPEL),
    ("embedding:words/redhouse++ (old embedding:redhouse)0.6.", COMPEL, f"({WORDS})++ (old {WORDS})0.6.", COMPEL),
    ("embedding:redhouse.attend(1.4), (<one.v1-x> house)1.2", COMPEL, f"({WORDS})1.4, ({WORDS})1.2", COMPEL),
    ("(embedding:redhouse:1.3) [<redhouse>] BREAK <redhouse>", A1111, f"({WORDS}:1.3) [{WORDS}] BREAK {WORDS}", A1111),
    ("(<redhouse>, tree:0.5)", A1111, f"({WORDS}, tree:0.5)", A1111),
]


# SDXL's pooled text is made of the syntax as it stands: that has to be the same.
SAME = [row for row in NAMED if re.sub("<redhouse>|embedding:redhouse", WORDS, row[0]) == row[2]]


@pytest.mark.parametrize("model,suffix,named,syntax,words,same", [("tiny-sd15", "", *row) for row in NAMED] +
                         [("tiny-sdxl", "xl", *row) for row in SAME])
def test_vectors_of_words_are_the_words(daemon, model, suffix, named, syntax, words, same):
    """To the last bit, in every syntax, in the wanted and in the unwanted prompt, pooled text included."""
    named = named.replace("redhouse", "redhouse" + suffix)
    ours = draw(daemon, model, prompt=named, prompt_syntax=syntax)
    assert ours.sha256 == draw(daemon, model, prompt=words, prompt_syntax=same).sha256
    assert ours.sha256 != draw(daemon, model, prompt="a blue car").sha256
    ours = draw(daemon, model, prompt="a car", negative_prompt=named, prompt_syntax=syntax)
    assert ours.sha256 == draw(daemon, model, prompt="a car", negative_prompt=words, prompt_syntax=same).sha256


def test_a_lora_brings_its_own(daemon):
    """Its prompts name them while it is in the set, whatever its weight; what cannot be used is named by the report."""
    def generate(weight, prompt):
        asked = request("tiny-sd15", prompt=prompt)
        asked.loras.add(name="brings", weight=weight)
        result = Result()
        for response in daemon.denoise.Generate(asked, timeout=120):
            result.add(response.event)
        return result
    named = generate(0, "<sks> by <brings/sks>")
    assert named.sha256 == draw(daemon, "tiny-sd15", prompt=f"{WORDS} by {WORDS}").sha256
    assert named.sha256 != draw(daemon, "tiny-sd15", prompt="<sks> by <brings/sks>").sha256
    report = named.done.loras[0]
    assert (list(report.embeddings), list(report.unused_embeddings)) == (["far", "sks"], ["far"])
    assert (report.unmatched_count, list(report.unmatched_samples)) == (1, ["lora_unet_no_such_layer"])
    assert [(e.name, e.tokens) for e in named.done.embeddings] == [("brings/sks", 2)]
    daemon.expect_all_released()


def test_lists_of_loras_say_what_fits_and_what_is_none(daemon):
    shown = {lora.name: lora for lora in daemon.models.ListLoras(model_pb2.ListLorasRequest(model="tiny-sd15")).loras}
    assert list(shown["brings"].embeddings) == ["far", "sks"] and not shown["brings"].problem
    assert list(shown["brings"].match.unmatched_samples) == ["lora_unet_no_such_layer"]
    assert "is a web page" in shown["page"].problem
    other = {lora.name: lora for lora in daemon.models.ListLoras(model_pb2.ListLorasRequest(model="shapes-flux")).loras}
    assert "none of its 2 layers" in other["brings"].problem


def test_second_prompts_name_them_too(daemon):
    ours = draw(daemon, "tiny-sdxl", prompt="a car", prompt_2="a <redhousexl>", negative_prompt="fog",
                negative_prompt_2="embedding:redhousexl")
    words = draw(daemon, "tiny-sdxl", prompt="a car", prompt_2=f"a {WORDS}", negative_prompt="fog", negative_prompt_2=WORDS)
    assert ours.sha256 == words.sha256


@pytest.mark.parametrize("case,model,syntax", [
    ("sd15-embedding", "tiny-sd15", PLAIN), ("sd15-embedding-long", "tiny-sd15", COMPEL),
    ("sdxl-embedding-compel", "tiny-sdxl", COMPEL)])
def test_pictures_are_those_of_diffusers(daemon, case, model, syntax):
    file = GOLDENS / f"cases/{case}.safetensors"
    golden = load_file(file)
    with safe_open(file, "np") as opened:
        settings = opened.metadata()
    texts = {key: bytes(golden[key].tolist()).decode() for key in ("prompt", "negative")}
    result = draw(daemon, model, prompt=texts["prompt"], negative_prompt=texts["negative"], prompt_syntax=syntax,
                  width=int(settings["width"]), height=int(settings["height"]), steps=int(settings["steps"]),
                  guidance=float(settings["guidance"]), seed=int(golden["seed.0"]), sampler=settings["sampler"])
    pixels = np.asarray(Image.open(io.BytesIO(result.pictures[0].data)))
    assert np.abs(pixels.astype(int) - golden["pixels.0"].numpy().astype(int)).max() <= 1
    assert sorted(e.name for e in result.done.embeddings) == sorted(
        f"golden/{name}" for name in settings["embeddings"].split(","))


def test_what_names_none_is_text(daemon):
    for prompt in ("a <lora:x:1> house", "a <unknown> <3 house", "embedding: a house", "a < b > c"):
        assert not draw(daemon, "tiny-sd15", prompt=prompt).done.embeddings
    a, b = (draw(daemon, "tiny-sd15", prompt=p).sha256 for p in ("<unknown> house", "< unknown > house"))
    assert a == b, "read letter by letter"


def test_flux_has_text_in_its_place(daemon):
    words = draw(daemon, "shapes-flux", prompt=WORDS).sha256
    for prompt in ("<redhouse>", "embedding:redhouse", "embedding:unknown", "<fox>"):
        result = draw(daemon, "shapes-flux", prompt=prompt)
        assert not result.done.embeddings and result.sha256 != words
    assert not records(daemon).get("embedding/words/redhouse") or not records(daemon)["embedding/words/redhouse"].lock_count


NOT_FOUND, INVALID, FAILED, LOSS = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT,
                                    grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.DATA_LOSS)
REFUSED = [
    ("tiny-sd15", dict(prompt="a embedding:dog, x"), NOT_FOUND, "EMBEDDING_NOT_FOUND", "params.prompt", "dog"),
    ("tiny-sd15", dict(negative_prompt="embedding:dog"), NOT_FOUND, "EMBEDDING_NOT_FOUND", "params.negative_prompt", "dog"),
    ("tiny-sdxl", dict(prompt_2="embedding:dog"), NOT_FOUND, "EMBEDDING_NOT_FOUND", "params.prompt_2", "dog"),
    ("tiny-sdxl", dict(negative_prompt_2="embedding:dog"), NOT_FOUND, "EMBEDDING_NOT_FOUND", "params.negative_prompt_2",
     "dog"),
    ("tiny-sd15", dict(prompt="embedding:../cases/x"), NOT_FOUND, "EMBEDDING_NOT_FOUND", "params.prompt", "../cases/x"),
    ("tiny-sd15", dict(prompt="<fox>"), INVALID, "EMBEDDING_AMBIGUOUS", "params.prompt", "pets/fox, wild/fox"),
    ("tiny-sd15", dict(prompt="embedding:fox"), INVALID, "EMBEDDING_AMBIGUOUS", "params.prompt", "pets/fox, wild/fox"),
    ("tiny-sd15", dict(prompt="<redhousexl>"), FAILED, "EMBEDDING_MISMATCH", "params.prompt", "clip_l 24, clip_g 40"),
    ("tiny-sdxl", dict(negative_prompt="<redhouse>"), FAILED, "EMBEDDING_MISMATCH", "params.negative_prompt", "clip_l 24"),
    ("tiny-sd15", dict(prompt="<real15>"), FAILED, "EMBEDDING_MISMATCH", "params.prompt", "clip_l 768"),
    ("tiny-sd15", dict(prompt="<nan>"), INVALID, "INVALID_EMBEDDING", None, "embedding nan: "),
    ("tiny-sd15", dict(prompt="<many>"), INVALID, "INVALID_EMBEDDING", "params.prompt", "76 vectors"),
    ("tiny-sd15", dict(prompt="<pickle>"), FAILED, "UNSAFE_FILE", "params.prompt", "pickle"),
    ("tiny-sd15", dict(prompt="<torn>"), LOSS, "CORRUPT_FILE", "params.prompt", "embedding torn: "),
]


@pytest.mark.parametrize("model,params,code,reason,field,text", REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_errors_are_typed_and_name_the_prompt(daemon, model, params, code, reason, field, text):
    error = fails(daemon, model, **params)
    assert (error.code, error.reason) == (code, reason), error
    assert text in error.message
    assert error.fields == ([field] if field else [])
    if reason != "INVALID_EMBEDDING" or field:    # values are read when the file is loaded
        with pytest.raises(grpc.RpcError) as caught:
            daemon.denoise.Plan(denoise_pb2.PlanRequest(model=model, params=request(model, **params).params))
        assert reason_of(caught.value).reason == reason


def test_the_refiner_takes_what_the_base_takes(daemon):
    png = io.BytesIO()
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(png, "PNG")
    init = denoise_pb2.InitImage(data=png.getvalue(), strength=0.9)
    ours, words = (draw(daemon, "tiny-refiner", prompt=p, init_image=init) for p in ("a <redhousexl-2>", f"a {WORDS}"))
    assert ours.sha256 == words.sha256
    assert draw(daemon, "tiny-refiner", prompt="a <catxl>", init_image=init).done.embeddings[0].tokens == 4
    assert fails(daemon, "tiny-refiner", prompt="<redhouse>", init_image=init).reason == "EMBEDDING_MISMATCH"


# Encoded many times over, so that there is time to look: a version for each word that is weighed down.
SLOW = " ".join(f"(house{i} <redhouse>)0.{i % 9 + 1}" for i in range(60))


def test_a_record_is_held_while_prompts_are_encoded_and_no_longer(daemon):
    daemon.cache.TrimCache(cache_pb2.TrimCacheRequest())
    held, after_trim, done = [], [], threading.Event()

    def watch():
        while not done.is_set():
            record = records(daemon).get("embedding/words/redhouse")
            if record is not None and record.lock_count:
                held.append((record.lock_count, list(record.holders)))
                daemon.cache.TrimCache(cache_pb2.TrimCacheRequest())
                after_trim.append("embedding/words/redhouse" in records(daemon))
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    locked_later = False
    try:
        for response in daemon.denoise.Generate(request("tiny-sd15", prompt=SLOW, prompt_syntax=COMPEL, steps=40)):
            if response.event.WhichOneof("event") == "step" and response.event.step.index == 20:
                record = records(daemon).get("embedding/words/redhouse")
                locked_later = record is not None and record.lock_count > 0
    finally:
        done.set()
        watcher.join()
    assert len(held) > 3 and all(count == 1 and len(holders) == 1 for count, holders in held)
    assert after_trim[:-1] and all(after_trim[:-1]), "what is held stays; the last look may have come when it was let go"
    assert not locked_later, "it is let go when prompts are encoded"
    daemon.expect_all_released()
    record = draw(daemon, "tiny-sd15", prompt="<redhouse>") and records(daemon)["embedding/words/redhouse"]
    assert (record.lock_count, record.bytes, record.use) == (0, 2 * 24 * 4, "patches")
    daemon.cache.TrimCache(cache_pb2.TrimCacheRequest())
    assert not daemon.stats().records and daemon.stats().ram_budget.in_use_bytes == 0


def test_jobs_that_are_cancelled_or_whose_client_is_gone_leave_nothing(daemon):
    for end in ("cancel", "gone"):
        daemon.cache.TrimCache(cache_pb2.TrimCacheRequest())
        call = daemon.denoise.Generate(request("tiny-sd15", prompt=SLOW, prompt_syntax=COMPEL))
        while not (records(daemon).get("embedding/words/redhouse") and daemon.sessions()):
            time.sleep(0.002)
        if end == "gone":
            call.cancel()
        else:
            session = daemon.sessions()[0]
            daemon.server.CancelJob(server_pb2.CancelJobRequest(session=session.session, job_id=session.jobs[0].job_id))
            with pytest.raises(grpc.RpcError):
                list(call)
        daemon.expect_all_released()
        daemon.cache.TrimCache(cache_pb2.TrimCacheRequest())
        assert not daemon.stats().records and daemon.stats().ram_budget.in_use_bytes == 0


def test_streamed_it_is_the_same(start, root, daemon):
    """Rows are given to the encoder, wherever its weights are."""
    streamed = start("--model-roots", str(GOLDENS), "--embedding-roots", str(root), "--devices", "sim:0=256MiB",
                     "--residency", "stream")
    for model, prompt in (("tiny-sd15", "a <redhouse>, (<cat>)1.2"), ("tiny-sdxl", "a <catxl>")):
        ours = draw(streamed, model, prompt=prompt, prompt_syntax=COMPEL)
        assert ours.sha256 == draw(daemon, model, prompt=prompt, prompt_syntax=COMPEL).sha256
    streamed.expect_all_released()


def test_a_file_is_read_once_and_again_when_it_was_replaced(daemon, root):
    file = root / "words/changing.safetensors"
    save_file({"x": rows("tiny-sd15")}, file)
    first = draw(daemon, "tiny-sd15", prompt="a <changing> tree")
    assert first.sha256 == draw(daemon, "tiny-sd15", prompt=f"a {WORDS} tree").sha256
    loads = daemon.stats().misses
    assert draw(daemon, "tiny-sd15", prompt="a <changing> tree", steps=2).done.phases[0].cached, "so is what it encoded to"
    assert daemon.stats().misses == loads
    fresh = root / "words/fresh"
    save_file({"x": rows("tiny-sd15").flip(0).contiguous()}, fresh)
    os.replace(fresh, file)
    assert draw(daemon, "tiny-sd15", prompt="a <changing> tree").sha256 == \
        draw(daemon, "tiny-sd15", prompt="a house red tree").sha256
    assert daemon.cache.DropModel(cache_pb2.DropModelRequest(name="words/changing")).evicted_records >= 2
    assert not draw(daemon, "tiny-sd15", prompt="a <changing> tree").done.phases[0].cached, "made of what was dropped"
    file.unlink()
    assert fails(daemon, "tiny-sd15", prompt="embedding:changing").reason == "EMBEDDING_NOT_FOUND"
    daemon.expect_all_released()


def test_load_and_pin(daemon):
    daemon.cache.TrimCache(cache_pb2.TrimCacheRequest())
    loaded = daemon.cache.LoadModel(cache_pb2.LoadModelRequest(name="words/redhouse", pin=True))
    assert loaded.loaded_records == 1 and loaded.bytes == 192
    daemon.cache.TrimCache(cache_pb2.TrimCacheRequest())
    assert records(daemon)["embedding/words/redhouse"].lock_count == 1
    daemon.cache.UnloadModel(cache_pb2.UnloadModelRequest(name="words/redhouse"))
    assert not records(daemon)
    for extra in (dict(components=["x"]), dict(device="sim:0")):
        with pytest.raises(grpc.RpcError) as caught:
            daemon.cache.LoadModel(cache_pb2.LoadModelRequest(name="words/redhouse", **extra))
        assert reason_of(caught.value).fields == list(extra)
    daemon.expect_all_released()


def test_plan_counts_them(daemon):
    daemon.cache.TrimCache(cache_pb2.TrimCacheRequest())
    params = request("tiny-sd15", prompt="a <redhouse>").params
    plan = daemon.denoise.Plan(denoise_pb2.PlanRequest(model="tiny-sd15", params=params))
    assert [(load.kind, load.bytes) for load in plan.loads if load.kind == "embedding"] == [("embedding", 192)]
    assert plan.fits
    draw(daemon, "tiny-sd15", prompt="a <redhouse>")
    plan = daemon.denoise.Plan(denoise_pb2.PlanRequest(model="tiny-sd15", params=params))
    assert not plan.loads and any(p.cached for p in plan.phases)


def test_listed(daemon, root):
    listed = {e.name: e for e in daemon.models.ListEmbeddings(model_pb2.ListEmbeddingsRequest()).embeddings}
    assert {"words/redhouse", "words/redhousexl", "pets/fox", "wild/fox", "one.v1-x", "pickle", "torn"} <= set(listed)
    one = listed["words/redhouse"]
    assert (one.trigger, one.tokens, dict(one.widths), one.family) == ("<redhouse>", 2, {"clip_l": 24}, "")
    assert one.id.startswith("embedding/words/redhouse@")
    assert one.bytes == (root / "words/redhouse.safetensors").stat().st_size
    assert (listed["real15"].family, listed["pets/fox"].trigger) == ("SD 1.x", "<pets/fox>")
    assert dict(listed["words/redhousexl"].widths) == {"clip_l": 24, "clip_g": 40}
    assert listed["pickle"].tokens == 0 and "pickle" in listed["pickle"].problem
    assert listed["many"].problem and not one.problem

    names, token = [], ""
    while True:
        page = daemon.models.ListEmbeddings(model_pb2.ListEmbeddingsRequest(page_size=3, page_token=token))
        assert len(page.embeddings) <= 3
        names += [e.name for e in page.embeddings]
        token = page.next_page_token
        if not token:
            break
    assert names == sorted(listed)
    with pytest.raises(grpc.RpcError) as caught:
        daemon.models.ListEmbeddings(model_pb2.ListEmbeddingsRequest(page_size=-1))
    assert reason_of(caught.value).fields == ["page_size"]


def ctl(daemon, *arguments):
    return subprocess.run([BIN / "latentctl", "--address", daemon.address, *arguments], capture_output=True, text=True,
                          timeout=60)


def test_latentctl(daemon, tmp_path):
    run = ctl(daemon, "embeddings")
    assert run.returncode == 0, run.stderr
    usable, problems = run.stdout.split("CANNOT BE USED")
    lines = {line.split()[0]: line for line in usable.splitlines() if line}
    assert "<redhouse>" in lines["words/redhouse"] and "SD 1.x" in lines["real15"]
    assert "torn" not in lines and "\ntorn " in problems
    run = ctl(daemon, "--json", "embeddings")
    assert {"words/redhouse"} <= {e["name"] for e in json.loads(run.stdout)["embeddings"]}
    run = ctl(daemon, "generate", "a <redhouse>", "-m", "tiny-sd15", "--seed", "7", "--steps", "3", "--width", "64",
              "--height", "64", "-o", str(tmp_path / "x.png"))
    assert run.returncode == 0, run.stderr
    words = draw(daemon, "tiny-sd15", prompt=f"a {WORDS}").pictures[0].data
    assert (tmp_path / "x.png").read_bytes() == words
    run = ctl(daemon, "generate", "embedding:dog", "-m", "tiny-sd15", "-o", str(tmp_path / "y.png"))
    assert run.returncode == 1 and "EMBEDDING_NOT_FOUND" in run.stderr
    shown = json.loads(ctl(daemon, "--json", "cache").stdout)
    assert any(r["kind"] == "embedding" for r in shown["records"])


def test_a_budget_that_is_full_is_an_error_and_leaves_nothing(start, root):
    daemon = start("--model-roots", str(GOLDENS), "--embedding-roots", str(root))
    daemon.cache.SetCap(cache_pb2.SetCapRequest(budget="ram", cap_bytes=100))
    assert fails(daemon, "tiny-sd15", prompt="<redhouse>").reason == "MODEL_EXCEEDS_BUDGET"
    assert not daemon.stats().records and daemon.stats().ram_budget.in_use_bytes == 0


def test_no_roots_no_embeddings(start):
    daemon = start("--model-roots", str(GOLDENS))
    assert not daemon.models.ListEmbeddings(model_pb2.ListEmbeddingsRequest()).embeddings
    assert not draw(daemon, "tiny-sd15", prompt="<redhouse>").done.embeddings
    assert fails(daemon, "tiny-sd15", prompt="embedding:redhouse").reason == "EMBEDDING_NOT_FOUND"
