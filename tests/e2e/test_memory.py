"""Memory over the wire: prefetch, pins, caps, keep-alive, plans, and what is done when a device is short."""

import json
import subprocess
import time

import grpc
import pytest

from conftest import BIN, LORAS, MODEL, cache_pb2, denoise_pb2, loras, reason_of

A = LORAS[0]
Adapted = denoise_pb2.JobEvent.Adapted


def load(daemon, name, **fields):
    return daemon.cache.LoadModel(cache_pb2.LoadModelRequest(name=name, **fields))


def unload(daemon, name):
    return daemon.cache.UnloadModel(cache_pb2.UnloadModelRequest(name=name))


def keys(daemon):
    return {r.key for r in daemon.stats().records}


def plan(daemon, *lora, **params):
    return daemon.denoise.Plan(denoise_pb2.PlanRequest(
        model=MODEL, loras=loras(*lora),
        params=denoise_pb2.GenerateParams(**{"prompt": "a red circle on a blue background", "seed": 7, "steps": 4, **params})))


def test_a_model_is_loaded_ahead_pinned_and_unloaded(start):
    daemon = start("--devices", "sim:0=64MiB")
    answer = load(daemon, MODEL, device="sim:0", pin=True)
    assert answer.loaded_records == 4 and len(answer.keys) == 4
    assert answer.bytes == daemon.stats().record_bytes
    assert all(r.residency[0].bytes == r.residency[0].full_bytes > 0 for r in daemon.stats().records)
    assert load(daemon, MODEL).loaded_records == 0
    load(daemon, A, pin=True)

    misses = daemon.stats().misses
    daemon.generate(lora=(A,))
    assert daemon.stats().misses == misses, "everything was there"
    daemon.cache.TrimCache(cache_pb2.TrimCacheRequest())
    assert set(answer.keys) <= keys(daemon), "what is pinned stays"
    assert {h for r in daemon.stats().records for h in r.holders} == {"pin"}

    session = daemon.session(lora=(A,))
    busy = unload(daemon, A)
    assert (busy.evicted_records, busy.busy_records) == (0, 1)
    session.close()
    gone = unload(daemon, MODEL)
    assert gone.evicted_records == 4 and gone.evicted_bytes == answer.bytes
    unload(daemon, A)
    daemon.expect_all_released()


@pytest.mark.parametrize("fields, code, field", [
    ({"name": "nothing"}, grpc.StatusCode.NOT_FOUND, None),
    ({"name": MODEL, "components": ["nothing"]}, grpc.StatusCode.INVALID_ARGUMENT, "components"),
    ({"name": A, "components": ["transformer"]}, grpc.StatusCode.INVALID_ARGUMENT, "components"),
    ({"name": MODEL, "device": "cuda:7"}, grpc.StatusCode.INVALID_ARGUMENT, "device"),
])
def test_loads_that_make_no_sense(daemon, fields, code, field):
    with pytest.raises(grpc.RpcError) as caught:
        load(daemon, **fields)
    reason = reason_of(caught.value)
    assert reason.code == code and (field is None or reason.fields == [field])


def test_unloading_what_is_not_there(daemon):
    assert unload(daemon, A).evicted_records == 0
    with pytest.raises(grpc.RpcError) as caught:
        unload(daemon, "nothing")
    assert reason_of(caught.value).reason == "MODEL_NOT_FOUND"


