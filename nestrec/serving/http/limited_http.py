"""uvicorn's HTTP protocol with limits: open connections, size and duration of request heads, and pipelined requests.

uvicorn closes idle keep-alive connections, but it waits indefinitely for a head that is sent slowly (slowloris) and for
a client that does not read its responses. Its parser limits neither the size of a head nor of the trailers after a
chunked body. It also parses everything that has arrived, so a client can fill the memory with pipelined requests. Here,
more bytes are read and parsed only when the previous request has been answered (backpressure).

Ranking requests without unusual headers take the fast path of `fast_request`, which bypasses ASGI.
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
    OnResponse,
    RequestHead,
    address_of,
    request_head_of,
)
from nestrec.serving.security.server_security import RequestAuthorizer

_SPARE_HEAD_BYTES = 256
"""Bytes for method, version and line ends, which `LimitsConfig.max_header_bytes` does not include."""
_SPARE_CONNECTIONS = 64
"""Number of connections above the limit whose requests get 503 with Retry-After; further ones are closed."""
_BLOCK_BYTES = 512
"""Bytes that are passed to the parser at a time: it cannot be paused, so all requests in them are held in memory."""
_MAX_LENGTH_DIGITS = 19
"""Maximum number of digits of the header Content-Length."""
_UNUSUAL_HEADERS = frozenset((b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"))


class _HeldFlow(FlowControl):
    """Flow control with backpressure: reading stays paused while received requests wait, even if uvicorn resumes it."""

    def __init__(self, transport: asyncio.Transport, protocol: "LimitedProtocol"):
        super().__init__(transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if not self._protocol.has_waiting:
            super().resume_reading()


class LimitedProtocol(HttpToolsProtocol):
    """HTTP protocol of one connection.

    Closes the connection if a request head is not received, or a response not read, in time; rejects requests if too
    many connections are open or if the host or the API key is invalid. `protocol_with` creates a subclass that has the
    class attributes.
    """

    limits: LimitsConfig
    direct_app: DirectApp | None
    hosts: AllowedHosts
    authorizer: RequestAuthorizer
    on_response: OnResponse | None
    """Called for each response."""
    open_connections: "Connections[LimitedProtocol]"
    address = ""
    """Address that identifies the client; see `address_of`."""
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _awaits_head = True
    _is_over_limit = False
    """Whether the maximum number of connections was already open."""
    _is_upgrade = False
    """Whether the head offers to switch to another protocol."""
    _is_feeding = False
    _head_bytes = 0
    """Bytes that were parsed since the last complete head, body fragment or request."""
    _body_left = 0
    """Bytes of the declared body that have not been received."""
    _unparsed = b""
    """Received bytes; those from `_parse_position` on have not been parsed."""
    _parse_position = 0

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._inner_app, self.app = self.app, self._serve_or_reject

    async def _serve_or_reject(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = request_head_of(scope)
        assert head is not None
        current_request_id.set(head.id)  # this task serves nothing else
        if head.rejection is None:
            work = self._inner_app(scope, receive, head.with_request_id(send, self.on_response))
            await (head.traced(work) if head.is_traced else work)
        else:
            self._count_malformed(head.rejection.status)
            await head.rejection.send(head.with_request_id(send, self.on_response), is_last=True)

    def _read_head(self) -> RequestHead:
        """Check and authorize the received head."""
        request_id = request_id_of(next((value for name, value in self.headers if name == REQUEST_ID_HEADER), None))
        rejection = self._reject_head(self.headers, self.parser.get_http_version())
        if rejection is not None:
            return RequestHead(request_id, "", rejection)
        raw_path = (httptools.parse_url(self.url).path or b"").decode("ascii")
        path = unquote(raw_path) if "%" in raw_path else raw_path
        admission = self.authorizer.authorize(path, raw_path, self.headers, self.address)
        if self.on_response is None and not tracing.is_on():
            return RequestHead(request_id, admission.client, admission.rejection, admission.key)
        route = self.authorizer.route_of(path, raw_path)
        parent = next((value for name, value in self.headers if name == tracing.HEADER), b"")
        return RequestHead(request_id, admission.client, admission.rejection, admission.key, route, parent)

    def _reject_head(self, headers: list[tuple[bytes, bytes]], version: str) -> HttpResponse | None:
        """Return the response to a request whose connection or host is not acceptable; None if it is."""
        if self._is_over_limit:
            return problem(503, "the server has too many open connections", "", retry_after(1.0))
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            return problem(400, "the request must have exactly one header Host")
        if hosts and hosts[0] not in self.hosts:
            return problem(421, "the header Host is not a name of this server; add it to --allowed_hosts", "host")
        return None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _HeldFlow(transport, self)
        self.address = address_of(self.client)
        evicted = self.open_connections.opened(self, self.address)
        self._is_over_limit = evicted is self
        if len(self.open_connections) > self.open_connections.max_connections + _SPARE_CONNECTIONS:
            transport.abort()
        elif evicted is not None and evicted is not self:
            evicted.transport.abort()
        self._update_head_timer()

    def data_received(self, data: bytes) -> None:
        self._unparsed = self._unparsed[self._parse_position :] + data if self._unparsed else data
        self._parse_position = 0
        self._feed()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection open while a request is served, because the client may still read."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return False  # TLS does not support half-closed connections
        cycle.keep_alive = False
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        self.open_connections.closed(self)
        self._unparsed = b""
        self.pipeline.clear()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self._unparsed = b""
        if not self.transport.is_closing():  # a second close of asyncio's TLS transport makes it ignore an abort
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # Received bytes and the parser.

    @property
    def has_waiting(self) -> bool:
        """Whether received bytes or pipelined requests wait for the response to the current request."""
        return bool(self._unparsed or self.pipeline)

    def _feed(self) -> None:
        """Pass received bytes to the parser, until it finds a request that must wait for the current one."""
        stop_keep_alive_timer(self)
        self._is_feeding = True
        while self._unparsed and not self.pipeline and not self.transport.is_closing():
            end = self._parse_position + max(_BLOCK_BYTES, self._body_left)
            block, self._parse_position = self._unparsed[self._parse_position : end], end
            if end >= len(self._unparsed):
                self._unparsed = b""
                self._parse_position = 0
            self._parse(block)
        self._is_feeding = False
        if self.transport.is_closing():
            return
        cycle: object = self.cycle
        if isinstance(cycle, FastRequestCycle) and cycle.more_body:
            # The body did not arrive at once: switch to ASGI, where the application limits its size and duration.
            self.cycle = None  # type: ignore[assignment]
            self._start_asgi_cycle(cycle.head)
            super().on_body(bytes(cycle.body))
        if self.has_waiting:
            self.flow.pause_reading()
        elif self._awaits_head:
            self.flow.resume_reading()
        self._update_head_timer()

    def _parse(self, block: bytes) -> None:
        self._head_bytes += len(block)
        try:
            self.parser.feed_data(block)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(block[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._head_bytes > self.limits.max_header_bytes + _SPARE_HEAD_BYTES:
            self._reject_long_head()

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its header Upgrade.

        After a head with this header, the parser leaves the remaining bytes, which can be a request body, to the other
        protocol.
        """
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
        self._head_bytes = 0
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._awaits_head:  # a trailer of a chunked body, which is ignored
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
        self._head_bytes = 0
        length = next((value for name, value in self.headers if name == b"content-length"), b"")
        self._body_left = int(length) if length.isdigit() and len(length) <= _MAX_LENGTH_DIGITS else 0
        head = self._read_head()
        route = self._fast_route() if head.rejection is None else None
        if route is None or self.direct_app is None:
            self._start_asgi_cycle(head)
        else:
            self.cycle = FastRequestCycle(  # type: ignore[assignment]
                self, self.direct_app, route, head, self.on_response
            )

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._awaits_head = True
        self._head_bytes = 0
        self._body_left = 0
        self.open_connections.mark_busy(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline and self.cycle.more_body:  # the rest of the body will not be read
            self.transport.close()
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.open_connections.mark_idle(self)
        if self._unparsed and not self._is_feeding:
            self.loop.call_soon(self._feed)

    def _fast_route(self) -> str | None:
        """Return the route of a request if it qualifies for the fast path, otherwise None."""
        route = None if self.direct_app is None else self.direct_app.fast_routes.get(self.url)
        if route is None or self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            return None
        if (self.cycle is not None and not self.cycle.response_complete) or self.flow.write_paused:
            return None
        headers = dict(self.headers)
        if (
            len(headers) < len(self.headers)
            or not _UNUSUAL_HEADERS.isdisjoint(headers)
            or headers.get(b"content-type") != JSON
        ):
            return None
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS or int(length) > self.limits.max_body_bytes:
            return None
        if head_bytes(self.url, self.headers) > self.limits.max_header_bytes:
            return None
        return route

    def _start_asgi_cycle(self, head: RequestHead) -> None:
        url = self.url
        headers = self.headers
        expects = self.expect_100_continue
        super().on_message_begin()
        head.store_in(self.scope)
        self.url = url
        self.expect_100_continue = expects
        self.headers += headers
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._reject_malformed(problem(400, msg))

    def _reject_long_head(self) -> None:
        if not self.transport.is_closing():
            error = too_long_head(self.limits)
            self._reject_malformed(problem(error.status, error.message))

    def _reject_malformed(self, response: HttpResponse) -> None:
        """Respond to a request that could not be parsed, and close the connection."""
        self._count_malformed(response.status)
        headers = (*self.server_state.default_headers, (REQUEST_ID_HEADER, request_id_of(None).encode()))
        self.transport.write(response.as_http(headers, is_last=True))
        self.transport.close()

    def _count_malformed(self, status: int) -> None:
        if self.direct_app is not None:
            self.direct_app.count_malformed(status)

    def _update_head_timer(self) -> None:
        """Run the timer while a head is incomplete: on a new connection from its start, then from the first byte."""
        if not self._awaits_head or (self.cycle is not None and not self._head_bytes):
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._expire)

    def _expire(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:  # the previous request must be answered first
            self._update_head_timer()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def protocol_with(
    limits: LimitsConfig,
    hosts: AllowedHosts,
    authorizer: RequestAuthorizer,
    direct_app: DirectApp | None = None,
    *,
    on_response: OnResponse | None = None,
) -> type[LimitedProtocol]:
    """Return a protocol class for uvicorn, which creates one instance per connection.

    Args:
        limits: Limits of requests and connections.
        hosts: Host names that clients can use.
        authorizer: Authenticates and authorizes requests.
        direct_app: Application of the fast path; None disables the fast path.
        on_response: Called for each response, for the access log.
    """
    connections: Connections[LimitedProtocol] = Connections(limits.max_connections, limits.max_connections_per_address)
    callback = None if on_response is None else staticmethod(on_response)
    attributes = {
        "limits": limits,
        "hosts": hosts,
        "authorizer": authorizer,
        "direct_app": direct_app,
        "open_connections": connections,
        "on_response": callback,
    }
    return type("Limited", (LimitedProtocol,), attributes)
