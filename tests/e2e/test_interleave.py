"""Sessions on one device take turns step by step and do not see each other."""

import threading

from conftest import LORAS

A, B = LORAS[:2]


def run_together(daemon, jobs):
    """Runs [(session, prompt, …)] at once; returns results and the order of steps over all of them."""
    order, results, lock = [], {}, threading.Lock()
    ready = threading.Barrier(len(jobs))

    def drive(name, session, params):
        ready.wait()
        session.start(name, **params)
        from conftest import Result
        result = Result()
        for response in session.call:
            event = response.job_event.event
            result.add(event)
            kind = event.WhichOneof("event")
            if kind == "step":
                with lock:
                    order.append(name)
            if kind in ("done", "failed", "cancelled"):
                break
        results[name] = result

    threads = [threading.Thread(target=drive, args=job) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results, order


def test_two_sessions_with_different_loras_on_one_sim_device(start):
    daemon = start("--devices", "sim:0=256MiB")
    params = {"steps": 60, "seed": 11}
    alone = {"a": daemon.generate(lora=(A,), **params).sha256, "b": daemon.generate(lora=(B,), **params).sha256}
    assert alone["a"] != alone["b"]
    sessions = {"a": daemon.session(lora=(A,)), "b": daemon.session(lora=(B,))}
    results, order = run_together(daemon, [(n, sessions[n], params) for n in ("a", "b")])
    for name in ("a", "b"):
        assert results[name].sha256 == alone[name]
    # Once both run they alternate: no run of one that is longer than a few steps while the other has some left.
    both = order[max(order.index("a"), order.index("b")):]
    last = min(len(both) - 1 - both[::-1].index("a"), len(both) - 1 - both[::-1].index("b"))
    switches = sum(x != y for x, y in zip(both[:last], both[1:last + 1]))
    assert switches > last * 0.6, "".join(order)
    for s in sessions.values():
        s.close()
    daemon.expect_all_released()


def test_four_sessions_on_two_devices(start):
    daemon = start("--devices", "sim:0=256MiB", "--devices", "sim:1=256MiB")
    stacks = {"none": (), "a": (A,), "b": (B,), "ab": (A, f"{B}:0.5")}
    params = {"steps": 12, "seed": 5}
    alone = {n: daemon.generate(lora=s, **params).sha256 for n, s in stacks.items()}
    sessions = {n: daemon.session(lora=s) for n, s in stacks.items()}
    results, _ = run_together(daemon, [(n, sessions[n], params) for n in stacks])
    assert {n: r.sha256 for n, r in results.items()} == alone
    for s in sessions.values():
        s.close()
    daemon.expect_all_released()


def test_a_higher_priority_runs_first(daemon):
    low, high = daemon.session(priority=0), daemon.session(priority=5)
    low.start("low", steps=300)
    low.until("step")
    high.run("high", steps=20)
    low.send(request_id="c", cancel={"job_id": "low"})
    steps = [e.step.index for e in low.wait("low").events if e.WhichOneof("event") == "step"]
    assert not steps or max(steps) < 300, "the low one was done before the high one"
    low.close()
    high.close()
