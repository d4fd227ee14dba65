"""Client of the engine process for a frontend worker: the scoring service over two socket pairs."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from nestrec.serving.core import tracing
from nestrec.serving.core.asgi import HttpResponse
from nestrec.serving.core.background_tasks import reported
from nestrec.serving.core.rejections import OverloadedError, UnavailableError
from nestrec.serving.core.request_limits import RequestSource, current_request_id, current_sender
from nestrec.serving.frontend.deployment_names import DeploymentNameCache, RemoteDeployment
from nestrec.serving.frontend.wire_format import (
    OK,
    OVERLOADED,
    SWAPPED,
    UNAVAILABLE,
    Channel,
    FrameKind,
    RankFrame,
    RankReply,
)
from nestrec.serving.inputs.engine_request import RankResult
from nestrec.serving.kv_cache.preinfer_trigger import Decision
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec.serving.model.servable_spec import short_version
from nestrec.serving.service.inference_service import ModelDeployment, ModelSwappedError, ServiceConfig

_REPLY_TIMEOUT_S = 30.0
"""Timeout in seconds for replies that need no computation on the device."""
_FULL_S = 0.005
"""Seconds for which a queue reported as full counts as full; after that, the next request probes it again."""
_REJECTIONS = {OVERLOADED: OverloadedError, UNAVAILABLE: UnavailableError}
_NO_ITEMS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _FullQueue:
    """The last overload reply for a client: requests of at least this size are rejected unread until `until_s`."""

    num_bytes: int
    queued_s: float
    until_s: float


class RemoteScoringService:
    """Implementation of `ScoringService` that calls the engine process. Use it from one event loop."""

    def __init__(self, cfg: ServiceConfig, drain_counters: Callable[[], Mapping[str, Any]], stop: Callable[[], None]):
        """Create the client; its two channels are connected by the caller.

        Args:
            cfg: Configuration of the service.
            drain_counters: Returns the counters since its last call; called when the engine process requests them.
            stop: Called when this worker must shut down.
        """
        self.cfg = cfg
        self._drain_counters = drain_counters
        self._stop = stop
        self.control, self.quick = (Channel(self._on_frame, self._on_engine_lost) for _ in range(2))
        self.names = DeploymentNameCache()
        self._names_changed = asyncio.Condition()
        self.unread_rejections: dict[str, int] = {}
        """Number of requests that were rejected without being read, by role."""
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0
        self._sessions: dict[str, int] = {}
        self._full: dict[tuple[str, str], _FullQueue] = {}
        self._apply_task: asyncio.Task[None] | None = None
        self._unapplied: list[bytes] = []
        self._return_transit_s = 0.0

    # Methods of `ScoringService`.

    @property
    def deployments(self) -> Mapping[str, ModelDeployment]:
        return self.names.in_service

    @property
    def ranker(self) -> str:
        return "ranking" if "ranking" in self.names.in_service else "retrieval"

    def session_deployment(self, user: str) -> ModelDeployment:
        return self.ranking_deployment(user)

    def ranking_deployment(self, user: str) -> ModelDeployment:
        """Return the ranking deployment in service, or the one to which the engine process has pinned the user."""
        pinned = self.names.find(self._sessions.pop(user, 0))
        return replace(pinned or self.names.in_service[self.ranker], resolved_by="session")

    def overload_error(self, role: str, sender: RequestSource) -> OverloadedError | None:
        full = self._full.get((role, sender.client))
        if full is None or sender.num_bytes < full.num_bytes or time.monotonic() > full.until_s:
            return None
        self.unread_rejections[role] = self.unread_rejections.get(role, 0) + 1
        return OverloadedError("the queue is too long to answer this request in time", max(0.05, full.queued_s))

    async def rank(
        self, deployment: ModelDeployment, user: str, history: History, candidates: Candidates, *, timeout_s: float
    ) -> RankResult:
        reply = await self._send_rank_frame(FrameKind.RANK, deployment, user, history, candidates, timeout_s=timeout_s)
        assert reply.result is not None
        assert reply.times is not None
        self._return_transit_s = time.perf_counter() - reply.times.ended_s
        tracing.record_engine_spans(
            reply.times,
            prefix_source=reply.result.source,
            num_cached=reply.result.num_cached,
            model_version=short_version(reply.result.version),
            num_candidates=len(candidates),
        )
        return reply.result

    async def preinfer(
        self,
        deployment: ModelDeployment,
        user: str,
        history: History,
        now_ms: int,
        num_candidates: int,
        *,
        timeout_s: float,
    ) -> Decision:
        expected = Candidates(items=_NO_ITEMS, now_ms=now_ms, num_best=num_candidates)
        reply = await self._send_rank_frame(
            FrameKind.PREINFER, deployment, user, history, expected, timeout_s=timeout_s
        )
        return Decision(reply.reason == "admitted", reply.reason)

    async def would_admit_preinfer(
        self, user: str, num_events: int, num_candidates: int
    ) -> tuple[ModelDeployment, Decision]:
        body = orjson.dumps({"user": user, "num_events": num_events, "num_candidates": num_candidates})
        response = await self.forward("POST", "/v1/preinfer", body, client=current_sender.get().client)
        reason = orjson.loads(response.body).get("reason", "never")
        return self.names.in_service[self.ranker], Decision(False, reason)

    # Requests to the engine process.

    async def forward(
        self, method: str, path: str, body: bytes = b"", *, raw_path: str = "", query: str = "", client: str = ""
    ) -> HttpResponse:
        """Forward an HTTP request to the engine process unchanged and return its response."""
        with tracing.client_span(0) as trace:
            head = {
                "method": method,
                "path": path,
                "raw_path": raw_path or path,
                "query": query,
                "client": client,
                "id": current_request_id.get(),
                "trace": trace.decode(),
            }
            head_json = orjson.dumps(head)
            payload = await self._exchange(
                FrameKind.FORWARD, len(head_json).to_bytes(4, "little") + head_json + body, None
            )
        size = int.from_bytes(payload[:4], "little")
        response_head = orjson.loads(payload[4 : 4 + size])
        response = HttpResponse(response_head["status"], payload[4 + size :])
        response.is_counted = True
        response.headers = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in response_head["headers"]
        ]
        return response

    async def _send_rank_frame(
        self,
        kind: FrameKind,
        fleet: ModelDeployment,
        user: str,
        history: History,
        candidates: Candidates,
        *,
        timeout_s: float,
    ) -> RankReply:
        assert isinstance(fleet, RemoteDeployment)
        sender = current_sender.get()
        frame = RankFrame(
            deployment=fleet.number,
            resolved_by=fleet.resolved_by,
            user=user,
            sender=replace(sender, return_transit_s=self._return_transit_s),
            timeout_s=timeout_s,
            history=history,
            candidates=candidates,
        )
        reply_timeout_s = timeout_s if kind == FrameKind.RANK else _REPLY_TIMEOUT_S
        reply = RankReply.decode(await self._exchange(kind, frame.encode(), reply_timeout_s))
        self._note_load(fleet.role, sender, reply)
        if reply.outcome == SWAPPED:
            await self._wait_for_deployment(reply.deployment)
            if fleet.resolved_by == "session":
                self._sessions[user] = reply.deployment
            raise ModelSwappedError
        if reply.outcome in _REJECTIONS:
            raise _REJECTIONS[reply.outcome](reply.reason, reply.retry_after_s)
        if reply.outcome != OK:
            raise RuntimeError(reply.reason)
        return reply

    def _note_load(self, role: str, sender: RequestSource, reply: RankReply) -> None:
        if reply.is_full:
            until_s = time.monotonic() + _FULL_S
            self._full[role, sender.client] = _FullQueue(sender.num_bytes, reply.queued_s, until_s)
        else:
            self._full.pop((role, sender.client), None)

    async def _exchange(self, kind: FrameKind, payload: bytes, reply_timeout_s: float | None) -> bytes:
        loop = asyncio.get_running_loop()
        self._number = number = (self._number + 1) & 0xFFFFFFFF
        waiter: asyncio.Future[bytes] = loop.create_future()
        self._waiting[number] = waiter
        timer = None if reply_timeout_s is None else loop.call_later(reply_timeout_s, _expire, waiter)
        channel = self.control if kind == FrameKind.FORWARD else self.quick
        channel.send(kind, number, payload)
        try:
            return await waiter
        except BaseException:
            channel.send(FrameKind.CANCEL, number)
            raise
        finally:
            del self._waiting[number]
            if timer is not None:
                timer.cancel()

    async def _wait_for_deployment(self, number: int) -> None:
        async with self._names_changed:
            await self._names_changed.wait_for(lambda: self.names.last_number >= number)

    async def wait_until_ready(self) -> None:
        """Wait until the names of the deployments in service have been received."""
        async with self._names_changed:
            await self._names_changed.wait_for(lambda: self.names.in_service)

    # Frames from the engine process.

    def _on_frame(self, kind: int, number: int, payload: bytes) -> None:
        match kind:
            case FrameKind.REPLY | FrameKind.FORWARD:
                waiter = self._waiting.get(number)
                if waiter is not None and not waiter.done():
                    waiter.set_result(payload)
            case FrameKind.COUNTERS:
                self.control.send(FrameKind.COUNTERS, number, orjson.dumps(self._drain_counters()))
            case FrameKind.NAMES:
                self._unapplied.append(payload)
                if self._apply_task is None or self._apply_task.done():
                    self._apply_task = asyncio.create_task(self._apply_names())
                    self._apply_task.add_done_callback(reported("nestrec-names"))
            case FrameKind.STOP:
                self._stop()

    async def _apply_names(self) -> None:
        """Apply received names on another thread: a large catalog takes a while, and requests must not wait."""
        while self._unapplied:
            await asyncio.to_thread(self.names.apply, self._unapplied.pop(0))
            async with self._names_changed:
                self._names_changed.notify_all()

    def _on_engine_lost(self) -> None:
        """Fail all pending requests and stop the worker: the engine process has ended."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(UnavailableError("the engine process has ended", 1.0))
        self._stop()


def _expire(waiter: "asyncio.Future[bytes]") -> None:
    if not waiter.done():
        waiter.set_exception(UnavailableError("the deadline passed", 0.05))
