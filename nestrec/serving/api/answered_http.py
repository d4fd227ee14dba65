"""A request of ASGI that is answered whatever becomes of it, and counted once."""

import time
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass

from nestrec.serving.api.posts import Observe, explained
from nestrec.serving.api.protocol.http import Answered, Body, DisconnectedError, Receive, Scope, Send
from nestrec.serving.api.protocol.incoming import incoming_of
from nestrec.serving.api.schema import LimitsConfig

Answer = Callable[[Scope, Receive, Body], Awaitable[tuple[str, Answered]]]
"""the route as it is declared, and what is answered"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswers:
    """Of an application."""

    limits: LimitsConfig
    routes: Container[str]
    """those that are counted by name where a request fails"""
    answer: Answer
    observe: Observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_s, path, body = time.perf_counter(), scope["path"], Body(scope, receive, self.limits)
        route, incoming = path if path in self.routes else "other", incoming_of(scope)
        try:
            route, answered = await self.answer(scope, receive, body)
        except DisconnectedError:
            if incoming is None or not incoming.is_forwarded:
                self.observe(route, 499, time.perf_counter() - start_s)
            return
        except Exception as error:
            answered = explained(error)
        await answered.send(send, is_last=body.is_unread)
        if not answered.is_counted:
            self.observe(route, answered.status, time.perf_counter() - start_s)
