"""The ASGI application of a frontend worker process.

Hot routes (ranking, pre-infer, recommendation) are decoded and answered in the worker, which sends only arrays to the
engine process. All other requests are forwarded to the engine process unchanged.

`KeepAwake` keeps the worker's CPU core awake between requests (busy polling). On GPU hosts, especially virtual ones, a
sleeping core needs tens to hundreds of microseconds to wake and is several times slower right after that. A worker
waits three times per request: for the request, for the result and for the next request.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nestrec.serving.core.asgi import Body, HttpResponse, Receive, Scope, Send, check_head, unless_disconnected
from nestrec.serving.core.background_tasks import FAILURES
from nestrec.serving.core.request_limits import LimitsConfig, RequestSource, current_sender
from nestrec.serving.frontend.remote_service import RemoteScoringService
from nestrec.serving.http.endpoint_spec import EndpointSpec
from nestrec.serving.http.fast_request import client_of_request
from nestrec.serving.http.http_app import HttpResponder, PostHandler
from nestrec.serving.service.inference_service import ModelSwappedError


class KeepAwake:
    """Keeps an event loop busy for some time after each request. Use it from within that loop."""

    def __init__(self, seconds: float):
        """Set for how long the loop stays awake after a request, in seconds; 0 disables it."""
        self._seconds = seconds
        self._until_s = 0.0
        self._is_spinning = False

    def on_request(self) -> None:
        """Record the arrival of a request."""
        if self._seconds:
            self._until_s = time.monotonic() + self._seconds
            if not self._is_spinning:
                self._is_spinning = True
                self._spin()

    def _spin(self) -> None:
        """Reschedule itself until the time is over: a loop with a ready callback polls instead of sleeping."""
        self._is_spinning = time.monotonic() < self._until_s
        if self._is_spinning:
            asyncio.get_running_loop().call_soon(self._spin)


class WorkerCounters:
    """Request counters and failures of a frontend worker since they were last drained."""

    def __init__(self) -> None:
        self._responses: dict[tuple[str, int], list[float]] = {}
        self._auth_failures: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self.auth_failures: Mapping[str, int] = {}
        """Requests that authentication or rate limits rejected since the start of the process, by reason."""

    def observe(self, route: str, status: int, seconds: float) -> None:
        self._responses.setdefault((route, status), []).append(seconds)

    def drain(self) -> dict[str, Any]:
        """Return the counts since the last call, as JSON values, and reset them."""
        responses, self._responses = self._responses, {}
        before, self._auth_failures = self._auth_failures, dict(self.auth_failures)
        failed, self._failures = self._failures, FAILURES.counts
        return {
            "failures": {task: count - failed.get(task, 0) for task, count in self._failures.items()},
            "responses": [[route, status, seconds] for (route, status), seconds in responses.items()],
            "auth_failures": {reason: count - before.get(reason, 0) for reason, count in self._auth_failures.items()},
        }


@dataclass(frozen=True, slots=True)
class _HotRouteContext:
    """Context that the handlers of hot routes receive."""

    service: RemoteScoringService
    limits: LimitsConfig


class FrontendApp:
    """ASGI application of a frontend worker; also serves requests without ASGI (`DirectApp`).

    The scoring service runs in the engine process and is called through `RemoteScoringService`.
    """

    def __init__(
        self,
        service: RemoteScoringService,
        limits: LimitsConfig,
        endpoints: Mapping[str, EndpointSpec],
        counters: WorkerCounters,
        *,
        connect: Callable[[], Any],
        on_request: Callable[[], None],
    ):
        """Create the application.

        Args:
            service: Client of the engine process.
            limits: Limits of requests.
            endpoints: All endpoints of the server, by name.
            counters: Receives the counts of requests.
            connect: Coroutine function that is awaited before the first request.
            on_request: Called for each request of a hot route.
        """
        self._service = service
        self._limits = limits
        self._counters = counters
        self._connect = connect
        self._on_request = on_request
        hot = [endpoint for endpoint in endpoints.values() if endpoint.runs_in_frontend_workers]
        self._hot = PostHandler(_HotRouteContext(service, limits), hot, counters.observe)
        self._http = HttpResponder(
            limits=limits,
            routes={endpoint.path for endpoint in endpoints.values()},
            respond=self._respond,
            observe=counters.observe,
        )
        self._posts = {endpoint.path for endpoint in endpoints.values() if endpoint.method == "POST"}
        self.fast_routes: Mapping[bytes, str] = {route.encode(): route for route in self._posts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    # Methods of `DirectApp`: requests whose body has already been read.

    def reject_unread(self, route: str, client: str, num_bytes: int) -> HttpResponse | None:
        return self._hot.reject_unread(route, client, num_bytes) if route in self._hot else None

    def count_malformed(self, status: int) -> None:
        self._counters.observe("malformed", status, 0.0)

    def set_auth_failures(self, auth_failures: Mapping[str, int]) -> None:
        self._counters.auth_failures = auth_failures

    async def serve(self, route: str, client: str, body: bytes, reply: Callable[[HttpResponse], None]) -> None:
        self._on_request()
        await self._hot.serve(
            route, RequestSource(client, len(body), time.perf_counter()), self._post(route, client, body), reply
        )

    async def _post(self, route: str, client: str, body: bytes) -> HttpResponse:
        """Answer a POST request; forward it if it needs the stored history, which only the engine process has."""
        if route not in self._hot:
            return await self._service.forward("POST", route, body, client=client)
        data = self._hot.parsed(route, body)
        if data.get("history") is None or data.get("prefer_stored_history") is True:
            return await self._service.forward("POST", route, body, client=client)
        while True:
            try:
                return await self._hot.handle(route, data)
            except ModelSwappedError:
                continue

    # All other requests.

    async def _respond(self, scope: Scope, receive: Receive, unread: Body) -> tuple[str, HttpResponse]:
        method = scope["method"]
        path = scope["path"]
        client = client_of_request(scope)
        check_head(scope, self._limits)
        body = await unread.read() if method == "POST" and path in self._posts else b""
        if method == "POST" and path in self._posts:
            sender = RequestSource(client, len(body), time.perf_counter())
            current_sender.set(sender)
            if path in self._hot and (rejection := self._hot.overload_error(path, sender)) is not None:
                raise rejection
            return path, await unless_disconnected(self._post(path, client, body), receive)
        raw_path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
        return path, await self._service.forward(method, path, raw_path=raw_path, query=query, client=client)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self._connect()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
