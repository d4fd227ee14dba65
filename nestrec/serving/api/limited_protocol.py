"""uvicorn's HTTP protocol with limits on open connections and on how long the head of a request may take to arrive.

uvicorn ends idle connections after a request, but waits without end for a head that trickles in, so that a few slow
clients could hold every connection. It can bound connections, but does not say when to come back.

Under overload, requests that have arrived whole are refused before they are parsed: parsing one and answering in the
usual way takes four tenths of a millisecond of an interpreter that the engine needs for those that were accepted.
"""

import asyncio
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from nestrec.serving.api.http import Answered, Receive, Scope, Send, problem, retry_after
from nestrec.serving.api.schema import LimitsConfig

_SPECIAL = (b"transfer-encoding", b"expect", b"upgrade", b"close")


class Door(Protocol):
    """What may turn requests away before they are parsed."""

    @property
    def is_full(self) -> bool:
        """Some would be refused; asked for every request, so it must be cheap."""
        ...

    def refused_unread(self, path: str) -> Answered | None:
        """The answer to a request for this path, or none where it is to be parsed."""
        ...


class LimitedProtocol(H11Protocol):
    """Closes a connection whose request line and headers are not complete in time; refuses what is beyond the most."""

    limits: LimitsConfig
    door: Door | None
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._served, self.app = self.app, self._within_limit

    async def _within_limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.connections) <= self.limits.max_connections:
            await self._served(scope, receive, send)
            return
        ends = (b"connection", b"close")
        await problem(503, "too many connections are open", "", retry_after(1.0), ends).send(send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        if not self._refuses_unread(data):
            super().data_received(data)
            self._watch_head()

    def _refuses_unread(self, data: bytes) -> bool:
        if self.door is None or not self.door.is_full:
            return False
        if not self.conn.our_state is self.conn.their_state is h11.IDLE or self.conn.trailing_data[0]:
            return False  # it belongs to something that came before
        path = path_of_whole(data, self.limits.max_header_bytes)
        answered = self.door.refused_unread(path) if path is not None else None
        if answered is None:
            return False
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self.transport.write(answered.as_http())
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        """The timer runs from the first byte that is waited for to the last one of the head."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._expire)

    def _expire(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def protocol_with(limits: LimitsConfig, door: Door | None = None) -> type[LimitedProtocol]:
    """The protocol with its limits, as uvicorn wants it: a class."""
    return type("Limited", (LimitedProtocol,), {"limits": limits, "door": door})


def path_of_whole(data: bytes, most_head_bytes: int) -> str | None:
    """Path of an HTTP/1.1 POST that `data` holds from beginning to end, with nothing special about it; else none."""
    end = data.find(b"\r\n\r\n", 0, most_head_bytes)
    line, _, rest = data[: max(end, 0)].partition(b"\r\n")
    words, headers = line.split(b" "), b"\r\n" + rest.lower()
    if len(words) != 3 or words[0] != b"POST" or words[2] != b"HTTP/1.1":
        return None
    if headers.count(b"\r\ncontent-length:") != 1 or any(word in headers for word in _SPECIAL):
        return None
    length = headers.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0].strip()
    if not length.isdigit() or len(length) > 9 or len(data) != end + 4 + int(length):
        return None
    return words[1].decode("latin-1")
