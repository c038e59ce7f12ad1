"""A budget is never overdrawn: what does not fit is an error with numbers, never a picture and never a death."""

import grpc
import pytest

from conftest import LORAS, Daemon

A = LORAS[0]
STEP = 16 << 10  # resolution of the search for the smallest cap


@pytest.fixture(scope="module")
def free(tmp_path_factory):
    d = Daemon(tmp_path_factory.mktemp("free"), "--ram-cap", "64GiB")
    yield d
    d.stop()


def works(start, cap, **kwargs) -> bool:
    daemon = start("--ram-cap", str(cap))
    try:
        daemon.generate(**kwargs)
        return True
    except grpc.RpcError:
        return False
    finally:
        daemon.stop()


@pytest.fixture
def smallest_cap(start, free):
    peak = free.generate().done.peak_ram_bytes
    low, high = 0, peak + STEP
    while high - low > STEP:
        middle = (low + high) // 2
        if works(start, middle):
            high = middle
        else:
            low = middle
    return high


def test_a_cap_for_the_model_but_not_the_lora(start, free, smallest_cap):
    expected = free.generate().sha256
    assert start("--ram-cap", str(smallest_cap)).generate().sha256 == expected, "smallest workable cap"

    # A server of its own: one that has run such a job knows that it takes less than the estimate.
    daemon = start("--ram-cap", str(smallest_cap))
    error = daemon.fails(lora=(A,))
    assert error.code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION)
    assert error.reason in ("BUDGET_EXHAUSTED", "MODEL_EXCEEDS_BUDGET")
    assert int(error.details["needed_bytes"]) > 0
    assert int(error.details["cap_bytes"]) == smallest_cap
    assert "held_bytes" in error.details
    daemon.expect_all_released()

    assert daemon.generate().sha256 == expected, "the next request works"
    budget = daemon.stats().ram_budget
    assert budget.peak_bytes <= budget.cap_bytes


def test_a_cap_below_the_largest_component_says_so(start):
    daemon = start("--ram-cap", "1MiB")
    error = daemon.fails()
    assert error.code == grpc.StatusCode.FAILED_PRECONDITION
    assert error.reason == "MODEL_EXCEEDS_BUDGET"
    assert int(error.details["cap_bytes"]) == 1 << 20
    daemon.expect_all_released()


def test_a_sim_device_gives_the_same_pictures_from_memory_of_its_own(start, free):
    for stack, mode in (((), 0), ((A,), 2), ((A,), 3)):
        expected = free.generate(lora=stack, mode=mode).sha256
        daemon = start("--devices", "sim:0=256MiB")
        assert daemon.generate(lora=stack, mode=mode).sha256 == expected
        stats = daemon.stats()
        device = stats.devices[0]
        on_device = sum(p.bytes for r in stats.records for p in r.residency if p.device == "sim:0")
        assert device.in_use_bytes == on_device > 0
        daemon.stop()


def test_a_sim_device_that_is_too_small_says_so(start):
    daemon = start("--devices", "sim:0=1MiB")
    error = daemon.fails()
    assert error.reason in ("MODEL_EXCEEDS_BUDGET", "BUDGET_EXHAUSTED")
    assert error.details["budget"] == "sim:0"
    daemon.expect_all_released()
