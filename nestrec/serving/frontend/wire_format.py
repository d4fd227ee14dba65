"""Wire format and low-latency sockets between frontend workers and the engine process.

Messages are length-prefixed frames. Each worker has two socket pairs to the engine process.

    bytes    4        1      4         rest
             length   kind   number    payload          length: bytes after this field; number: request id

The *quick* channel carries ranking and pre-infer requests, their cancellations and replies (RANK, PREINFER, CANCEL,
REPLY). In the engine process, a dedicated thread reads it. The *control* channel carries everything else and is read by
the event loop. Workers send only numbers, text and JSON, nothing that is unpickled: they are the processes exposed to
untrusted clients.

Ranking requests and replies contain the row ids of a model as raw arrays, so that decoding creates no Python object
per element.

    request   head, user, client, feature names, then int64: items, times and actions of the events, their features,
              candidates, their features, query features, excluded items, allowed items
    reply     head, version, then int64 items and float32 scores

`EngineSocketLoop` bypasses the event loop of the engine process. An event loop sleeps until a request arrives and again
until the engine has the result, and a core that has slept is slow to wake. Instead, one thread reads the requests of
all workers, and the engine thread that has a result sends the reply itself. On GPU hosts the reading thread busy-polls
for a while after each request (`ReadableSpin`) without holding the GIL, as the engines do: a poll in Python would
take the interpreter from the other threads.
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
from nestrec.serving.model.request_inputs import Candidates, History, is_broadcast

_HEAD = struct.Struct("<IBI")
_AFTER_LENGTH = _HEAD.size - 4


class FrameKind(enum.IntEnum):
    """Kind of a frame."""

    CONFIG = 1
    """To a worker: its configuration."""
    NAMES = 2
    """To a worker: names of the served models (`DeploymentNameCache.apply`)."""
    LISTENING = 3
    """From a worker: it accepts connections; the number is its process id."""
    RANK = 4
    """From a worker: request for scores, or for the best items."""
    PREINFER = 5
    """From a worker: a ranking request is about to follow; prefill its history."""
    CANCEL = 6
    """From a worker: the client no longer waits for this request."""
    REPLY = 7
    """To a worker: reply to RANK or PREINFER."""
    FORWARD = 8
    """From a worker: an HTTP request that the engine process must answer. To a worker: the response."""
    COUNTERS = 9
    """To a worker: request for its counters. From a worker: its counts since the last reply, as JSON."""
    STOP = 10
    """To a worker: drain accepted requests and shut down."""


def frame(kind: FrameKind, number: int, *parts: bytes | memoryview) -> bytes:
    """Return an encoded frame; the parts are concatenated to its payload."""
    size = sum(len(part) for part in parts)
    return b"".join((_HEAD.pack(size + _AFTER_LENGTH, kind, number), *parts))


FrameHandler = Callable[[int, int, bytes], None]
"""Called with the kind, the number and the payload of a frame."""


class FrameReader:
    """Incremental parser of frames in a byte stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[tuple[int, int, bytes]]:
        """Add received bytes and return (kind, number, payload) of each frame that is complete now."""
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
    """One end of a channel, as an asyncio protocol. Use it from one event loop.

    Args:
        received: Called with each received frame.
        lost: Called when the connection is closed.
    """

    def __init__(self, received: FrameHandler, lost: Callable[[], None]):
        self._received = received
        self._lost = lost
        self._reader = FrameReader()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transports are not subclasses of it

    def data_received(self, data: bytes) -> None:
        for kind, number, payload in self._reader.feed(data):
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
ResolvedBy = Literal["name", "session"]
_REQUEST_HEAD = struct.Struct("<IBdqIddIiiiiiHHIII")
_RESOLVED_BY: tuple[ResolvedBy, ...] = ("name", "session")
_REPLY_HEAD = struct.Struct("<BBdIIIBHddddIII")
_SOURCES: tuple[Source, ...] = ("none", "device", "host")
_NO_LIST = -1
_BROADCAST_PREFIX = "*"
"""Prefix of the name of a feature with one value for all positions, which is sent once; never part of a real name."""
OK, SWAPPED, OVERLOADED, UNAVAILABLE, FAILED = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFrame:
    """A ranking or pre-infer request."""

    deployment: int
    """Number of the deployment whose names were used to decode the HTTP request."""
    resolved_by: ResolvedBy
    """How the deployment is chosen: `name` is the one in `deployment`; `session` is the one that received the user's
    pre-infer request, if there was one."""
    user: str
    sender: RequestSource
    timeout_s: float
    history: History
    candidates: Candidates
    """Candidates to rank; for a pre-infer request, empty with the expected number of candidates in `num_best`."""

    def encode(self) -> bytes:
        """Return the request as bytes."""
        history = self.history
        candidates = self.candidates
        names = _encoded_names(history.features), _encoded_names(candidates.features), [*history.query_features]
        texts = self.user.encode(), self.sender.client.encode(), *("\n".join(group).encode() for group in names)
        allowed = candidates.allowed
        head = _REQUEST_HEAD.pack(
            self.deployment, _RESOLVED_BY.index(self.resolved_by), self.timeout_s, candidates.now_ms,
            self.sender.num_bytes, self.sender.received_s, self.sender.return_transit_s,
            candidates.num_best, len(history), len(candidates),
            len(candidates.excluded), _NO_LIST if allowed is None else len(allowed), len(history.query_features),
            *map(len, texts),
        )  # fmt: skip
        query_values = np.array([*history.query_features.values()], np.int64)
        arrays = (
            history.items, history.times_ms, history.actions, *_feature_values(history.features), candidates.items,
            *_feature_values(candidates.features), query_values, candidates.excluded,
            *(() if allowed is None else (allowed,)),
        )  # fmt: skip
        return b"".join((head, *texts, *(np.ascontiguousarray(array, np.int64).tobytes() for array in arrays)))

    @staticmethod
    def decode(data: bytes) -> "RankFrame":
        """Return the request encoded in `data`. Its arrays are views of `data` and must not be modified."""
        deployment, by, timeout_s, now_ms, num_bytes, began_s, back_s, num_best, *rest = _REQUEST_HEAD.unpack_from(data)
        num_events, num_candidates, num_excluded, num_allowed, num_query_features, *sizes = rest
        offset = _REQUEST_HEAD.size
        texts = []
        for size in sizes:
            texts.append(data[offset : offset + size].decode())
            offset += size
        user, client, *groups = texts
        event_names, candidate_names, query_names = (group.split("\n") if group else [] for group in groups)
        arrays = _ArrayReader(np.frombuffer(data, np.int64, offset=offset))
        history = History(
            items=arrays.next(num_events),
            times_ms=arrays.next(num_events),
            actions=arrays.next(num_events),
            features=arrays.features(event_names, num_events),
        )
        items = arrays.next(num_candidates)
        features = arrays.features(candidate_names, num_candidates)
        if num_query_features:
            query_values = dict(zip(query_names, arrays.next(num_query_features).tolist(), strict=True))
            history = History(
                items=history.items, times_ms=history.times_ms, actions=history.actions, features=history.features,
                query_features=query_values,
            )  # fmt: skip
        candidates = Candidates(
            items=items,
            now_ms=now_ms,
            features=features,
            num_best=num_best,
            excluded=arrays.next(num_excluded),
            allowed=None if num_allowed == _NO_LIST else arrays.next(num_allowed),
        )
        return RankFrame(
            deployment=deployment,
            resolved_by=_RESOLVED_BY[by],
            user=user,
            sender=RequestSource(client, num_bytes, began_s, back_s),
            timeout_s=timeout_s,
            history=history,
            candidates=candidates,
        )


