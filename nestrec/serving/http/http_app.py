"""The ASGI application: routing, admission before parsing, and responses.

A request of ASGI that is answered whatever becomes of it, and counted once.

Requests with a body to their endpoints, and the answers to what goes wrong.

The front: requests to their endpoints. Everything that is no endpoint is refused.
"""

import asyncio
import inspect
import logging
import re
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

from nestrec.serving.core.asgi import (
    Body,
    ClientDisconnectedError,
    HttpResponse,
    Receive,
    Scope,
    Send,
    as_json,
    check_head,
    parse_json,
    problem,
    problem_of,
    retry_after,
    unless_disconnected,
)
from nestrec.serving.core.rejections import OverloadedError, RequestRejectedError, UnavailableError
from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig, RequestSource, current_sender
from nestrec.serving.history_store.history_store import (
    HistoryStore,
    HistoryStoreConfig,
    HistoryStoreUnavailableError,
    RawHistory,
)
from nestrec.serving.history_store.memory_store import MemoryHistoryStore
from nestrec.serving.http.endpoint_spec import EndpointSpec, HandlerContext, HotRouteContext
from nestrec.serving.http.fast_request import client_in, incoming_of
from nestrec.serving.http.routes import all_endpoints
from nestrec.serving.http.server_metrics import Metrics
from nestrec.serving.inputs.json_long_lists import loads, warm_up
from nestrec.serving.inputs.request_resolver import parse_user
from nestrec.serving.inputs.request_schema import reader
from nestrec.serving.inputs.stored_history import fitted, readable
from nestrec.serving.kv_cache.preinfer_trigger import USUAL_CANDIDATES
from nestrec.serving.security.server_security import ServerSecurity
from nestrec.serving.service.inference_service import ModelSwappedError, Service
from nestrec.serving.service.model_reloader import Reloader

_LOG = logging.getLogger(__name__)
Handler = Callable[[dict[str, Any]], Awaitable[HttpResponse]]
Observe = Callable[[str, int, float], None]
"""route, status, seconds"""


