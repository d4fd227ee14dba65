"""HTTP under limits: connections, heads, bodies, and the short way of a whole request.

uvicorn's HTTP protocol with limits on open connections, on what waits in one, and on the size and time of a request.

uvicorn ends idle connections after a request, but waits without end for a head that trickles in and for a client that
does not read its answers; nor does its parser bound the bytes of a head or of what follows a chunked body. It parses
whatever has arrived, and so keeps as many requests of one connection as somebody sends: here the next bytes are given
to the parser, and read from the socket, when a request before them has been answered.

Ranking requests that arrive whole take the short way of `plain_cycle`.
"""

import asyncio
from typing import Any
from urllib.parse import unquote

import httptools

from nestrec.base.compat import FlowControl, HttpToolsProtocol, stop_keep_alive_timer
from nestrec.serving.core import tracing
from nestrec.serving.core.asgi import (
    JSON,
    REQUEST_ID_HEADER,
    AllowedHosts,
    HttpResponse,
    Receive,
    Scope,
    Send,
    head_bytes,
    problem,
    request_id_of,
    retry_after,
    too_long_head,
)
from nestrec.serving.core.request_limits import LimitsConfig, current_request_id
from nestrec.serving.http.fast_request import (
    Connections,
    DirectApp,
    FastRequestCycle,
    RequestHead,
    Tell,
    address_of,
    incoming_of,
)
from nestrec.serving.security.server_security import RequestAuthorizer

