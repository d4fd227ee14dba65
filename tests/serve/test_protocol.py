"""The HTTP protocol over sockets: the fast path and the ASGI path, and limits at and above their maximum."""

import asyncio
import contextlib
import gzip
import json
import re
import socket
import struct
import threading
from dataclasses import replace

import pytest
from uvicorn.server import ServerState

from nestrec.base.errors import UserError
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.http.fast_request import FastRequestCycle
from nestrec.serving.http.http_app import App
from nestrec.serving.http.limited_http import LimitedProtocol
from nestrec.serving.http.serve_config import ServeConfig, uvicorn_config
from nestrec.serving.kv_cache.tiered_prefix_cache import PrefixCacheConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=32, time_bias=True)
LIMITS = LimitsConfig(
    max_body_bytes=2000,
    max_header_bytes=500,
    max_connections=3,
    body_timeout_s=60.0,
    write_timeout_s=60.0,
    default_timeout_ms=10_000,
)
BODY = {"user": "u", "history": {"items": [1, 2], "times_ms": [1, 2]}, "candidates": [3, 4], "now_ms": 9}
JSON_TYPE = b"content-type: application/json\r\n"
CONFIG = ServiceConfig(engine=EngineConfig(max_queue_delay_s=1e9, prefix_cache=PrefixCacheConfig(enabled=False)))


@pytest.fixture(scope="module")
def service():
    service = Service({"retrieval": random_retrieval(ENCODER, num_items=50)}, CONFIG)
    yield service
    service.close()


@pytest.fixture
def app(service):
    return App(service, LIMITS)


@pytest.fixture
def fast_routes(monkeypatch):
    """Return a list to which each request on the fast path appends its route."""
    routes = []
    begin = FastRequestCycle._begin
    monkeypatch.setattr(FastRequestCycle, "_begin", lambda self: routes.append(self._route) or begin(self))
    return routes


@contextlib.asynccontextmanager
async def listening(app, limits=LIMITS):
    """Serve an application; yield its port and the server state of uvicorn."""
    config = uvicorn_config(app, ServeConfig(limits=limits), app)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    yield server.sockets[0].getsockname()[1], state
    server.close()


def exchange(app, *chunks):
    """Send chunks in order on one connection; return the bytes received until the server closes it."""

    async def run():
        async with listening(app) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for chunk in chunks:
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(0.005)  # so that chunks arrive separately: the kernel has no clock to inject
            received = await reader.read()
            writer.close()
            return received

    return asyncio.run(run())


def request(body=BODY, *, head=b"", ends=True, is_chunked=False, path=b"/v1/rank", kind=JSON_TYPE, host=b"localhost"):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % len(content)
    lines = b"POST " + path + b" HTTP/1.1\r\nhost: " + host + b"\r\n" + kind + head
    lines += b"connection: close\r\n" if ends else b""
    framed = b"%x\r\n" % len(content) + content + b"\r\n0\r\n\r\n" if is_chunked else content
    return lines + length + b"\r\n\r\n" + framed


def parse_responses(received):
    """Return (status, body) of each response."""
    found = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])
        found.append((int(head.split(b" ", 2)[1]), rest[:length]))
        received = rest[length:]
    return found


BODIES = [
    BODY,
    {**BODY, "candidates": []},
    {**BODY, "more": 1},
    {**BODY, "user": "x" * 257},
    {"user": "a"},
    [],
    b"{",
    b"",
    b"\xff",
    {**BODY, "candidates": ["none", 1, "2"]},
    {**BODY, "timeout_ms": 0},
    {**BODY, "candidates": [True]},
]


@pytest.mark.parametrize("path", [b"/v1/rank", b"/v1/recommend", b"/v1/preinfer", b"/v1/events"])
def test_protocol_fast_path_equals_asgi_path(app, fast_routes, path):
    for body in BODIES:
        before = len(fast_routes)
        (fast,) = parse_responses(exchange(app, request(body, path=path)))
        assert len(fast_routes) == before + 1
        (asgi,) = parse_responses(exchange(app, request(body, path=path, is_chunked=True)))
        assert len(fast_routes) == before + 1
        assert fast == asgi


