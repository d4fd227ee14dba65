"""Fast path of hot routes without ASGI, parsed request heads, and the limit of open connections.

`Connections`: if the maximum number of connections is open, a new connection replaces an idle one: first one that has
not sent a request yet, then a keep-alive connection, each of the client address that has most of them. Therefore an
attacker with many idle sockets cannot lock out other clients. A connection with a request in progress is never closed.

`RequestHead`: the request id, the client, and the result of authentication and of the checks of the head.

`FastRequestCycle`: ASGI (scope, messages, a task that watches for disconnects, two writes per response) takes more time
than parsing a ranking request and writing its scores. A request with nothing unusual in its head therefore bypasses
ASGI: it is passed to the application directly, and its response is sent with one write. The ASGI path is the reference
implementation; responses are identical.
"""

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from nestrec.base.compat import HttpToolsProtocol
from nestrec.serving.core import tracing
from nestrec.serving.core.asgi import REQUEST_ID_HEADER, Header, HttpResponse, Message, Scope, Send, client_of
from nestrec.serving.core.request_limits import current_request_id

Connection = TypeVar("Connection")
_PREFIX_BITS = 64
"""Number of bits of an IPv6 address that identify a client: a client usually has a complete /64 network."""


@dataclass(slots=True)
class _Address(Generic[Connection]):
    num_open: int = 0
    unused: OrderedDict[Connection, None] = field(default_factory=OrderedDict)
    """Connections without a complete request so far, oldest first."""
    idle: OrderedDict[Connection, None] = field(default_factory=OrderedDict)
    """Keep-alive connections between two requests, longest idle first."""


class Connections(Generic[Connection]):
    """Open connections by client address. Not thread-safe; use from one event loop.

    Args:
        max_connections: Maximum number of open connections.
        max_per_address: Maximum number of open connections per client address.
    """

    def __init__(self, max_connections: int, max_per_address: int):
        self.max_connections = max_connections
        self.max_per_address = max_per_address
        self._addresses: dict[str, _Address[Connection]] = {}
        self._open: dict[Connection, str] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection, address: str) -> Connection | None:
        """Add a new connection.

        Returns:
            The connection to close, which is already removed: an idle one, or the new one if no other is idle. None if
            the limits are not exceeded.
        """
        own = self._addresses.setdefault(address, _Address())
        own.num_open += 1
        self._open[connection] = address
        evicted: Connection | None = None
        if own.num_open > self.max_per_address:
            evicted = _longest_idle(own) or connection
        elif len(self._open) > self.max_connections:
            evicted = self._longest_idle_of_all() or connection
        own.unused[connection] = None
        if evicted is not None and evicted is not connection:
            self.closed(evicted)
        return evicted

    def mark_busy(self, connection: Connection) -> None:
        """Mark a connection as busy: a complete request was received, so it is not idle until its response is sent."""
        self._remove_from_idle(connection)

    def mark_idle(self, connection: Connection) -> None:
        """Mark a connection as idle: all of its requests were answered."""
        if connection in self._open:
            self._addresses[self._open[connection]].idle[connection] = None

    def closed(self, connection: Connection) -> None:
        """Remove a connection; has no effect if it was removed before."""
        own = self._remove_from_idle(connection)
        if own is not None:
            own.num_open -= 1
            address = self._open.pop(connection)
            if own.num_open == 0:
                del self._addresses[address]

    def _remove_from_idle(self, connection: Connection) -> _Address[Connection] | None:
        """Return the address of a connection; None if it was removed before."""
        if connection not in self._open:
            return None
        own = self._addresses[self._open[connection]]
        own.unused.pop(connection, None)
        own.idle.pop(connection, None)
        return own

    def _longest_idle_of_all(self) -> Connection | None:
        addresses = self._addresses.values()
        most_unused = max(addresses, key=lambda address: len(address.unused))
        if most_unused.unused:
            return next(iter(most_unused.unused))
        return _longest_idle(max(addresses, key=lambda address: len(address.idle)))


def _longest_idle(address: _Address[Connection]) -> Connection | None:
    return next(iter(address.unused or address.idle), None)


def address_of(peer: tuple[str, int] | None) -> str:
    """Return the IPv4 address or the IPv6 /64 network that identifies a client; empty for a Unix socket."""
    if peer is None:
        return ""
    if ":" not in peer[0]:
        return peer[0]
    try:
        address = ipaddress.IPv6Address(peer[0].partition("%")[0])
    except ValueError:
        return peer[0]
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), _PREFIX_BITS), strict=False))


