"""A session's LoRAs are locked for as long as it lives, and not a moment longer."""

import io
import json
import os
import subprocess
import sys
import time

import grpc
import pytest
from PIL import Image

from conftest import BIN, LORAS, MODEL, ROOT, cache_pb2, reason_of, server_pb2

A, B = LORAS[:2]


def lora_records(daemon):
    return {r.key.split("@")[0].removeprefix("lora/"): r for r in daemon.stats().records if r.kind == "lora"}


def test_an_open_session_shows_its_loras_locked(daemon):
    session = daemon.session(lora=(A, B))
    records = lora_records(daemon)
    for name in (A, B):
        assert records[name].lock_count == 1
        assert list(records[name].holders) == [session.opened.session]
    text = subprocess.run([BIN / "latentctl", "--address", daemon.address, "--json", "cache"],
                          check=True, capture_output=True, text=True).stdout
    shown = {r["key"].split("@")[0]: r for r in json.loads(text)["records"]}
    for name in (A, B):
        assert shown[f"lora/{name}"]["lockCount"] == 1
        assert shown[f"lora/{name}"]["holders"] == [session.opened.session]
    stats = daemon.stats()
    assert stats.ram_budget.in_use_bytes == sum(r.bytes for r in stats.records)
    session.close()
    daemon.expect_all_released()


def test_trim_and_drop_leave_a_sessions_loras_usable_and_counted(daemon):
    expected = daemon.generate(lora=(A, B)).sha256
    session = daemon.session(lora=(A, B))
    daemon.cache.TrimCache(cache_pb2.TrimCacheRequest())
    kept = lora_records(daemon)
    assert set(kept) >= {A, B}, "trim took a LoRA that is in use"
    assert not [r for r in daemon.stats().records if r.kind != "lora"], "trim left what nobody holds"
    for name in (A, B):
        result = daemon.cache.DropModel(cache_pb2.DropModelRequest(name=name))
        assert (result.stale_records, result.evicted_records) == (1, 0)
    stats = daemon.stats()
    stale = [r for r in stats.records if r.stale]
    assert len(stale) == 2 and all(r.lock_count == 1 for r in stale)
    assert stats.ram_budget.in_use_bytes == sum(r.bytes for r in stats.records)
    misses = stats.misses
    assert session.run("j").sha256 == expected
    assert not [r for r in daemon.stats().records if r.kind == "lora" and not r.stale], "a LoRA was read again"
    assert daemon.stats().misses > misses  # the model was, after the trim
    session.close()
    daemon.expect_all_released()
    assert not [r for r in daemon.stats().records if r.stale]


def test_dropping_the_model_in_the_middle_of_a_run_changes_nothing(daemon):
    expected = daemon.generate(steps=40).sha256
    session = daemon.session()
    session.start("j", steps=40)
    session.until("step")
    assert daemon.cache.DropModel(cache_pb2.DropModelRequest(name=MODEL)).stale_records >= 1
    assert session.wait("j").sha256 == expected
    session.close()
    daemon.expect_all_released()


def test_replies_echo_the_request_id_and_events_come_in_order(daemon):
    session = daemon.session()
    session.send(request_id="r-1", denoise={"job_id": "j", "params": {"prompt": "x", "steps": 2, "seed": 1}})
    kinds = []
    for response in session.call:
        assert response.request_id == "r-1"
        kinds.append(response.job_event.event.WhichOneof("event"))
        if kinds[-1] == "done":
            break
    order = ["queued", "encoded", "step", "image_header", "image_chunk", "done"]
    assert kinds[0] == "queued"
    kinds = [k for k in kinds if k != "loading"]  # comes before each phase whose weights are not there
    assert [order.index(k) for k in kinds] == sorted(order.index(k) for k in kinds)
    session.close()


def test_close(daemon):
    session = daemon.session(lora=(A, B))
    session.start("j", steps=1000)
    session.close()
    daemon.expect_all_released()


def test_half_close_lets_the_job_finish(daemon):
    session = daemon.session(lora=(A, B))
    session.start("j", steps=8)
    session.half_close()
    result = session.wait("j")
    assert result.done is not None
    for last in session.call:
        pass
    assert last.WhichOneof("response") == "closed"
    assert session.call.code() == grpc.StatusCode.OK
    daemon.expect_all_released()


