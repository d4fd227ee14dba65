"""`nestrec serve` as a separate process, with real sockets and signals."""

import asyncio
import contextlib
import itertools
import json
import random
import re
import shlex
import signal
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_process import exchange, post, provoke_with_retries, running_server, status_of, status_once_sent

from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.model.servable import Servable
from nestrec_bench.harness.random_model import random_retrieval

LONG_TIMEOUT = ("--limits.default_timeout_ms", "10000")
"""Options for machines under other load."""
BODY = {"user": "u", "history": {"items": ["1", "2", "3"], "times_ms": [1, 2, 3]}, "k": 5}


@pytest.fixture(scope="module")
def server(retrieval):
    """Yield (port, process); the last test of this file stops the process."""
    with running_server(
        retrieval.folder, "--service.engine.max_queue_delay_s", "1000", *LONG_TIMEOUT
    ) as port_and_process:
        yield port_and_process


def test_server_serves_exported_run(server):
    port, _ = server
    response = exchange(port, post("/v1/recommend", BODY))
    assert status_of(response) == 200
    assert len(json.loads(response.partition(b"\r\n\r\n")[2])["items"]) == 5


# tests/meta/test_readme.py sends the example of the README
@pytest.mark.parametrize(("page", "count"), [("docs/serving.md", 7), ("docs/get-started/quickstart.md", 4)])
def test_server_accepts_curl_examples_of_docs(server, page, count):
    port, _ = server
    examples = curl_examples((Path(__file__).parents[2] / page).read_text())
    assert len(examples) == count
    users_with_events = set()
    for method, path, body in examples:
        user = path.split("/")[3] if method == "DELETE" else json.loads(body)["user"]
        status = {"/v1/events": 202, "/v1/preinfer": 202}.get(path, 204 if method == "DELETE" else 200)
        if path == "/v1/recommend" and "history" not in json.loads(body) and user not in users_with_events:
            status = 400  # the examples show this error
        request = post(path, (body or "").encode()).replace(b"POST", method.encode(), 1)
        assert status_of(exchange(port, request)) == status, (method, path, body)
        if path == "/v1/events":
            users_with_events.add(user)
        elif method == "DELETE":
            users_with_events.remove(user)


def curl_examples(text):
    """Return (method, path, body) of each curl command in the `sh` blocks of a page, with `$URL` substituted."""
    examples = []
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        words = shlex.split(block.replace("\\\n", " "), comments=True)
        variables = dict(word.split("=", 1) for word in words if word.startswith("URL="))
        starts = [index for index, word in enumerate(words) if word == "curl"]
        for start, end in itertools.pairwise([*starts, len(words)]):
            command = words[start:end]
            (url,) = (word for word in command if word.startswith(("http://", "$URL/")))
            url = url.replace("$URL", variables.get("URL", "$URL"))
            assert url.startswith("http://127.0.0.1:8000/"), url
            body = command[command.index("-d") + 1] if "-d" in command else None
            method = "POST" if body else "GET"
            if "-X" in command:
                method = command[command.index("-X") + 1]
            examples.append((method, url.removeprefix("http://127.0.0.1:8000"), body))
    return examples


def test_server_header_limit_at_and_above_maximum(server):
    port, _ = server
    head = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: "
    counted = len("/health/live") + len("hostlocalhost") + len("connectionclose") + len("x") + 3 * 4
    for size, status in (((1 << 14) - counted, 200), ((1 << 14) - counted + 1, 431)):
        assert status_of(exchange(port, head + b"a" * size + b"\r\n\r\n")) == status


