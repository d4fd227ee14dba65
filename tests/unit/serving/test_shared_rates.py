"""Rates of keys that several processes keep together."""

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


def test_it_says_what_the_rates_of_one_process_say(rates, clock):
    alone = LocalRateLimiter(clock)
    keys = [key("a"), key("b", rate=0.5, burst=1.0), key("c", rate=float("inf"))]
    for step in range(60):
        clock.sleep(0.1 * (step % 4))
        for one in keys:
            assert rates.wait_s(one) == alone.wait_s(one)


@pytest.mark.filterwarnings("ignore:This process")  # has threads, which the child has no use for
def test_what_a_forked_process_takes_is_taken_from_all(clock, rates):
    child = os.fork()
    if child == 0:
        os._exit(sum(rates.wait_s(key("a")) == 0.0 for _ in range(2)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert [rates.wait_s(key("a")) == 0.0 for _ in range(3)] == [True, False, False]


def test_keys_that_come_take_the_places_of_those_that_went(monkeypatch, clock):
    monkeypatch.setattr(rate_limiter, "_NUM_ENTRIES", 2)
    rates = SharedRateLimiter(clock)
    for name in "abc":
        assert [rates.wait_s(key(name, burst=1.0)) == 0.0 for _ in range(2)] == [True, False], name
        clock.sleep(0.01)
    for name in "bc":
        assert rates.wait_s(key(name, burst=1.0)) > 0.0, "the oldest one went"
        clock.sleep(0.01)
    assert rates.wait_s(key("a", burst=1.0)) == 0.0
    assert rates.wait_s(key("c", burst=1.0)) > 0.0, "and it did not come back to the place that another has now"
    rates.close()


@pytest.mark.filterwarnings("ignore:This process")
def test_processes_that_ask_at_once_get_no_more_than_one_would(clock, rates):
    """Without a lock, two that read the same bucket would both take its last token."""
    often = key("a", rate=1e-9, burst=3000.0)
    children = []
    (told, tell) = os.pipe()
    for _ in range(3):
        child = os.fork()
        if child == 0:
            granted = sum(rates.wait_s(often) == 0.0 for _ in range(2000))
            os.write(tell, granted.to_bytes(4, "little"))
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
    assert sum(int.from_bytes(os.read(told, 4), "little") for _ in children) == 3000
    os.close(told)
    os.close(tell)
