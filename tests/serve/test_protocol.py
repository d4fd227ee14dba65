"""The protocol under the front, over sockets: the short way and the usual one, and limits at their value and above."""

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
    answer_timeout_s=60.0,
    default_timeout_ms=10_000,
)
BODY = {"user": "u", "history": {"items": [1, 2], "times_ms": [1, 2]}, "candidates": [3, 4], "now_ms": 9}
JSON_TYPE = b"content-type: application/json\r\n"
CONFIG = ServiceConfig(engine=EngineConfig(max_queue_s=1e9, tiers=PrefixCacheConfig(keeps_prefix=False)))


@pytest.fixture(scope="module")
def service():
    service = Service({"retrieval": random_retrieval(ENCODER, num_items=50)}, CONFIG)
    yield service
    service.close()


@pytest.fixture
def front(service):
    return App(service, LIMITS)


@pytest.fixture
def short(monkeypatch):
    """Targets of requests that took the short way."""
    taken = []
    begin = FastRequestCycle._begin
    monkeypatch.setattr(FastRequestCycle, "_begin", lambda self: taken.append(self._route) or begin(self))
    return taken


@contextlib.asynccontextmanager
async def listening(front, limits=LIMITS):
    config = uvicorn_config(front, ServeConfig(limits=limits), front)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    yield server.sockets[0].getsockname()[1], state
    server.close()


def talk(front, *pieces):
    """Send pieces one after the other on one connection; all that came back until the server ended it."""

    async def run():
        async with listening(front) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.005)  # a piece for itself: there is no clock to inject into the kernel
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


def answers(received):
    """(status, body) of each answer."""
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
def test_the_short_way_gives_the_answers_of_the_usual_way(front, short, path):
    for body in BODIES:
        before = len(short)
        (plain,) = answers(talk(front, request(body, path=path)))
        assert len(short) == before + 1
        (usual,) = answers(talk(front, request(body, path=path, is_chunked=True)))
        assert len(short) == before + 1
        assert plain == usual


@pytest.mark.parametrize(
    "unusual",
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
def test_unusual_requests_take_the_usual_way(front, short, unusual):
    assert re.match(rb"HTTP/1.1 (200|100|400|415|421) ", talk(front, unusual))
    assert not short


@pytest.mark.parametrize("path", [b"/v1/rank", b"/v1/recommend", b"/v1/preinfer", b"/v1/events"])
@pytest.mark.parametrize("encoding", [b"gzip", b"deflate, gzip", b"IDENTITY"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_compressed_body_is_rejected_with_415(front, path, encoding, is_chunked):
    head = b"content-encoding: " + encoding + b"\r\n"
    content = gzip.compress(json.dumps(BODY).encode())
    ((status, body),) = answers(talk(front, request(content, head=head, path=path, is_chunked=is_chunked)))
    assert status == (400 if encoding == b"IDENTITY" else 415)
    assert status == 400 or json.loads(body)["error"]["field"] == "content-encoding"


def test_a_body_in_pieces_takes_the_usual_way(front, short):
    whole = request()
    for place, num_short in ((1, 1), (20, 2), (whole.index(b"{"), 2), (len(whole) - 30, 2), (len(whole) - 1, 2)):
        ((status, body),) = answers(talk(front, whole[:place], whole[place:]))
        assert (status, len(json.loads(body)["scores"]["score"])) == (200, 2)
        assert len(short) == num_short


@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_body_at_its_limit_and_one_byte_above(front, is_chunked):
    content = json.dumps(BODY).encode()
    for size, status in ((2000, 200), (2001, 413)):
        received = talk(front, request(content.ljust(size), is_chunked=is_chunked, ends=status != 413))
        assert answers(received)[0][0] == status
        assert b"connection: close" in received, "nobody reads the rest"


@pytest.mark.parametrize("num_pieces", [1, 2])
def test_the_head_at_its_limit_and_one_byte_above(front, num_pieces):
    known = len("/v1/rankhostlocalhostcontent-typeapplication/jsonconnectionclosecontent-length114x") + 5 * 4
    for size, status in ((500 - known, 200), (501 - known, 431)):
        whole = request(json.dumps(BODY).encode().ljust(114), head=b"x: " + b"a" * size + b"\r\n")
        pieces = (whole,) if num_pieces == 1 else (whole[:300], whole[300:])
        received = talk(front, *pieces)
        assert answers(received)[0][0] == status


def test_a_head_that_never_ends_is_cut_off(front):
    received = talk(front, b"POST /v1/rank HTTP/1.1\r\nx: ", *[b"a" * 200] * 4)
    assert answers(received)[0][0] == 431


def test_what_is_no_request_is_counted_and_not_logged(front, capfd):
    for data in (b"nonsense\r\n\r\n", request().replace(b"HTTP/1.1", b"HTTP/x")):
        assert answers(talk(front, data))[0][0] == 400
    assert 'nestrec_requests_total{route="malformed",status="400"} 2.0' in front.metrics.exposition().decode()
    assert capfd.readouterr() == ("", "")


def test_what_follows_a_chunked_body_is_bounded_and_ignored(front):
    whole = request(is_chunked=True)
    short_trailer = whole[:-2] + b"content-type: text/plain\r\n\r\n"
    assert answers(talk(front, short_trailer))[0][0] == 200
    received = talk(front, whole[:-2] + b"x: ", *[b"a" * 200] * 5)
    assert answers(received)[0][0] == 431


def test_a_body_that_stays_away_is_given_up(service):
    received = talk(App(service, replace(LIMITS, body_timeout_s=0.1)), request(ends=False)[:-1])
    assert answers(received)[0][0] == 408
    assert b"connection: close" in received


def test_pipelined_requests_are_answered_in_order(front, short):
    many = [request({**BODY, "candidates": [1] * (1 + i)}, ends=i == 5, is_chunked=i % 3 == 1) for i in range(6)]
    found = answers(talk(front, b"".join(many)))
    assert [status for status, _ in found] == [200] * 6
    assert [len(json.loads(body)["scores"]["score"]) for _, body in found] == [1, 2, 3, 4, 5, 6]
    assert short == ["/v1/rank"], "only the first had nothing before it"


async def read_answer(reader):
    """(status, body)"""
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split()[1]), await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))


