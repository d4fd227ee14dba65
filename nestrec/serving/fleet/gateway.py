"""The embedded gateway: every request of a user goes to the same instance, by the policy of `router`.

An instance that does not answer is left out at once; its users move to their next slots until it is back. Requests that
change nothing are tried again elsewhere, where they are computed in full, within their deadline; only events may have
to be sent again. What writes or reads the events that instances keep goes to the user's own slot or is refused:
elsewhere it would make a second history.

What a front reads in a request: whom it is about, how long it may take, and whether only one instance will do.
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
from nestrec.serving.http.fast_request import client_in
from nestrec.serving.kv_cache.preinfer_trigger import USUAL_CANDIDATES
from nestrec.serving.security.server_security import ServerSecurity

SIGNAL_PATH = "/v1/preinfer"


@dataclass(frozen=True, slots=True)
class RoutingInfo:
    user: str
    """as the instance will read it; empty where the request names none, and is refused by any instance"""
    timeout_s: float
    """until its deadline"""
    needs_home: bool
    """it writes or reads events that only the user's own instance keeps"""
    num_events: int | None = None
    """of a signal about as many candidates as usual: of the history that it tells, or tells the length of"""


def addressed(path: str, body: bytes, limits: LimitsConfig, *, are_shared: bool = False) -> RoutingInfo:
    """Of a POST. What is no request at all may go anywhere and is refused there. are_shared: all instances have the
    events that are kept."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = None
    if not isinstance(data, dict):
        data = {"history": None}
    timeout_ms = data.get("timeout_ms")
    if type(timeout_ms) is not int or not 1 <= timeout_ms <= limits.max_timeout_ms:
        timeout_ms = limits.default_timeout_ms
    is_about_kept = path == "/v1/events" or "history" not in data or data.get("prefer_kept") is True
    num_events = _events_in(data) if path == SIGNAL_PATH else None
    return RoutingInfo(user_in(data), timeout_ms / 1000.0, is_about_kept and not are_shared, num_events)


def _events_in(data: dict[str, Any]) -> int | None:
    history, told, candidates = data.get("history"), data.get("events"), data.get("num_candidates", 1)
    if type(candidates) is not int or not 1 <= candidates <= USUAL_CANDIDATES:
        return None
    if isinstance(history, dict) and data.get("prefer_kept") is not True:
        return len(history["items"]) if isinstance(history.get("items"), list) else None
    return told if type(told) is int and told >= 0 and history is None else None


def user_of(body: bytes) -> str:
    """Whoever a request is about; empty where it names nobody."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    return user_in(data) if isinstance(data, dict) else ""


def user_in(data: dict[str, Any]) -> str:
    """A number and the text of it are one user."""
    user = data.get("user")
    if type(user) is int:
        return str(user)
    return user if isinstance(user, str) else ""


_LOG = logging.getLogger(__name__)
_PROMETHEUS, _JSON = b"text/plain; version=0.0.4; charset=utf-8", b"application/json"
_REPEATABLE = ("/v1/rank", "/v1/preinfer", "/v1/recommend")
_FORWARDED = (b"retry-after", b"allow", b"x-content-type-options", b"content-security-policy")
_REPEATABLE_METHODS = ("GET", "DELETE")
_ITEMS = "/v1/items"
_EVENTS_OF_USER = b"/events"
_OK = 200
_TOLD_TIMEOUT_S = 2.0
_GRACE_S = 0.2
"""beyond a deadline: the instance's own answer says more"""