@pytest.mark.parametrize(
    "data",
    [
        request(head=b"expect: 100-continue\r\n"),
        request(kind=b"content-type: application/json; charset=utf-8\r\n"),
        request(path=b"/v1/rank?a=1"),
        request(path=b"http://t/v1/rank"),
        request(path=b"/v1%2frank"),
        request().replace(b"HTTP/1.1", b"HTTP/1.0"),
        request(is_chunked=True),
        request(head=b"upgrade: x\r\n"),
        request(head=b"content-encoding: identity\r\n"),
        request(head=b"content-encoding: gzip\r\n"),
        request(kind=b""),
        request(host=b"elsewhere.example"),
        request(head=b"host: localhost\r\n"),
    ],
)
def test_protocol_unusual_requests_use_asgi_path(app, fast_routes, data):
    assert re.match(rb"HTTP/1.1 (200|100|400|415|421) ", exchange(app, data))
    assert not fast_routes


@pytest.mark.parametrize("path", [b"/v1/rank", b"/v1/recommend", b"/v1/preinfer", b"/v1/events"])
@pytest.mark.parametrize("encoding", [b"gzip", b"deflate, gzip", b"IDENTITY"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_compressed_body_is_rejected_with_415(app, path, encoding, is_chunked):
    head = b"content-encoding: " + encoding + b"\r\n"
    content = gzip.compress(json.dumps(BODY).encode())
    ((status, body),) = parse_responses(exchange(app, request(content, head=head, path=path, is_chunked=is_chunked)))
    assert status == (400 if encoding == b"IDENTITY" else 415)
    assert status == 400 or json.loads(body)["error"]["field"] == "content-encoding"


def test_protocol_split_request_uses_asgi_path(app, fast_routes):
    """The fast path requires that the end of the head and the complete body arrive in one read."""
    data = request()
    for split, num_fast in ((1, 1), (20, 2), (data.index(b"{"), 2), (len(data) - 30, 2), (len(data) - 1, 2)):
        ((status, body),) = parse_responses(exchange(app, data[:split], data[split:]))
        assert (status, len(json.loads(body)["scores"]["score"])) == (200, 2)
        assert len(fast_routes) == num_fast


@pytest.mark.parametrize("is_chunked", [False, True])
def test_protocol_body_limit_at_and_above_maximum(app, is_chunked):
    content = json.dumps(BODY).encode()
    for size, status in ((2000, 200), (2001, 413)):
        received = exchange(app, request(content.ljust(size), is_chunked=is_chunked, ends=status != 413))
        assert parse_responses(received)[0][0] == status
        assert b"connection: close" in received, "the server does not read the rest"


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_protocol_header_limit_at_and_above_maximum(app, num_chunks):
    known_size = len("/v1/rankhostlocalhostcontent-typeapplication/jsonconnectionclosecontent-length114x") + 5 * 4
    for size, status in ((500 - known_size, 200), (501 - known_size, 431)):
        data = request(json.dumps(BODY).encode().ljust(114), head=b"x: " + b"a" * size + b"\r\n")
        chunks = (data,) if num_chunks == 1 else (data[:300], data[300:])
        received = exchange(app, *chunks)
        assert parse_responses(received)[0][0] == status


def test_protocol_endless_header_is_closed(app):
    received = exchange(app, b"POST /v1/rank HTTP/1.1\r\nx: ", *[b"a" * 200] * 4)
    assert parse_responses(received)[0][0] == 431


def test_protocol_malformed_request_is_counted_not_logged(app, capfd):
    for data in (b"nonsense\r\n\r\n", request().replace(b"HTTP/1.1", b"HTTP/x")):
        assert parse_responses(exchange(app, data))[0][0] == 400
    assert 'nestrec_http_requests_total{route="malformed",status="400"} 2.0' in app.metrics.exposition().decode()
    assert capfd.readouterr() == ("", "")


def test_protocol_trailers_are_bounded_and_ignored(app):
    data = request(is_chunked=True)
    short_trailer = data[:-2] + b"content-type: text/plain\r\n\r\n"
    assert parse_responses(exchange(app, short_trailer))[0][0] == 200
    received = exchange(app, data[:-2] + b"x: ", *[b"a" * 200] * 5)
    assert parse_responses(received)[0][0] == 431


def test_protocol_missing_body_times_out(service):
    received = exchange(App(service, replace(LIMITS, body_timeout_s=0.1)), request(ends=False)[:-1])
    assert parse_responses(received)[0][0] == 408
    assert b"connection: close" in received


def test_pipelined_responses_are_in_request_order(app, fast_routes):
    data = [request({**BODY, "candidates": [1] * (1 + i)}, ends=i == 5, is_chunked=i % 3 == 1) for i in range(6)]
    found = parse_responses(exchange(app, b"".join(data)))
    assert [status for status, _ in found] == [200] * 6
    assert [len(json.loads(body)["scores"]["score"]) for _, body in found] == [1, 2, 3, 4, 5, 6]
    assert fast_routes == ["/v1/rank"], "requests after another one use the ASGI path"


async def read_response(reader):
    """Read one response; return (status, body)."""
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split()[1]), await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))


