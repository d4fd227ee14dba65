"""The embedded gateway: a load balancer with session affinity over the instances of a fleet.

All requests of a user go to the same instance (consistent hashing with bounded loads, `slot_router`), because that
instance holds the user's KV cache. An instance that does not respond is taken out immediately, and its users move to
their next slots until it is back. Idempotent requests are retried on another instance within their deadline, where they
are computed without the prefix cache; event writes may have to be sent again by the client. Requests that read or write
the history stored by an instance go to the user's own slot or are rejected: on another instance they would create a
second history.

To route a request, the gateway reads only its user, its timeout and whether it needs the stored history.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import orjson

from nestrec.base.clock import RealClock
from nestrec.serving.core.asgi import (
    Body,
    ClientDisconnectedError,
    HttpResponse,
    Receive,
    Scope,
    Send,
    as_json,
    check_head,
    problem,
    problem_of,
    retry_after,
)
from nestrec.serving.core.background_tasks import reported
from nestrec.serving.core.http_client import Response
from nestrec.serving.core.request_limits import BadRequestError, LimitsConfig
from nestrec.serving.core.slot_router import KeyedHash, Ring, Route, Router
from nestrec.serving.fleet.gateway_metrics import GatewayMetrics
from nestrec.serving.fleet.readiness_probes import Probes
from nestrec.serving.fleet.rolling_update import Change, FleetBroadcast, Operations, RollingUpdate, Supervisor
from nestrec.serving.fleet.upstream_connection import Upstream
from nestrec.serving.http.fast_request import client_of_request
from nestrec.serving.kv_cache.preinfer_trigger import DEFAULT_CANDIDATES
from nestrec.serving.security.server_security import ServerSecurity

PREINFER_PATH = "/v1/preinfer"


@dataclass(frozen=True, slots=True)
class RoutingInfo:
    """Properties of a request that decide where the gateway sends it."""

    user: str
    """User id as the instance will parse it; empty if the request names no user, which any instance rejects."""
    timeout_s: float
    """Time until the deadline of the request, in seconds."""
    needs_home: bool
    """Whether the request reads or writes events that only the user's own instance stores."""
    num_events: int | None = None
    """History length in a pre-infer request with the usual number of candidates; None for all other requests."""


def parse_routing_info(path: str, body: bytes, limits: LimitsConfig, *, is_history_shared: bool = False) -> RoutingInfo:
    """Return the routing information of a POST request. A malformed one can go to any instance, which rejects it.

    Args:
        path: Path of the endpoint.
        body: Body of the request.
        limits: Limits and defaults of timeouts.
        is_history_shared: Whether all instances share one history store.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = None
    if not isinstance(data, dict):
        data = {"history": None}
    timeout_ms = data.get("timeout_ms")
    if type(timeout_ms) is not int or not 1 <= timeout_ms <= limits.max_timeout_ms:
        timeout_ms = limits.default_timeout_ms
    needs_history = path == "/v1/events" or "history" not in data or data.get("prefer_stored_history") is True
    num_events = _events_in(data) if path == PREINFER_PATH else None
    return RoutingInfo(user_in(data), timeout_ms / 1000.0, needs_history and not is_history_shared, num_events)


def _events_in(data: dict[str, Any]) -> int | None:
    history, num_events, candidates = data.get("history"), data.get("num_events"), data.get("num_candidates", 1)
    if type(candidates) is not int or not 1 <= candidates <= DEFAULT_CANDIDATES:
        return None
    if isinstance(history, dict) and data.get("prefer_stored_history") is not True:
        return len(history["items"]) if isinstance(history.get("items"), list) else None
    return num_events if type(num_events) is int and num_events >= 0 and history is None else None


def user_of(body: bytes) -> str:
    """Return the user id in the body of a request; empty if there is none."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    return user_in(data) if isinstance(data, dict) else ""


def user_in(data: dict[str, Any]) -> str:
    """Return the user id in a parsed body; empty if there is none. A number and its text are the same user."""
    user = data.get("user")
    if type(user) is int:
        return str(user)
    return user if isinstance(user, str) else ""