class Gateway:
    """An ASGI application over instances on ports of this machine; slot i is whatever listens on ports[i]. Requests of
    users that arrive whole are asked for without ASGI in between (`DirectApp`)."""

    plain_routes: Mapping[bytes, str] = {route.encode(): route for route in _REPEATABLE}

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
        adding_s: float = 60.0,
    ):
        """shares_histories: any instance has the events of any user. supervisor: who has started the instances.
        folders: of the models that `ask_reload` loads anew. adding_s: that an instance may take to know new items, for
        which it may have to make its tables anew."""
        self._upstreams = [Upstream(port) for port in ports]
        self._limits = limits
        self._shares_histories = shares_histories
        keyed = KeyedHash()
        self.router = Router(Ring.make(len(ports), keyed), keyed, RealClock(), bound=bound)
        self._probes = Probes(self._upstreams, self.router, lambda: self.rollout.turn)
        self._all = FleetBroadcast(self._upstreams, self._probes)
        self._erasing = Change(limits.default_timeout_ms / 1000.0 + _GRACE_S, is_done_by_end=True)
        self._adding = Change(adding_s, is_done_by_end=False)
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
                answered = await self._answer(scope, body)
            except ClientDisconnectedError:
                return
            except BadRequestError as error:
                answered = problem_of(error)
            await answered.send(send, is_last=body.is_unread)

    def refused_unread(self, route: str, client: str, num_bytes: int) -> HttpResponse | None:
        """Instances refuse, each for itself."""
        return None

    def count_malformed(self, status: int) -> None:
        """It is answered, and nobody here counts it."""

    async def serve(self, route: str, client: str, body: bytes, reply: Callable[[HttpResponse], None]) -> None:
        """Answer a request of a user."""
        try:
            answered = await self._routed("POST", route, route.encode(), body, client)
        except BadRequestError as error:
            answered = problem_of(error)
        except Exception as error:
            _LOG.error("a request failed", exc_info=error)
            answered = problem(500, "the request failed here")
        reply(answered)

    async def _answer(self, scope: Scope, unread: Body) -> HttpResponse:
        check_head(scope, self._limits)
        # What HEAD leaves out of an answer is left out by the server.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        path = scope["path"]
        if (answered := await self._of_front(method, path, scope["query_string"])) is not None:
            return answered
        body = await unread.read() if method == "POST" else b""
        if path.startswith("/v1/admin/"):
            return await self._operations.answer(method, path, body)
        if method == "DELETE" and path.startswith("/v1/users/") and not self._is_in_store(scope["raw_path"]):
            return await self._everywhere(self._erasing, method, scope["raw_path"])
        if (method, path) == ("POST", _ITEMS):
            return await self._everywhere(self._adding, method, scope["raw_path"], body)
        return await self._routed(method, path, scope["raw_path"], body, client_in(scope))

    def _is_in_store(self, raw_path: bytes) -> bool:
        """What is kept of a user there is in one place: any one instance, but a living one, can erase it."""
        return self._shares_histories and raw_path.endswith(_EVENTS_OF_USER)

    async def _of_front(self, method: str, path: str, query: bytes) -> HttpResponse | None:
        """What this front says of itself and of its instances; none where a request is for one of them."""
        match path:
            case "/health/live":
                return as_json({"status": "live"})
            case "/health/ready":
                is_alive = self.router.is_alive[: self.router.num_slots]
                return as_json({"slots": is_alive}, 200 if any(is_alive) else 503)
            case "/v1/gateway":
                return as_json(self.status())
            case "/metrics" if method == "GET":
                return await self._exposition()
            case "/v1/live" if (slot := _slot_in(query)) is not None:
                return await self._live(slot)
        return None

    def moved(self, models: list[str]) -> bool:
        """Have all instances go to these newer versions, unless they are to stay; whether they do. From another thread
        than the loop's, and waits."""
        if self._loop is None:
            return False
        return asyncio.run_coroutine_threadsafe(self.rollout.follow(models), self._loop).result().status == _OK

    def ask_reload(self) -> None:
        """Let all instances load the folders that they were started with anew, soon; from any thread."""
        self._is_reload_due = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_reload)

    def _begin_reload(self) -> None:
        if self._reload is None or self._reload.done():
            self._reload = asyncio.create_task(self._reload_while_due())
            self._reload.add_done_callback(reported("nestrec-reload"))

    async def _reload_while_due(self) -> None:
        """Whoever asks while one is under way gets one more after it."""
        while self._is_reload_due:
            self._is_reload_due = False
            await self.rollout.swap(self._folders, cause="reload")

    def count_refusals_of(self, refusals: Mapping[str, int]) -> None:
        self.metrics.refusals = refusals

    def report_files_of(self, safety: ServerSecurity) -> None:
        self.metrics.safety = safety

    async def _exposition(self) -> HttpResponse:
        """What every instance counts, beside what this front does."""
        slots = range(len(self._upstreams))
        told = await asyncio.gather(*(self._told(slot, b"/metrics") for slot in slots))
        texts = {slot: one.body for slot, one in zip(slots, told, strict=True) if one is not None}
        return HttpResponse(200, self.metrics.exposition(texts), _PROMETHEUS)

    async def _live(self, slot: int) -> HttpResponse:
        """How one instance fares."""
        response = await self._told(slot, b"/v1/live") if slot < len(self._upstreams) else None
        if response is None:
            return problem(503, "the instance does not answer", "", retry_after(1.0))
        return HttpResponse(response.status, response.body, _JSON, (b"x-nestrec-slot", str(slot).encode()))

    async def _told(self, slot: int, target: bytes) -> Response | None:
        try:
            return await self._upstreams[slot].send("GET", target, timeout_s=_TOLD_TIMEOUT_S)
        except (OSError, EOFError):  # a TimeoutError is an OSError
            return None

    def status(self) -> dict[str, object]:
        """Loads and what went another way than a user's own."""
        router = self.router
        return {
            "alive": router.is_alive[: router.num_slots],
            "loads": router.loads[: router.num_slots],
            "diverted": router.num_diverted,
            "leaked": router.num_leaked,
            "failed_over": self.metrics.num_failed_over,
            "short_signals": self.metrics.num_short_signals,
        }

    async def _routed(self, method: str, path: str, target: bytes, body: bytes, client: str) -> HttpResponse:
        about = RoutingInfo(unquote(path), self._limits.default_timeout_ms / 1000.0, False)
        if method == "POST":
            about = addressed(path, body, self._limits, are_shared=self._shares_histories)
        is_repeatable = method in _REPEATABLE_METHODS or path in _REPEATABLE
        clock = asyncio.get_running_loop().time
        end_s = clock() + about.timeout_s + _GRACE_S
        for _ in range(len(self._upstreams)):
            route = self.router.begin(about.user, at_home=about.needs_home)
            if route is None:
                break
            if (short := self._not_worth_a_signal(route.slot, about)) is not None:
                self.router.end(route.slot)
                return short
            try:
                response = await self._upstreams[route.slot].send(
                    method, target, body, client=client, is_repeatable=is_repeatable, timeout_s=end_s - clock()
                )
            except TimeoutError:  # perhaps it only has much to do
                self._probes.begin(route.slot)
                return problem(503, "the deadline passed", "", retry_after(1.0))
            except (OSError, EOFError) as error:
                self._probes.lost(route.slot)
                if not is_repeatable and not isinstance(error, ConnectionRefusedError):  # it has reached nobody
                    return problem(503, "the instance was lost; send it again", "", retry_after(1.0))
            else:
                if response.status != 503 or await self._probes.is_ready(route.slot):
                    return _answered(response, route)
            finally:
                self.router.end(route.slot)
            self.metrics.num_failed_over += not about.needs_home
        if about.needs_home:
            return problem(503, "the instance that keeps the events of this user is away", "", retry_after(1.0))
        return problem(503, "no instance is alive", "", retry_after(1.0))

    def _not_worth_a_signal(self, slot: int, about: RoutingInfo) -> HttpResponse | None:
        """The answer to a signal that the user's instance has no use for, as it last said: nothing goes there."""
        if about.num_events is None or about.num_events >= self._probes.signals_from.get(slot, 0) or not about.user:
            return None
        self.metrics.num_short_signals += 1
        answer = {"admitted": False, "reason": "short", "model": "", "unknown": [], "defaults": []}
        return as_json(answer, 202, (b"x-nestrec-slot", str(slot).encode()))

    async def _everywhere(self, change: Change, method: str, target: bytes, body: bytes = b"") -> HttpResponse:
        """A user may have been served by any of them, and items are known to each by itself."""
        response = await self._all.make(change, method, target, body)
        if response is None:
            return problem(503, "not every instance has answered; send it again", "", retry_after(1.0))
        return _answered(response, None)

    async def close(self) -> None:
        """End what is kept and what is under way to instances."""
        tasks: list[asyncio.Task[Any]] = [*self._operations.under_way]
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
    """Of `slot=N`."""
    name, _, value = query.partition(b"=")
    return int(value) if name == b"slot" and value.isdigit() and len(value) < 6 else None


def _answered(response: Response, route: Route | None) -> HttpResponse:
    content_type = response.headers.get(b"content-type", b"application/json")
    shown = [(name, value) for name, value in response.headers.items() if name in _FORWARDED]
    if route is not None:
        shown.append((b"x-nestrec-slot", str(route.slot).encode()))
        shown.append((b"x-nestrec-diverted", str(int(route.is_diverted)).encode()))
    return HttpResponse(response.status, response.body, content_type, *shown)