_SCOPE_KEY = "nestrec"


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Properties of a request that are known from its head."""

    id: str
    """Request id."""
    client: str
    """Client to which the work is charged in fair queuing."""
    rejection: HttpResponse | None
    """Response if the request is rejected because of its head; None if it is accepted."""
    key: str = ""
    """Name of the API key; empty without one."""
    route: str = "other"
    """Path of the endpoint as it is declared, without parameter values."""
    traceparent: bytes = b""
    """Trace context of the client (W3C header `traceparent`)."""
    is_forwarded: bool = False
    """Whether a frontend worker forwarded the request; that process counts client disconnects."""
    arrived_s: float = field(default_factory=time.perf_counter)
    """Arrival time in seconds of `time.perf_counter`."""

    @property
    def header(self) -> Header:
        """Response header with the request id."""
        return REQUEST_ID_HEADER, self.id.encode("ascii")

    @property
    def is_traced(self) -> bool:
        """Whether the request gets a span; health checks and metrics do not, because they are frequent and trivial."""
        return tracing.is_on() and self.route.startswith("/v1")

    def traced(self, work: Awaitable[None]) -> Coroutine[Any, Any, None]:
        """Return a coroutine that serves the request inside a span."""
        return tracing.traced(work, self.traceparent, self.route, self.id)

    def store_in(self, scope: Any) -> None:
        """Store the head in an ASGI scope; see `request_head_of`."""
        scope[_SCOPE_KEY] = self

    def with_request_id(self, send: Send, on_response: Callable[["RequestHead", int], None] | None = None) -> Send:
        """Return a `send` function that adds the request id to the response.

        Args:
            send: ASGI function that sends the messages of a response.
            on_response: Called with this head and the status of the response.
        """

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self.header]}
                tracing.set_span_attributes(http__response__status_code=message["status"])
                if on_response is not None:
                    on_response(self, message["status"])
            await send(message)

        return send_with_id


def request_head_of(scope: Scope) -> RequestHead | None:
    """Return the request head that `LimitedProtocol` stored in a scope; None if another ASGI server calls the app."""
    head = scope.get(_SCOPE_KEY)
    return head if isinstance(head, RequestHead) else None


def client_of_request(scope: Scope) -> str:
    """Return the client of a request: the name of its API key, or its address."""
    head = request_head_of(scope)
    return head.client if head is not None else client_of(address_of(scope.get("client")), scope["headers"])


OnResponse = Callable[[RequestHead, int], None]
"""Callback for a response: called with the head of the request and the status."""


class DirectApp(Protocol):
    """Application that serves hot routes without ASGI."""

    fast_routes: Mapping[bytes, str]
    """Routes of the fast path by request target."""

    def reject_unread(self, route: str, client: str, num_bytes: int) -> HttpResponse | None:
        """Return the response to a request that is rejected before it is parsed; None if it is admitted.

        Args:
            route: Path of the endpoint.
            client: Client that sent the request.
            num_bytes: Size of the request body.
        """
        ...

    def count_malformed(self, status: int) -> None:
        """Record a malformed request, which was rejected with this status."""
        ...

    def serve(
        self, route: str, client: str, body: bytes, reply: Callable[[HttpResponse], None]
    ) -> Coroutine[Any, Any, None]:
        """Serve a request and pass exactly one response to `reply`. The task is cancelled if the client disconnects."""
        ...


class FastRequestCycle:
    """One request and its response without ASGI, with the interface of uvicorn's request-response cycle.

    uvicorn's protocol appends to `body`, sets `more_body` to False at the end of the request, `disconnected` to True if
    the client disconnects and `keep_alive` to False when the server shuts down, and calls `message_event.set()` after
    each of these changes.

    Args:
        protocol: Protocol of the connection.
        direct_app: Application that serves the request.
        route: Path of the endpoint.
        head: Head of the request.
        on_response: Called when the response is sent.
    """

    __slots__ = (
        "_direct_app", "_on_response", "_protocol", "_route", "_task", "body", "disconnected", "head", "keep_alive",
        "more_body", "response_complete",
    )  # fmt: skip

    def __init__(
        self,
        protocol: HttpToolsProtocol,
        direct_app: DirectApp,
        route: str,
        head: RequestHead,
        on_response: OnResponse | None = None,
    ):
        self._protocol = protocol
        self._direct_app = direct_app
        self._route = route
        self.head = head
        self._task: asyncio.Task[None] | None = None
        self._on_response = on_response
        self.body = b""
        self.more_body = True
        self.disconnected = self.response_complete = False
        self.keep_alive = protocol.parser.should_keep_alive()

    @property
    def message_event(self) -> "FastRequestCycle":
        return self

    def set(self) -> None:
        """Handle a change of the state: start to serve a complete request, or cancel it if the client disconnected."""
        if self.disconnected:
            if self._task is not None:
                self._task.cancel()
        elif not self.more_body and self._task is None and not self.response_complete:
            self._begin()

    def _begin(self) -> None:
        client = self.head.client
        rejection = self._direct_app.reject_unread(self._route, client, len(self.body))
        if rejection is not None:
            self._reply(rejection)
        else:
            token = current_request_id.set(self.head.id)
            work = self._direct_app.serve(self._route, client, self.body, self._reply)
            if self.head.is_traced:
                work = self.head.traced(work)
            self._task = self._protocol.loop.create_task(work)
            current_request_id.reset(token)

    def _reply(self, response: HttpResponse) -> None:
        self.response_complete = True
        protocol = self._protocol
        headers = (*protocol.server_state.default_headers, self.head.header)
        tracing.set_span_attributes(http__response__status_code=response.status)
        if self._on_response is not None:
            self._on_response(self.head, response.status)
        protocol.transport.write(response.as_http(headers, is_last=not self.keep_alive))
        if not self.keep_alive:
            protocol.transport.close()
        protocol.on_response_complete()
