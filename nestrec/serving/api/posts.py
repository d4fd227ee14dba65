"""Requests with a body to their endpoints, and the answers to what goes wrong."""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from nestrec.serving.api.answering import HotFront
from nestrec.serving.api.endpoint import Endpoint
from nestrec.serving.api.protocol.http import Answered, as_json, parse_json, problem, problem_of, retry_after
from nestrec.serving.api.protocol.long_lists import loads, warm_up
from nestrec.serving.api.schema import BadRequestError
from nestrec.serving.api.shapes import reader
from nestrec.serving.client import Sender, current_sender
from nestrec.serving.engine.work import OverloadedError, RefusedError

_LOG = logging.getLogger(__name__)
Handler = Callable[[dict[str, Any]], Awaitable[Answered]]
Observe = Callable[[str, int, float], None]
"""route, status, seconds"""


class Posts:
    """Of some endpoints, by their paths."""

    def __init__(self, front: HotFront, endpoints: Iterable[Endpoint], observe: Observe):
        self._front, self._observe = front, observe
        self._handlers: dict[str, Handler] = {}
        self._computed_by: dict[str, str | None] = {}
        self._with_lists: set[str] = set()
        for endpoint in endpoints:
            read = reader(endpoint.request, front.limits) if endpoint.request is not None else lambda _: None
            self._handlers[endpoint.path] = partial(self._handle, endpoint, read)
            self._computed_by[endpoint.path] = endpoint.computed_by
            if endpoint.takes_plain_lists:
                self._with_lists.add(endpoint.path)
        self.plain_routes = {route.encode(): route for route in self._handlers}
        warm_up()

    def __contains__(self, path: object) -> bool:
        return path in self._handlers

    def parsed(self, path: str, body: bytes) -> dict[str, Any]:
        return parse_json(body, loads) if path in self._with_lists else parse_json(body)

    async def handle(self, path: str, data: dict[str, Any]) -> Answered:
        """`SwappedError` where the model was swapped meanwhile."""
        return await self._handlers[path](data)

    async def _handle(self, endpoint: Endpoint, read: Callable[[Any], Any], data: Any) -> Answered:
        return await handled(endpoint, self._front, read(data))

    def refusal(self, path: str, sender: Sender) -> OverloadedError | None:
        """For a request that nobody has looked into yet; none where it may be served."""
        service, role = self._front.service, self._computed_by[path]
        role = service.ranker if role == "ranker" else role
        return service.refusal(role, sender) if role is not None and role in service.fleets else None

    def refused_unread(self, route: str, client: str, num_bytes: int) -> Answered | None:
        """The answer to a request that is refused before it is parsed; none where it may be served.

        Under overload most requests end here: reading them would take the interpreter from the work of the others.
        """
        refusal = self.refusal(route, Sender(client, num_bytes))
        if refusal is None:
            return None
        self._observe(route, 429, 0.0)
        return explained(refusal)

    async def serve(
        self, route: str, sender: Sender, answer: Awaitable[Answered], reply: Callable[[Answered], None]
    ) -> None:
        """Answer a request, whatever becomes of it, and count that."""
        start_s = time.perf_counter()
        current_sender.set(sender)
        try:
            answered = await answer
        except asyncio.CancelledError:
            self._observe(route, 499, time.perf_counter() - start_s)
            raise
        except Exception as error:
            answered = explained(error)
        reply(answered)
        if not answered.is_counted:
            self._observe(route, answered.status, time.perf_counter() - start_s)


async def handled(endpoint: Endpoint, front: Any, request: Any) -> Answered:
    """The answer of an endpoint. Where it is not as the endpoint says, the log tells which endpoint that is."""
    waited = endpoint.handle(front, request)
    if not inspect.isawaitable(waited):
        raise _mistake(endpoint, f"gives {type(waited).__name__} and nothing to wait for: write it as `async def`")
    answer = await waited
    if isinstance(answer, Answered):
        return answer
    fields = getattr(endpoint.answer, "__required_keys__", frozenset[str]())
    if fields and not (isinstance(answer, Mapping) and fields <= answer.keys()):
        given = sorted(answer) if isinstance(answer, Mapping) else type(answer).__name__
        raise _mistake(endpoint, f"gives {given}, where {endpoint.answer.__name__} has {sorted(fields)}")
    try:
        return as_json(answer, endpoint.status)
    except TypeError as error:
        raise _mistake(endpoint, f"gives what JSON cannot hold ({error})") from error


def _mistake(endpoint: Endpoint, problem: str) -> TypeError:
    name = getattr(endpoint.handle, "__qualname__", endpoint.handle)
    return TypeError(f"nestrec.endpoints: {endpoint.method} {endpoint.path}: `handle` ({name}) {problem}")


def explained(error: Exception) -> Answered:
    """The answer to a request that was not served."""
    match error:
        case BadRequestError():
            return problem_of(error)
        case OverloadedError():
            return problem(429, error.reason, "", retry_after(error.retry_after_s))
        case RefusedError():
            return problem(503, error.reason, "", retry_after(error.retry_after_s))
        case _:
            _LOG.error("a request failed", exc_info=error)
            return problem(500, "the request failed here")