class _ArrayReader:
    def __init__(self, values: Ids):
        self._values = values
        self._position = 0

    def next(self, count: int) -> Ids:
        self._position += count
        return self._values[self._position - count : self._position]

    def features(self, names: list[str], count: int) -> dict[str, Ids]:
        features: dict[str, Ids] = {}
        for name in names:
            is_broadcast_feature = name.startswith(_BROADCAST_PREFIX)
            features[name.removeprefix(_BROADCAST_PREFIX)] = (
                np.broadcast_to(self.next(1), count) if is_broadcast_feature else self.next(count)
            )
        return features


def _encoded_names(features: Mapping[str, Ids]) -> list[str]:
    return [_BROADCAST_PREFIX + name if is_broadcast(values) else name for name, values in features.items()]


def _feature_values(features: Mapping[str, Ids]) -> list[Ids]:
    return [values[:1] if is_broadcast(values) else values for values in features.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReply:
    """Reply of the engine process to a ranking or pre-infer request."""

    outcome: int
    """OK, or the reason of the failure: SWAPPED, OVERLOADED, UNAVAILABLE or FAILED."""
    is_full: bool = False
    """Whether another request of this client with the same size would be rejected now."""
    queued_s: float = 0.0
    """Device time of the queued requests, in seconds."""
    deployment: int = 0
    """If the outcome is SWAPPED: number of the deployment whose names must be used to decode the request again."""
    result: RankResult | None = None
    """Result of a ranking request."""
    times: EngineTimes | None = None
    """Times of a ranking request in the engine."""
    reason: str = ""
    """Reason of a rejection, or the decision about a pre-infer request."""
    retry_after_s: float = 0.0
    """Seconds after which a rejected request may be sent again."""

    def encode(self) -> bytes:
        """Return the reply as bytes."""
        result = self.result
        times = self.times
        arrays: tuple[NDArray[Any], ...] = ()
        if result is None or times is None:
            version = self.reason.encode()
            source = 0
            num_cached = 0
            shape = (0, 0, 0)
            moments = (self.retry_after_s, 0.0, 0.0, 0.0)
            num_tokens = 0
        else:
            version = result.version.encode()
            source = _SOURCES.index(result.source)
            num_cached = result.num_cached
            shape = (len(result.items), *result.scores.shape)
            moments = (times.arrived_s, times.planned_s, times.computed_s, times.ended_s)
            num_tokens = times.num_tokens
            arrays = result.items.astype(np.int64, copy=False), result.scores.astype(np.float32, copy=False)
        head = _REPLY_HEAD.pack(
            self.outcome, self.is_full, self.queued_s, self.deployment, num_cached, num_tokens, source, len(version),
            *moments, *shape,
        )  # fmt: skip
        return b"".join((head, version, *(array.tobytes() for array in arrays)))

    @staticmethod
    def decode(data: bytes) -> "RankReply":
        outcome, is_full, queued_s, deployment, num_cached, num_tokens, source, size, *rest = _REPLY_HEAD.unpack_from(
            data
        )
        arrived_s, planned_s, computed_s, ended_s, num_items, num_rows, num_outputs = rest
        offset = _REPLY_HEAD.size
        text = data[offset : offset + size].decode()
        if not num_outputs:
            return RankReply(
                outcome=outcome, is_full=bool(is_full), queued_s=queued_s, deployment=deployment, reason=text,
                retry_after_s=arrived_s,
            )  # fmt: skip
        offset += size
        items = np.frombuffer(data, np.int64, num_items, offset)
        scores = np.frombuffer(data, np.float32, num_rows * num_outputs, offset + items.nbytes)
        result = RankResult(items, scores.reshape(num_rows, num_outputs), text, _SOURCES[source], num_cached)
        times = EngineTimes(arrived_s, planned_s, computed_s, ended_s, num_tokens)
        return RankReply(
            outcome=outcome, is_full=bool(is_full), queued_s=queued_s, deployment=deployment, result=result, times=times
        )


_POLLED = np.dtype([("descriptor", np.int32), ("events", np.int16), ("revents", np.int16)])
"""`struct pollfd` of poll(2)."""
_poll: Any = types.ExternalFunction("poll", types.int32(types.intp, types.uint64, types.int32))


@njit(cache=True, nogil=True)
def _poll_until_ready(address: int, count: int, max_polls: int) -> int:
    """Poll until a descriptor is ready, at most `max_polls` times; return the number of polls."""
    for number in range(max_polls):
        if _poll(address, count, 0) != 0:
            return number + 1
    return max_polls


class ReadableSpin(Spin):
    """A spin wait that ends when a socket is ready: each iteration polls the sockets once."""

    _first_rate = 2e6

    def __init__(self) -> None:
        self._polled = np.zeros(0, _POLLED)
        super().__init__()

    def watch(self, events: Mapping[int, int]) -> None:
        """Set the file descriptors to poll and the events to wait for (`select.POLLIN` and others)."""
        self._polled = np.array([(descriptor, mask, 0) for descriptor, mask in events.items()], _POLLED)

    def spin(self, limit: int) -> int:
        return int(_poll_until_ready(self._polled.ctypes.data, len(self._polled), limit))


_READ_BYTES = 1 << 18


class EngineSocket:
    """The engine process's end of a quick channel.

    `send` and `shut_down` are thread-safe; the other methods are called by the thread of `EngineSocketLoop`.
    """

    def __init__(self, end: socket.socket, received: FrameHandler, loop: "EngineSocketLoop"):
        end.setblocking(False)
        self._socket = end
        self._received = received
        self._loop = loop
        self._reader = FrameReader()
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._is_open = True

    def send(self, kind: FrameKind, number: int, *parts: bytes | memoryview) -> None:
        """Send a frame without blocking, in call order; discard it if the other end is closed."""
        data = frame(kind, number, *parts)
        with self._lock:
            if not self._is_open:
                return
            sent = 0 if self._unsent else self._try_send(data)
            if sent == len(data):
                return
            self._unsent += memoryview(data)[sent:]
        self._loop.wake()

    def shut_down(self) -> None:
        """Close the connection: the worker has ended or must no longer be served."""
        with self._lock, contextlib.suppress(OSError):
            if self._is_open:
                self._socket.shutdown(socket.SHUT_RDWR)  # the thread then reads end-of-file and closes the socket

    # Called by the thread of `EngineSocketLoop`.

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """Events of poll(2) to wait for."""
        return select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN

    def handle_events(self, events: int, buffer: memoryview) -> bool:
        """Send and receive what is possible without blocking; return whether the connection is still open."""
        if events & select.POLLOUT:
            with self._lock:
                del self._unsent[: self._try_send(self._unsent)]
        if not events & ~select.POLLOUT:
            return True
        try:
            count = self._socket.recv_into(buffer)
        except BlockingIOError:
            return True
        except OSError:
            return False
        for kind, number, payload in self._reader.feed(buffer[:count]):
            self._received(kind, number, payload)
        return count > 0

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            self._unsent.clear()
            self._socket.close()

    def _try_send(self, data: bytes | bytearray) -> int:
        """Send without blocking and return the number of bytes sent.

        If the other end is closed, the data counts as sent: the reading thread detects the loss.
        """
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)


