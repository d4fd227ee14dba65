"""Wire format between frontend workers and the engine process.

What fronts and the engine say to each other: frames over two pairs of sockets a front.

    bytes    4        1      4         the rest
             length   kind   number    payload          length: of all after it; number: of the request it belongs to

One pair has what is asked of engines and their answers (RANK, SIGNAL, their CANCEL, ANSWER), and is read by a thread of
its own in the process that computes (`wires`). The other one has everything else, and is read by the event loop there.
What a front says is numbers, text and JSON, and nothing that could run: it is the process that strangers talk to.

Ranking requests and their answers as bytes, in the ids of a model: arrays as they lie in memory, without a copy in
the interpreter's objects.

    request   head, user, client, names of features, then int64: items, times and actions of events, their features,
              candidates, their features, features of what is asked for, excluded items, allowed items
    answer    head, version, then int64 items and float32 scores

Waiting for sockets to be readable without sleeping, and without the interpreter.

A thread that sleeps until a socket is readable is woken late, on a core that has slept too. One that asked again and
again in Python would take the interpreter each time.

The quick way between fronts and engines, past the event loop of the process that computes.

An event loop sleeps until a request comes, and again until an engine calls it with the answer: a core that slept is
slow for both. Here one thread reads what all fronts ask. Beside a GPU it stays awake for a while after each request,
without the interpreter (`readable`), as engines do. An answer is sent by the thread of the engine that has it.
"""

import asyncio
import contextlib
import enum
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from nestrec.serving.core.background_tasks import FAILURES, BackgroundThread
from nestrec.serving.core.request_limits import RequestSource
from nestrec.serving.core.tracing import EngineTimes
from nestrec.serving.engine.batch_pacer import Spin
from nestrec.serving.http.sockets import close_all
from nestrec.serving.inputs.engine_request import RankResult, Source
from nestrec.serving.model.request_inputs import Candidates, History, is_shared

_HEAD = struct.Struct("<IBI")
_AFTER_LENGTH = _HEAD.size - 4


class FrameKind(enum.IntEnum):
    """What a frame is."""

    CONFIG = 1
    """to a front: what it is to do"""
    NAMES = 2
    """to a front: what the models in service call things"""
    LISTENING = 3
    """from a front: it takes requests; its process id"""
    RANK = 4
    """from a front: scores, or the best items, are wanted"""
    SIGNAL = 5
    """from a front: a ranking request is on its way"""
    CANCEL = 6
    """from a front: nobody waits for the answer any more"""
    ANSWER = 7
    """to a front: to RANK or SIGNAL"""
    FORWARD = 8
    """from a front, and the answer to it: a request that it does not answer by itself"""
    TELL = 9
    """to a front, and the answer from it: what it has counted since the last one"""
    STOP = 10
    """to a front: answer what has been accepted, and end"""


def frame(kind: FrameKind, number: int, *parts: bytes | memoryview) -> bytes:
    size = sum(len(part) for part in parts)
    return b"".join((_HEAD.pack(size + _AFTER_LENGTH, kind, number), *parts))


Received = Callable[[int, int, bytes], None]
"""kind, number, payload"""


