"""The load generator: intended moments, no coordinated omission, and the search for the largest rate."""

import asyncio
import json
import math
import time

import numpy as np
import pytest

from nestrec.base.config_overrides import with_overrides
from nestrec.base.errors import UserError
from nestrec_bench.load_test.load_test import (
    LoadTestConfig,
    RequiredInputs,
    chosen_items,
    made_up_request,
    make_load,
    replay,
    send_load,
)
from nestrec_bench.load_test.open_loop import HttpClient, Reply, Trial, largest, poisson_arrivals, run_open_loop


def trial_of(latency_ms, duration_s=1.0):
    return Trial(1.0, np.array(latency_ms), 0.0, duration_s)


def test_arrivals_are_a_function_of_the_seed_with_the_right_mean():
    at_s = poisson_arrivals(200.0, 50.0, seed=1)
    assert np.array_equal(at_s, poisson_arrivals(200.0, 50.0, seed=1))
    assert abs(len(at_s) - 10_000) < 400
    assert at_s[-1] < 50.0
    assert abs(np.diff(at_s).std() * 200 - 1) < 0.1


def test_a_stall_is_felt_by_every_request_that_it_delays():
    """A server that does nothing for 300 ms: all who were meant to be sent meanwhile have waited."""

    async def send(number):
        if number == 0:
            time.sleep(0.3)
        return True

    trial = asyncio.run(run_open_loop([0.0, *np.linspace(0.01, 0.2, 20)], send))
    assert np.all(trial.latency_ms[1:] >= 300 - 200 - 1)
    assert trial.latency_ms[1] >= 289
    assert trial.lateness_ms >= 280


def test_refused_requests_count_as_never_answered():
    async def send(number):
        return number % 10 != 0

    trial = asyncio.run(run_open_loop(np.linspace(0, 0.01, 100), send))
    assert trial.num_refused == 10
    assert math.isinf(trial.percentile_ms(99))
    assert not trial.meets(1e9)


def test_percentiles_and_goodput():
    trial = trial_of([*range(1, 101)], duration_s=2.0)
    assert (trial.percentile_ms(50), trial.percentile_ms(99), trial.percentile_ms(100)) == (50, 99, 100)
    assert trial.goodput(80.0) == 40.0


@pytest.mark.parametrize("capacity", [3.0, 37.0, 1000.0])
def test_the_search_finds_the_largest_rate(capacity):
    asked = []

    def measure(rate):
        asked.append(rate)
        return trial_of([1.0 if rate <= capacity else 99.0])

    found, best = largest(measure, 50.0, start=10.0, rounds=6)
    assert 0.9 * capacity <= found <= capacity
    assert best.meets(50.0)
    assert len(asked) <= 16


@pytest.mark.parametrize("start", [9.6, 100.0])
def test_a_search_from_far_away_takes_few_trials_and_ends_within_a_factor(start):
    asked = []

    def measure(rate):
        asked.append(rate)
        return trial_of([1.0 if rate <= 31.0 else 99.0])

    found, _ = largest(measure, 50.0, start=start, rounds=1, factor=1.15)
    assert 31.0 / 1.15 <= found <= 31.0
    assert min(rate for rate in asked if rate > 31.0) <= found * 1.15 * 1.01
    assert len(asked) <= 8


def test_the_search_tries_nothing_beyond_the_most():
    asked = []

    def measure(rate):
        asked.append(rate)
        return trial_of([1.0])

    found, _ = largest(measure, 50.0, start=10.0, most=35.0)
    assert found == asked[-1] == max(asked) == 35.0
    assert len(asked) == 3


def test_load_over_http_reaches_a_server_and_is_timed(tmp_path):
    seen = []

    async def answer(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            seen.append((head.split()[1], json.loads(await reader.readexactly(length))))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async def run(load):
        server = await asyncio.start_server(_quietly(answer), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        trial = await send_load(f"http://127.0.0.1:{port}", load, 0.02)
        server.close()
        return trial

    cfg = LoadTestConfig(duration_s=0.5, signal_ms=20.0, returning=0.5)
    load = make_load(cfg, 60.0, 7, RequiredInputs(features=("tab",)), ["a", "b"])
    trial = asyncio.run(run(load))
    assert trial.num_refused == 0
    assert (
        sum(path == b"/v1/preinfer" for path, _ in seen)
        == sum(path == b"/v1/rank" for path, _ in seen)
        == len(load.at_s)
    )
    assert len({body["user"] for _, body in seen}) < len(load.at_s)
    assert {item for _, body in seen for item in body["history"]["items"]} == {"a", "b"}
    recorded = tmp_path / "load.jsonl"
    recorded.write_text('{"at_s": 0.0, "path": "/v1/recommend", "body": {"user": "a"}}\n')
    seen.clear()
    asyncio.run(run(make_load(LoadTestConfig(recorded=str(recorded)), 1.0, 1, RequiredInputs())))
    assert seen == [(b"/v1/recommend", {"user": "a"})]


def _quietly(answer):
    async def handle(reader, writer):
        try:
            await answer(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    return handle


def test_a_server_that_is_not_there_is_a_failed_request():
    async def run():
        return await HttpClient("127.0.0.1", 1).post("/", b"")

    assert asyncio.run(run()) == Reply(0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:8000", "https://127.0.0.1:8000"])
def test_a_load_that_nobody_would_hear_is_an_error_and_no_measurement(url):
    with pytest.raises(UserError) as refused:
        replay(url, LoadTestConfig(duration_s=0.01))
    assert (refused.value.option, refused.value.value) == ("URL", url)


def test_replay_items_are_those_of_a_file_or_a_number(tmp_path):
    path = tmp_path / "items.txt"
    path.write_text("B07\n\n x9 \n")
    assert chosen_items("http://nobody", str(path)) == ["B07", "x9"]
    assert list(chosen_items("http://nobody", "3")) == [1, 2, 3]
    path.write_text("\n")
    for wrong in (str(path), str(tmp_path / "none"), "0", "-3"):
        with pytest.raises(UserError, match=r"(?s)items = .*one item id per line"):
            chosen_items("http://nobody", wrong)


def test_synthetic_requests_of_a_seed_stay_the_same():
    cfg = LoadTestConfig(candidates=4, seed=7)
    reads = RequiredInputs(actions=("click", "buy"))
    _, body = made_up_request(5, 6, cfg, np.random.default_rng(3), reads, items=range(1, 1001))
    own = np.random.default_rng((7, 5))
    assert body["history"]["items"] == own.integers(1, 1001, 6).tolist()
    assert body["history"]["actions"] == own.choice(["click", "buy"], 6).tolist()
    assert body["candidates"] == np.random.default_rng(3).integers(1, 1001, 4).tolist()


def test_wrong_options_are_named(tmp_path):
    with pytest.raises(UserError, match="finds"):
        with_overrides(LoadTestConfig(), {"finds": "speed"})
    with pytest.raises(UserError, match="recorded"):
        make_load(LoadTestConfig(recorded=str(tmp_path / "none")), 1.0, 1, RequiredInputs())