class EngineSocketLoop:
    """All `EngineSocket`s of the engine process and the thread that reads them."""

    def __init__(self, awake_s: float = 0.0):
        """Start the thread.

        Args:
            awake_s: Time in seconds for which the thread busy-polls after a request; 0 disables busy polling.
        """
        self._awake_s = awake_s
        self._awake_until_s = 0.0
        self._spin = ReadableSpin() if awake_s else None
        self._wakeup_sender, self._wakeup_receiver = socket.socketpair()
        for one in (self._wakeup_sender, self._wakeup_receiver):
            one.setblocking(False)
        self._new: deque[EngineSocket] = deque()
        self._sockets: dict[int, EngineSocket] = {}
        self._is_closed = False
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._waiting = select.poll()
        self._watch()
        self._thread = BackgroundThread("nestrec-frontend-channels", self._turn).start()

    def add(self, end: socket.socket, received: FrameHandler) -> EngineSocket:
        """Add the socket of one more worker.

        Args:
            end: This process's end of the socket pair.
            received: Called by the thread with each frame of the worker.
        """
        engine_socket = EngineSocket(end, received, self)
        self._new.append(engine_socket)
        self.wake()
        return engine_socket

    def wake(self) -> None:
        """Wake the thread: a socket was added or has unsent data. Thread-safe."""
        with contextlib.suppress(OSError):  # full: a wake-up is already pending; closed: the thread has ended
            self._wakeup_sender.send(b"c")

    def close(self) -> None:
        self._is_closed = True
        self.wake()
        self._thread.join()
        for engine_socket in (*self._sockets.values(), *self._new):
            engine_socket.close()
        close_all([self._wakeup_sender, self._wakeup_receiver])

    def _turn(self) -> bool:
        for descriptor, events in self._ready():
            if descriptor == self._wakeup_receiver.fileno():
                self._drain_wakeups()
            elif not self._handle_events(self._sockets[descriptor], events, self._buffer):
                self._waiting.unregister(descriptor)
                self._sockets.pop(descriptor).close()
            elif not events & select.POLLOUT:
                continue
            self._watch()
        return not self._is_closed

    def _watch(self) -> None:
        """Register new sockets, and update the events to wait for."""
        while self._new:
            engine_socket = self._new.popleft()
            self._sockets[engine_socket.fileno()] = engine_socket
        events = {self._wakeup_receiver.fileno(): select.POLLIN}
        events.update((descriptor, engine_socket.events) for descriptor, engine_socket in self._sockets.items())
        for descriptor, mask in events.items():
            self._waiting.register(descriptor, mask)
        if self._spin is not None:
            self._spin.watch(events)

    def _ready(self) -> list[tuple[int, int]]:
        while self._spin is not None and (left_s := self._awake_until_s - time.monotonic()) > 0:
            self._spin.wait(left_s)
            if ready := self._waiting.poll(0):
                return ready
        return self._waiting.poll()

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup_receiver.recv(_READ_BYTES):
                pass

    def _handle_events(self, engine_socket: EngineSocket, events: int, buffer: memoryview) -> bool:
        """Handle the events of a socket; return whether it stays open."""
        self._awake_until_s = time.monotonic() + self._awake_s
        try:
            return engine_socket.handle_events(events, buffer)
        except Exception as error:
            FAILURES.add("nestrec-frontend-channels", error, "the connection to this frontend worker was closed")
            return False