def test_cancel_of_the_call(daemon):
    session = daemon.session(lora=(A, B))
    session.start("j", steps=1000)
    session.until("step")
    session.call.cancel()
    daemon.expect_all_released()


def test_cancel_of_a_job_leaves_the_session(daemon):
    session = daemon.session(lora=(A, B))
    session.start("j", steps=1000)
    session.start("queued", steps=1000)
    session.until("step")
    daemon.server.CancelJob(server_pb2.CancelJobRequest(session=session.opened.session, job_id="queued"))
    session.send(request_id="c", cancel={"job_id": "j"})
    seen = {}
    for response in session.call:
        kind = response.job_event.event.WhichOneof("event")
        if kind in ("cancelled", "done", "failed"):
            seen[response.job_event.job_id] = kind
        if len(seen) == 2:
            break
    assert seen == {"j": "cancelled", "queued": "cancelled"}
    assert lora_records(daemon)[A].lock_count == 1
    session.run("again")
    session.close()
    daemon.expect_all_released()


def test_deadline(daemon):
    session = daemon.session(lora=(A, B), timeout=1.0)
    session.start("j", steps=1000, width=256, height=256)
    with pytest.raises(grpc.RpcError) as caught:
        for _ in session.call:
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    daemon.expect_all_released()


def test_idle_session_is_ended_with_a_reason(start):
    daemon = start("--session-idle-timeout", "1s")
    session = daemon.session(lora=(A,))
    with pytest.raises(grpc.RpcError) as caught:
        for _ in session.call:
            pass
    assert reason_of(caught.value).reason == "SESSION_IDLE"
    daemon.expect_all_released()


def big_init_image() -> str:
    import base64

    file = io.BytesIO()
    Image.new("RGB", (512, 512), (200, 40, 40)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


PHASES = {
    "idle": None,
    "PHASE_ENCODING": {"prompt": "x", "steps": 4, "width": 1024, "height": 1024, "initImage": {"strength": 0.5}},
    "PHASE_DENOISING": {"prompt": "x", "steps": 1000},
    "PHASE_DECODING": {"prompt": "x", "steps": 1, "count": 64, "width": 256, "height": 256},
}


@pytest.mark.parametrize("phase", PHASES)
def test_kill_dash_nine_in_each_phase(daemon, phase, tmp_path):
    params = PHASES[phase]
    argument = "-"
    if params is not None:
        params = dict(params)
        if "initImage" in params:
            params["initImage"] = {**params["initImage"], "data": big_init_image()}
        (tmp_path / "params.json").write_text(json.dumps(params))
        argument = f"@{tmp_path}/params.json"
    kill_in(daemon, phase, argument)
    daemon.expect_all_released(within=60)


def kill_in(daemon, phase, argument):
    client = subprocess.Popen([sys.executable, ROOT / "tests/e2e/kill_client.py", daemon.address, f"{A},{B}", argument],
                              stdout=subprocess.PIPE, text=True)
    assert client.stdout.readline() == "open\n"
    try:
        deadline = time.monotonic() + 60
        while True:
            sessions = daemon.sessions()
            phases = {server_pb2.JobInfo.Phase.Name(j.phase) for s in sessions for j in s.jobs}
            if phase in phases or (phase == "idle" and sessions):
                break
            assert time.monotonic() < deadline, f"never saw {phase}, but {phases}"
            time.sleep(0.001)
    finally:
        os.kill(client.pid, 9)
        client.wait()


def test_kill_dash_nine_while_waiting_for_memory(start):
    """A job that waits in a load: its client's death ends the wait."""
    size = {"width": 512, "height": 512}
    probe = start()
    running = probe.session(lora=(A, B))
    running.start("j", steps=1000, **size)
    running.until("step")
    budget = probe.stats().ram_budget
    probe.stop()
    # Room for one of them and for the second one's LoRAs, not for its work.
    cap = budget.in_use_bytes + budget.reserved_bytes + (64 << 10)
    daemon = start("--ram-cap", str(cap), "--memory-wait-timeout", "60s")
    holder = daemon.session(lora=(A, B))
    holder.start("long", steps=1000, **size)
    holder.until("step")
    kill_in(daemon, "PHASE_LOADING", json.dumps({"prompt": "x", "steps": 4, **size}))
    holder.close()
    daemon.expect_all_released()