def test_a_cap_is_changed_while_jobs_run(start):
    daemon = start()
    expected = daemon.generate().sha256
    in_use = daemon.stats().ram_budget.in_use_bytes
    session = daemon.session(lora=(A,))
    session.start("long", steps=200)
    session.until("step")
    answer = daemon.cache.SetCap(cache_pb2.SetCapRequest(budget="ram", cap_bytes=in_use // 2))
    assert answer.old_cap_bytes == 1 << 30
    assert daemon.stats().ram_budget.cap_bytes == in_use // 2
    daemon.cache.SetCap(cache_pb2.SetCapRequest(budget="ram", cap_bytes=1 << 30))
    assert session.wait("long").done is not None, "what runs keeps what it has"
    session.close()
    assert daemon.generate().sha256 == expected
    for request, field in ((cache_pb2.SetCapRequest(budget="gpu", cap_bytes=1), "budget"),
                           (cache_pb2.SetCapRequest(budget="ram", cap_bytes=0), "cap_bytes"),
                           (cache_pb2.SetCapRequest(budget="cpu", cap_bytes=1), "budget")):
        with pytest.raises(grpc.RpcError) as caught:
            daemon.cache.SetCap(request)
        assert reason_of(caught.value).fields == [field]
    daemon.expect_all_released()


def test_what_nobody_uses_leaves_after_the_keep_alive(start):
    daemon = start("--keep-alive", "400ms")
    daemon.generate(lora=(A,))
    session = daemon.session(lora=(A,))
    deadline = time.monotonic() + 30
    while len(keys(daemon)) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    stats = daemon.stats()
    assert [r.kind for r in stats.records] == ["lora"], "a session holds it"
    assert stats.expired > 0 and {e.reason for e in stats.recent_evictions} == {"keep_alive"}
    session.close()
    while keys(daemon) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not keys(daemon)
    daemon.expect_all_released()


def test_a_plan_changes_nothing_and_comes_true(start):
    daemon = start("--devices", "sim:0=64MiB")
    cold = plan(daemon, A)
    assert cold.fits and cold.device == "sim:0" and cold.seconds == 0
    assert len(cold.loads) == 5 and not keys(daemon)
    result = daemon.generate(lora=(A,))
    assert {e.key for e in cold.loads} <= keys(daemon)
    assert [(p.component, p.working_bytes) for p in cold.phases] == [
        (p.component, p.working_bytes) for p in result.done.phases]
    warm = plan(daemon, A)
    assert not warm.loads and [p.cached for p in warm.phases] == [True, True, False, False]
    assert warm.seconds > 0
    with pytest.raises(grpc.RpcError) as caught:
        plan(daemon, A, steps=0)
    assert reason_of(caught.value).fields == ["params.steps"]


def test_a_device_without_room_is_streamed_to_and_the_picture_is_the_same(start):
    roomy = start("--devices", "sim:0=64MiB")
    expected = roomy.generate(lora=(A,)).sha256
    daemon = start("--devices", "sim:0=64MiB", "--residency", "stream")
    result = daemon.generate(lora=(A,))
    assert result.sha256 == expected
    assert any(p.resident_bytes < p.full_bytes for p in result.done.phases)
    assert daemon.stats().devices[0].streamed_locks > 0
    daemon.expect_all_released()


def test_measures_are_told_as_events(start):
    daemon = start("--devices", "sim:0=64MiB,fail_allocation=40")
    expected = start("--devices", "sim:0=64MiB").generate().sha256
    result = daemon.generate()
    adapted = [e.adapted for e in result.events if e.WhichOneof("event") == "adapted"]
    assert adapted and all(a.device == "sim:0" and a.reason for a in adapted)
    assert result.sha256 == expected
    daemon.expect_all_released()


def test_a_lost_device_is_an_error_of_its_own(start):
    daemon = start("--devices", "sim:0=64MiB,lose_after=30")
    error = daemon.fails()
    assert error.code == grpc.StatusCode.UNAVAILABLE and error.reason == "DEVICE_LOST"
    daemon.expect_all_released()


def test_the_ledger_adds_up_at_every_look(start):
    daemon = start("--devices", "sim:0=32MiB", "--devices", "sim:1=32MiB", "--ram-cap", "24MiB")
    sessions = [daemon.session(lora=(A,)) for _ in range(3)]
    for i, session in enumerate(sessions):
        for j in range(4):
            session.start(f"j{j}", prompt=f"picture {i} {j}", steps=6)
    for _ in range(200):
        stats = daemon.stats()
        budget = stats.ram_budget
        assert stats.unaccounted_bytes == 0
        assert budget.in_use_bytes == stats.record_bytes + stats.leaving_bytes
        assert budget.in_use_bytes + budget.reserved_bytes <= budget.cap_bytes
        assert budget.in_use_bytes == sum(u.in_use_bytes for u in budget.uses)
        assert budget.reserved_bytes == sum(u.reserved_bytes for u in budget.uses)
        for device in stats.devices:
            assert device.in_use_bytes + device.reserved_bytes <= device.cap_bytes
    for session in sessions:
        for j in range(4):
            session.wait(f"j{j}")
        session.close()
    daemon.expect_all_released()


def test_latentctl_top_and_plan_on_a_daemon(start):
    daemon = start("--devices", "sim:0=64MiB")

    def ctl(*words):
        run = subprocess.run([BIN / "latentctl", "--address", daemon.address, *words], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
        return run.stdout

    text = ctl("plan", "--lora", A, "a red circle")
    assert "fits, on sim:0" in text and f"lora/{A}" in text
    daemon.generate(lora=(A,))
    session = daemon.session(lora=(A,))
    top = ctl("top", "--once")
    assert "sim:0" in top and MODEL in top and "conditioning" in top
    json.loads(ctl("--json", "top", "--once"))
    session.close()
