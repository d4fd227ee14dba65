"""The quick way between fronts and engines: whole frames in order, whoever is slow or gone, and waits without sleep."""

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
def wired(wires, received=lambda *_: None):
    """(wire, the front's end of it)"""
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    with theirs:
        yield wires.add(ours, received), theirs


def frames_from(end, count):
    reader = FrameReader()
    found = []
    while len(found) < count:
        data = end.recv(1 << 16)
        assert data
        found += reader.taken(data)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_frames_are_whole_and_in_order_however_they_are_cut(seed):
    rng = np.random.default_rng(seed)
    sent = [(int(rng.integers(1, 11)), number, rng.bytes(int(rng.choice([0, 1, 40, 70_000])))) for number in range(30)]
    data = b"".join(frame(*one) for one in sent)
    reader = FrameReader()
    found = []
    while data:
        size = int(rng.choice([1, 3, 9, 50_000]))
        found += reader.taken(data[:size])
        data = data[size:]
    assert found == sent


def test_what_fronts_ask_is_heard_and_answered_by_the_thread_that_has_the_answer(wires):
    asked = queue.SimpleQueue()
    with (
        wired(wires, lambda *what: asked.put((1, *what))) as (one, first),
        wired(wires, lambda *what: asked.put((2, *what))) as (two, second),
    ):
        for _ in range(3):
            first.sendall(frame(FrameKind.RANK, 7, b"abc"))
            second.sendall(frame(FrameKind.SIGNAL, 8))
            heard = {asked.get(timeout=PATIENCE_S) for _ in range(2)}
            assert heard == {(1, FrameKind.RANK, 7, b"abc"), (2, FrameKind.SIGNAL, 8, b"")}
            one.send(FrameKind.ANSWER, 7, b"x", b"yz")
            two.send(FrameKind.ANSWER, 8)
            assert frames_from(first, 1) == [(FrameKind.ANSWER, 7, b"xyz")]
            assert frames_from(second, 1) == [(FrameKind.ANSWER, 8, b"")]


def test_a_front_that_does_not_read_makes_nobody_wait_and_gets_everything_in_order_when_it_does(wires):
    """Many threads send more than its socket takes."""
    with wired(wires) as (wire, end):
        threads = [
            threading.Thread(
                target=lambda who=who: [wire.send(FrameKind.ANSWER, i, bytes([who]) * 40_000) for i in range(50)]
            )
            for who in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        found = frames_from(end, 200)
        for who in range(4):
            numbers = [number for _, number, payload in found if payload == bytes([who]) * 40_000]
            assert numbers == list(range(50))


@pytest.mark.parametrize("how", ["the front ends", "it is given up"])
def test_a_front_that_is_gone_is_told_nothing_and_its_socket_is_closed(wires, how):
    with wired(wires) as (wire, end):
        if how == "the front ends":
            end.close()
        else:
            wire.give_up()
            assert end.recv(1) == b""
        wait_for(lambda: wire.fileno() < 0)
        wire.send(FrameKind.ANSWER, 1, b"nobody hears this")
        wire.give_up()
    asked = queue.SimpleQueue()
    with wired(wires, lambda *what: asked.put(what)) as (_, other):
        other.sendall(frame(FrameKind.RANK, 1))
        assert asked.get(timeout=PATIENCE_S) == (FrameKind.RANK, 1, b"")


def test_a_front_that_makes_no_sense_loses_its_wire_and_others_keep_theirs(wires, caplog):
    asked = queue.SimpleQueue()

    def fails(*_):
        raise ValueError("what?")

    with (
        caplog.at_level(logging.CRITICAL),
        wired(wires, fails) as (_, mad),
        wired(wires, lambda *what: asked.put(what)) as (_, sane),
    ):
        mad.sendall(frame(FrameKind.RANK, 1))
        assert mad.recv(1) == b""
        sane.sendall(frame(FrameKind.RANK, 2))
        assert asked.get(timeout=PATIENCE_S) == (FrameKind.RANK, 2, b"")


def test_a_spin_looks_until_something_can_be_read():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        spin = ReadableSpin()
        spin.watch({ours.fileno(): select.POLLIN, theirs.fileno(): select.POLLIN})
        assert spin.turn(1000) == 1000
        theirs.send(b"x")
        assert spin.turn(1000) == 1


def wait_for(condition):
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(1e-3)  # another thread changes it: there is no clock to inject