async def wait_closed(reader):
    """Wait until the server closes the connection; return True."""
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    return True


def test_connections_idle_ones_are_closed_first(app):
    async def run():
        async with listening(app) as (port, state):
            unused, idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            idle[1].write(request(ends=False))
            found = [(await read_response(idle[0]))[0]]
            may_continue = asyncio.Event()
            rank = app._posts._handlers["/v1/rank"]

            async def wait_and_rank(data):
                await may_continue.wait()
                return await rank(data)

            app._posts._handlers["/v1/rank"] = wait_and_rank
            busy = []
            for number in range(LIMITS.max_connections):
                busy.append(await asyncio.open_connection("127.0.0.1", port))
                busy[-1][1].write(request(ends=False))
                while sum(c.cycle is not None and not c.cycle.response_complete for c in state.connections) <= number:
                    await asyncio.sleep(0.001)
                if number:  # the connection without a request is closed first
                    found.append(await wait_closed((unused, idle)[number - 1][0]))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request())
            rejected = await reader.read()
            may_continue.set()
            found += [(await read_response(reader))[0] for reader, _ in busy]
            for _, opened in (*busy, unused, idle, (None, writer)):
                opened.close()
            return found, rejected

    found, rejected = asyncio.run(run())
    assert found == [200, True, True, 200, 200, 200]
    assert rejected.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in rejected


def test_connections_per_address_limit_holds(app):
    async def run():
        async with listening(app, replace(LIMITS, max_connections_per_address=2)) as (port, _):
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            found = await asyncio.wait_for(wait_closed(opened[0][0]), 60.0)
            for _, writer in opened:
                writer.close()
            return found

    assert asyncio.run(run())


def test_client_disconnect_cancels_request(app):
    async def run():
        async with listening(app) as (port, state):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            held = asyncio.Event()
            app._posts._handlers["/v1/rank"] = lambda _: held.wait()
            linger = struct.pack("ii", 1, 0)  # abort with a reset: after a half-close, the client could still read
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.write(request(ends=False))
            while not any(isinstance(c.cycle, FastRequestCycle) for c in state.connections):
                await asyncio.sleep(0.001)
            writer.transport.abort()
            while state.connections:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)

    asyncio.run(run())
    assert 'nestrec_http_requests_total{route="/v1/rank",status="499"} 1.0' in app.metrics.exposition().decode()


def test_graceful_shutdown_responds_and_closes(app):
    async def run():
        async with listening(app) as (port, state):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            may_continue = asyncio.Event()
            rank = app._posts._handlers["/v1/rank"]

            async def wait_and_rank(data):
                await may_continue.wait()
                return await rank(data)

            app._posts._handlers["/v1/rank"] = wait_and_rank
            writer.write(request(ends=False))
            while not any(isinstance(c.cycle, FastRequestCycle) for c in state.connections):
                await asyncio.sleep(0.001)
            for connection in state.connections:
                connection.shutdown()
            may_continue.set()
            received = await reader.read()
            writer.close()
            return received

    received = asyncio.run(run())
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close\r\n" in received


