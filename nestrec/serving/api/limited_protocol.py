"""uvicorn's HTTP protocol with limits on open connections and on how long the head of a request may take to arrive.

uvicorn ends idle connections after a request, but waits without end for a head that trickles in, so that a few slow
clients could hold every connection. It can bound connections, but does not say when to come back.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from nestrec.serving.api.http import Receive, Scope, Send, problem, retry_after
from nestrec.serving.api.schema import LimitsConfig


class LimitedProtocol(H11Protocol):
    """Closes a connection whose request line and headers are not complete in time; refuses what is beyond the most."""

    limits: LimitsConfig
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
            self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._expire)

    def _expire(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def protocol_with(limits: LimitsConfig) -> type[LimitedProtocol]:
    """The protocol with its limits, as uvicorn wants it: a class."""
    return type("Limited", (LimitedProtocol,), {"limits": limits})
