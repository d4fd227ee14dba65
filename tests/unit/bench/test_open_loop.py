"""Tests of the open-loop load generator: send times, no coordinated omission, and the search for the maximum rate."""

import asyncio
import json
import math
import time

import numpy as np
import pytest

from nestrec.base.config_overrides import apply_overrides
from nestrec.base.errors import UserError
from nestrec_bench.load_test.load_test import (
    LoadTestConfig,
    RequiredInputs,
    make_load,
    request_items,
    run_load_test,
    send_load,
    synthetic_request,
)
from nestrec_bench.load_test.open_loop import HttpClient, Reply, Trial, largest, poisson_arrivals, run_open_loop


def trial_of(latency_ms, duration_s=1.0):
    return Trial(1.0, np.array(latency_ms), 0.0, duration_s)


def test_open_loop_poisson_arrivals_are_deterministic():
    at_s = poisson_arrivals(200.0, 50.0, seed=1)
    assert np.array_equal(at_s, poisson_arrivals(200.0, 50.0, seed=1))
    assert abs(len(at_s) - 10_000) < 400
    assert at_s[-1] < 50.0
    assert abs(np.diff(at_s).std() * 200 - 1) < 0.1


def test_open_loop_counts_stalls_without_coordinated_omission():
    """A server stalls for 300 ms, which increases the latency of all requests that are due meanwhile."""

    async def send(number):
        if number == 0:
            time.sleep(0.3)
        return True

    trial = asyncio.run(run_open_loop([0.0, *np.linspace(0.01, 0.2, 20)], send))
    assert np.all(trial.latency_ms[1:] >= 300 - 200 - 1)
    assert trial.latency_ms[1] >= 289
    assert trial.lateness_ms >= 280


def test_open_loop_rejected_requests_have_infinite_latency():
    async def send(number):
        return number % 10 != 0

    trial = asyncio.run(run_open_loop(np.linspace(0, 0.01, 100), send))
    assert trial.num_rejected == 10
    assert math.isinf(trial.percentile_ms(99))
    assert not trial.meets(1e9)


def test_open_loop_percentiles_and_goodput():
    trial = trial_of([*range(1, 101)], duration_s=2.0)
    assert (trial.percentile_ms(50), trial.percentile_ms(99), trial.percentile_ms(100)) == (50, 99, 100)
    assert trial.goodput(80.0) == 40.0


@pytest.mark.parametrize("capacity", [3.0, 37.0, 1000.0])
def test_open_loop_search_finds_largest_rate(capacity):
    rates = []

    def measure(rate):
        rates.append(rate)
        return trial_of([1.0 if rate <= capacity else 99.0])

    found, best = largest(measure, 50.0, start=10.0, rounds=6)
    assert 0.9 * capacity <= found <= capacity
    assert best.meets(50.0)
    assert len(rates) <= 16


@pytest.mark.parametrize("start", [9.6, 100.0])
def test_open_loop_search_from_far_needs_few_trials(start):
    rates = []

    def measure(rate):
        rates.append(rate)
        return trial_of([1.0 if rate <= 31.0 else 99.0])

    found, _ = largest(measure, 50.0, start=start, rounds=1, factor=1.15)
    assert 31.0 / 1.15 <= found <= 31.0
    assert min(rate for rate in rates if rate > 31.0) <= found * 1.15 * 1.01
    assert len(rates) <= 8


def test_open_loop_search_respects_maximum():
    rates = []

    def measure(rate):
        rates.append(rate)
        return trial_of([1.0])

    found, _ = largest(measure, 50.0, start=10.0, most=35.0)
    assert found == rates[-1] == max(rates) == 35.0
    assert len(rates) == 3


