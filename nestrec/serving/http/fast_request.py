"""The fast path of hot routes: request head, connections, and cycle without ASGI.

Which connections may stay open, and which give way where there is no room for another.

A connection without a complete request gives way to a new one: first of those that have never asked anything, then of
those that are kept for a next request, and of the address that has most of them. So many silent sockets cost those who
ask nothing. One that is being answered never gives way.

What is known of a request from its head: its name, whom it is from, and whether it is answered at all.

The short way of a request that arrives whole, in one piece, with nothing unusual about it.

What comes between the parser and an ASGI application (a scope, messages, a task that watches for the client, two writes
for an answer) costs more than parsing the request and writing the scores. Ranking requests that need none of it go to
the application directly and are answered in one write. Everything else takes the usual way, which is the definition:
the answers are the same.
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
"""of an IPv6 address: whoever has one usually has all that begin like it"""


@dataclass(slots=True)
class _Address(Generic[Connection]):
    num_open: int = 0
    silent: OrderedDict[Connection, None] = field(default_factory=OrderedDict)
    """that have not asked anything yet, oldest first"""
    kept: OrderedDict[Connection, None] = field(default_factory=OrderedDict)
    """that wait for another request, longest idle first"""


class Connections(Generic[Connection]):
    """Open connections by address. Used inside one event loop."""

    def __init__(self, most: int, most_an_address: int):
        self.most = most
        self.most_an_address = most_an_address
        self._addresses: dict[str, _Address[Connection]] = {}
        self._open: dict[Connection, str] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection, address: str) -> Connection | None:
        """A new connection; the one that gives way to it, which is itself where nobody can; none where there is room.

        Whoever gives way counts as closed.
        """
        own = self._addresses.setdefault(address, _Address())
        own.num_open += 1
        self._open[connection] = address
        gives_way: Connection | None = None
        if own.num_open > self.most_an_address:
            gives_way = _longest_idle(own) or connection
        elif len(self._open) > self.most:
            gives_way = self._longest_idle_of_all() or connection
        own.silent[connection] = None
        if gives_way is not None and gives_way is not connection:
            self.closed(gives_way)
        return gives_way

    def began(self, connection: Connection) -> None:
        """A complete request is there: from now on it is being answered."""
        self._leaves(connection)

    def ended(self, connection: Connection) -> None:
        """All that it asked for is answered."""
        if connection in self._open:
            self._addresses[self._open[connection]].kept[connection] = None

    def closed(self, connection: Connection) -> None:
        own = self._leaves(connection)
        if own is not None:
            own.num_open -= 1
            address = self._open.pop(connection)
            if own.num_open == 0:
                del self._addresses[address]

    def _leaves(self, connection: Connection) -> _Address[Connection] | None:
        """It is not idle any more; its address, none where it has given way before."""
        if connection not in self._open:
            return None
        own = self._addresses[self._open[connection]]
        own.silent.pop(connection, None)
        own.kept.pop(connection, None)
        return own

    def _longest_idle_of_all(self) -> Connection | None:
        everyone = self._addresses.values()
        most_silent = max(everyone, key=lambda address: len(address.silent))
        if most_silent.silent:
            return next(iter(most_silent.silent))
        return _longest_idle(max(everyone, key=lambda address: len(address.kept)))


def _longest_idle(address: _Address[Connection]) -> Connection | None:
    return next(iter(address.silent or address.kept), None)


def address_of(peer: tuple[str, int] | None) -> str:
    """Whom a connection comes from; empty where nobody can tell (a socket of this machine without an address)."""
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


_IN_SCOPE = "nestrec"


@dataclass(frozen=True, slots=True)
class RequestHead:
    id: str
    """of the request"""
    client: str
    """whose share of the device its work counts as"""
    refused: HttpResponse | None
    """what it is answered without being looked into"""
    key: str = ""
    """name of the key that was given"""
    route: str = "other"
    """as it is declared"""
    traceparent: bytes = b""
    """the trace that it belongs to, as the client names it"""
    is_forwarded: bool = False
    """from a process that listens for this one, and counts it where its client goes away"""
    came_s: float = field(default_factory=time.perf_counter)
    """`perf_counter`"""

    @property
    def header(self) -> Header:
        """Of the answer."""
        return REQUEST_ID_HEADER, self.id.encode("ascii")

    @property
    def is_traced(self) -> bool:
        """What watches a server asks too often, and nothing happens for it."""
        return tracing.is_on() and self.route.startswith("/v1")

    def traced(self, work: Awaitable[None]) -> Coroutine[Any, Any, None]:
        """Serve it inside of a span."""
        return tracing.traced(work, self.traceparent, self.route, self.id)

    def put_into(self, scope: Any) -> None:
        scope[_IN_SCOPE] = self

    def naming(self, send: Send, tell: Callable[["RequestHead", int], None] | None = None) -> Send:
        """An answer with the request's name. tell: called with its status."""

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self.header]}
                tracing.note(http__response__status_code=message["status"])
                if tell is not None:
                    tell(self, message["status"])
            await send(message)

        return named


