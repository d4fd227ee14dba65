"""uvicorn's HTTP protocol with limits on open connections and on the size and time of what is not a body.

uvicorn ends idle connections after a request, but waits without end for a head that trickles in, so that a few slow
clients could hold every connection; nor does its parser bound the bytes of a head or of what follows a chunked body. It
can bound connections, but does not say when to come back.

Ranking requests that arrive whole take the short way of `plain_cycle`.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nestrec.serving.api.http import JSON, Receive, Scope, Send, head_bytes, problem, retry_after, too_long_head
from nestrec.serving.api.plain_cycle import Door, PlainCycle
from nestrec.serving.api.schema import LimitsConfig

_SPARE_HEAD_BYTES = 256
"""of method, version and ends of lines, which are not counted as head"""
_UNUSUAL = frozenset((b"transfer-encoding", b"expect", b"upgrade"))


class LimitedProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers are not complete in time; refuses what is beyond the most."""

    limits: LimitsConfig
    door: Door | None
    _head_timer: asyncio.TimerHandle | None = None
    _awaits_head = True
    _unplaced_bytes = 0
    """that have come since the last whole head, piece of a body or whole request"""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._served, self.app = self.app, self._within_limit

    async def _within_limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.connections) <= self.limits.max_connections:
            await self._served(scope, receive, send)
            return
        await problem(503, "too many connections are open", "", retry_after(1.0)).send(send, is_last=True)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        self._unplaced_bytes += len(data)
        super().data_received(data)
        if self._unplaced_bytes > self.limits.max_header_bytes + _SPARE_HEAD_BYTES:
            self._refuse_head()
            return
        cycle: object = self.cycle
        if isinstance(cycle, PlainCycle) and cycle.more_body:
            # The rest of the body is still to come, within limits that the application keeps.
            self.cycle = None  # type: ignore[assignment]
            self._take_usual_way()
            super().on_body(bytes(cycle.body))
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    # What the parser calls.

    def on_message_begin(self) -> None:
        self.url, self.headers, self.expect_100_continue = b"", [], False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._awaits_head:  # it came after a chunked body, where nobody looks for it
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._awaits_head, self._unplaced_bytes = False, 0
        route = self._plain_route()
        if route is None or self.door is None:
            self._take_usual_way()
        else:
            self.cycle = PlainCycle(self, self.door, route)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._unplaced_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._awaits_head, self._unplaced_bytes = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline and self.cycle.more_body:  # nobody reads the rest of it
            self.transport.close()
        super().on_response_complete()

    def _plain_route(self) -> str | None:
        """Where the request goes if nothing is special about it and nothing is before it; else none."""
        route = None if self.door is None else self.door.plain_routes.get(self.url)
        if route is None or self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            return None
        if (self.cycle is not None and not self.cycle.response_complete) or self.flow.write_paused:
            return None
        headers = dict(self.headers)
        if not _UNUSUAL.isdisjoint(headers) or headers.get(b"content-type", JSON) != JSON:
            return None
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or int(length) > self.limits.max_body_bytes:
            return None
        if head_bytes(self.url, self.headers) > self.limits.max_header_bytes:
            return None
        return route if len(self.connections) <= self.limits.max_connections else None

    def _take_usual_way(self) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._count_malformed(400)
        super().send_400_response(msg)

    def _refuse_head(self) -> None:
        if not self.transport.is_closing():
            refused = too_long_head(self.limits)
            self._count_malformed(refused.status)
            self.transport.write(problem(refused.status, refused.message).as_http(is_last=True))
            self.transport.close()

    def _count_malformed(self, status: int) -> None:
        if self.door is not None:
            self.door.count_malformed(status)

    def _watch_head(self) -> None:
        """The timer runs from the first byte that is waited for to the last one of the head."""
        if not self._awaits_head or (self.cycle is not None and not self._unplaced_bytes):
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._expire)

    def _expire(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:  # the answer to the request before it comes first
            self._watch_head()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def protocol_with(limits: LimitsConfig, door: Door | None = None) -> type[LimitedProtocol]:
    """The protocol with its limits, as uvicorn wants it: a class."""
    return type("Limited", (LimitedProtocol,), {"limits": limits, "door": door})
