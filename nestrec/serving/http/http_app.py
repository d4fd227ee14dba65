"""ASGI application of the server: routing, admission control before parsing, stored histories, and error responses.

`App` routes requests to endpoints; unknown paths get 404. `PostHandler` parses and validates request bodies. If the
queue of the model is full, it rejects a request before it is parsed (admission control, load shedding). `HttpResponder`
sends exactly one response per ASGI request and counts it once, also if the handler raises an exception.
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
from nestrec.serving.http.fast_request import client_of_request, request_head_of
from nestrec.serving.http.routes import all_endpoints
from nestrec.serving.http.server_metrics import Metrics
from nestrec.serving.inputs.json_long_lists import loads, warm_up
from nestrec.serving.inputs.request_resolver import parse_user
from nestrec.serving.inputs.request_schema import reader
from nestrec.serving.inputs.stored_history import drop_unreadable, fit_to_model
from nestrec.serving.kv_cache.preinfer_trigger import DEFAULT_CANDIDATES
from nestrec.serving.security.server_security import ServerSecurity
from nestrec.serving.service.inference_service import ModelSwappedError, Service
from nestrec.serving.service.model_reloader import Reloader

_LOG = logging.getLogger(__name__)
Handler = Callable[[dict[str, Any]], Awaitable[HttpResponse]]
Observe = Callable[[str, int, float], None]
"""Function that records a response in the metrics, from its route, status and duration in seconds."""


class PostHandler:
    """Handler of requests with a body: parses and validates them and runs their endpoints.

    Args:
        context: Context that is passed to the handlers of the endpoints.
        endpoints: Endpoints with the method POST.
        observe: Records responses in the metrics.
    """

    def __init__(self, context: HotRouteContext, endpoints: Iterable[EndpointSpec], observe: Observe):
        self._context = context
        self._observe = observe
        self._handlers: dict[str, Handler] = {}
        self._computed_by: dict[str, str | None] = {}
        self._with_lists: set[str] = set()
        for endpoint in endpoints:
            read = reader(endpoint.request, context.limits) if endpoint.request is not None else lambda _: None
            self._handlers[endpoint.path] = partial(self._handle, endpoint, read)
            self._computed_by[endpoint.path] = endpoint.computed_by
            if endpoint.accepts_typed_lists:
                self._with_lists.add(endpoint.path)
        self.fast_routes = {route.encode(): route for route in self._handlers}
        warm_up()

    def __contains__(self, path: object) -> bool:
        return path in self._handlers

    def parsed(self, path: str, body: bytes) -> dict[str, Any]:
        return parse_json(body, loads) if path in self._with_lists else parse_json(body)

    async def handle(self, path: str, data: dict[str, Any]) -> HttpResponse:
        """Run the endpoint of a path.

        Raises:
            ModelSwappedError: The model was swapped during the request; run it again.
        """
        return await self._handlers[path](data)

    async def _handle(self, endpoint: EndpointSpec, read: Callable[[Any], Any], data: Any) -> HttpResponse:
        return await run_endpoint(endpoint, self._context, read(data))

    def overload_error(self, path: str, sender: RequestSource) -> OverloadedError | None:
        """Return the error of a request that must be rejected before it is parsed; None if it is admitted."""
        service = self._context.service
        role = self._computed_by[path]
        role = service.ranker if role == "ranker" else role
        return service.overload_error(role, sender) if role is not None and role in service.deployments else None

    def reject_unread(self, route: str, client: str, num_bytes: int) -> HttpResponse | None:
        """Return the response to a request that is rejected before it is parsed; None if it is admitted.

        Under overload most requests are rejected here, because parsing them would take interpreter time from the
        admitted ones.
        """
        rejection = self.overload_error(route, RequestSource(client, num_bytes))
        if rejection is None:
            return None
        self._observe(route, 429, 0.0)
        return error_response(rejection)

    async def serve(
        self, route: str, sender: RequestSource, pending: Awaitable[HttpResponse], reply: Callable[[HttpResponse], None]
    ) -> None:
        """Await a response, or create an error response, send it with `reply`, and record it in the metrics."""
        start_s = time.perf_counter()
        current_sender.set(sender)
        try:
            response = await pending
        except asyncio.CancelledError:
            self._observe(route, 499, time.perf_counter() - start_s)
            raise
        except Exception as error:
            response = error_response(error)
        reply(response)
        if not response.is_counted:
            self._observe(route, response.status, time.perf_counter() - start_s)


async def run_endpoint(endpoint: EndpointSpec, context: Any, request: Any) -> HttpResponse:
    """Call the handler of an endpoint and return its response.

    Raises:
        TypeError: The handler returned something else than the endpoint declares; the message names the endpoint.
    """
    awaitable = endpoint.handle(context, request)
    if not inspect.isawaitable(awaitable):
        raise _handler_error(endpoint, f"returns {type(awaitable).__name__}, which cannot be awaited; use `async def`")
    result = await awaitable
    if isinstance(result, HttpResponse):
        return result
    fields = getattr(endpoint.response, "__required_keys__", frozenset[str]())
    if fields and not (isinstance(result, Mapping) and fields <= result.keys()):
        actual = sorted(result) if isinstance(result, Mapping) else type(result).__name__
        raise _handler_error(
            endpoint, f"returns {actual}, but {endpoint.response.__name__} requires the fields {sorted(fields)}"
        )
    try:
        return as_json(result, endpoint.status)
    except TypeError as error:
        raise _handler_error(endpoint, f"returns a value that cannot be converted to JSON ({error})") from error


def _handler_error(endpoint: EndpointSpec, problem: str) -> TypeError:
    name = getattr(endpoint.handle, "__qualname__", endpoint.handle)
    return TypeError(f"nestrec.endpoints: {endpoint.method} {endpoint.path}: `handle` ({name}) {problem}")


def error_response(error: Exception) -> HttpResponse:
    """Return the response to a request that failed or was rejected."""
    match error:
        case BadRequestError():
            return problem_of(error)
        case OverloadedError():
            return problem(429, error.reason, "", retry_after(error.retry_after_s))
        case RequestRejectedError():
            return problem(503, error.reason, "", retry_after(error.retry_after_s))
        case _:
            _LOG.error("request failed", exc_info=error)
            return problem(500, "internal server error")


Respond = Callable[[Scope, Receive, Body], Awaitable[tuple[str, HttpResponse]]]
"""Function that returns the route of a request, as the endpoint declares it, and the response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponder:
    """ASGI entry point of an application: sends one response per request, and records it in the metrics."""

    limits: LimitsConfig
    routes: Container[str]
    """Routes that have their own label in the metrics; failed requests to other paths are recorded as `other`."""
    respond: Respond
    observe: Observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_s = time.perf_counter()
        path = scope["path"]
        body = Body(scope, receive, self.limits)
        route = path if path in self.routes else "other"
        head = request_head_of(scope)
        try:
            route, response = await self.respond(scope, receive, body)
        except ClientDisconnectedError:
            if head is None or not head.is_forwarded:
                self.observe(route, 499, time.perf_counter() - start_s)
            return
        except Exception as error:
            response = error_response(error)
        await response.send(send, is_last=body.is_unread)
        if not response.is_counted:
            self.observe(route, response.status, time.perf_counter() - start_s)