class FrameReader:
    """Frames out of what comes in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def taken(self, data: bytes | memoryview) -> list[tuple[int, int, bytes]]:
        """(kind, number, payload) of the frames that are whole now."""
        self._buffer += data
        frames = []
        first = 0
        end = len(self._buffer)
        while end - first >= _HEAD.size:
            length, kind, number = _HEAD.unpack_from(self._buffer, first)
            after = first + 4 + length
            if after > end:
                break
            frames.append((kind, number, bytes(memoryview(self._buffer)[first + _HEAD.size : after])))
            first = after
        if first:
            del self._buffer[:first]
        return frames


class Channel(asyncio.Protocol):
    """One end. Used inside one event loop."""

    def __init__(self, received: Received, lost: Callable[[], None]):
        self._received = received
        self._lost = lost
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are of no such class

    def data_received(self, data: bytes) -> None:
        for kind, number, payload in self._reader.taken(data):
            self._received(kind, number, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def send(self, kind: FrameKind, number: int, *parts: bytes | memoryview) -> None:
        """Write one frame, or nothing if the connection is closed."""
        if self._transport is not None:
            self._transport.write(frame(kind, number, *parts))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


Ids = NDArray[np.int64]
By = Literal["name", "session"]
_ASK = struct.Struct("<IBdqIddIiiiiiHHIII")
_BY: tuple[By, ...] = ("name", "session")
_ANSWER = struct.Struct("<BBdIIIBHddddIII")
_SOURCES: tuple[Source, ...] = ("none", "device", "dram")
_NOBODY = -1
_ONCE = "*"
"""before the name of a feature that has one value at all places, which is sent once; no feature's name begins so"""
OK, SWAPPED, OVERLOADED, UNAVAILABLE, FAILED = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFrame:
    """A ranking request, or a signal of one."""

    fleet: int
    """number of the model whose names it was read with"""
    by: By
    """name: that model answers it; session: the one that the user's signal went to, where there was one"""
    user: str
    sender: RequestSource
    timeout_s: float
    history: History
    candidates: Candidates
    """of a signal: so many of them are expected, as `num_best`"""

    def packed(self) -> bytes:
        history = self.history
        candidates = self.candidates
        names = _names(history.features), _names(candidates.features), [*history.asked]
        texts = self.user.encode(), self.sender.client.encode(), *("\n".join(group).encode() for group in names)
        allowed = candidates.allowed
        head = _ASK.pack(
            self.fleet, _BY.index(self.by), self.timeout_s, candidates.now_ms, self.sender.num_bytes,
            self.sender.began_s, self.sender.back_s, candidates.num_best, len(history), len(candidates),
            len(candidates.excluded), _NOBODY if allowed is None else len(allowed), len(history.asked),
            *map(len, texts),
        )  # fmt: skip
        asked = np.array([*history.asked.values()], np.int64)
        arrays = (
            history.items, history.times_ms, history.actions, *_told(history.features), candidates.items,
            *_told(candidates.features), asked, candidates.excluded, *(() if allowed is None else (allowed,)),
        )  # fmt: skip
        return b"".join((head, *texts, *(np.ascontiguousarray(array, np.int64).tobytes() for array in arrays)))

    @staticmethod
    def unpacked(data: bytes) -> "RankFrame":
        """The arrays are views of the data, and are not to be changed."""
        fleet, by, timeout_s, now_ms, num_bytes, began_s, back_s, num_best, *rest = _ASK.unpack_from(data)
        num_events, num_candidates, num_excluded, num_allowed, num_asked, *sizes = rest
        place = _ASK.size
        texts = []
        for size in sizes:
            texts.append(data[place : place + size].decode())
            place += size
        user, client, *groups = texts
        of_events, of_candidates, of_asked = (group.split("\n") if group else [] for group in groups)
        arrays = _Arrays(np.frombuffer(data, np.int64, offset=place))
        history = History(
            items=arrays.next(num_events),
            times_ms=arrays.next(num_events),
            actions=arrays.next(num_events),
            features=arrays.features(of_events, num_events),
        )
        items = arrays.next(num_candidates)
        features = arrays.features(of_candidates, num_candidates)
        if num_asked:
            asked = dict(zip(of_asked, arrays.next(num_asked).tolist(), strict=True))
            history = History(
                items=history.items, times_ms=history.times_ms, actions=history.actions, features=history.features,
                asked=asked,
            )  # fmt: skip
        candidates = Candidates(
            items=items,
            now_ms=now_ms,
            features=features,
            num_best=num_best,
            excluded=arrays.next(num_excluded),
            allowed=None if num_allowed == _NOBODY else arrays.next(num_allowed),
        )
        return RankFrame(
            fleet=fleet,
            by=_BY[by],
            user=user,
            sender=RequestSource(client, num_bytes, began_s, back_s),
            timeout_s=timeout_s,
            history=history,
            candidates=candidates,
        )


class _Arrays:
    def __init__(self, values: Ids):
        self._values = values
        self._place = 0

    def next(self, count: int) -> Ids:
        self._place += count
        return self._values[self._place - count : self._place]

    def features(self, names: list[str], count: int) -> dict[str, Ids]:
        found: dict[str, Ids] = {}
        for name in names:
            is_once = name.startswith(_ONCE)
            found[name.removeprefix(_ONCE)] = np.broadcast_to(self.next(1), count) if is_once else self.next(count)
        return found


def _names(features: Mapping[str, Ids]) -> list[str]:
    return [_ONCE + name if is_shared(values) else name for name, values in features.items()]


