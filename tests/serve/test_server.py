"""`nestrec serve` as users run it: a process, sockets, signals."""

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_process import exchange, post, provoke_patiently, running_server, status_of, status_once_sent

from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.model.servable import Servable
from nestrec_bench.harness.random_model import random_retrieval

PATIENT = ("--limits.default_timeout_ms", "10000")
"""on a machine that others share"""
BODY = {"user": "u", "history": {"items": ["1", "2", "3"], "times_ms": [1, 2, 3]}, "k": 5}


@pytest.fixture(scope="module")
def server(retrieval):
    """(port, process); the last test of this file stops it."""
    with running_server(retrieval.folder, "--service.engine.max_queue_s", "1000", *PATIENT) as found:
        yield found


def test_an_exported_run_answers(server):
    port, _ = server
    response = exchange(port, post("/v1/recommend", BODY))
    assert status_of(response) == 200
    assert len(json.loads(response.partition(b"\r\n\r\n")[2])["items"]) == 5


@pytest.mark.parametrize("page", ["docs/serving.md"])  # tests/meta/test_readme.py sends the one of the README
def test_the_requests_that_the_pages_show_are_answered(server, page):
    port, _ = server
    text = (Path(__file__).parents[2] / page).read_text()
    shown = re.findall(r"curl -H 'content-type: application/json' http://127.0.0.1:8000(\S+) \\\n  -d '(.+)'\n", text)
    assert shown
    for path, body in shown:
        assert status_of(exchange(port, post(path, body.encode()))) == 200


def test_headers_at_their_limit_and_one_byte_above(server):
    port, _ = server
    head = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: "
    counted = len("/health/live") + len("hostlocalhost") + len("connectionclose") + len("x") + 3 * 4
    for size, status in (((1 << 14) - counted, 200), ((1 << 14) - counted + 1, 431)):
        assert status_of(exchange(port, head + b"a" * size + b"\r\n\r\n")) == status


def raw_request(rng):  # noqa: PLR0911
    """A request that something is wrong with, at the level of bytes."""
    good = post("/v1/recommend", {**BODY, "user": str(rng.random())})
    kind = rng.randrange(8)
    if kind == 0:
        return good[: rng.randrange(1, len(good))]
    if kind == 1:
        broken = bytearray(good)
        for _ in range(rng.randint(1, 8)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        return bytes(broken)
    if kind == 2:
        return rng.randbytes(rng.randint(1, 300))
    if kind == 3:
        return good.replace(
            b"content-length: ", rng.choice([b"content-length: -", b"content-length: 9", b"content-length: x"])
        )
    if kind == 4:
        return good.replace(b"content-length: ", b"transfer-encoding: chunked\r\nx: ")
    if kind == 5:
        return good.replace(b"HTTP/1.1", rng.choice([b"HTTP/9.9", b"HTTP/1.", b"HTP/1.1", b""]))
    if kind == 6:
        place = rng.randrange(len(good))
        return good[:place] + rng.choice([b"\r\n", b"\x00", b"\xff\xfe", b"\r", b"\n\n"]) + good[place:]
    return b"GET " + b"/" * rng.randint(1, 400) + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("count", [2_000, pytest.param(40_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_raw_malformed_requests_never_crash_hang_or_blame_the_server(server, count):
    port, process = server
    rng = random.Random(count)
    requests = [raw_request(rng) for _ in range(count)]
    with ThreadPoolExecutor(8) as pool:  # each waits a little for answers that never come
        statuses = list(pool.map(lambda data: status_of(provoke_patiently(port, data)), requests))
    assert all(status is None or status < 500 for status in statuses)
    assert statuses.count(400) > count // 8
    assert process.poll() is None
    assert status_of(exchange(port, post("/v1/recommend", BODY))) == 200
    state = json.loads(exchange(port, b"GET /v1/status HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")[2])
    assert state["models"]["retrieval"]["queued_s"] == 0.0
    assert state["router"]["loads"] == [0]


def test_slow_heads_and_bodies_are_cut_off_and_connections_are_bounded(retrieval):
    limits = ("--limits.head_timeout_s", "0.5", "--limits.body_timeout_s", "0.5", "--limits.max_connections", "3")
    with running_server(retrieval.folder, *limits, *PATIENT) as (port, _):
        whole = post("/v1/recommend", BODY)
        with contextlib.ExitStack() as others:
            kept = []
            for _ in range(3):  # each asks at once: half a second after it has come, who has not is cut off
                kept.append(others.enter_context(socket.create_connection(("127.0.0.1", port))))
                kept[-1].sendall(whole.replace(b"connection: close", b"connection: keep-alive"))
                assert status_of(kept[-1].recv(65536)) == 200
            assert status_of(exchange(port, whole)) == 200
            with contextlib.suppress(ConnectionResetError):
                assert kept[0].recv(1) == b"", "the longest idle gave way"
        assert exchange(port, b"") == b""
        assert exchange(port, whole[:30]) == b""
        assert status_of(exchange(port, whole[:-5])) == 408
        assert status_of(exchange(port, whole)) == 200


def wait_until_reloaded(port):
    while True:
        answer = exchange(port, b"GET /v1/status HTTP/1.0\r\n\r\n")
        reloads = json.loads(answer.partition(b"\r\n\r\n")[2])["reloads"]
        if reloads["done"] == reloads["asked"]:
            return
        time.sleep(0.02)  # another process loads: there is no clock to inject


def test_sighup_swaps_the_model_and_refuses_a_damaged_one(tmp_path):
    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16, time_bias=True)
    current = tmp_path / "current"
    for seed in (1, 2):
        write_servable(random_retrieval(encoder, num_items=20, seed=seed), tmp_path / str(seed))
    current.symlink_to(tmp_path / "1")
    first, second = (Servable.load(tmp_path / name).version[:12] for name in ("1", "2"))
    with running_server(current, "--tables.store", "disk", "--tables.cache_rows", "8", *PATIENT) as (port, process):

        def version():
            response = exchange(port, post("/v1/recommend", BODY))
            assert status_of(response) == 200
            return json.loads(response.partition(b"\r\n\r\n")[2])["model"]

        assert version() == first
        current.unlink()
        current.symlink_to(tmp_path / "2")
        process.send_signal(signal.SIGHUP)
        while (found := version()) == first:
            pass
        assert found == second
        assert f"{second} has taken over from {first}".encode() in next(
            line for line in process.stdout if b"over" in line
        )
        for number in range(1, 9):  # faster than a model is loaded: the last one wins
            current.unlink()
            current.symlink_to(tmp_path / ("1", "2")[number % 2 == 0])
            process.send_signal(signal.SIGHUP)
            time.sleep(0.01)
        wait_until_reloaded(port)
        assert version() == second
        (tmp_path / "2" / "weights.safetensors").write_bytes(b"damaged")
        process.send_signal(signal.SIGHUP)
        assert b"stays as it is" in next(line for line in process.stdout if b"stays" in line)
        assert version() == second


def test_sigterm_loses_nothing_of_what_is_in_flight(server):
    """500 connections whose requests have all been sent before the signal."""
    port, process = server

    def request(number):
        return post("/v1/recommend", {**BODY, "user": f"u{number}"})

    async def run():
        sent = asyncio.Semaphore(0)
        asked = [asyncio.create_task(status_once_sent(port, request(i), sent)) for i in range(500)]
        for _ in range(500):
            await sent.acquire()
        # All bytes are with the kernel; the server has accepted a connection once it answers on it.
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(run())
    assert process.wait(timeout=100) == 0
    assert answers.count(200) == 500, {str(a): answers.count(a) for a in set(map(str, answers))}