@contextlib.asynccontextmanager
async def requests_in_flight(engine, port):
    """Hold one request in a running batch and another one in the queue until the context ends."""
    entered = threading.Event()
    may_continue = threading.Event()
    launch = engine._runner.launch
    others = []

    def wait_and_launch(parts):
        entered.set()
        may_continue.wait(100)
        return launch(parts)

    engine._runner.launch = wait_and_launch
    try:
        for has_arrived in (entered.is_set, lambda: engine._does_any_wait):
            others.append(await asyncio.open_connection("127.0.0.1", port))
            others[-1][1].write(request())
            while not has_arrived():
                await asyncio.sleep(0.001)
        yield
    finally:
        may_continue.set()
        for reader, writer in others:
            await reader.read()
            writer.close()
        engine._runner.launch = launch


def test_load_shedding_rejects_unread_and_keeps_connection(app, service, monkeypatch):
    engine = service.deployment("retrieval").engines[0]
    plain = request(ends=False)
    chunked = request(ends=False, is_chunked=True)
    num_shed_before = engine.counts.get("shed_overload", 0)
    parsed = []
    serve = app._through_swaps
    app._through_swaps = lambda path, data: parsed.append(data) or serve(path, data)

    async def send(reader, writer, data):
        parsed.clear()
        monkeypatch.setattr(engine._estimator, "_byte_s", 1e10)
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        content = await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
        return int(head.split()[1]), b"retry-after: " in head, "error" in json.loads(content), len(parsed)

    async def run():
        found = []
        async with listening(app) as (port, _):
            connection = await asyncio.open_connection("127.0.0.1", port)
            for rejected, accepted in (([plain, plain, chunked], plain), ([plain], chunked)):
                async with requests_in_flight(engine, port):
                    found += [await send(*connection, data) for data in rejected]
                found.append(await send(*connection, accepted))
            connection[1].close()
        return found

    shed = (429, True, True, 0)
    served = (200, False, False, 1)
    assert asyncio.run(run()) == [shed, shed, shed, served, shed, served]
    assert engine.counts["shed_overload"] == num_shed_before + 4
    assert 'nestrec_http_requests_total{route="/v1/rank",status="429"} 4.0' in app.metrics.exposition().decode()


GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