def _told(features: Mapping[str, Ids]) -> list[Ids]:
    return [values[:1] if is_shared(values) else values for values in features.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReply:
    """What became of a request."""

    outcome: int
    """OK, or why not"""
    is_full: bool = False
    """another one of this client, as large as this one, would be refused now"""
    queued_s: float = 0.0
    """device seconds of the work that waits"""
    fleet: int = 0
    """of SWAPPED: number of the model to read it with"""
    answer: RankResult | None = None
    times: EngineTimes | None = None
    reason: str = ""
    """why it was refused, or what was decided about a signal"""
    retry_after_s: float = 0.0

    def packed(self) -> bytes:
        answer = self.answer
        times = self.times
        arrays: tuple[NDArray[Any], ...] = ()
        if answer is None or times is None:
            version = self.reason.encode()
            source = 0
            num_cached = 0
            shape = (0, 0, 0)
            moments = (self.retry_after_s, 0.0, 0.0, 0.0)
            num_tokens = 0
        else:
            version = answer.version.encode()
            source = _SOURCES.index(answer.source)
            num_cached = answer.num_cached
            shape = (len(answer.items), *answer.scores.shape)
            moments = (times.arrived_s, times.planned_s, times.computed_s, times.ended_s)
            num_tokens = times.num_tokens
            arrays = answer.items.astype(np.int64, copy=False), answer.scores.astype(np.float32, copy=False)
        head = _ANSWER.pack(
            self.outcome, self.is_full, self.queued_s, self.fleet, num_cached, num_tokens, source, len(version),
            *moments, *shape,
        )  # fmt: skip
        return b"".join((head, version, *(array.tobytes() for array in arrays)))

    @staticmethod
    def unpacked(data: bytes) -> "RankReply":
        outcome, is_full, queued_s, fleet, num_cached, num_tokens, source, size, *rest = _ANSWER.unpack_from(data)
        arrived_s, planned_s, computed_s, ended_s, num_items, num_rows, num_outputs = rest
        place = _ANSWER.size
        text = data[place : place + size].decode()
        if not num_outputs:
            return RankReply(
                outcome=outcome, is_full=bool(is_full), queued_s=queued_s, fleet=fleet, reason=text,
                retry_after_s=arrived_s,
            )  # fmt: skip
        place += size
        items = np.frombuffer(data, np.int64, num_items, place)
        scores = np.frombuffer(data, np.float32, num_rows * num_outputs, place + items.nbytes)
        answer = RankResult(items, scores.reshape(num_rows, num_outputs), text, _SOURCES[source], num_cached)
        times = EngineTimes(arrived_s, planned_s, computed_s, ended_s, num_tokens)
        return RankReply(
            outcome=outcome, is_full=bool(is_full), queued_s=queued_s, fleet=fleet, answer=answer, times=times
        )


_POLLED = np.dtype([("descriptor", np.int32), ("events", np.int16), ("found", np.int16)])
"""`struct pollfd` of poll(2)"""
_poll: Any = types.ExternalFunction("poll", types.int32(types.intp, types.uint64, types.int32))


@njit(cache=True, nogil=True)
def _looks(address: int, count: int, most: int) -> int:
    """How often was looked."""
    for number in range(most):
        if _poll(address, count, 0) != 0:
            return number + 1
    return most


class ReadableSpin(Spin):
    """A spin wait that ends when a socket is ready: each turn polls the sockets once."""

    _first_rate = 2e6

    def __init__(self) -> None:
        self._polled = np.zeros(0, _POLLED)
        super().__init__()

    def watch(self, events: Mapping[int, int]) -> None:
        """Descriptors, and what is waited for of each (`select.POLLIN` and others)."""
        self._polled = np.array([(descriptor, wanted, 0) for descriptor, wanted in events.items()], _POLLED)

    def turn(self, most: int) -> int:
        return int(_looks(self._polled.ctypes.data, len(self._polled), most))


_READ_BYTES = 1 << 18


class EngineSocket:
    """The end of the process that computes. Any thread sends and gives up; the thread of `EngineSocketLoop` does the
    rest."""

    def __init__(self, end: socket.socket, received: Received, wires: "EngineSocketLoop"):
        end.setblocking(False)
        self._end = end
        self._received = received
        self._wires = wires
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

    # The thread of `EngineSocketLoop`.

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


class EngineSocketLoop:
    """All of them, and the thread that reads them."""

    def __init__(self, awake_s: float = 0.0):
        """awake_s: for which the thread keeps its core awake after a request."""
        self._awake_s = awake_s
        self._awake_until_s = 0.0
        self._spin = ReadableSpin() if awake_s else None
        self._calls, self._called = socket.socketpair()
        for one in (self._calls, self._called):
            one.setblocking(False)
        self._new: deque[EngineSocket] = deque()
        self._wires: dict[int, EngineSocket] = {}
        self._is_closed = False
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._waiting = select.poll()
        self._watch()
        self._thread = BackgroundThread("nestrec-wires", self._turn).start()

    def add(self, end: socket.socket, received: Received) -> EngineSocket:
        """received: called by the thread, with what a front asks."""
        wire = EngineSocket(end, received, self)
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

    def _heed(self, wire: EngineSocket, events: int, buffer: memoryview) -> bool:
        """Whether it is to be heeded again."""
        self._awake_until_s = time.monotonic() + self._awake_s
        try:
            return wire.heed(events, buffer)
        except Exception as error:
            FAILURES.add("nestrec-wires", error, "the connection to its front is closed")
            return False