_SPARE_HEAD_BYTES = 256
"""of method, version and ends of lines, which are not counted as head"""
_SPARE_CONNECTIONS = 64
"""beyond the most that are told to come back; those beyond them are cut off"""
_PIECE_BYTES = 512
"""given to the parser at a time: it cannot be stopped, and all requests that it finds in them wait in memory"""
_LONGEST_NUMBER = 19
"""digits of a declared length"""
_UNUSUAL = frozenset((b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"))


class _HeldFlow(FlowControl):
    """Reading stays off while anything of a connection waits, whoever asks for more."""

    def __init__(self, transport: asyncio.Transport, protocol: "LimitedProtocol"):
        super().__init__(transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if not self._protocol.has_waiting:
            super().resume_reading()


class LimitedProtocol(HttpToolsProtocol):
    """Closes a connection whose request does not come, or whose answer is not read, in time; refuses what is beyond
    the most."""

    limits: LimitsConfig
    door: DirectApp | None
    hosts: AllowedHosts
    gate: RequestAuthorizer
    tell: Tell | None
    """called at each answer"""
    room: "Connections[LimitedProtocol]"
    address = ""
    """whom it comes from"""
    _head_timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle | None = None
    _awaits_head = True
    _is_beyond = False
    """the most were open already"""
    _is_upgrade = False
    """the head offers to go on in another protocol"""
    _is_feeding = False
    _unplaced_bytes = 0
    """that have come since the last whole head, piece of a body or whole request"""
    _body_left = 0
    """bytes of the declared body that are still to come"""
    _unfed = b""
    """that have come and that the parser has not seen, from `_first_unfed` on"""
    _first_unfed = 0

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._served, self.app = self.app, self._within_limit

    async def _within_limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        incoming = incoming_of(scope)
        assert incoming is not None
        current_request_id.set(incoming.id)  # this task serves nothing else
        if incoming.refused is None:
            served = self._served(scope, receive, incoming.naming(send, self.tell))
            await (incoming.traced(served) if incoming.is_traced else served)
        else:
            self._count_malformed(incoming.refused.status)
            await incoming.refused.send(incoming.naming(send, self.tell), is_last=True)

    def _incoming(self) -> RequestHead:
        """What the head says, and what the gate says to it."""
        request_id = request_id_of(next((value for name, value in self.headers if name == REQUEST_ID_HEADER), None))
        refused = self._refused(self.headers, self.parser.get_http_version())
        if refused is not None:
            return RequestHead(request_id, "", refused)
        raw_path = (httptools.parse_url(self.url).path or b"").decode("ascii")
        path = unquote(raw_path) if "%" in raw_path else raw_path
        admission = self.gate.admit(path, raw_path, self.headers, self.address)
        if self.tell is None and not tracing.is_on():
            return RequestHead(request_id, admission.client, admission.refused, admission.key)
        route = self.gate.route_of(path, raw_path)
        parent = next((value for name, value in self.headers if name == tracing.HEADER), b"")
        return RequestHead(request_id, admission.client, admission.refused, admission.key, route, parent)

    def _refused(self, headers: list[tuple[bytes, bytes]], version: str) -> HttpResponse | None:
        """The answer to a request that is not looked into."""
        if self._is_beyond:
            return problem(503, "too many connections are open", "", retry_after(1.0))
        named = [value for name, value in headers if name == b"host"]
        if len(named) > 1 or (not named and version == "1.1"):
            return problem(400, "the header Host must be there once")
        if named and named[0] not in self.hosts:
            return problem(421, "this server does not answer to that name; give its names as --hosts", "host")
        return None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _HeldFlow(transport, self)
        self.address = address_of(self.client)
        gives_way = self.room.opened(self, self.address)
        self._is_beyond = gives_way is self
        if len(self.room) > self.room.most + _SPARE_CONNECTIONS:
            transport.abort()
        elif gives_way is not None and gives_way is not self:
            gives_way.transport.abort()
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        self._unfed = self._unfed[self._first_unfed :] + data if self._unfed else data
        self._first_unfed = 0
        self._feed()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whoever has asked and says no more may still listen; the answer shows whether somebody does."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return False  # TLS knows no half of a connection
        cycle.keep_alive = False
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        self.room.closed(self)
        self._unfed = b""
        self.pipeline.clear()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self._unfed = b""
        if not self.transport.is_closing():  # a second close of asyncio's TLS transport makes it ignore an abort
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._answer_timer is None:
            self._answer_timer = self.loop.call_later(self.limits.answer_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    # What has come, and the parser.

    @property
    def has_waiting(self) -> bool:
        """Something has come that is behind a request which is not answered yet."""
        return bool(self._unfed or self.pipeline)

    def _feed(self) -> None:
        """Give the parser what has come, up to a request that has to wait for the one before it."""
        stop_keep_alive_timer(self)
        self._is_feeding = True
        while self._unfed and not self.pipeline and not self.transport.is_closing():
            end = self._first_unfed + max(_PIECE_BYTES, self._body_left)
            piece, self._first_unfed = self._unfed[self._first_unfed : end], end
            if end >= len(self._unfed):
                self._unfed = b""
                self._first_unfed = 0
            self._parse(piece)
        self._is_feeding = False
        if self.transport.is_closing():
            return
        cycle: object = self.cycle
        if isinstance(cycle, FastRequestCycle) and cycle.more_body:
            # The rest of the body is still to come, within limits that the application keeps.
            self.cycle = None  # type: ignore[assignment]
            self._take_usual_way(cycle.incoming)
            super().on_body(bytes(cycle.body))
        if self.has_waiting:
            self.flow.pause_reading()
        elif self._awaits_head:
            self.flow.resume_reading()
        self._watch_head()

    def _parse(self, piece: bytes) -> None:
        self._unplaced_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._unplaced_bytes > self.limits.max_header_bytes + _SPARE_HEAD_BYTES:
            self._refuse_head()

    def _decline_upgrade(self, rest: bytes) -> None:
        """The request as if it had not offered another protocol: the parser takes what follows its head for that
        protocol, and so a body for the next request."""
        self._is_upgrade = False
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("Invalid HTTP request received.")
            return
        lines = [method + b" " + self.url + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in self.headers if name not in (b"upgrade", b"connection")]
        lines += [b"connection: close"] if not self.parser.should_keep_alive() else []
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._unplaced_bytes = 0
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    # What the parser calls.

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._awaits_head:  # it came after a chunked body, where nobody looks for it
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # see `_decline_upgrade`
            self._is_upgrade = True
            return
        self._awaits_head = False
        self._unplaced_bytes = 0
        length = next((value for name, value in self.headers if name == b"content-length"), b"")
        self._body_left = int(length) if length.isdigit() and len(length) <= _LONGEST_NUMBER else 0
        incoming = self._incoming()
        route = self._plain_route() if incoming.refused is None else None
        if route is None or self.door is None:
            self._take_usual_way(incoming)
        else:
            self.cycle = FastRequestCycle(self, self.door, route, incoming, self.tell)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._unplaced_bytes = 0
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._awaits_head = True
        self._unplaced_bytes = 0
        self._body_left = 0
        self.room.began(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline and self.cycle.more_body:  # nobody reads the rest of it
            self.transport.close()
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.room.ended(self)
        if self._unfed and not self._is_feeding:
            self.loop.call_soon(self._feed)

    def _plain_route(self) -> str | None:
        """Where the request goes if nothing is special about it and nothing is before it; else none."""
        route = None if self.door is None else self.door.plain_routes.get(self.url)
        if route is None or self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            return None
        if (self.cycle is not None and not self.cycle.response_complete) or self.flow.write_paused:
            return None
        headers = dict(self.headers)
        if len(headers) < len(self.headers) or not _UNUSUAL.isdisjoint(headers) or headers.get(b"content-type") != JSON:
            return None
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or len(length) > _LONGEST_NUMBER or int(length) > self.limits.max_body_bytes:
            return None
        if head_bytes(self.url, self.headers) > self.limits.max_header_bytes:
            return None
        return route

    def _take_usual_way(self, incoming: RequestHead) -> None:
        url = self.url
        headers = self.headers
        expects = self.expect_100_continue
        super().on_message_begin()
        incoming.put_into(self.scope)
        self.url = url
        self.expect_100_continue = expects
        self.headers += headers
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._answer_at_once(problem(400, msg))

    def _refuse_head(self) -> None:
        if not self.transport.is_closing():
            refused = too_long_head(self.limits)
            self._answer_at_once(problem(refused.status, refused.message))

    def _answer_at_once(self, answered: HttpResponse) -> None:
        """What came was no request that could be looked into."""
        self._count_malformed(answered.status)
        headers = (*self.server_state.default_headers, (REQUEST_ID_HEADER, request_id_of(None).encode()))
        self.transport.write(answered.as_http(headers, is_last=True))
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


def protocol_with(
    limits: LimitsConfig,
    hosts: AllowedHosts,
    gate: RequestAuthorizer,
    door: DirectApp | None = None,
    *,
    tell: Tell | None = None,
) -> type[LimitedProtocol]:
    """The protocol with its limits, as uvicorn wants it: a class."""
    room: Connections[LimitedProtocol] = Connections(limits.max_connections, limits.max_connections_an_address)
    called = None if tell is None else staticmethod(tell)
    named = {"limits": limits, "hosts": hosts, "gate": gate, "door": door, "room": room, "tell": called}
    return type("Limited", (LimitedProtocol,), named)
