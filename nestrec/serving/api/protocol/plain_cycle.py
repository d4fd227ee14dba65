"""The short way of a request that arrives whole, in one piece, with nothing unusual about it.

What comes between the parser and an ASGI application (a scope, messages, a task that watches for the client, two writes
for an answer) costs more than parsing the request and writing the scores. Ranking requests that need none of it go to
the application directly and are answered in one write. Everything else takes the usual way, which is the definition:
the answers are the same.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nestrec.serving import tracing
from nestrec.serving.api.protocol.http import Answered
from nestrec.serving.api.protocol.incoming import Incoming
from nestrec.serving.safety.request_id import current_request_id

Tell = Callable[[Incoming, int], None]


class Door(Protocol):
    """An application that can be asked without ASGI in between."""

    plain_routes: Mapping[bytes, str]
    """route of each target of a request that may come this way"""

    def refused_unread(self, route: str, client: str, num_bytes: int) -> Answered | None:
        """The answer to a request of so many bytes that is refused before it is parsed; none where it may be served."""
        ...

    def count_malformed(self, status: int) -> None:
        """What came was no request, and was refused with this status."""
        ...

    def serve(
        self, route: str, client: str, body: bytes, reply: Callable[[Answered], None]
    ) -> Coroutine[Any, Any, None]:
        """Answer a request through `reply`, whatever it holds. Cancelled where the client goes away."""
        ...


class PlainCycle:
    """One request and its answer; to uvicorn's protocol it looks like a cycle of its own.

    The protocol adds to `body`, takes `more_body` away at the end of the request, sets `disconnected` when the client
    has gone, takes `keep_alive` away when the server is to end, and calls `message_event.set()` at what happens.
    """

    __slots__ = (
        "_door", "_protocol", "_route", "_task", "_tell", "body", "disconnected", "incoming", "keep_alive", "more_body",
        "response_complete",
    )  # fmt: skip

    def __init__(
        self, protocol: HttpToolsProtocol, door: Door, route: str, incoming: Incoming, tell: Tell | None = None
    ):
        """tell: called at the answer."""
        self._protocol, self._door, self._route, self.incoming = protocol, door, route, incoming
        self._task: asyncio.Task[None] | None = None
        self._tell = tell
        self.body, self.more_body = b"", True
        self.disconnected = self.response_complete = False
        self.keep_alive = protocol.parser.should_keep_alive()

    @property
    def message_event(self) -> "PlainCycle":
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

    def _reply(self, answered: Answered) -> None:
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