async def gone(reader):
    """Once the server has ended the connection."""
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    return True


def test_silent_and_idle_connections_give_way_and_those_being_answered_do_not(front):
    async def run():
        async with listening(front) as (port, state):
            first, kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            kept[1].write(request(ends=False))
            found = [(await read_answer(kept[0]))[0]]
            going_on = asyncio.Event()
            rank = front._posts._handlers["/v1/rank"]

            async def later(data):
                await going_on.wait()
                return await rank(data)

            front._posts._handlers["/v1/rank"] = later
            busy = []
            for number in range(LIMITS.max_connections):
                busy.append(await asyncio.open_connection("127.0.0.1", port))
                busy[-1][1].write(request(ends=False))
                while sum(c.cycle is not None and not c.cycle.response_complete for c in state.connections) <= number:
                    await asyncio.sleep(0.001)
                if number:  # the first to go is the one that never asked
                    found.append(await gone((first, kept)[number - 1][0]))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request())
            refused = await reader.read()
            going_on.set()
            found += [(await read_answer(reader))[0] for reader, _ in busy]
            for _, opened in (*busy, first, kept, (None, writer)):
                opened.close()
            return found, refused

    found, refused = asyncio.run(run())
    assert found == [200, True, True, 200, 200, 200]
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in refused


def test_connections_of_one_address_give_way_among_themselves_though_there_is_room(front):
    async def run():
        async with listening(front, replace(LIMITS, max_connections_an_address=2)) as (port, _):
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            found = await asyncio.wait_for(gone(opened[0][0]), 60.0)
            for _, writer in opened:
                writer.close()
            return found

    assert asyncio.run(run())


def test_a_client_that_goes_away_takes_its_request_along(front):
    async def run():
        async with listening(front) as (port, state):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            held = asyncio.Event()
            front._posts._handlers["/v1/rank"] = lambda _: held.wait()
            linger = struct.pack("ii", 1, 0)  # so that its end is a reset; whoever only says no more may still listen
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.write(request(ends=False))
            while not any(isinstance(c.cycle, FastRequestCycle) for c in state.connections):
                await asyncio.sleep(0.001)
            writer.transport.abort()
            while state.connections:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)

    asyncio.run(run())
    assert 'nestrec_requests_total{route="/v1/rank",status="499"} 1.0' in front.metrics.exposition().decode()


