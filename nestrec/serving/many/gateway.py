"""The embedded gateway: every request of a user goes to the same instance, by the policy of `router`.

An instance that does not answer is left out at once; its users move to their next slots until it is back. Requests that
change nothing are tried again elsewhere, where they are computed in full, within their deadline; only events may have
to be sent again. What writes or reads the events that instances keep goes to the user's own slot or is refused:
elsewhere it would make a second history.
"""

import asyncio
import contextlib
import itertools
from urllib.parse import unquote

from nestrec.base.clock import RealClock
from nestrec.serving.api.protocol.connections import address_of
from nestrec.serving.api.protocol.http import (
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
)
from nestrec.serving.api.schema import BadRequestError, LimitsConfig
from nestrec.serving.client import client_of
from nestrec.serving.keyed_hash import KeyedHash
from nestrec.serving.many.addressed import Addressed, addressed
from nestrec.serving.many.router import Ring, Route, Router
from nestrec.serving.many.upstream import Response, Upstream

_REPEATABLE = ("/v1/rank", "/v1/preinfer", "/v1/recommend")
_FORWARDED = (b"retry-after", b"allow", b"x-content-type-options", b"content-security-policy")
_TURN_S, _TURNS_A_PROBE = 0.1, 10
_PROBE_TIMEOUT_S = 2.0
_GRACE_S = 0.2
"""beyond a deadline: the instance's own answer says more"""


