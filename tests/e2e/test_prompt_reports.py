"""What `encoded` and `done` say of prompts: tokens that were read of how many, counted by transformers' tokenizers; and
what is perhaps not what was meant."""

import subprocess

import grpc
import pytest
from conftest import BIN, Daemon, reason_of
from latentd.v1 import denoise_pb2
from test_pictures import draw
from test_replay import GOLDENS

PLAIN, COMPEL, A1111 = (denoise_pb2.PROMPT_SYNTAX_PLAIN, denoise_pb2.PROMPT_SYNTAX_COMPEL,
                        denoise_pb2.PROMPT_SYNTAX_A1111)
LONG = "a photo of a red house by a road, " * 12
SHORT = "a blue tree"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    daemon = Daemon(tmp_path_factory.mktemp("prompts"), "--model-roots", str(GOLDENS))
    yield daemon
    assert daemon.stop() == 0


def count(model, folder, text):
    from transformers import AutoTokenizer, CLIPTokenizer
    kind = AutoTokenizer if model in ("tiny-dev", "tiny-schnell") and folder == "tokenizer_2" else CLIPTokenizer
    return len(kind.from_pretrained(GOLDENS / model / folder)(text, add_special_tokens=False).input_ids)


def told(result):
    encoded = next(e.encoded for e in result.events if e.HasField("encoded"))
    assert list(encoded.tokens) == list(result.done.tokens)
    return {(t.field.removeprefix("params."), t.component): (t.read, t.total) for t in result.done.tokens}


def test_a_plain_prompt_is_cut_and_says_so(daemon):
    total, negative = count("tiny-sd15", "tokenizer", LONG), count("tiny-sd15", "tokenizer", SHORT)
    assert total > 75 > negative > 0
    result = draw(daemon, prompt=LONG, negative_prompt=SHORT)
    assert told(result) == {("prompt", "text_encoder"): (75, total), ("negative_prompt", "text_encoder"): (negative, negative)}
    assert [(w.reason, w.field) for w in result.done.warnings] == [("PROMPT_CUT", "params.prompt")]
    assert f"75 of {total}" in result.done.warnings[0].message
    again = draw(daemon, prompt=LONG, negative_prompt=SHORT)    # encoded texts are kept
    assert told(again) == told(result)


@pytest.mark.parametrize("syntax", [COMPEL, A1111])
def test_windows_read_all_of_it(daemon, syntax):
    total = count("tiny-sd15", "tokenizer", LONG)
    result = draw(daemon, prompt=LONG, prompt_syntax=syntax, guidance=1.0)
    assert told(result) == {("prompt", "text_encoder"): (total, total)} and not result.done.warnings


def test_each_encoder_has_a_count_of_its_own(daemon):
    result = draw(daemon, "tiny-sdxl", prompt=SHORT, prompt_2=LONG, guidance=1.0)
    first, second = count("tiny-sdxl", "tokenizer", SHORT), count("tiny-sdxl", "tokenizer_2", LONG)
    assert told(result) == {("prompt", "text_encoder"): (first, first), ("prompt_2", "text_encoder_2"): (75, second)}
    clip, t5 = count("tiny-dev", "tokenizer", LONG), count("tiny-dev", "tokenizer_2", LONG)
    flux = draw(daemon, "tiny-dev", prompt=LONG, max_sequence_length=48)
    read = told(flux)
    assert read[("prompt", "text_encoder_2")] == (47, t5) and t5 > 47
    assert read[("prompt", "text_encoder")][1] == clip
    whole = told(draw(daemon, "tiny-dev", prompt=SHORT, prompt_2=LONG, max_sequence_length=512))
    assert whole[("prompt_2", "text_encoder_2")] == (t5, t5)


def test_a_lora_tag_is_text_and_says_so_or_an_error(daemon):
    tag = "<lora:dusk:0.8>"
    for model, syntax in (("tiny-sd15", PLAIN), ("tiny-sd15", COMPEL), ("tiny-sdxl", 0), ("tiny-dev", 0)):
        result = draw(daemon, model, prompt=f"a {tag} house", prompt_syntax=syntax)
        assert [(w.reason, w.field) for w in result.done.warnings] == [("LORA_TAG_IN_PROMPT", "params.prompt")], model
        assert tag in result.done.warnings[0].message and "loras" in result.done.warnings[0].message
    assert not draw(daemon, prompt="a <lora and >").done.warnings
    with pytest.raises(grpc.RpcError) as caught:
        draw(daemon, prompt=f"a {tag}", prompt_syntax=A1111)
    assert reason_of(caught.value).fields == ["params.prompt"]
    run = subprocess.run([BIN / "latentctl", "--address", daemon.address, "generate", f"a {tag}", "-m", "tiny-sd15", "-W", "64",
                          "-H", "64", "-s", "1", "-o", "/dev/null"], capture_output=True, text=True)
    assert run.returncode == 0 and tag in run.stderr, run.stderr


def test_prompts_are_in_the_log_only_where_the_config_says_so(start):
    for flags, logged in (((), False), (("--log-prompts",), True)):
        daemon = start(*flags)
        daemon.generate("a very secret circle", steps=1, seed=1)
        assert ("a very secret circle" in daemon.log.read_text()) == logged
