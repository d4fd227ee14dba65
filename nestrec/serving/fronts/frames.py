"""What fronts and the engine say to each other: frames over two pairs of sockets a front.

    bytes    4        1      4         the rest
             length   kind   number    payload          length: of all after it; number: of the request it belongs to

One pair has what is asked of engines and their answers (RANK, SIGNAL, their CANCEL, ANSWER), and is read by a thread of
its own in the process that computes (`wires`). The other one has everything else, and is read by the event loop there.
What a front says is numbers, text and JSON, and nothing that could run: it is the process that strangers talk to.
"""

import asyncio
import enum
import struct
from collections.abc import Callable
from typing import cast

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
        frames, first, end = [], 0, len(self._buffer)
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
        self._received, self._lost = received, lost
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