def test_a_server_that_ends_answers_and_closes(front):
    async def run():
        async with listening(front) as (port, state):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            going_on = asyncio.Event()
            rank = front._posts._handlers["/v1/rank"]

            async def later(data):
                await going_on.wait()
                return await rank(data)

            front._posts._handlers["/v1/rank"] = later
            writer.write(request(ends=False))
            while not any(isinstance(c.cycle, FastRequestCycle) for c in state.connections):
                await asyncio.sleep(0.001)
            for connection in state.connections:
                connection.shutdown()
            going_on.set()
            received = await reader.read()
            writer.close()
            return received

    received = asyncio.run(run())
    assert received.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close\r\n" in received


@contextlib.asynccontextmanager
async def somebody_waits(engine, port):
    """A request in a batch that does not end before this does, and another one behind it."""
    entered = threading.Event()
    going_on = threading.Event()
    launch = engine._runner.launch
    others = []

    def launch_later(parts):
        entered.set()
        going_on.wait(100)
        return launch(parts)

    engine._runner.launch = launch_later
    try:
        for is_there in (entered.is_set, lambda: engine._does_any_wait):
            others.append(await asyncio.open_connection("127.0.0.1", port))
            others[-1][1].write(request())
            while not is_there():
                await asyncio.sleep(0.001)
        yield
    finally:
        going_on.set()
        for reader, writer in others:
            await reader.read()
            writer.close()
        engine._runner.launch = launch


def test_a_full_server_refuses_unread_and_serves_the_same_connection_later(front, service, monkeypatch):
    engine = service.fleet("retrieval").engines[0]
    whole, chunked = request(ends=False), request(ends=False, is_chunked=True)
    refused_before = engine.counts.get("refused_overload", 0)
    read = []
    served = front._through_swaps
    front._through_swaps = lambda path, data: read.append(data) or served(path, data)

    async def ask(reader, writer, data):
        read.clear()
        monkeypatch.setattr(engine._outlook, "_byte_s", 1e10)
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        content = await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
        return int(head.split()[1]), b"retry-after: " in head, "error" in json.loads(content), len(read)

    async def run():
        found = []
        async with listening(front) as (port, _):
            connection = await asyncio.open_connection("127.0.0.1", port)
            for refused, taken in (([whole, whole, chunked], whole), ([whole], chunked)):
                async with somebody_waits(engine, port):
                    found += [await ask(*connection, data) for data in refused]
                found.append(await ask(*connection, taken))
            connection[1].close()
        return found

    no, yes = (429, True, True, 0), (200, False, False, 1)
    assert asyncio.run(run()) == [no, no, no, yes, no, yes]
    assert engine.counts["refused_overload"] == refused_before + 4
    assert 'nestrec_requests_total{route="/v1/rank",status="429"} 4.0' in front.metrics.exposition().decode()


GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


