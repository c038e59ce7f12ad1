"""Equal stacks of LoRAs give equal pictures, whatever was applied before, and no trace of one is left."""

from conftest import LORAS

A, B = LORAS[:2]
STACKS = [(), (A,), (), (B,), (A, B), ()]


def test_one_session_and_six_processes_agree(daemon, start):
    in_session = []
    session = daemon.session()
    for i, stack in enumerate(STACKS):
        reply = session.set_loras(*stack)
        assert reply.WhichOneof("response") == "loras_set", reply
        in_session.append(session.run(f"j{i}").sha256)
    session.close()

    alone = []
    for stack in STACKS:
        d = start()
        alone.append(d.generate(lora=stack).sha256)
        d.stop()

    assert in_session == alone
    none = {in_session[0], in_session[2], in_session[5]}
    assert len(none) == 1
    assert len(set(in_session)) == 4  # none, A, B, A+B all differ


def test_order_of_loras_does_not_matter(daemon):
    for mode in (2, 3):  # direct, sidecar
        ab = daemon.generate(lora=(f"{A}:0.7", f"{B}:0.4"), mode=mode).sha256
        ba = daemon.generate(lora=(f"{B}:0.4", f"{A}:0.7"), mode=mode).sha256
        assert ab == ba


def test_weight_zero_is_none(daemon):
    none = daemon.generate().sha256
    assert daemon.generate(lora=(f"{A}:0",)).sha256 == none
    assert daemon.generate(lora=(f"{A}:0", f"{B}:0"), mode=2).sha256 == none


def test_weights_matter_and_repeat(daemon):
    pictures = [daemon.generate(lora=(f"{A}:{w}",)).sha256 for w in (0.5, 1, 0.5, -1)]
    assert pictures[0] == pictures[2]
    assert len(set(pictures)) == 3


def test_set_loras_is_all_or_nothing(daemon):
    session = daemon.session(lora=(A,))
    before = session.run("before").sha256
    reply = session.set_loras(B, "no-such-lora")
    assert reply.WhichOneof("response") == "error"
    assert session.run("after").sha256 == before
    session.close()
    daemon.expect_all_released()


def test_report_counts_what_matched(daemon):
    result = daemon.generate(lora=(A,), mode=2)
    report = result.done.loras[0]
    assert report.name == A
    assert sum(report.matched.values()) + report.unmatched_count == report.layers_in_file > 0
    assert report.direct_tensors > 0 and report.sidecar_tensors == 0
    report = daemon.generate(lora=(A,), mode=3).done.loras[0]
    assert report.sidecar_tensors > 0 and report.direct_tensors == 0


def test_batch_equals_singles(daemon):
    batch = daemon.generate(seed=20, count=3)
    assert [p.seed for p in batch.pictures] == [20, 21, 22]
    for picture in batch.pictures:
        assert daemon.generate(seed=picture.seed).sha256 == picture.sha256


def test_seed_is_drawn_and_echoed(daemon):
    from latentd.v1 import denoise_pb2
    from conftest import MODEL, Result

    result = Result()
    request = denoise_pb2.GenerateRequest(model=MODEL, params=denoise_pb2.GenerateParams(prompt="a star", steps=2))
    for response in daemon.denoise.Generate(request):
        result.add(response.event)
    assert daemon.generate("a star", steps=2, seed=result.done.seeds[0]).sha256 == result.sha256
