"""Routes of the front. Everything that is not listed here is refused."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from nestrec.serving.api.connections import address_of
from nestrec.serving.api.history_store import HistoryStore, HistoryStoreConfig, MemoryHistoryStore
from nestrec.serving.api.http import (
    Answered,
    Body,
    DisconnectedError,
    Receive,
    Scope,
    Send,
    as_json,
    check_head,
    problem,
    retry_after,
    unless_disconnected,
)
from nestrec.serving.api.metrics import Metrics
from nestrec.serving.api.openapi import openapi
from nestrec.serving.api.page import PAGE
from nestrec.serving.api.schema import (
    Asked,
    BadRequestError,
    LimitsConfig,
    candidates_of,
    integer,
    parse_candidates,
    parse_json,
    parse_request,
    parse_user,
)
from nestrec.serving.client import client_of, current_client
from nestrec.serving.engine.work import Answer, OverloadedError, RefusedError
from nestrec.serving.service import Fleet, Service, SwappedError

_LOG = logging.getLogger(__name__)
Handler = Callable[[dict[str, Any]], Awaitable[Answered]]
_POLICY = b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_SECURITY = ((b"x-content-type-options", b"nosniff"), (b"content-security-policy", _POLICY))


class App:
    """An ASGI application over a service."""

    def __init__(self, service: Service, limits: LimitsConfig, store: HistoryStore | None = None):
        self._service, self._limits, self.metrics = service, limits, Metrics(service)
        self._store = store or MemoryHistoryStore(HistoryStoreConfig())
        self._posts: dict[str, Handler] = {
            "/v1/rank": self._rank,
            "/v1/preinfer": self._preinfer,
            "/v1/recommend": self._recommend,
            "/v1/events": self._events,
        }
        self.plain_routes: Mapping[bytes, str] = {route.encode(): route for route in self._posts}
        self._gets: dict[str, Callable[[], Answered]] = {
            "/": lambda: Answered(200, PAGE, b"text/html; charset=utf-8", *_SECURITY),
            "/v1/status": lambda: as_json(self.metrics.status()),
            "/health/live": lambda: as_json({"status": "live"}),
            "/health/ready": self._ready,
            "/metrics": lambda: Answered(200, self.metrics.exposition(), b"text/plain; version=0.0.4; charset=utf-8"),
            "/openapi.json": lambda: as_json(openapi(self._limits)),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_s = time.perf_counter()
        route, body = scope["path"], Body(scope, receive, self._limits)
        current_client.set(client_of(address_of(scope.get("client")), scope["headers"]))
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
        current_client.set(client)
        try:
            answered = await self._through_swaps(self._posts[route], self._with_history(route, parse_json(body)))
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
            if (refusal := self._refusal(path, current_client.get(), len(body))) is not None:
                raise refusal
            data = self._with_history(path, parse_json(body))
            return path, await unless_disconnected(self._through_swaps(self._posts[path], data), receive)
        if path in self._gets:
            if method not in ("GET", "HEAD"):
                return path, problem(405, "use GET", "", (b"allow", b"GET"))
            return path, self._gets[path]()
        if path.startswith("/v1/users/"):
            user, _, what = path.removeprefix("/v1/users/").rpartition("/")
            if what in ("cache", "events"):
                return f"/v1/users/{{id}}/{what}", self._forget(method, user, what)
        return "other", problem(404, "there is nothing here")

    def refused_unread(self, route: str, client: str, num_bytes: int) -> Answered | None:
        """The answer to a request that is refused before it is parsed; none where it may be served.

        Under overload most requests end here: reading them would take the interpreter from the work of the others.
        """
        refusal = self._refusal(route, client, num_bytes)
        if refusal is None:
            return None
        self.metrics.observe(route, 429, 0.0)
        return _explained(refusal)

    def count_malformed(self, status: int) -> None:
        self.metrics.observe("malformed", status, 0.0)

    def _refusal(self, path: str, client: str, num_bytes: int) -> OverloadedError | None:
        if path == "/v1/rank":
            return self._service.refusal(self._service.ranker, client, num_bytes)
        if path == "/v1/recommend" and "retrieval" in self._service.fleets:
            return self._service.refusal("retrieval", client, num_bytes)
        return None

    def _with_history(self, path: str, data: dict[str, Any]) -> dict[str, Any]:
        """A request without a history gets the one that the store has."""
        if "history" in data or path == "/v1/events":
            return data
        kept = self._store.get(parse_user(data.get("user"), self._limits))
        return data if kept is None else {**data, "history": kept}

    async def _events(self, data: dict[str, Any]) -> Answered:
        servable = self._service.fleet(self._service.ranker).servable
        asked = parse_request("events", data, servable, self._limits)
        if not len(asked.history) or data["history"].get("times_ms") is None:
            raise BadRequestError("must hold items and times_ms", "history")
        try:
            return as_json({"events": self._store.append(asked.user, data["history"])}, 202)
        except ValueError as error:
            raise BadRequestError(str(error), "history.times_ms") from error

    async def _through_swaps(self, handler: Handler, data: dict[str, Any]) -> Answered:
        """A request that arrives while a model is swapped begins again with the new one."""
        while True:
            try:
                return await handler(data)
            except SwappedError:
                continue

    async def _rank(self, data: dict[str, Any]) -> Answered:
        fleet = self._service.fleet(self._service.ranker)
        asked = parse_request("rank", data, fleet.servable, self._limits)
        candidates = parse_candidates(asked, fleet.servable, self._limits)
        answer = await self._service.rank(fleet, asked.user, asked.history, candidates, timeout_s=asked.timeout_s)
        return as_json({"scores": _columns(fleet, answer), **_about(answer)})

    async def _preinfer(self, data: dict[str, Any]) -> Answered:
        fleet = self._service.fleet(self._service.ranker)
        asked = parse_request("preinfer", data, fleet.servable, self._limits)
        count = integer(data, "num_candidates", default=256, low=1, high=self._limits.max_candidates)
        decision = self._service.preinfer(
            fleet, asked.user, asked.history, asked.now_ms, count, timeout_s=asked.timeout_s
        )
        return as_json({"admitted": decision.is_admitted, "reason": decision.reason}, 202)

    async def _recommend(self, data: dict[str, Any]) -> Answered:
        """The cascade: the signal for ranking goes out first, then retrieval, then ranking of what it found."""
        service = self._service
        if "retrieval" not in service.fleets:
            raise BadRequestError("no retrieval model is served; give candidates to /v1/rank", status=404)
        retrieval = service.fleet("retrieval")
        features = {"user_features", "candidate_features"}
        asked = parse_request("recommend", _without_features(data, features), retrieval.servable, self._limits)
        if not len(asked.history):
            raise BadRequestError("must hold an event: a retrieval model knows a user by nothing else", "history")
        k = integer(data, "k", default=10, low=1, high=self._limits.max_k)
        ranking = service.fleets.get("ranking")
        to_rank = None if ranking is None else parse_request("recommend", data, ranking.servable, self._limits)
        if ranking is not None and to_rank is not None:
            service.preinfer(
                ranking, asked.user, to_rank.history, asked.now_ms, service.cfg.preranked, timeout_s=asked.timeout_s
            )
        found = await service.retrieve(
            retrieval, asked.user, asked.history, count=k if ranking is None else max(k, service.cfg.preranked),
            now_ms=asked.now_ms, excluded=_seen(asked), timeout_s=asked.timeout_s,
        )  # fmt: skip
        keys = [retrieval.servable.item_keys[i - 1] for i in found.items.tolist()]
        if ranking is None or to_rank is None or not keys:
            return as_json({"items": keys, "scores": _columns(retrieval, found), **_about(found)})
        candidates = candidates_of(to_rank, ranking.servable.ids_of(keys), ranking.servable)
        answer = await service.rank(ranking, asked.user, to_rank.history, candidates, timeout_s=asked.timeout_s)
        order = np.argsort(-answer.scores[:, 0], kind="stable")[:k]
        scores = {name: values[order] for name, values in _columns(ranking, answer).items()}
        return as_json({"items": [keys[i] for i in order], "scores": scores, **_about(answer)})

    def _forget(self, method: str, user: str, what: str) -> Answered:
        if method != "DELETE":
            return problem(405, "use DELETE", "", (b"allow", b"DELETE"))
        if not 1 <= len(user) <= self._limits.max_user_characters or "/" in user:
            return problem(400, f"must be text of 1 to {self._limits.max_user_characters} characters", "user")
        if what == "cache":
            self._service.forget(user)
        else:
            self._store.forget(user)
        return Answered(204, b"")

    def _ready(self) -> Answered:
        return as_json({"status": "ready"}) if self._service.is_ready else problem(503, "not ready", "", retry_after(1))

    def _known(self, route: str) -> str:
        return route if route in self._posts or route in self._gets or route.startswith("/v1/users/{id}") else "other"

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
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


def _columns(fleet: Fleet, answer: Answer) -> dict[str, Any]:
    outputs = fleet.engines[0].form.outputs
    return {name: np.ascontiguousarray(answer.scores[:, i]) for i, name in enumerate(outputs)}


def _about(answer: Answer) -> dict[str, Any]:
    return {"model": answer.version[:12], "prefix": {"from": answer.source, "tokens": answer.num_cached}}


def _seen(asked: Asked) -> np.ndarray[Any, np.dtype[np.int64]]:
    excludes = asked.fields.get("exclude_seen", True)
    if type(excludes) is not bool:
        raise BadRequestError("must be true or false", "exclude_seen")
    return np.unique(asked.history.items) if excludes else np.zeros(0, np.int64)


def _without_features(data: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The request as a retrieval model reads it: without categories, which only a ranking model has."""
    history = data.get("history")
    plain = {name: value for name, value in data.items() if name not in names}
    if isinstance(history, dict):
        plain["history"] = {name: value for name, value in history.items() if name not in ("features", "actions")}
    return plain