def test_what_waits_in_one_connection_is_bounded_whoever_reads_the_answers(front):
    """However much is sent: nothing is read beyond what is being answered, and the answers are those of all of it."""
    count, most_waiting, most_unfed = 4_000, 0, 0
    long = GET.replace(b"\r\n\r\n", b"\r\nx: " + b"a" * 300 + b"\r\n\r\n")
    assert count * len(long) > 4 << 18

    async def run():
        nonlocal most_waiting, most_unfed
        async with listening(front) as (port, state):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
            writer.write(long * count + GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            stalled = 0
            while stalled < 20:  # nobody reads: it comes to rest
                before = dict(front.metrics._answers._counts)
                await asyncio.sleep(0.002)
                stalled = stalled + 1 if front.metrics._answers._counts == before else 0
                for connection in state.connections:
                    most_waiting = max(most_waiting, len(connection.pipeline))
                    most_unfed = max(most_unfed, len(connection._unfed))
            received = bytearray()
            while data := await reader.read(1 << 16):
                received += data
                most_waiting = max([most_waiting, *(len(c.pipeline) for c in state.connections)])
            writer.close()
            return received.count(b"HTTP/1.1 200 OK")

    assert asyncio.run(run()) == count + 1
    assert most_waiting <= 512 // len(GET) + 1
    assert most_unfed <= 1 << 18


def test_a_client_that_does_not_read_its_answers_is_cut_off_also_while_the_server_stops(front):
    async def run():
        async with listening(front, replace(LIMITS, answer_timeout_s=0.1)) as (port, state):
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


def test_an_offer_of_another_protocol_is_declined_and_the_request_answered(front, short):
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    for is_chunked in (False, True):
        first = request(head=offer, ends=False, is_chunked=is_chunked)
        for place in (1, 50, len(first) - 3, len(first)):
            found = answers(talk(front, first[:place], first[place:] + request()))
            assert [(status, len(json.loads(body)["scores"]["score"])) for status, body in found] == [(200, 2)] * 2
    assert answers(talk(front, b"CONNECT t:80 HTTP/1.1\r\nhost: t\r\n\r\n"))[0][0] == 400


def test_whoever_says_no_more_after_a_complete_request_is_answered(front):
    async def run(data):
        async with listening(front) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.write_eof()
            received = await reader.read()
            writer.close()
            return received

    for is_chunked in (False, True):
        assert [s for s, _ in answers(asyncio.run(run(request(ends=False, is_chunked=is_chunked))))] == [200]
    assert [s for s, _ in answers(asyncio.run(run(request(ends=False) * 3)))] == [200] * 3
    assert asyncio.run(run(request(ends=False)[:-1])) == b"", "this one is not complete"


@pytest.mark.parametrize("is_chunked", [False, True])
def test_names_of_others_and_bodies_of_no_type_are_refused_on_loopback(front, is_chunked):
    """What a web page can send after its name was made to point to this machine."""
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
        assert answers(talk(front, request(host=host, is_chunked=is_chunked)))[0][0] == status
    assert answers(talk(front, request(kind=b"", is_chunked=is_chunked)))[0][0] == 415
    assert answers(talk(front, b"GET /v1/status HTTP/1.1\r\nhost: evil.example\r\n\r\n"))[0][0] == 421
    assert answers(talk(front, b"GET /v1/status HTTP/1.1\r\n\r\n"))[0][0] == 400


def test_health_has_a_port_of_its_own_while_the_server_lives(front):
    probe = b"GET %b HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"

    async def ask(port, path):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(probe % path)
        received = await reader.read()
        writer.close()
        return int(received.split()[1])

    async def run():
        config = uvicorn_config(front, ServeConfig(limits=LIMITS, health_port=0), front)
        app = config.app
        messages = asyncio.Queue()
        told = asyncio.Queue()
        lifespan = asyncio.create_task(app({"type": "lifespan"}, messages.get, told.put))
        await messages.put({"type": "lifespan.startup"})
        assert (await told.get())["type"] == "lifespan.startup.complete"
        async with listening(front) as (port, state):  # where all connections are being answered
            going_on = asyncio.Event()
            rank = front._posts._handlers["/v1/rank"]

            async def later(data):
                await going_on.wait()
                return await rank(data)

            front._posts._handlers["/v1/rank"] = later
            busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(LIMITS.max_connections)]
            for _, writer in busy:
                writer.write(request(ends=False))
            while not all(c.cycle is not None for c in state.connections) or len(state.connections) < len(busy):
                await asyncio.sleep(0.001)
            found = [await ask(port, b"/health/live")]
            paths = (b"/health/live", b"/health/ready", b"/metrics", b"/v1/status")
            found += [await ask(app.port, path) for path in paths]
            going_on.set()
            for reader, writer in busy:
                assert (await read_answer(reader))[0] == 200
                writer.close()
            while state.connections:
                await asyncio.sleep(0.001)
        await messages.put({"type": "lifespan.shutdown"})
        assert (await told.get())["type"] == "lifespan.shutdown.complete"
        await lifespan
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", app.port)
        return found

    assert asyncio.run(run()) == [503, 200, 200, 200, 404]


def test_a_health_port_that_is_taken_is_said_so(front):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="health_port"):
        uvicorn_config(front, ServeConfig(health_port=taken.getsockname()[1]), front)


def test_the_protocol_is_what_the_server_runs():
    assert issubclass(uvicorn_config(None, ServeConfig()).http, LimitedProtocol)
