"""The embedded gateway: every request of a user goes to the same instance, by the policy of `router`.

An instance that does not answer is left out at once; its users move to their next slots until it is back. Requests that
change nothing are tried again elsewhere, where they are computed in full; only events may have to be sent again.
"""

import asyncio
import contextlib
from urllib.parse import unquote

import orjson

from nestrec.base.clock import RealClock
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
)
from nestrec.serving.api.schema import BadRequestError, LimitsConfig
from nestrec.serving.keyed_hash import KeyedHash
from nestrec.serving.many.router import Ring, Route, Router
from nestrec.serving.many.upstream import Response, Upstream

_REPEATABLE = ("/v1/rank", "/v1/preinfer", "/v1/recommend")
_FORWARDED = (b"retry-after", b"allow", b"x-content-type-options", b"content-security-policy")
_PROBE_EVERY_S = 0.1


class Gateway:
    """An ASGI application over instances on ports of this machine; slot i is whatever listens on ports[i]."""

    def __init__(self, ports: list[int], limits: LimitsConfig, *, bound: float = 1.25):
        self._upstreams, self._limits = [Upstream(port) for port in ports], limits
        keyed = KeyedHash()
        self.router = Router(Ring.make(len(ports), keyed), keyed, RealClock(), bound=bound)
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
        method, path = scope["method"], scope["path"]
        if path == "/health/live":
            return as_json({"status": "live"})
        if path == "/health/ready":
            return as_json({"slots": self.router.is_alive}, 200 if any(self.router.is_alive) else 503)
        if path == "/v1/gateway":
            return as_json(self.status())
        body = await unread.read() if method == "POST" else b""
        if method == "DELETE" and path.startswith("/v1/users/"):
            return await self._everywhere(method, scope["raw_path"])
        return await self._routed(method, path, scope["raw_path"], body)

    def status(self) -> dict[str, object]:
        """Loads and what went another way than a user's own."""
        router = self.router
        return {
            "alive": list(router.is_alive), "loads": list(router.loads), "diverted": router.num_diverted,
            "leaked": router.num_leaked, "failed_over": self.num_failed_over,
        }  # fmt: skip

    async def _routed(self, method: str, path: str, target: bytes, body: bytes) -> Answered:
        user = user_of(body) if method == "POST" else unquote(path)
        is_repeatable = method == "GET" or path in _REPEATABLE
        for _ in self._upstreams:
            route = self.router.begin(user)
            if route is None:
                break
            try:
                response = await self._upstreams[route.slot].send(method, target, body, is_repeatable=is_repeatable)
                return _answered(response, route)
            except (OSError, EOFError, TimeoutError):
                self._lost(route.slot)
                if not is_repeatable:
                    return problem(503, "the instance was lost; send it again", "", retry_after(1.0))
                self.num_failed_over += 1
            finally:
                self.router.end(route.slot)
        return problem(503, "no instance is alive", "", retry_after(1.0))

    async def _everywhere(self, method: str, target: bytes) -> Answered:
        """The user may have been served by any of them."""
        responses = []
        for slot, upstream in enumerate(self._upstreams):
            try:
                responses.append(await upstream.send(method, target))
            except (OSError, EOFError, TimeoutError):  # an instance that is gone has forgotten
                self._lost(slot)
        if not responses:
            return problem(503, "no instance is alive", "", retry_after(1.0))
        return _answered(max(responses, key=lambda response: response.status), None)

    def _lost(self, slot: int) -> None:
        self.router.set_alive(slot, False)
        self._upstreams[slot].drop()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        watcher = asyncio.create_task(self._watch())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        for upstream in self._upstreams:
            await upstream.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _watch(self) -> None:
        """Ask those that were lost whether they are back."""
        while True:
            for slot, upstream in enumerate(self._upstreams):
                if not self.router.is_alive[slot]:
                    with contextlib.suppress(OSError, EOFError, TimeoutError):
                        response = await upstream.send("GET", b"/health/ready")
                        self.router.set_alive(slot, response.status == 200)
            await asyncio.sleep(_PROBE_EVERY_S)


def user_of(body: bytes) -> str:
    """Whoever a request is about; what is no request at all may go anywhere and is refused there."""
    try:
        user = orjson.loads(body)["user"]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return ""
    return user if isinstance(user, str) else ""


def _answered(response: Response, route: Route | None) -> Answered:
    content_type = response.headers.get(b"content-type", b"application/json")
    shown = [(name, value) for name, value in response.headers.items() if name in _FORWARDED]
    if route is not None:
        shown.append((b"x-nestrec-slot", str(route.slot).encode()))
        shown.append((b"x-nestrec-diverted", str(int(route.is_diverted)).encode()))
    return Answered(response.status, response.body, content_type, *shown)