class PostHandler:
    """Of some endpoints, by their paths."""

    def __init__(self, front: HotRouteContext, endpoints: Iterable[EndpointSpec], observe: Observe):
        self._front = front
        self._observe = observe
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

    async def handle(self, path: str, data: dict[str, Any]) -> HttpResponse:
        """`ModelSwappedError` where the model was swapped meanwhile."""
        return await self._handlers[path](data)

    async def _handle(self, endpoint: EndpointSpec, read: Callable[[Any], Any], data: Any) -> HttpResponse:
        return await handled(endpoint, self._front, read(data))

    def refusal(self, path: str, sender: RequestSource) -> OverloadedError | None:
        """For a request that nobody has looked into yet; none where it may be served."""
        service = self._front.service
        role = self._computed_by[path]
        role = service.ranker if role == "ranker" else role
        return service.refusal(role, sender) if role is not None and role in service.fleets else None

    def refused_unread(self, route: str, client: str, num_bytes: int) -> HttpResponse | None:
        """The answer to a request that is refused before it is parsed; none where it may be served.

        Under overload most requests end here: reading them would take the interpreter from the work of the others.
        """
        refusal = self.refusal(route, RequestSource(client, num_bytes))
        if refusal is None:
            return None
        self._observe(route, 429, 0.0)
        return explained(refusal)

    async def serve(
        self, route: str, sender: RequestSource, answer: Awaitable[HttpResponse], reply: Callable[[HttpResponse], None]
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


async def handled(endpoint: EndpointSpec, front: Any, request: Any) -> HttpResponse:
    """The answer of an endpoint. Where it is not as the endpoint says, the log tells which endpoint that is."""
    waited = endpoint.handle(front, request)
    if not inspect.isawaitable(waited):
        raise _mistake(endpoint, f"gives {type(waited).__name__} and nothing to wait for: write it as `async def`")
    answer = await waited
    if isinstance(answer, HttpResponse):
        return answer
    fields = getattr(endpoint.answer, "__required_keys__", frozenset[str]())
    if fields and not (isinstance(answer, Mapping) and fields <= answer.keys()):
        given = sorted(answer) if isinstance(answer, Mapping) else type(answer).__name__
        raise _mistake(endpoint, f"gives {given}, where {endpoint.answer.__name__} has {sorted(fields)}")
    try:
        return as_json(answer, endpoint.status)
    except TypeError as error:
        raise _mistake(endpoint, f"gives what JSON cannot hold ({error})") from error


def _mistake(endpoint: EndpointSpec, problem: str) -> TypeError:
    name = getattr(endpoint.handle, "__qualname__", endpoint.handle)
    return TypeError(f"nestrec.endpoints: {endpoint.method} {endpoint.path}: `handle` ({name}) {problem}")


def explained(error: Exception) -> HttpResponse:
    """The answer to a request that was not served."""
    match error:
        case BadRequestError():
            return problem_of(error)
        case OverloadedError():
            return problem(429, error.reason, "", retry_after(error.retry_after_s))
        case RequestRejectedError():
            return problem(503, error.reason, "", retry_after(error.retry_after_s))
        case _:
            _LOG.error("a request failed", exc_info=error)
            return problem(500, "the request failed here")


Answer = Callable[[Scope, Receive, Body], Awaitable[tuple[str, HttpResponse]]]
"""the route as it is declared, and what is answered"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponder:
    """Of an application."""

    limits: LimitsConfig
    routes: Container[str]
    """those that are counted by name where a request fails"""
    answer: Answer
    observe: Observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_s = time.perf_counter()
        path = scope["path"]
        body = Body(scope, receive, self.limits)
        route = path if path in self.routes else "other"
        incoming = incoming_of(scope)
        try:
            route, answered = await self.answer(scope, receive, body)
        except ClientDisconnectedError:
            if incoming is None or not incoming.is_forwarded:
                self.observe(route, 499, time.perf_counter() - start_s)
            return
        except Exception as error:
            answered = explained(error)
        await answered.send(send, is_last=body.is_unread)
        if not answered.is_counted:
            self.observe(route, answered.status, time.perf_counter() - start_s)


_SIGNAL_PATH = "/v1/preinfer"


class App:
    """An ASGI application over a service."""

    def __init__(
        self,
        service: Service,
        limits: LimitsConfig,
        store: HistoryStore | None = None,
        endpoints: Mapping[str, EndpointSpec] | None = None,
        reloader: Reloader | None = None,
    ):
        """endpoints: by name; none takes those of this package and of others that are installed."""
        self._service = service
        self._limits = limits
        self.metrics = Metrics(service, None if reloader is None else reloader.followers)
        self._store = store or MemoryHistoryStore(HistoryStoreConfig())
        found = all_endpoints() if endpoints is None else endpoints
        self.front = HandlerContext(
            service=service, limits=limits, store=self._store, metrics=self.metrics, endpoints=found, reloader=reloader
        )
        whole = [endpoint for endpoint in found.values() if "{" not in endpoint.path]
        self._posts = PostHandler(self.front, [one for one in whole if one.method == "POST"], self.metrics.observe)
        self._others = {endpoint.path: endpoint for endpoint in whole if endpoint.method != "POST"}
        self._patterns = [(_pattern(one.path), one) for one in found.values() if "{" in one.path]
        self._takes_kept_history = {endpoint.path for endpoint in whole if endpoint.takes_kept_history}
        self._http = HttpResponder(
            limits=limits,
            routes={endpoint.path for endpoint in found.values()},
            answer=self._answer,
            observe=self.metrics.observe,
        )
        self.plain_routes: Mapping[bytes, str] = self._posts.plain_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def serve(self, route: str, client: str, body: bytes, reply: Callable[[HttpResponse], None]) -> None:
        """Answer a request without ASGI in between."""
        await self._posts.serve(
            route, RequestSource(client, len(body), time.perf_counter()), self._posted(route, body), reply
        )

    async def _posted(self, route: str, body: bytes) -> HttpResponse:
        return await self._through_swaps(route, self._posts.parsed(route, body))

    async def _answer(self, scope: Scope, receive: Receive, unread: Body) -> tuple[str, HttpResponse]:
        method, path = scope["method"], scope["path"]
        check_head(scope, self._limits)
        if path in self._posts:
            if method != "POST":
                return path, problem(405, "use POST", "", (b"allow", b"POST"))
            body = await unread.read()
            sender = RequestSource(client_in(scope), len(body), time.perf_counter())
            current_sender.set(sender)
            if (refusal := self._posts.refusal(path, sender)) is not None:
                raise refusal
            return path, await unless_disconnected(self._posted(path, body), receive)
        endpoint, argument = self._found(path, scope["raw_path"].decode("latin-1"))
        if endpoint is None:
            return "other", problem(404, "there is nothing here")
        if method != endpoint.method and (method, endpoint.method) != ("HEAD", "GET"):
            return endpoint.path, problem(405, f"use {endpoint.method}", "", (b"allow", endpoint.method.encode()))
        return endpoint.path, await handled(endpoint, self.front, argument)

    def _found(self, path: str, raw_path: str) -> tuple[EndpointSpec | None, str | None]:
        """The endpoint without a body that a path belongs to, and what the path holds in place of braces.

        raw_path: in percent encoding, in which an id may hold any character.
        """
        if (endpoint := self._others.get(path)) is not None:
            return endpoint, None
        for pattern, endpoint in self._patterns:
            if (match := pattern.fullmatch(raw_path)) is not None:
                return endpoint, unquote(match[1])
        return None, None

    def refused_unread(self, route: str, client: str, num_bytes: int) -> HttpResponse | None:
        """The answer to a request that is refused before it is parsed; none where it may be served."""
        return self._posts.refused_unread(route, client, num_bytes)

    def count_refusals_of(self, refusals: Mapping[str, int]) -> None:
        self.metrics.refusals = refusals

    def report_files_of(self, safety: ServerSecurity) -> None:
        self.metrics.safety = safety

    def count_malformed(self, status: int) -> None:
        self.metrics.observe("malformed", status, 0.0)

    async def _kept_for(self, data: dict[str, Any]) -> tuple[RawHistory | None, dict[str, Any]]:
        """What the store has for a request without a history, or one that prefers it, whose own stands in where the
        store has none or is away. What that took is taken off the deadline of the request, which comes second."""
        loop = asyncio.get_running_loop()
        user = parse_user(data.get("user"), self._limits)
        start_s = loop.time()
        timeout_ms = data.get("timeout_ms")
        timeout_ms = self._limits.default_timeout_ms if timeout_ms is None else timeout_ms
        is_timely = type(timeout_ms) is int and 1 <= timeout_ms <= self._limits.max_timeout_ms  # else it is refused
        try:
            kept = await self._store.get(user, (timeout_ms if is_timely else 1) / 1000.0)
        except HistoryStoreUnavailableError:
            if data.get("history") is None:
                raise
            kept = None
        if is_timely and (took_ms := int(1000 * (loop.time() - start_s))):
            if took_ms >= timeout_ms:
                raise UnavailableError("the deadline passed", 1.0)
            data = {**data, "timeout_ms": timeout_ms - took_ms}
        return kept, data

    async def _through_swaps(self, path: str, data: dict[str, Any]) -> HttpResponse:
        """A request that arrives while a model is swapped begins again with the new one."""
        while True:
            try:
                if await self._takes_kept(path, data):
                    return await self._with_kept(path, data)
                return await self._posts.handle(path, data)
            except ModelSwappedError:
                continue

    async def _with_kept(self, path: str, data: dict[str, Any]) -> HttpResponse:
        """Kept events are read once. Only where the present model or its limits refuse some of them, which others have
        let in, they are looked through for those, and read again without them."""
        kept, data = await self._kept_for(data)
        if kept is None:
            return await self._posts.handle(path, data)
        servable = self._service.fleet(self._service.ranker).servable
        history = fitted(kept, servable, self._limits)
        try:
            return await self._posts.handle(path, {**data, "history": history})
        except BadRequestError as error:
            if not error.field.startswith("history."):
                raise
            return await self._posts.handle(path, {**data, "history": readable(history, servable, self._limits)})

    async def _takes_kept(self, path: str, data: dict[str, Any]) -> bool:
        """A request is about events that are kept here. A signal that tells their number fetches them only where that
        would be of use."""
        if path not in self._takes_kept_history or ("history" in data and data.get("prefer_kept") is not True):
            return False
        events, user, candidates = data.get("events"), data.get("user"), data.get("num_candidates", USUAL_CANDIDATES)
        if path != _SIGNAL_PATH or type(events) is not int or type(candidates) is not int or events < 0:
            return True
        known = parse_user(user, self._limits)
        return (await self._service.foresee(known, events, candidates))[1].reason == "wanted"

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        sampling = asyncio.create_task(self.metrics.sample())
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                sampling.cancel()
                await self._store.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


def _pattern(path: str) -> re.Pattern[str]:
    """Of a path with a part in braces."""
    return re.compile(re.sub(r"\\{\w+\\}", "([^/]*)", re.escape(path)))
