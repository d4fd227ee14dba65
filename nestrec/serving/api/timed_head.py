"""uvicorn's HTTP protocol with a limit on how long the head of a request may take to arrive.

uvicorn ends idle connections after a request, but waits without end for a head that trickles in, so that a few slow
clients could hold every connection.
"""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedHeadProtocol(H11Protocol):
    """Closes a connection whose request line and headers are not complete in time."""

    head_timeout_s: float = 10.0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        """The timer runs from the first byte that is waited for to the last one of the head."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._expire)

    def _expire(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def protocol_with(head_timeout_s: float) -> type[TimedHeadProtocol]:
    """The protocol with its limit, as uvicorn wants it: a class."""
    return type("LimitedProtocol", (TimedHeadProtocol,), {"head_timeout_s": head_timeout_s})
