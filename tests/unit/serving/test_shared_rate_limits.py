"""Rate limits of API keys that several processes share."""

import os

import pytest

from nestrec.serving.security import rate_limiter
from nestrec.serving.security.auth import ApiKey
from nestrec.serving.security.rate_limiter import LocalRateLimiter, SharedRateLimiter
from nestrec_bench.harness.clocks import ManualClock


def key(name, rate=2.0, burst=3.0):
    return ApiKey(name, "public", b"", float("inf"), rate, burst)


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def rates(clock):
    rates = SharedRateLimiter(clock)
    yield rates
    rates.close()


def test_shared_rate_limits_equal_single_process(rates, clock):
    alone = LocalRateLimiter(clock)
    keys = [key("a"), key("b", rate=0.5, burst=1.0), key("c", rate=float("inf"))]
    for step in range(60):
        clock.sleep(0.1 * (step % 4))
        for limited_key in keys:
            assert rates.wait_s(limited_key) == alone.wait_s(limited_key)


@pytest.mark.filterwarnings(
    "ignore:This process"
)  # warning of threads in a forked process; the child does not use them
def test_shared_rate_limits_count_forked_processes(clock, rates):
    child = os.fork()
    if child == 0:
        os._exit(sum(rates.wait_s(key("a")) == 0.0 for _ in range(2)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert [rates.wait_s(key("a")) == 0.0 for _ in range(3)] == [True, False, False]


def test_shared_rate_limits_evict_oldest_key(monkeypatch, clock):
    monkeypatch.setattr(rate_limiter, "_NUM_ENTRIES", 2)
    rates = SharedRateLimiter(clock)
    for name in "abc":
        assert [rates.wait_s(key(name, burst=1.0)) == 0.0 for _ in range(2)] == [True, False], name
        clock.sleep(0.01)
    for name in "bc":
        assert rates.wait_s(key(name, burst=1.0)) > 0.0, "the oldest key must be evicted"
        clock.sleep(0.01)
    assert rates.wait_s(key("a", burst=1.0)) == 0.0
    assert rates.wait_s(key("c", burst=1.0)) > 0.0, "an evicted key must not replace a newer one"
    rates.close()


@pytest.mark.filterwarnings("ignore:This process")
def test_shared_rate_limits_are_atomic_across_processes(clock, rates):
    """Without a lock, two processes could both take the last token of a bucket."""
    key_of_processes = key("a", rate=1e-9, burst=3000.0)
    children = []
    (reader, writer) = os.pipe()
    for _ in range(3):
        child = os.fork()
        if child == 0:
            granted = sum(rates.wait_s(key_of_processes) == 0.0 for _ in range(2000))
            os.write(writer, granted.to_bytes(4, "little"))
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
    assert sum(int.from_bytes(os.read(reader, 4), "little") for _ in children) == 3000
    os.close(reader)
    os.close(writer)