class Gateway:
    """An ASGI application over instances on ports of this machine; slot i is whatever listens on ports[i]."""

    def __init__(self, ports: list[int], limits: LimitsConfig, *, shares_histories: bool = False, bound: float = 1.25):
        """shares_histories: any instance has the events of any user."""
        self._upstreams, self._limits = [Upstream(port) for port in ports], limits
        self._shares_histories = shares_histories
        keyed = KeyedHash()
        self.router = Router(Ring.make(len(ports), keyed), keyed, RealClock(), bound=bound)
        self._probes: dict[int, asyncio.Task[bool]] = {}
        self.num_failed_over = 0
        """requests that were begun again on another instance"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            body = Body(scope, receive, self._limits)
            try:
                answered = await self._answer(scope, body)
            except DisconnectedError:
                return
            except BadRequestError as error:
                answered = problem(error.status, error.message, error.field)
            await answered.send(send, is_last=body.is_unread)

    async def _answer(self, scope: Scope, unread: Body) -> Answered:
        check_head(scope, self._limits)
        # What HEAD leaves out of an answer is left out by the server.
        method, path = "GET" if scope["method"] == "HEAD" else scope["method"], scope["path"]
        if path == "/health/live":
            return as_json({"status": "live"})
        if path == "/health/ready":
            return as_json({"slots": self.router.is_alive}, 200 if any(self.router.is_alive) else 503)
        if path == "/v1/gateway":
            return as_json(self.status())
        body = await unread.read() if method == "POST" else b""
        if method == "DELETE" and path.startswith("/v1/users/"):
            return await self._everywhere(method, scope["raw_path"])
        client = client_of(address_of(scope.get("client")), scope["headers"])
        return await self._routed(method, path, scope["raw_path"], body, client)

    def status(self) -> dict[str, object]:
        """Loads and what went another way than a user's own."""
        router = self.router
        return {
            "alive": list(router.is_alive), "loads": list(router.loads), "diverted": router.num_diverted,
            "leaked": router.num_leaked, "failed_over": self.num_failed_over,
        }  # fmt: skip

    async def _routed(self, method: str, path: str, target: bytes, body: bytes, client: str) -> Answered:
        about = Addressed(unquote(path), self._limits.default_timeout_ms / 1000.0, False)
        if method == "POST":
            about = addressed(path, body, self._limits, are_shared=self._shares_histories)
        is_repeatable = method == "GET" or path in _REPEATABLE
        clock = asyncio.get_running_loop().time
        end_s = clock() + about.timeout_s + _GRACE_S
        for _ in self._upstreams:
            route = self.router.begin(about.user, at_home=about.needs_home)
            if route is None:
                break
            try:
                response = await self._upstreams[route.slot].send(
                    method, target, body, client=client, is_repeatable=is_repeatable, timeout_s=end_s - clock()
                )
            except TimeoutError:  # perhaps it only has much to do
                self._probe(route.slot)
                return problem(503, "the deadline passed", "", retry_after(1.0))
            except (OSError, EOFError) as error:
                self._lost(route.slot)
                if not is_repeatable and not isinstance(error, ConnectionRefusedError):  # it has reached nobody
                    return problem(503, "the instance was lost; send it again", "", retry_after(1.0))
            else:
                if response.status != 503 or await self._probe(route.slot):
                    return _answered(response, route)
            finally:
                self.router.end(route.slot)
            self.num_failed_over += not about.needs_home
        if about.needs_home:
            return problem(503, "the instance that keeps the events of this user is away", "", retry_after(1.0))
        return problem(503, "no instance is alive", "", retry_after(1.0))

    async def _everywhere(self, method: str, target: bytes) -> Answered:
        """The user may have been served by any of them: all must say that it is done."""
        slots = range(len(self._upstreams))
        responses = await asyncio.gather(*(self._erased(slot, method, target) for slot in slots))
        heard = [response for response in responses if response is not None]
        if len(heard) < len(slots):
            return problem(503, "not every instance has answered; send it again", "", retry_after(1.0))
        return _answered(max(heard, key=lambda response: response.status), None)

    async def _erased(self, slot: int, method: str, target: bytes) -> Response | None:
        """None where an instance that may remember does not answer."""
        timeout_s = self._limits.default_timeout_ms / 1000.0 + _GRACE_S
        try:
            return await self._upstreams[slot].send(method, target, timeout_s=timeout_s)
        except ConnectionRefusedError:  # there is no process, so nothing that remembers
            self._lost(slot)
            return Response(204, {}, b"")
        except (OSError, EOFError):
            self._probe(slot)
            return None

    def _lost(self, slot: int) -> None:
        self.router.set_alive(slot, False)
        self._upstreams[slot].drop()

    def _probe(self, slot: int) -> "asyncio.Task[bool]":
        """Find out whether an instance is ready, once for all who want to know at a time."""
        probe = self._probes.get(slot)
        if probe is None or probe.done():
            probe = self._probes[slot] = asyncio.create_task(self._is_ready(slot))
        return probe

    async def _is_ready(self, slot: int) -> bool:
        try:
            response = await self._upstreams[slot].send("GET", b"/health/ready", timeout_s=_PROBE_TIMEOUT_S)
        except (OSError, EOFError):
            self._lost(slot)
            return False
        self.router.set_alive(slot, response.status == 200)
        return response.status == 200

    async def close(self) -> None:
        """End what is kept and what is under way to instances."""
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        for upstream in self._upstreams:
            await upstream.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        watcher = asyncio.create_task(self._watch())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _watch(self) -> None:
        """Ask all of them from time to time whether they are ready, and those that were lost often."""
        for turn in itertools.count():
            for slot, is_alive in enumerate(self.router.is_alive):
                if not is_alive or turn % _TURNS_A_PROBE == 0:
                    self._probe(slot)
            await asyncio.sleep(_TURN_S)


def _answered(response: Response, route: Route | None) -> Answered:
    content_type = response.headers.get(b"content-type", b"application/json")
    shown = [(name, value) for name, value in response.headers.items() if name in _FORWARDED]
    if route is not None:
        shown.append((b"x-nestrec-slot", str(route.slot).encode()))
        shown.append((b"x-nestrec-diverted", str(int(route.is_diverted)).encode()))
    return Answered(response.status, response.body, content_type, *shown)