_LOG = logging.getLogger(__name__)
_PROMETHEUS, _JSON = b"text/plain; version=0.0.4; charset=utf-8", b"application/json"
_REPEATABLE = ("/v1/rank", "/v1/preinfer", "/v1/recommend")
_FORWARDED_HEADERS = (b"retry-after", b"allow", b"x-content-type-options", b"content-security-policy")
_REPEATABLE_METHODS = ("GET", "DELETE")
_ITEMS = "/v1/items"
_EVENTS_OF_USER = b"/events"
_OK = 200
_STATUS_TIMEOUT_S = 2.0
_GRACE_S = 0.2
"""Seconds to wait beyond a deadline: the error response of the instance is more specific than ours."""


class Gateway:
    """ASGI application that balances load over the instances on this machine; slot i listens on ports[i].

    Requests whose body has already been read bypass ASGI (`DirectApp`).
    """

    fast_routes: Mapping[bytes, str] = {route.encode(): route for route in _REPEATABLE}

    def __init__(
        self,
        ports: list[int],
        limits: LimitsConfig,
        *,
        shares_histories: bool = False,
        bound: float = 1.25,
        supervisor: Supervisor | None = None,
        folders: Sequence[str] = (),
        drain_s: float = 30.0,
        insert_timeout_s: float = 60.0,
    ):
        """Create the gateway.

        Args:
            ports: Ports of the instances, by slot.
            limits: Limits of requests.
            shares_histories: Whether all instances share one history store.
            bound: Load bound of consistent hashing: no slot gets more than this multiple of the mean load.
            supervisor: Starts the instances; None if they are started by other means.
            folders: Models that `request_reload` loads again.
            drain_s: Time to drain an instance that is removed, in seconds.
            insert_timeout_s: Time for an instance to add new items, in seconds; it may have to enlarge its tables.
        """
        self._upstreams = [Upstream(port) for port in ports]
        self._limits = limits
        self._shares_histories = shares_histories
        keyed = KeyedHash()
        self.router = Router(Ring.make(len(ports), keyed), keyed, RealClock(), bound=bound)
        self._probes = Probes(self._upstreams, self.router, lambda: self.rollout.turn)
        self._fleet_broadcast = FleetBroadcast(self._upstreams, self._probes)
        self._deletion = Change(limits.default_timeout_ms / 1000.0 + _GRACE_S, is_done_if_down=True)
        self._insertion = Change(insert_timeout_s, is_done_if_down=False)
        self.rollout = RollingUpdate(self._upstreams, self.router, supervisor, self._probes.is_ready_since)
        self._folders = list(folders)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reload: asyncio.Task[None] | None = None
        self._is_reload_due = False
        self._operations = Operations(self.rollout, limits, drain_s)
        self.metrics = GatewayMetrics(self.router)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            body = Body(scope, receive, self._limits)
            try:
                response = await self._respond(scope, body)
            except ClientDisconnectedError:
                return
            except BadRequestError as error:
                response = problem_of(error)
            await response.send(send, is_last=body.is_unread)

    def reject_unread(self, route: str, client: str, num_bytes: int) -> HttpResponse | None:
        """Return None: admission control is up to the instances."""
        return None

    def count_malformed(self, status: int) -> None:
        """Do nothing: the gateway does not count malformed requests."""

    async def serve(self, route: str, client: str, body: bytes, reply: Callable[[HttpResponse], None]) -> None:
        """Answer a user's request whose body has been read."""
        try:
            response = await self._route("POST", route, route.encode(), body, client)
        except BadRequestError as error:
            response = problem_of(error)
        except Exception as error:
            _LOG.error("a request failed", exc_info=error)
            response = problem(500, "the request failed in the gateway; see its log")
        reply(response)

    async def _respond(self, scope: Scope, unread: Body) -> HttpResponse:
        check_head(scope, self._limits)
        # The HTTP server removes the body from responses to HEAD requests.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        path = scope["path"]
        if (response := await self._own_response(method, path, scope["query_string"])) is not None:
            return response
        body = await unread.read() if method == "POST" else b""
        if path.startswith("/v1/admin/"):
            return await self._operations.handle(method, path, body)
        if method == "DELETE" and path.startswith("/v1/users/") and not self._is_in_shared_store(scope["raw_path"]):
            return await self._broadcast(self._deletion, method, scope["raw_path"])
        if (method, path) == ("POST", _ITEMS):
            return await self._broadcast(self._insertion, method, scope["raw_path"], body)
        return await self._route(method, path, scope["raw_path"], body, client_of_request(scope))

    def _is_in_shared_store(self, raw_path: bytes) -> bool:
        """Return whether a deletion concerns only the shared history store, so that any live instance can do it."""
        return self._shares_histories and raw_path.endswith(_EVENTS_OF_USER)

    async def _own_response(self, method: str, path: str, query: bytes) -> HttpResponse | None:
        """Answer requests about the gateway itself and its instances; return None for requests to an instance."""
        match path:
            case "/health/live":
                return as_json({"status": "live"})
            case "/health/ready":
                is_alive = self.router.is_alive[: self.router.num_slots]
                return as_json({"slots": is_alive}, 200 if any(is_alive) else 503)
            case "/v1/gateway":
                return as_json(self.status())
            case "/metrics" if method == "GET":
                return await self._metrics_response()
            case "/v1/live" if (slot := _slot_in(query)) is not None:
                return await self._live_response(slot)
        return None

    def on_new_version(self, models: list[str]) -> bool:
        """Update all instances to newer versions, unless they are pinned to a version.

        Blocks; call it from a thread other than that of the event loop.

        Args:
            models: Addresses with versions.

        Returns:
            Whether all instances serve them now.
        """
        if self._loop is None:
            return False
        return asyncio.run_coroutine_threadsafe(self.rollout.follow(models), self._loop).result().status == _OK

    def request_reload(self) -> None:
        """Schedule a reload, on all instances, of the models that they were started with. Thread-safe."""
        self._is_reload_due = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_reload)

    def _begin_reload(self) -> None:
        if self._reload is None or self._reload.done():
            self._reload = asyncio.create_task(self._reload_while_due())
            self._reload.add_done_callback(reported("nestrec-reload"))

    async def _reload_while_due(self) -> None:
        """Reload until no request is pending: a request during a reload causes one more reload after it."""
        while self._is_reload_due:
            self._is_reload_due = False
            await self.rollout.swap(self._folders, cause="reload")

    def set_auth_failures(self, auth_failures: Mapping[str, int]) -> None:
        self.metrics.auth_failures = auth_failures

    def set_security(self, security: ServerSecurity) -> None:
        self.metrics.security = security

    async def _metrics_response(self) -> HttpResponse:
        """Return the metrics of all instances and of the gateway."""
        slots = range(len(self._upstreams))
        responses = await asyncio.gather(*(self._query_instance(slot, b"/metrics") for slot in slots))
        texts = {slot: response.body for slot, response in zip(slots, responses, strict=True) if response is not None}
        return HttpResponse(200, self.metrics.exposition(texts), _PROMETHEUS)

    async def _live_response(self, slot: int) -> HttpResponse:
        """Return the live statistics of one instance."""
        response = await self._query_instance(slot, b"/v1/live") if slot < len(self._upstreams) else None
        if response is None:
            return problem(503, "the instance is not responding", "", retry_after(1.0))
        return HttpResponse(response.status, response.body, _JSON, (b"x-nestrec-slot", str(slot).encode()))

    async def _query_instance(self, slot: int, target: bytes) -> Response | None:
        try:
            return await self._upstreams[slot].send("GET", target, timeout_s=_STATUS_TIMEOUT_S)
        except (OSError, EOFError):  # a TimeoutError is an OSError
            return None

    def status(self) -> dict[str, object]:
        """Return the load of each slot and the counts of requests that did not go to their user's own slot."""
        router = self.router
        return {
            "alive": router.is_alive[: router.num_slots],
            "loads": router.loads[: router.num_slots],
            "diverted": router.num_diverted,
            "spilled": router.num_spilled,
            "failed_over": self.metrics.num_failed_over,
            "preinfer_skipped": self.metrics.num_preinfer_skipped,
        }

    async def _route(self, method: str, path: str, target: bytes, body: bytes, client: str) -> HttpResponse:
        routing = RoutingInfo(unquote(path), self._limits.default_timeout_ms / 1000.0, False)
        if method == "POST":
            routing = parse_routing_info(path, body, self._limits, is_history_shared=self._shares_histories)
        is_repeatable = method in _REPEATABLE_METHODS or path in _REPEATABLE
        clock = asyncio.get_running_loop().time
        end_s = clock() + routing.timeout_s + _GRACE_S
        for _ in range(len(self._upstreams)):
            route = self.router.begin(routing.user, home_only=routing.needs_home)
            if route is None:
                break
            if (short := self._skipped_preinfer(route.slot, routing)) is not None:
                self.router.end(route.slot)
                return short
            try:
                response = await self._upstreams[route.slot].send(
                    method, target, body, client=client, is_repeatable=is_repeatable, timeout_s=end_s - clock()
                )
            except TimeoutError:  # the instance may only be overloaded
                self._probes.begin(route.slot)
                return problem(503, "the deadline passed", "", retry_after(1.0))
            except (OSError, EOFError) as error:
                self._probes.mark_lost(route.slot)
                if not is_repeatable and not isinstance(error, ConnectionRefusedError):  # no instance received it
                    return problem(503, "the connection to the instance was lost; send it again", "", retry_after(1.0))
            else:
                if response.status != 503 or await self._probes.is_ready(route.slot):
                    return _to_http_response(response, route)
            finally:
                self.router.end(route.slot)
            self.metrics.num_failed_over += not routing.needs_home
        if routing.needs_home:
            return problem(503, "the instance that stores the events of this user is down", "", retry_after(1.0))
        return problem(503, "all instances are down", "", retry_after(1.0))

    def _skipped_preinfer(self, slot: int, routing: RoutingInfo) -> HttpResponse | None:
        """Answer a pre-infer request with a history too short for the user's instance; None for all others.

        The minimum length is the one in the last readiness probe of the instance, to which nothing is sent.
        """
        if (
            routing.num_events is None
            or routing.num_events >= self._probes.min_preinfer_events.get(slot, 0)
            or not routing.user
        ):
            return None
        self.metrics.num_preinfer_skipped += 1
        decision = {"admitted": False, "reason": "short", "model": "", "unknown_ids": [], "defaults_used": []}
        return as_json(decision, 202, (b"x-nestrec-slot", str(slot).encode()))

    async def _broadcast(self, change: Change, method: str, target: bytes, body: bytes = b"") -> HttpResponse:
        """Send a change to all instances: any of them may have served a user, and each has its own catalog."""
        response = await self._fleet_broadcast.broadcast(change, method, target, body)
        if response is None:
            return problem(503, "not all instances have confirmed the change; send it again", "", retry_after(1.0))
        return _to_http_response(response, None)

    async def close(self) -> None:
        """Cancel operations and probes in progress, and close the connections to instances."""
        tasks: list[asyncio.Task[Any]] = [*self._operations.active_tasks]
        tasks += [self._reload] if self._reload is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._probes.close()
        for upstream in self._upstreams:
            await upstream.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._loop = asyncio.get_running_loop()
        watcher = asyncio.create_task(self._probes.watch())
        if self._is_reload_due:
            self._begin_reload()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})


def _slot_in(query: bytes) -> int | None:
    """Return N of the query string `slot=N`; None for other queries."""
    name, _, value = query.partition(b"=")
    return int(value) if name == b"slot" and value.isdigit() and len(value) < 6 else None


def _to_http_response(response: Response, route: Route | None) -> HttpResponse:
    content_type = response.headers.get(b"content-type", b"application/json")
    headers = [(name, value) for name, value in response.headers.items() if name in _FORWARDED_HEADERS]
    if route is not None:
        headers.append((b"x-nestrec-slot", str(route.slot).encode()))
        headers.append((b"x-nestrec-diverted", str(int(route.is_diverted)).encode()))
    return HttpResponse(response.status, response.body, content_type, *headers)
