"""Readiness probes over real sockets: each probe ends despite faults of the peer, and the next one sees its state."""

import asyncio
import contextlib
import random
import socket
import struct

import pytest

from nestrec.base.clock import RealClock
from nestrec.serving.core.slot_router import KeyedHash, Ring, Router
from nestrec.serving.fleet.readiness_probes import Probes
from nestrec.serving.fleet.upstream_connection import Upstream

BODY = b'{"status":"ready","models":{"retrieval":"a"},"min_preinfer_events":0}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY)
FAULTS = {
    "no response": b"",
    "truncated head": HEAD[:20],
    "truncated body": HEAD + BODY[:9],
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "no status": HEAD.replace(b"200", b"two"),
    "no length": HEAD.replace(b"length: ", b"length: x"),
    "endless head": b"x" * (1 << 17),
    "not JSON": HEAD + b"\0" * len(BODY),
    "not an object": HEAD.replace(b"%d" % len(BODY), b"2") + b"[]",
    "not a number": HEAD + BODY.replace(b"ready", b"read").replace(b":0", b":{}"),
    "no models": HEAD + BODY.replace(b'{"retrieval":"a"}', b'["retrieval","a"]'),
    "not ready": HEAD.replace(b"200", b"503") + BODY,
    "forbidden": HEAD.replace(b"200", b"403") + BODY,
}
"""Responses of a faulty peer by fault; `Peer.end` is the end of the connection."""
ENDS = ("open", "closed", "reset")
LIMIT_S = 120.0


class Peer:
    """A server on a port that can be faulty, stop, and start again on the same port."""

    def __init__(self):
        self.fault = ""
        self.end = "open"
        self.port = 0
        self.num_requests = 0
        self._server = None
        self._writers = set()

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self):
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        while self._writers:
            await asyncio.sleep(0)

    def send(self, data):
        """Send data on all connections."""
        for writer in self._writers:
            writer.write(data)

    async def _serve(self, reader, writer):
        self._writers.add(writer)
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.num_requests += 1
                writer.write(FAULTS.get(self.fault, HEAD + BODY))
                if self.end == "reset":
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                if self.end != "open":
                    break
        except (OSError, EOFError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


@contextlib.asynccontextmanager
async def probed(count):
    """Yield (peers, probes, router) with `count` peers."""
    peers = [Peer() for _ in range(count)]
    for peer in peers:
        await peer.start()
    keyed = KeyedHash()
    upstreams = [Upstream(peer.port) for peer in peers]
    router = Router(Ring.make(count, keyed), keyed, RealClock())
    probes = Probes(upstreams, router)
    try:
        yield peers, probes, router
    finally:
        await probes.close()
        for upstream, peer in zip(upstreams, peers, strict=True):
            await upstream.close()
            await peer.stop()


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("nestrec.serving.fleet.readiness_probes._TIMEOUT_S", 0.3)
    monkeypatch.setattr("nestrec.serving.fleet.readiness_probes._TICK_S", 0.002)


def test_probe_detects_faults_and_recovery(quick):
    kinds = [(fault, end) for fault in FAULTS for end in ENDS] + [("", "stopped")]

    async def run():
        async with probed(len(kinds)) as (peers, probes, router):
            for slot in range(len(kinds)):
                while not await probes.is_ready(slot):  # a probe can time out on a busy machine
                    pass
            for peer, (peer.fault, peer.end) in zip(peers, kinds, strict=True):
                if peer.end == "stopped":
                    await peer.stop()
            # All probes have an open connection, which now turns out to be broken.
            found = await asyncio.gather(*(probes.is_ready(s) for s in range(len(kinds))), return_exceptions=True)
            assert dict(zip(kinds, found, strict=True)) == dict.fromkeys(kinds, False)
            assert not any(router.is_alive)
            for peer in peers:
                if peer.end == "stopped":
                    await peer.start()
                peer.fault, peer.end = "", "open"
            watcher = asyncio.create_task(probes.watch())
            await until(lambda: all(router.is_alive))
            watcher.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fault", "end", "reason"),
    [
        ("no response", "open", "no response within 0.3 s"),
        ("truncated head", "closed", "it closed the connection before it sent a response"),
        ("not HTTP", "closed", "the server at port {port} did not send a valid HTTP response"),
        ("no status", "open", "the server at port {port} did not send a valid HTTP response"),
        ("not ready", "open", "status 503"),
    ],
)
def test_probe_logs_why_instance_is_not_ready(quick, caplog, fault, end, reason):
    async def run():
        async with probed(1) as (peers, probes, _):
            peers[0].fault = fault
            peers[0].end = end
            assert await probes.is_ready(0) is False
            return peers[0].port

    port = asyncio.run(run())
    (message,) = [
        record.getMessage() for record in caplog.records if record.name == "nestrec.serving.fleet.readiness_probes"
    ]
    assert message == f"instance 0 is not ready: {reason.format(port=port)}"


@pytest.mark.parametrize("num_rounds", [2, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_probe_random_faults_converge(quick, num_rounds):
    count = 24
    rng = random.Random(num_rounds)

    async def inject_faults(peer):
        for _ in range(rng.randrange(1, 8)):
            peer.fault, peer.end = rng.choice(["", *FAULTS]), rng.choice(ENDS)
            await asyncio.sleep(rng.random() * 0.03)
            if rng.random() < 0.3:
                await peer.stop()
                await asyncio.sleep(rng.random() * 0.01)
                await peer.start()

    async def run():
        async with probed(count) as (peers, probes, router):
            watcher = asyncio.create_task(probes.watch())
            for _ in range(num_rounds):
                await asyncio.gather(*(inject_faults(peer) for peer in peers))
                are_healthy = [rng.random() < 0.7 for _ in peers]
                for peer, is_healthy in zip(peers, are_healthy, strict=True):
                    peer.fault = "" if is_healthy else rng.choice(list(FAULTS))
                    peer.end = rng.choice(ENDS)
                await until(lambda expected=are_healthy: router.is_alive == expected)
            assert not watcher.done()
            watcher.cancel()

    asyncio.run(run())


def test_probe_cancelled_waiter_does_not_end_probe():
    async def run():
        async with probed(1) as (peers, probes, _):
            peers[0].fault = "truncated head"
            waiting = [asyncio.create_task(probes.is_ready(0)) for _ in range(2)]
            await until(lambda: peers[0].num_requests == 1)
            waiting[0].cancel()
            await asyncio.wait([waiting[0]])
            await peers[0].stop()
            await peers[0].start()
            assert await waiting[1] is False

    asyncio.run(run())


def test_probe_ignores_version_from_before_change():
    turn = [(0, None)]

    async def run():
        async with probed(1) as (peers, probes, router):
            probes._turn = lambda: turn[0]
            peers[0].fault = "truncated body"
            before = probes.begin(0)
            await until(lambda: peers[0].num_requests == 1)
            turn[0] = (2, None)
            peers[0].fault = ""  # a complete change: the turn number advanced twice
            since = asyncio.create_task(probes.is_ready_since(0))
            peers[0].send(BODY[9:])
            assert (await before, router.versions) == (True, [""])
            assert (await since, router.versions) == (True, ["retrieval=a"])
            assert peers[0].num_requests == 2, "the second probe is sent after the change"

    asyncio.run(run())
