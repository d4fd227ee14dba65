"""Sockets between frontend workers and engines: complete frames in order despite slow or lost peers, and spin waits."""

import contextlib
import logging
import queue
import select
import socket
import threading
import time

import numpy as np
import pytest

from nestrec.serving.frontend.wire_format import EngineSocketLoop, FrameKind, FrameReader, ReadableSpin, frame

PATIENCE_S = 30.0


@pytest.fixture(params=[0.0, 0.05], ids=["sleeps", "awake"])
def wires(request):
    with contextlib.closing(EngineSocketLoop(request.param)) as found:
        yield found


@contextlib.contextmanager
def connected_wire(wires, received=lambda *_: None):
    """Yield a wire and the socket at the end of the frontend worker."""
    engine_end, frontend_end = socket.socketpair()
    frontend_end.settimeout(PATIENCE_S)
    with frontend_end:
        yield wires.add(engine_end, received), frontend_end


def frames_from(end, count):
    reader = FrameReader()
    found = []
    while len(found) < count:
        data = end.recv(1 << 16)
        assert data
        found += reader.feed(data)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_frontend_wire_frames_are_complete_for_any_split(seed):
    rng = np.random.default_rng(seed)
    sent = [(int(rng.integers(1, 11)), number, rng.bytes(int(rng.choice([0, 1, 40, 70_000])))) for number in range(30)]
    data = b"".join(frame(*first_wire) for first_wire in sent)
    reader = FrameReader()
    found = []
    while data:
        size = int(rng.choice([1, 3, 9, 50_000]))
        found += reader.feed(data[:size])
        data = data[size:]
    assert found == sent


def test_frontend_wire_delivers_requests_and_responses(wires):
    received_frames = queue.SimpleQueue()
    with (
        connected_wire(wires, lambda *what: received_frames.put((1, *what))) as (first_wire, first),
        connected_wire(wires, lambda *what: received_frames.put((2, *what))) as (second_wire, second),
    ):
        for _ in range(3):
            first.sendall(frame(FrameKind.RANK, 7, b"abc"))
            second.sendall(frame(FrameKind.PREINFER, 8))
            frames = {received_frames.get(timeout=PATIENCE_S) for _ in range(2)}
            assert frames == {(1, FrameKind.RANK, 7, b"abc"), (2, FrameKind.PREINFER, 8, b"")}
            first_wire.send(FrameKind.REPLY, 7, b"x", b"yz")
            second_wire.send(FrameKind.REPLY, 8)
            assert frames_from(first, 1) == [(FrameKind.REPLY, 7, b"xyz")]
            assert frames_from(second, 1) == [(FrameKind.REPLY, 8, b"")]


def test_frontend_wire_slow_reader_does_not_block_others(wires):
    """Several threads send more bytes than the socket buffer of the reader holds."""
    with connected_wire(wires) as (wire, end):
        threads = [
            threading.Thread(
                target=lambda sender=sender: [
                    wire.send(FrameKind.REPLY, i, bytes([sender]) * 40_000) for i in range(50)
                ]
            )
            for sender in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        found = frames_from(end, 200)
        for sender in range(4):
            numbers = [number for _, number, payload in found if payload == bytes([sender]) * 40_000]
            assert numbers == list(range(50))


@pytest.mark.parametrize("cause", ["worker_exits", "shut_down"])
def test_frontend_wire_closes_socket_of_lost_worker(wires, cause):
    with connected_wire(wires) as (wire, end):
        if cause == "worker_exits":
            end.close()
        else:
            wire.shut_down()
            assert end.recv(1) == b""
        wait_for(lambda: wire.fileno() < 0)
        wire.send(FrameKind.REPLY, 1, b"not received")
        wire.shut_down()
    received_frames = queue.SimpleQueue()
    with connected_wire(wires, lambda *what: received_frames.put(what)) as (_, other):
        other.sendall(frame(FrameKind.RANK, 1))
        assert received_frames.get(timeout=PATIENCE_S) == (FrameKind.RANK, 1, b"")


def test_frontend_wire_closes_malformed_stream(wires, caplog):
    received_frames = queue.SimpleQueue()

    def fails(*_):
        raise ValueError("malformed")

    with (
        caplog.at_level(logging.CRITICAL),
        connected_wire(wires, fails) as (_, failing),
        connected_wire(wires, lambda *what: received_frames.put(what)) as (_, healthy),
    ):
        failing.sendall(frame(FrameKind.RANK, 1))
        assert failing.recv(1) == b""
        healthy.sendall(frame(FrameKind.RANK, 2))
        assert received_frames.get(timeout=PATIENCE_S) == (FrameKind.RANK, 2, b"")


def test_frontend_wire_spin_polls_until_readable():
    engine_end, frontend_end = socket.socketpair()
    with engine_end, frontend_end:
        spin = ReadableSpin()
        spin.watch({engine_end.fileno(): select.POLLIN, frontend_end.fileno(): select.POLLIN})
        assert spin.spin(1000) == 1000
        frontend_end.send(b"x")
        assert spin.spin(1000) == 1


def wait_for(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(1e-3)  # another thread changes the condition, so a clock cannot be injected