def incoming_of(scope: Scope) -> RequestHead | None:
    """None where the application is asked without our protocol before it."""
    found = scope.get(_IN_SCOPE)
    return found if isinstance(found, RequestHead) else None


def client_in(scope: Scope) -> str:
    """Whom a request is from."""
    incoming = incoming_of(scope)
    return incoming.client if incoming is not None else client_of(address_of(scope.get("client")), scope["headers"])


Tell = Callable[[RequestHead, int], None]


class DirectApp(Protocol):
    """An application that can be asked without ASGI in between."""

    plain_routes: Mapping[bytes, str]
    """route of each target of a request that may come this way"""

    def refused_unread(self, route: str, client: str, num_bytes: int) -> HttpResponse | None:
        """The answer to a request of so many bytes that is refused before it is parsed; none where it may be served."""
        ...

    def count_malformed(self, status: int) -> None:
        """What came was no request, and was refused with this status."""
        ...

    def serve(
        self, route: str, client: str, body: bytes, reply: Callable[[HttpResponse], None]
    ) -> Coroutine[Any, Any, None]:
        """Answer a request through `reply`, whatever it holds. Cancelled where the client goes away."""
        ...


class FastRequestCycle:
    """One request and its answer; to uvicorn's protocol it looks like a cycle of its own.

    The protocol adds to `body`, takes `more_body` away at the end of the request, sets `disconnected` when the client
    has gone, takes `keep_alive` away when the server is to end, and calls `message_event.set()` at what happens.
    """

    __slots__ = (
        "_door", "_protocol", "_route", "_task", "_tell", "body", "disconnected", "incoming", "keep_alive", "more_body",
        "response_complete",
    )  # fmt: skip

    def __init__(
        self, protocol: HttpToolsProtocol, door: DirectApp, route: str, incoming: RequestHead, tell: Tell | None = None
    ):
        """tell: called at the answer."""
        self._protocol = protocol
        self._door = door
        self._route = route
        self.incoming = incoming
        self._task: asyncio.Task[None] | None = None
        self._tell = tell
        self.body = b""
        self.more_body = True
        self.disconnected = self.response_complete = False
        self.keep_alive = protocol.parser.should_keep_alive()

    @property
    def message_event(self) -> "FastRequestCycle":
        return self

    def set(self) -> None:
        """Something has happened."""
        if self.disconnected:
            if self._task is not None:
                self._task.cancel()
        elif not self.more_body and self._task is None and not self.response_complete:
            self._begin()

    def _begin(self) -> None:
        client = self.incoming.client
        refused = self._door.refused_unread(self._route, client, len(self.body))
        if refused is not None:
            self._reply(refused)
        else:
            before = current_request_id.set(self.incoming.id)
            served = self._door.serve(self._route, client, self.body, self._reply)
            if self.incoming.is_traced:
                served = self.incoming.traced(served)
            self._task = self._protocol.loop.create_task(served)
            current_request_id.reset(before)

    def _reply(self, answered: HttpResponse) -> None:
        self.response_complete = True
        protocol = self._protocol
        headers = (*protocol.server_state.default_headers, self.incoming.header)
        tracing.note(http__response__status_code=answered.status)
        if self._tell is not None:
            self._tell(self.incoming, answered.status)
        protocol.transport.write(answered.as_http(headers, is_last=not self.keep_alive))
        if not self.keep_alive:
            protocol.transport.close()
        protocol.on_response_complete()