def test_load_test_sends_signals_and_requests_over_http(tmp_path):
    received = []

    async def respond(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            received.append((head.split()[1], json.loads(await reader.readexactly(length))))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async def run(load):
        server = await asyncio.start_server(_closing_at_end(respond), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        trial = await send_load(f"http://127.0.0.1:{port}", load, 0.02)
        server.close()
        return trial

    cfg = LoadTestConfig(duration_s=0.5, preinfer_lead_ms=20.0, returning_fraction=0.5)
    load = make_load(cfg, 60.0, 7, RequiredInputs(features=("tab",)), ["a", "b"])
    trial = asyncio.run(run(load))
    assert trial.num_rejected == 0
    assert (
        sum(path == b"/v1/preinfer" for path, _ in received)
        == sum(path == b"/v1/rank" for path, _ in received)
        == len(load.at_s)
    )
    assert len({body["user"] for _, body in received}) < len(load.at_s)
    assert {item for _, body in received for item in body["history"]["items"]} == {"a", "b"}
    recording = tmp_path / "load.jsonl"
    recording.write_text('{"at_s": 0.0, "path": "/v1/recommend", "body": {"user": "a"}}\n')
    received.clear()
    asyncio.run(run(make_load(LoadTestConfig(recording=str(recording)), 1.0, 1, RequiredInputs())))
    assert received == [(b"/v1/recommend", {"user": "a"})]


@pytest.mark.parametrize(("path", "status"), [("/v1/events", "202 Accepted"), ("/v1/rank", "200 OK")])
def test_load_test_recording_counts_2xx_as_success(tmp_path, path, status):
    recording = tmp_path / "load.jsonl"
    recording.write_text(json.dumps({"at_s": 0.0, "path": path, "body": {"user": "a"}}) + "\n")
    (row,) = load_test_rows(recording, status)
    assert (row["requests"], math.isfinite(row["p50_ms"])) == (1, True)


def test_load_test_recording_counts_other_status_as_failure(tmp_path):
    recording = tmp_path / "load.jsonl"
    recording.write_text('{"at_s": 0.0, "path": "/v1/rank", "body": {}}\n')
    (row,) = load_test_rows(recording, "429 Too Many Requests")
    assert row["p50_ms"] is None


def test_load_test_recording_row_omits_synthetic_options(tmp_path):
    recording = tmp_path / "load.jsonl"
    recording.write_text('{"at_s": 0.0, "path": "/v1/rank", "body": {}}\n')
    (row,) = load_test_rows(recording, "200 OK")
    assert not {"history", "candidates"} & set(row)


def load_test_rows(recording, status):
    """Return the rows of a load test with recorded requests, to which the server responds with `status`."""

    async def respond(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 2\r\n\r\n{{}}".encode())

    async def run():
        server = await asyncio.start_server(_closing_at_end(respond), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        rows = await asyncio.to_thread(run_load_test, url, LoadTestConfig(recording=str(recording)))
        server.close()
        return rows

    return asyncio.run(run())


def _closing_at_end(respond):
    async def handle(reader, writer):
        try:
            await respond(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    return handle


def test_open_loop_missing_server_is_failed_request():
    async def run():
        return await HttpClient("127.0.0.1", 1).post("/", b"")

    assert asyncio.run(run()) == Reply(0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:8000", "https://127.0.0.1:8000"])
def test_load_test_rejects_unreachable_server(url):
    with pytest.raises(UserError) as error:
        run_load_test(url, LoadTestConfig(duration_s=0.01))
    assert (error.value.option, error.value.value) == ("URL", url)


def test_load_test_items_from_file_or_number(tmp_path):
    url = "http://unused"
    path = tmp_path / "items.txt"
    path.write_text("B07\n\n x9 \n")
    assert request_items(url, str(path)) == ["B07", "x9"]
    assert list(request_items(url, "3")) == [1, 2, 3]
    path.write_text("\n")
    for invalid in (str(path), str(tmp_path / "missing"), "0", "-3"):
        with pytest.raises(UserError, match=r"(?s)items=.*one item id per line"):
            request_items(url, invalid)


def test_load_test_synthetic_requests_are_deterministic():
    cfg = LoadTestConfig(num_candidates=4, seed=7)
    reads = RequiredInputs(actions=("click", "buy"))
    _, body = synthetic_request(5, 6, cfg, np.random.default_rng(3), reads, items=range(1, 1001))
    own = np.random.default_rng((7, 5))
    assert body["history"]["items"] == own.integers(1, 1001, 6).tolist()
    assert body["history"]["actions"] == own.choice(["click", "buy"], 6).tolist()
    assert body["candidates"] == np.random.default_rng(3).integers(1, 1001, 4).tolist()


def test_load_test_rejects_invalid_options(tmp_path):
    with pytest.raises(UserError, match="search_for"):
        apply_overrides(LoadTestConfig(), {"search_for": "speed"})
    with pytest.raises(UserError, match="recording="):
        make_load(LoadTestConfig(recording=str(tmp_path / "missing")), 1.0, 1, RequiredInputs())
