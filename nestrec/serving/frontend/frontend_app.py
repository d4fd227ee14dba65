"""The application of a frontend worker process.

Keeping a front's core awake while requests come: one that slept is slow for the next of them.

On hosts of GPUs, virtual ones above all, a core takes tens to hundreds of microseconds to wake, and is several times
slower just after it. A front waits three times for each request: for it, for what was computed, and for the next one.

The application of a front: hot routes are read and answered here, everything else goes on as it came.
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
from nestrec.serving.http.fast_request import client_in
from nestrec.serving.http.http_app import HttpResponder, PostHandler
from nestrec.serving.service.inference_service import ModelSwappedError


class KeepAwake:
    """An event loop that does not sleep until so many seconds after the last request. Used inside that loop."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._until_s = 0.0
        self._is_turning = False

    def called(self) -> None:
        """A request has come."""
        if self._seconds:
            self._until_s = time.monotonic() + self._seconds
            if not self._is_turning:
                self._is_turning = True
                self._turn()

    def _turn(self) -> None:
        """A loop that has something to do does not wait for anything."""
        self._is_turning = time.monotonic() < self._until_s
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)


class WorkerCounters:
    """What a front has counted since it was asked last."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, int], list[float]] = {}
        self._refusals: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self.refusals: Mapping[str, int] = {}
        """requests that the gate let not in, by reason, from the start"""

    def observe(self, route: str, status: int, seconds: float) -> None:
        self._answers.setdefault((route, status), []).append(seconds)

    def told(self) -> dict[str, Any]:
        answers, self._answers = self._answers, {}
        before, self._refusals = self._refusals, dict(self.refusals)
        failed, self._failures = self._failures, FAILURES.counts
        return {
            "failures": {task: count - failed.get(task, 0) for task, count in self._failures.items()},
            "answers": [[route, status, seconds] for (route, status), seconds in answers.items()],
            "refusals": {reason: count - before.get(reason, 0) for reason, count in self._refusals.items()},
        }


@dataclass(frozen=True, slots=True)
class _Hot:
    """What handlers of hot routes work with."""

    service: RemoteScoringService
    limits: LimitsConfig


class FrontendApp:
    """An ASGI application, and a door (`plain_cycle.Door`), over a service in another process."""

    def __init__(
        self,
        service: RemoteScoringService,
        limits: LimitsConfig,
        endpoints: Mapping[str, EndpointSpec],
        observed: WorkerCounters,
        *,
        connect: Callable[[], Any],
        called: Callable[[], None],
    ):
        """connect: awaited before the first request. called: told of each."""
        self._service = service
        self._limits = limits
        self._observed = observed
        self._connect = connect
        self._called = called
        hot = [endpoint for endpoint in endpoints.values() if endpoint.runs_in_fronts]
        self._hot = PostHandler(_Hot(service, limits), hot, observed.observe)
        self._http = HttpResponder(
            limits=limits,
            routes={endpoint.path for endpoint in endpoints.values()},
            answer=self._answer,
            observe=observed.observe,
        )
        self._posts = {endpoint.path for endpoint in endpoints.values() if endpoint.method == "POST"}
        self.plain_routes: Mapping[bytes, str] = {route.encode(): route for route in self._posts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    # A request that arrives whole.

    def refused_unread(self, route: str, client: str, num_bytes: int) -> HttpResponse | None:
        return self._hot.refused_unread(route, client, num_bytes) if route in self._hot else None

    def count_malformed(self, status: int) -> None:
        self._observed.observe("malformed", status, 0.0)

    def count_refusals_of(self, refusals: Mapping[str, int]) -> None:
        self._observed.refusals = refusals

    async def serve(self, route: str, client: str, body: bytes, reply: Callable[[HttpResponse], None]) -> None:
        self._called()
        await self._hot.serve(
            route, RequestSource(client, len(body), time.perf_counter()), self._posted(route, client, body), reply
        )

    async def _posted(self, route: str, client: str, body: bytes) -> HttpResponse:
        """What is about events that are kept is for whoever keeps them."""
        if route not in self._hot:
            return await self._service.forward("POST", route, body, client=client)
        data = self._hot.parsed(route, body)
        if data.get("history") is None or data.get("prefer_kept") is True:
            return await self._service.forward("POST", route, body, client=client)
        while True:
            try:
                return await self._hot.handle(route, data)
            except ModelSwappedError:
                continue

    # Any other.

    async def _answer(self, scope: Scope, receive: Receive, unread: Body) -> tuple[str, HttpResponse]:
        method = scope["method"]
        path = scope["path"]
        client = client_in(scope)
        check_head(scope, self._limits)
        body = await unread.read() if method == "POST" and path in self._posts else b""
        if method == "POST" and path in self._posts:
            sender = RequestSource(client, len(body), time.perf_counter())
            current_sender.set(sender)
            if path in self._hot and (refusal := self._hot.refusal(path, sender)) is not None:
                raise refusal
            return path, await unless_disconnected(self._posted(path, client, body), receive)
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