def test_backpressure_bounds_pipelined_requests(app):
    """The server stops reading while responses are pending, and finally responds to all requests."""
    count = 4_000
    max_waiting = 0
    max_unparsed = 0
    long = GET.replace(b"\r\n\r\n", b"\r\nx: " + b"a" * 300 + b"\r\n\r\n")
    assert count * len(long) > 4 << 18

    async def run():
        nonlocal max_waiting, max_unparsed
        async with listening(app) as (port, state):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
            writer.write(long * count + GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            stalled = 0
            while stalled < 20:  # the client does not read, so the server stalls
                before = dict(app.metrics._responses._counts)
                await asyncio.sleep(0.002)
                stalled = stalled + 1 if app.metrics._responses._counts == before else 0
                for connection in state.connections:
                    max_waiting = max(max_waiting, len(connection.pipeline))
                    max_unparsed = max(max_unparsed, len(connection._unparsed))
            received = bytearray()
            while data := await reader.read(1 << 16):
                received += data
                max_waiting = max([max_waiting, *(len(c.pipeline) for c in state.connections)])
            writer.close()
            return received.count(b"HTTP/1.1 200 OK")

    assert asyncio.run(run()) == count + 1
    assert max_waiting <= 512 // len(GET) + 1
    assert max_unparsed <= 1 << 18


def test_write_timeout_closes_slow_readers(app):
    async def run():
        async with listening(app, replace(LIMITS, write_timeout_s=0.1)) as (port, state):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
            writer.write(GET * 10_000)
            while not any(c.flow is not None and c.flow.write_paused for c in state.connections):
                await asyncio.sleep(0.002)
            for connection in list(state.connections):
                connection.shutdown()
            while state.connections:
                await asyncio.sleep(0.01)
            writer.transport.abort()

    asyncio.run(asyncio.wait_for(run(), 60.0))


def test_protocol_upgrade_is_declined(app):
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    for is_chunked in (False, True):
        first = request(head=offer, ends=False, is_chunked=is_chunked)
        for split in (1, 50, len(first) - 3, len(first)):
            found = parse_responses(exchange(app, first[:split], first[split:] + request()))
            assert [(status, len(json.loads(body)["scores"]["score"])) for status, body in found] == [(200, 2)] * 2
    assert parse_responses(exchange(app, b"CONNECT t:80 HTTP/1.1\r\nhost: t\r\n\r\n"))[0][0] == 400


def test_protocol_half_closed_client_gets_response(app):
    async def run(data):
        async with listening(app) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.write_eof()
            received = await reader.read()
            writer.close()
            return received

    for is_chunked in (False, True):
        assert [s for s, _ in parse_responses(asyncio.run(run(request(ends=False, is_chunked=is_chunked))))] == [200]
    assert [s for s, _ in parse_responses(asyncio.run(run(request(ends=False) * 3)))] == [200] * 3
    assert asyncio.run(run(request(ends=False)[:-1])) == b"", "an incomplete request has no response"


@pytest.mark.parametrize("is_chunked", [False, True])
def test_protocol_checks_host_and_content_type(app, is_chunked):
    """Defense against DNS rebinding: a web page whose host name resolves to this machine cannot send requests."""
    for host, status in (
        (b"localhost", 200),
        (b"127.0.0.1:8000", 200),
        (b"[::1]:8000", 200),
        (b"evil.example", 421),
        (b"evil", 421),
        (b"127.0.0.1.evil.example:8000", 421),
        (b"localhost:8000", 200),
        (b"", 421),
    ):
        assert parse_responses(exchange(app, request(host=host, is_chunked=is_chunked)))[0][0] == status
    assert parse_responses(exchange(app, request(kind=b"", is_chunked=is_chunked)))[0][0] == 415
    assert parse_responses(exchange(app, b"GET /v1/status HTTP/1.1\r\nhost: evil.example\r\n\r\n"))[0][0] == 421
    assert parse_responses(exchange(app, b"GET /v1/status HTTP/1.1\r\n\r\n"))[0][0] == 400


def test_health_port_responds_while_server_is_busy(app):
    probe = b"GET %b HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"

    async def get_status(port, path):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(probe % path)
        received = await reader.read()
        writer.close()
        return int(received.split()[1])

    async def run():
        config = uvicorn_config(app, ServeConfig(limits=LIMITS, health_port=0), app)
        with_health_port = config.app
        messages = asyncio.Queue()
        events = asyncio.Queue()
        lifespan = asyncio.create_task(with_health_port({"type": "lifespan"}, messages.get, events.put))
        await messages.put({"type": "lifespan.startup"})
        assert (await events.get())["type"] == "lifespan.startup.complete"
        async with listening(app) as (port, state):  # all its connections wait for a response
            may_continue = asyncio.Event()
            rank = app._posts._handlers["/v1/rank"]

            async def wait_and_rank(data):
                await may_continue.wait()
                return await rank(data)

            app._posts._handlers["/v1/rank"] = wait_and_rank
            busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(LIMITS.max_connections)]
            for _, writer in busy:
                writer.write(request(ends=False))
            while not all(c.cycle is not None for c in state.connections) or len(state.connections) < len(busy):
                await asyncio.sleep(0.001)
            found = [await get_status(port, b"/health/live")]
            paths = (b"/health/live", b"/health/ready", b"/metrics", b"/v1/status")
            found += [await get_status(with_health_port.port, path) for path in paths]
            may_continue.set()
            for reader, writer in busy:
                assert (await read_response(reader))[0] == 200
                writer.close()
            while state.connections:
                await asyncio.sleep(0.001)
        await messages.put({"type": "lifespan.shutdown"})
        assert (await events.get())["type"] == "lifespan.shutdown.complete"
        await lifespan
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", with_health_port.port)
        return found

    assert asyncio.run(run()) == [503, 200, 200, 200, 404]


def test_health_port_in_use_is_reported(app):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="health_port"):
        uvicorn_config(app, ServeConfig(health_port=taken.getsockname()[1]), app)


def test_protocol_class_is_used_by_server():
    assert issubclass(uvicorn_config(None, ServeConfig()).http, LimitedProtocol)