def raw_request(rng):  # noqa: PLR0911
    """Return a request that is malformed at the byte level."""
    valid = post("/v1/recommend", {**BODY, "user": str(rng.random())})
    kind = rng.randrange(8)
    if kind == 0:
        return valid[: rng.randrange(1, len(valid))]
    if kind == 1:
        broken = bytearray(valid)
        for _ in range(rng.randint(1, 8)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        return bytes(broken)
    if kind == 2:
        return rng.randbytes(rng.randint(1, 300))
    if kind == 3:
        return valid.replace(
            b"content-length: ", rng.choice([b"content-length: -", b"content-length: 9", b"content-length: x"])
        )
    if kind == 4:
        return valid.replace(b"content-length: ", b"transfer-encoding: chunked\r\nx: ")
    if kind == 5:
        return valid.replace(b"HTTP/1.1", rng.choice([b"HTTP/9.9", b"HTTP/1.", b"HTP/1.1", b""]))
    if kind == 6:
        position = rng.randrange(len(valid))
        return valid[:position] + rng.choice([b"\r\n", b"\x00", b"\xff\xfe", b"\r", b"\n\n"]) + valid[position:]
    return b"GET " + b"/" * rng.randint(1, 400) + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("count", [2_000, pytest.param(40_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_server_survives_malformed_requests(server, count):
    port, process = server
    rng = random.Random(count)
    requests = [raw_request(rng) for _ in range(count)]
    with ThreadPoolExecutor(8) as pool:  # each thread waits shortly for responses that may never arrive
        statuses = list(pool.map(lambda data: status_of(provoke_with_retries(port, data)), requests))
    assert all(status is None or status < 500 for status in statuses)
    assert statuses.count(400) > count // 8
    assert process.poll() is None
    assert status_of(exchange(port, post("/v1/recommend", BODY))) == 200
    state = json.loads(exchange(port, b"GET /v1/status HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")[2])
    assert state["models"]["retrieval"]["queued_s"] == 0.0
    assert state["router"]["loads"] == [0]


def test_server_timeouts_and_connection_limits(retrieval):
    limits = ("--limits.header_timeout_s", "0.5", "--limits.body_timeout_s", "0.5", "--limits.max_connections", "3")
    with running_server(retrieval.folder, *limits, *LONG_TIMEOUT) as (port, _):
        request = post("/v1/recommend", BODY)
        with contextlib.ExitStack() as others:
            idle = []
            for _ in range(3):  # each sends at once: a connection without a header is closed after half a second
                idle.append(others.enter_context(socket.create_connection(("127.0.0.1", port))))
                idle[-1].sendall(request.replace(b"connection: close", b"connection: keep-alive"))
                assert status_of(idle[-1].recv(65536)) == 200
            assert status_of(exchange(port, request)) == 200
            with contextlib.suppress(ConnectionResetError):
                assert idle[0].recv(1) == b"", "the connection that was idle longest is closed"
        assert exchange(port, b"") == b""
        assert exchange(port, request[:30]) == b""
        assert status_of(exchange(port, request[:-5])) == 408
        assert status_of(exchange(port, request)) == 200


def wait_until_reloaded(port):
    while True:
        response = exchange(port, b"GET /v1/status HTTP/1.0\r\n\r\n")
        reloads = json.loads(response.partition(b"\r\n\r\n")[2])["reloads"]
        if reloads["done"] == reloads["requested"]:
            return
        time.sleep(0.02)  # another process loads: there is no clock to inject


def test_sighup_reloads_model_and_rejects_corrupt_one(tmp_path):
    encoder = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16, time_bias=True)
    current = tmp_path / "current"
    for seed in (1, 2):
        write_servable(random_retrieval(encoder, num_items=20, seed=seed), tmp_path / str(seed))
    current.symlink_to(tmp_path / "1")
    first, second = (Servable.load(tmp_path / name).version[:12] for name in ("1", "2"))
    with running_server(current, "--tables.store", "disk", "--tables.cache_rows", "8", *LONG_TIMEOUT) as (
        port,
        process,
    ):

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
        assert f"{second} replaced {first}".encode() in next(line for line in process.stdout if b"replaced" in line)
        for number in range(1, 9):  # faster than a model is loaded; the last one must be served
            current.unlink()
            current.symlink_to(tmp_path / ("1", "2")[number % 2 == 0])
            process.send_signal(signal.SIGHUP)
            time.sleep(0.01)
        wait_until_reloaded(port)
        assert version() == second
        (tmp_path / "2" / "weights.safetensors").write_bytes(b"damaged")
        process.send_signal(signal.SIGHUP)
        assert b"stay in service" in next(line for line in process.stdout if b"reload failed" in line)
        assert version() == second


def test_sigterm_drains_requests_in_flight(server):
    """500 connections send a request each before the signal."""
    port, process = server

    def request(number):
        return post("/v1/recommend", {**BODY, "user": f"u{number}"})

    async def run():
        sent = asyncio.Semaphore(0)
        responses = [asyncio.create_task(status_once_sent(port, request(i), sent)) for i in range(500)]
        for _ in range(500):
            await sent.acquire()
        # All bytes are in the kernel; after the first response, the server has accepted connections.
        await asyncio.wait(responses, return_when=asyncio.FIRST_COMPLETED)
        process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*responses, return_exceptions=True)

    statuses = asyncio.run(run())
    assert process.wait(timeout=100) == 0
    assert statuses.count(200) == 500, Counter(map(str, statuses))
