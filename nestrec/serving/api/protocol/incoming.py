"""What is known of a request from its head: its name, whom it is from, and whether it is answered at all."""

import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from nestrec.serving import tracing
from nestrec.serving.api.protocol.connections import address_of
from nestrec.serving.api.protocol.http import Answered, Header, Message, Scope, Send
from nestrec.serving.client import client_of
from nestrec.serving.safety.request_id import HEADER

_IN_SCOPE = "nestrec"


@dataclass(frozen=True, slots=True)
class Incoming:
    id: str
    """of the request"""
    client: str
    """whose share of the device its work counts as"""
    refused: Answered | None
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
        return HEADER, self.id.encode("ascii")

    @property
    def is_traced(self) -> bool:
        """What watches a server asks too often, and nothing happens for it."""
        return tracing.is_on() and self.route.startswith("/v1")

    def traced(self, work: Awaitable[None]) -> Coroutine[Any, Any, None]:
        """Serve it inside of a span."""
        return tracing.traced(work, self.traceparent, self.route, self.id)

    def put_into(self, scope: Any) -> None:
        scope[_IN_SCOPE] = self

    def naming(self, send: Send, tell: Callable[["Incoming", int], None] | None = None) -> Send:
        """An answer with the request's name. tell: called with its status."""

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self.header]}
                tracing.note(http__response__status_code=message["status"])
                if tell is not None:
                    tell(self, message["status"])
            await send(message)

        return named


def incoming_of(scope: Scope) -> Incoming | None:
    """None where the application is asked without our protocol before it."""
    found = scope.get(_IN_SCOPE)
    return found if isinstance(found, Incoming) else None


def client_in(scope: Scope) -> str:
    """Whom a request is from."""
    incoming = incoming_of(scope)
    return incoming.client if incoming is not None else client_of(address_of(scope.get("client")), scope["headers"])
