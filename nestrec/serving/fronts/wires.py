"""The quick way between fronts and engines, past the event loop of the process that computes.

An event loop sleeps until a request comes, and again until an engine calls it with the answer: a core that slept is
slow for both. Here one thread reads what all fronts ask. Beside a GPU it stays awake for a while after each request,
without the interpreter (`readable`), as engines do. An answer is sent by the thread of the engine that has it.
"""

import contextlib
import select
import socket
import threading
import time
from collections import deque

from nestrec.serving.api.process.listening import close_all
from nestrec.serving.background import FAILURES, BackgroundThread
from nestrec.serving.fronts.frames import FrameKind, FrameReader, Received, frame
from nestrec.serving.fronts.readable import ReadableSpin

_READ_BYTES = 1 << 18


class Wire:
    """The end of the process that computes. Any thread sends and gives up; the thread of `Wires` does the rest."""

    def __init__(self, end: socket.socket, received: Received, wires: "Wires"):
        end.setblocking(False)
        self._end, self._received, self._wires = end, received, wires
        self._reader = FrameReader()
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._is_open = True

    def send(self, kind: FrameKind, number: int, *parts: bytes | memoryview) -> None:
        """In order, and without waiting; nowhere where the other end is gone."""
        data = frame(kind, number, *parts)
        with self._lock:
            if not self._is_open:
                return
            sent = 0 if self._unsent else self._sent(data)
            if sent == len(data):
                return
            self._unsent += memoryview(data)[sent:]
        self._wires.call()

    def give_up(self) -> None:
        """Nobody is at the other end any more, or nobody is to wait for it."""
        with self._lock, contextlib.suppress(OSError):
            if self._is_open:
                self._end.shutdown(socket.SHUT_RDWR)  # the thread then reads the end of it, and closes it

    # The thread of `Wires`.

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def events(self) -> int:
        """What is to be waited for."""
        return select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN

    def heed(self, events: int, buffer: memoryview) -> bool:
        """Send and read what can be; whether there is anybody at the other end."""
        if events & select.POLLOUT:
            with self._lock:
                del self._unsent[: self._sent(self._unsent)]
        if not events & ~select.POLLOUT:
            return True
        try:
            count = self._end.recv_into(buffer)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for kind, number, payload in self._reader.taken(buffer[:count]):
            self._received(kind, number, payload)
        return count > 0

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            self._unsent.clear()
            self._end.close()

    def _sent(self, data: bytes | bytearray) -> int:
        """How much of it could be sent at once: all of it to an end that is gone, which the thread then hears of."""
        try:
            return self._end.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)


class Wires:
    """All of them, and the thread that reads them."""

    def __init__(self, awake_s: float = 0.0):
        """awake_s: for which the thread keeps its core awake after a request."""
        self._awake_s, self._awake_until_s = awake_s, 0.0
        self._spin = ReadableSpin() if awake_s else None
        self._calls, self._called = socket.socketpair()
        for one in (self._calls, self._called):
            one.setblocking(False)
        self._new: deque[Wire] = deque()
        self._wires: dict[int, Wire] = {}
        self._is_closed = False
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._waiting = select.poll()
        self._watch()
        self._thread = BackgroundThread("nestrec-wires", self._turn).start()

    def add(self, end: socket.socket, received: Received) -> Wire:
        """received: called by the thread, with what a front asks."""
        wire = Wire(end, received, self)
        self._new.append(wire)
        self.call()
        return wire

    def call(self) -> None:
        """Something is new: a wire, or that one could not send at once. By any thread."""
        with contextlib.suppress(OSError):  # full: it is called already; closed: nobody is there
            self._calls.send(b"c")

    def close(self) -> None:
        self._is_closed = True
        self.call()
        self._thread.join()
        for wire in (*self._wires.values(), *self._new):
            wire.close()
        close_all([self._calls, self._called])

    def _turn(self) -> bool:
        for descriptor, events in self._ready():
            if descriptor == self._called.fileno():
                self._heed_calls()
            elif not self._heed(self._wires[descriptor], events, self._buffer):
                self._waiting.unregister(descriptor)
                self._wires.pop(descriptor).close()
            elif not events & select.POLLOUT:
                continue
            self._watch()
        return not self._is_closed

    def _watch(self) -> None:
        """Wait for what there is now."""
        while self._new:
            wire = self._new.popleft()
            self._wires[wire.fileno()] = wire
        events = {self._called.fileno(): select.POLLIN}
        events.update((descriptor, wire.events) for descriptor, wire in self._wires.items())
        for descriptor, wanted in events.items():
            self._waiting.register(descriptor, wanted)
        if self._spin is not None:
            self._spin.watch(events)

    def _ready(self) -> list[tuple[int, int]]:
        while self._spin is not None and (left_s := self._awake_until_s - time.monotonic()) > 0:
            self._spin.wait(left_s)
            if ready := self._waiting.poll(0):
                return ready
        return self._waiting.poll()

    def _heed_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._called.recv(_READ_BYTES):
                pass

    def _heed(self, wire: Wire, events: int, buffer: memoryview) -> bool:
        """Whether it is to be heeded again."""
        self._awake_until_s = time.monotonic() + self._awake_s
        try:
            return wire.heed(events, buffer)
        except Exception as error:
            FAILURES.add("nestrec-wires", error, "the connection to its front is closed")
            return False
