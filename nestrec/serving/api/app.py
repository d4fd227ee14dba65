"""The front: requests to their endpoints. Everything that is no endpoint is refused."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from nestrec.serving.api.endpoint import Endpoint, Front
from nestrec.serving.api.kept_history import fitted
from nestrec.serving.api.metrics import Metrics
from nestrec.serving.api.protocol.http import (
    Answered,
    Body,
    DisconnectedError,
    Receive,
    Scope,
    Send,
    as_json,
    check_head,
    parse_json,
    problem,
    retry_after,
    unless_disconnected,
)
from nestrec.serving.api.protocol.incoming import client_in
from nestrec.serving.api.protocol.long_lists import loads, warm_up
from nestrec.serving.api.reloader import Reloader
from nestrec.serving.api.routes import all_endpoints
from nestrec.serving.api.schema import BadRequestError, LimitsConfig, parse_user
from nestrec.serving.api.shapes import reader
from nestrec.serving.client import Sender, current_sender
from nestrec.serving.engine.work import OverloadedError, RefusedError, UnavailableError
from nestrec.serving.histories.memory import MemoryHistoryStore
from nestrec.serving.histories.store import HistoryStore, HistoryStoreConfig, StoreAwayError
from nestrec.serving.prefix.trigger import USUAL_CANDIDATES
from nestrec.serving.service import Service, SwappedError

_LOG = logging.getLogger(__name__)
_SIGNAL_PATH = "/v1/preinfer"
Handler = Callable[[dict[str, Any]], Awaitable[Answered]]


class App:
    """An ASGI application over a service."""

    def __init__(
        self,
        service: Service,
        limits: LimitsConfig,
        store: HistoryStore | None = None,
        endpoints: Mapping[str, Endpoint] | None = None,
        reloader: Reloader | None = None,
    ):
        """endpoints: by name; none takes those of this package and of others that are installed."""
        self._service, self._limits = service, limits
        self.metrics = Metrics(service, None if reloader is None else reloader.followers)
        self._store = store or MemoryHistoryStore(HistoryStoreConfig())
        found = all_endpoints() if endpoints is None else endpoints
        self.front = Front(
            service=service, limits=limits, store=self._store, metrics=self.metrics, endpoints=found, reloader=reloader
        )
        self._posts: dict[str, Handler] = {}
        self._others: dict[str, Endpoint] = {}
        self._patterns: list[tuple[re.Pattern[str], Endpoint]] = []
        self._computed_by: dict[str, str | None] = {}
        self._takes_kept_history: set[str] = set()
        self._takes_plain_lists: set[str] = set()
        warm_up()
        for endpoint in found.values():
            self._add(endpoint)
        self._routes = {endpoint.path for endpoint in found.values()}
        self.plain_routes: Mapping[bytes, str] = {route.encode(): route for route in self._posts}

    def _add(self, endpoint: Endpoint) -> None:
        if "{" in endpoint.path:
            path = re.compile(re.sub(r"\\{\w+\\}", "([^/]*)", re.escape(endpoint.path)))
            self._patterns.append((path, endpoint))
        elif endpoint.method == "POST":
            read = reader(endpoint.request, self._limits) if endpoint.request is not None else lambda _: None
            self._posts[endpoint.path] = partial(self._handle, endpoint, read)
            self._computed_by[endpoint.path] = endpoint.computed_by
            if endpoint.takes_kept_history:
                self._takes_kept_history.add(endpoint.path)
            if endpoint.takes_plain_lists:
                self._takes_plain_lists.add(endpoint.path)
        else:
            self._others[endpoint.path] = endpoint

    async def _handle(self, endpoint: Endpoint, read: Callable[[Any], Any], data: Any) -> Answered:
        answer = await endpoint.handle(self.front, read(data))
        return answer if isinstance(answer, Answered) else as_json(answer, endpoint.status)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_s = time.perf_counter()
        route, body = scope["path"], Body(scope, receive, self._limits)
        try:
            route, answered = await self._answer(scope, receive, body)
        except DisconnectedError:
            self.metrics.observe(self._known(route), 499, time.perf_counter() - start_s)
            return
        except Exception as error:
            answered = _explained(error)
        await answered.send(send, is_last=body.is_unread)
        self.metrics.observe(self._known(route), answered.status, time.perf_counter() - start_s)

    async def serve(self, route: str, client: str, body: bytes, reply: Callable[[Answered], None]) -> None:
        """Answer a request without ASGI in between."""
        start_s = time.perf_counter()
        current_sender.set(Sender(client, len(body)))
        try:
            answered = await self._through_swaps(route, self._parsed(route, body))
        except asyncio.CancelledError:
            self.metrics.observe(route, 499, time.perf_counter() - start_s)
            raise
        except Exception as error:
            answered = _explained(error)
        reply(answered)
        self.metrics.observe(route, answered.status, time.perf_counter() - start_s)

    async def _answer(self, scope: Scope, receive: Receive, unread: Body) -> tuple[str, Answered]:
        method, path = scope["method"], scope["path"]
        check_head(scope, self._limits)
        if path in self._posts:
            if method != "POST":
                return path, problem(405, "use POST", "", (b"allow", b"POST"))
            body = await unread.read()
            sender = Sender(client_in(scope), len(body))
            current_sender.set(sender)
            if (refusal := self._refusal(path, sender)) is not None:
                raise refusal
            return path, await unless_disconnected(self._through_swaps(path, self._parsed(path, body)), receive)
        endpoint, argument = self._found(path, scope["raw_path"].decode("latin-1"))
        if endpoint is None:
            return "other", problem(404, "there is nothing here")
        if method != endpoint.method and (method, endpoint.method) != ("HEAD", "GET"):
            return endpoint.path, problem(405, f"use {endpoint.method}", "", (b"allow", endpoint.method.encode()))
        return endpoint.path, await self._handle(endpoint, _as_it_is, argument)

    def _found(self, path: str, raw_path: str) -> tuple[Endpoint | None, str | None]:
        """The endpoint without a body that a path belongs to, and what the path holds in place of braces.

        raw_path: in percent encoding, in which an id may hold any character.
        """
        if (endpoint := self._others.get(path)) is not None:
            return endpoint, None
        for pattern, endpoint in self._patterns:
            if (match := pattern.fullmatch(raw_path)) is not None:
                return endpoint, unquote(match[1])
        return None, None

    def refused_unread(self, route: str, client: str, num_bytes: int) -> Answered | None:
        """The answer to a request that is refused before it is parsed; none where it may be served.

        Under overload most requests end here: reading them would take the interpreter from the work of the others.
        """
        refusal = self._refusal(route, Sender(client, num_bytes))
        if refusal is None:
            return None
        self.metrics.observe(route, 429, 0.0)
        return _explained(refusal)

    def count_refusals_of(self, refusals: Mapping[str, int]) -> None:
        self.metrics.refusals = refusals

    def count_malformed(self, status: int) -> None:
        self.metrics.observe("malformed", status, 0.0)

    def _refusal(self, path: str, sender: Sender) -> OverloadedError | None:
        role = self._computed_by[path]
        role = self._service.ranker if role == "ranker" else role
        return self._service.refusal(role, sender) if role in self._service.fleets else None

    async def _with_history(self, data: dict[str, Any]) -> dict[str, Any]:
        """A request without a history gets the one that the store has; so does one that prefers it, whose own stands in
        where the store has none or is away. What that took is taken off the deadline."""
        loop, user = asyncio.get_running_loop(), parse_user(data.get("user"), self._limits)
        start_s, timeout_ms = loop.time(), data.get("timeout_ms", self._limits.default_timeout_ms)
        is_timely = type(timeout_ms) is int and 1 <= timeout_ms <= self._limits.max_timeout_ms  # else it is refused
        try:
            kept = await self._store.get(user, (timeout_ms if is_timely else 1) / 1000.0)
        except StoreAwayError:
            if data.get("history") is None:
                raise
            kept = None
        if is_timely and (took_ms := int(1000 * (loop.time() - start_s))):
            if took_ms >= timeout_ms:
                raise UnavailableError("the deadline passed", 1.0)
            data = {**data, "timeout_ms": timeout_ms - took_ms}
        if kept is None:
            return data
        return {**data, "history": fitted(kept, self._service.fleet(self._service.ranker).servable, self._limits)}

    def _parsed(self, path: str, body: bytes) -> dict[str, Any]:
        return parse_json(body, loads) if path in self._takes_plain_lists else parse_json(body)

    async def _through_swaps(self, path: str, data: dict[str, Any]) -> Answered:
        """A request that arrives while a model is swapped begins again with the new one."""
        while True:
            try:
                if self._takes_kept(path, data):
                    return await self._posts[path](await self._with_history(data))
                return await self._posts[path](data)
            except SwappedError:
                continue

    def _takes_kept(self, path: str, data: dict[str, Any]) -> bool:
        """A request is about events that are kept here. A signal that tells their number fetches them only where that
        would be of use."""
        if path not in self._takes_kept_history or ("history" in data and data.get("prefer_kept") is not True):
            return False
        events, user, candidates = data.get("events"), data.get("user"), data.get("num_candidates", USUAL_CANDIDATES)
        if path != _SIGNAL_PATH or type(events) is not int or type(candidates) is not int or events < 0:
            return True
        known = parse_user(user, self._limits)
        return self._service.foresee(known, events, candidates)[1].reason == "wanted"

    def _known(self, route: str) -> str:
        return route if route in self._routes else "other"

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        sampling = asyncio.create_task(self.metrics.timeline.run())
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                sampling.cancel()
                await self._store.close()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


def _explained(error: Exception) -> Answered:
    """The answer to a request that was not served."""
    match error:
        case BadRequestError():
            return problem(error.status, error.message, error.field)
        case OverloadedError():
            return problem(429, error.reason, "", retry_after(error.retry_after_s))
        case RefusedError():
            return problem(503, error.reason, "", retry_after(error.retry_after_s))
        case _:
            _LOG.error("a request failed", exc_info=error)
            return problem(500, "the request failed here")


def _as_it_is(data: Any) -> Any:
    return data