_PREINFER_PATH = "/v1/preinfer"


class App:
    """ASGI application of a server: routes requests to the endpoints of a service.

    Args:
        service: Serves the models.
        limits: Limits of requests.
        store: History store; events are stored in memory by default.
        endpoints: Endpoints by name; by default the built-in ones and the installed plugins.
        reloader: Reloads and swaps the models; None disables the admin endpoints for it.
    """

    def __init__(
        self,
        service: Service,
        limits: LimitsConfig,
        store: HistoryStore | None = None,
        endpoints: Mapping[str, EndpointSpec] | None = None,
        reloader: Reloader | None = None,
    ):
        self._service = service
        self._limits = limits
        self.metrics = Metrics(service, None if reloader is None else reloader.followers)
        self._store = store or MemoryHistoryStore(HistoryStoreConfig())
        endpoints = all_endpoints() if endpoints is None else endpoints
        self.context = HandlerContext(
            service=service,
            limits=limits,
            store=self._store,
            metrics=self.metrics,
            endpoints=endpoints,
            reloader=reloader,
        )
        static = [endpoint for endpoint in endpoints.values() if "{" not in endpoint.path]
        self._posts = PostHandler(
            self.context, [endpoint for endpoint in static if endpoint.method == "POST"], self.metrics.observe
        )
        self._others = {endpoint.path: endpoint for endpoint in static if endpoint.method != "POST"}
        self._patterns = [(_pattern(one.path), one) for one in endpoints.values() if "{" in one.path]
        self._uses_stored_history = {endpoint.path for endpoint in static if endpoint.uses_stored_history}
        self._http = HttpResponder(
            limits=limits,
            routes={endpoint.path for endpoint in endpoints.values()},
            respond=self._respond,
            observe=self.metrics.observe,
        )
        self.fast_routes: Mapping[bytes, str] = self._posts.fast_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def serve(self, route: str, client: str, body: bytes, reply: Callable[[HttpResponse], None]) -> None:
        """Serve a request from the fast path, without ASGI; see `DirectApp.serve`."""
        await self._posts.serve(
            route, RequestSource(client, len(body), time.perf_counter()), self._posted(route, body), reply
        )

    async def _posted(self, route: str, body: bytes) -> HttpResponse:
        return await self._through_swaps(route, self._posts.parsed(route, body))

    async def _respond(self, scope: Scope, receive: Receive, unread: Body) -> tuple[str, HttpResponse]:
        method, path = scope["method"], scope["path"]
        check_head(scope, self._limits)
        if path in self._posts:
            if method != "POST":
                return path, problem(405, f"{path} requires the method POST", "", (b"allow", b"POST"))
            body = await unread.read()
            sender = RequestSource(client_of_request(scope), len(body), time.perf_counter())
            current_sender.set(sender)
            if (rejection := self._posts.overload_error(path, sender)) is not None:
                raise rejection
            return path, await unless_disconnected(self._posted(path, body), receive)
        endpoint, argument = self._match(path, scope["raw_path"].decode("latin-1"))
        if endpoint is None:
            return "other", problem(404, "no such path")
        if method != endpoint.method and (method, endpoint.method) != ("HEAD", "GET"):
            return endpoint.path, problem(
                405, f"{endpoint.path} requires the method {endpoint.method}", "", (b"allow", endpoint.method.encode())
            )
        return endpoint.path, await run_endpoint(endpoint, self.context, argument)

    def _match(self, path: str, raw_path: str) -> tuple[EndpointSpec | None, str | None]:
        """Return the endpoint without a request body that a path matches, and the value of its path parameter.

        Args:
            path: Decoded path.
            raw_path: Percent-encoded path, in which an id can contain every character, also an encoded slash.
        """
        if (endpoint := self._others.get(path)) is not None:
            return endpoint, None
        for pattern, endpoint in self._patterns:
            if (match := pattern.fullmatch(raw_path)) is not None:
                return endpoint, unquote(match[1])
        return None, None

    def reject_unread(self, route: str, client: str, num_bytes: int) -> HttpResponse | None:
        """Return the response to a request that is rejected before it is parsed; see `PostHandler.reject_unread`."""
        return self._posts.reject_unread(route, client, num_bytes)

    def set_auth_failures(self, auth_failures: Mapping[str, int]) -> None:
        self.metrics.auth_failures = auth_failures

    def set_security(self, security: ServerSecurity) -> None:
        self.metrics.security = security

    def count_malformed(self, status: int) -> None:
        self.metrics.observe("malformed", status, 0.0)

    async def _load_history(self, data: dict[str, Any]) -> tuple[RawHistory | None, dict[str, Any]]:
        """Load the stored history of a user.

        Returns:
            The stored history, and the request with its timeout reduced by the time that the store took. The history is
            None if the store is unavailable and the request contains a fallback.

        Raises:
            HistoryStoreUnavailableError: The store is unavailable and the request has no history.
            UnavailableError: The deadline of the request passed.
        """
        loop = asyncio.get_running_loop()
        user = parse_user(data.get("user"), self._limits)
        start_s = loop.time()
        timeout_ms = data.get("timeout_ms")
        timeout_ms = self._limits.default_timeout_ms if timeout_ms is None else timeout_ms
        # Validation rejects other values later.
        is_timely = type(timeout_ms) is int and 1 <= timeout_ms <= self._limits.max_timeout_ms
        try:
            stored = await self._store.get(user, (timeout_ms if is_timely else 1) / 1000.0)
        except HistoryStoreUnavailableError:
            if data.get("history") is None:
                raise
            stored = None
        if is_timely and (elapsed_ms := int(1000 * (loop.time() - start_s))):
            if elapsed_ms >= timeout_ms:
                raise UnavailableError("the deadline of the request passed", 1.0)
            data = {**data, "timeout_ms": timeout_ms - elapsed_ms}
        return stored, data

    async def _through_swaps(self, path: str, data: dict[str, Any]) -> HttpResponse:
        """Run a request, and again with the new model if the model is swapped meanwhile."""
        while True:
            try:
                if await self._needs_stored_history(path, data):
                    return await self._respond_with_stored_history(path, data)
                return await self._posts.handle(path, data)
            except ModelSwappedError:
                continue

    async def _respond_with_stored_history(self, path: str, data: dict[str, Any]) -> HttpResponse:
        """Run a request with the stored history of its user.

        The stored events may have been accepted for another model or under other limits. They are searched for invalid
        events only if validation fails, and then the request runs again without these.
        """
        stored, data = await self._load_history(data)
        if stored is None:
            return await self._posts.handle(path, data)
        servable = self._service.deployment(self._service.ranker).servable
        history = fit_to_model(stored, servable, self._limits)
        try:
            return await self._posts.handle(path, {**data, "history": history})
        except BadRequestError as error:
            if not error.field.startswith("history."):
                raise
            return await self._posts.handle(path, {**data, "history": drop_unreadable(history, servable, self._limits)})

    async def _needs_stored_history(self, path: str, data: dict[str, Any]) -> bool:
        """Return whether a request needs the stored history. A pre-infer request that contains the number of events
        needs it only if the history would be prefilled."""
        if path not in self._uses_stored_history or (
            "history" in data and data.get("prefer_stored_history") is not True
        ):
            return False
        num_events, user, num_candidates = (
            data.get("num_events"),
            data.get("user"),
            data.get("num_candidates", DEFAULT_CANDIDATES),
        )
        if path != _PREINFER_PATH or type(num_events) is not int or type(num_candidates) is not int or num_events < 0:
            return True
        user = parse_user(user, self._limits)
        return (await self._service.would_admit_preinfer(user, num_events, num_candidates))[
            1
        ].reason == "history_required"

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
    """Return the regular expression of a path with a path parameter in braces."""
    return re.compile(re.sub(r"\\{\w+\\}", "([^/]*)", re.escape(path)))
