"""The service, for a front: asked over a pair of sockets."""

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
from nestrec.serving.model.servable_spec import shown_version
from nestrec.serving.service.inference_service import ModelDeployment, ModelSwappedError, ServiceConfig

_PATIENCE_S = 30.0
"""for what is answered without computing"""
_FULL_S = 0.005
"""how long a full queue is taken to be full: then somebody is let through to see"""
_REFUSED = {OVERLOADED: OverloadedError, UNAVAILABLE: UnavailableError}
_NO_ITEMS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Full:
    num_bytes: int
    queued_s: float
    until_s: float


class RemoteScoringService:
    """What the endpoints of hot routes ask (`ScoringService`). Used inside one event loop."""

    def __init__(self, cfg: ServiceConfig, tell: Callable[[], Mapping[str, Any]], stop: Callable[[], None]):
        """tell: what has been counted since it was called last. stop: called when this front is to end."""
        self.cfg = cfg
        self._tell = tell
        self._stop = stop
        self.control, self.quick = (Channel(self._received, self._lost) for _ in range(2))
        self.known = DeploymentNameCache()
        self._are_known = asyncio.Condition()
        self.unread: dict[str, int] = {}
        """by role: requests that were refused without being read"""
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0
        self._sessions: dict[str, int] = {}
        self._full: dict[tuple[str, str], _Full] = {}
        self._taking: asyncio.Task[None] | None = None
        self._untaken: list[bytes] = []
        self._back_s = 0.0

    # What `Service` has.

    @property
    def fleets(self) -> Mapping[str, ModelDeployment]:
        return self.known.in_service

    @property
    def ranker(self) -> str:
        return "ranking" if "ranking" in self.known.in_service else "retrieval"

    def announced_fleet(self, user: str) -> ModelDeployment:
        return self.ranking_fleet(user)

    def ranking_fleet(self, user: str) -> ModelDeployment:
        """The one in service, unless the engine has just said that another one is told of this user."""
        told = self.known.find(self._sessions.pop(user, 0))
        return replace(told or self.known.in_service[self.ranker], by="session")

    def refusal(self, role: str, sender: RequestSource) -> OverloadedError | None:
        full = self._full.get((role, sender.client))
        if full is None or sender.num_bytes < full.num_bytes or time.monotonic() > full.until_s:
            return None
        self.unread[role] = self.unread.get(role, 0) + 1
        return OverloadedError("more work waits than can be done in time", max(0.05, full.queued_s))

    async def rank(
        self, fleet: ModelDeployment, user: str, history: History, candidates: Candidates, *, timeout_s: float
    ) -> RankResult:
        replied = await self._asked(FrameKind.RANK, fleet, user, history, candidates, timeout_s=timeout_s)
        assert replied.answer is not None
        assert replied.times is not None
        self._back_s = time.perf_counter() - replied.times.ended_s
        tracing.note_engine(
            replied.times,
            prefix_source=replied.answer.source,
            num_cached=replied.answer.num_cached,
            model_version=shown_version(replied.answer.version),
            num_candidates=len(candidates),
        )
        return replied.answer

    async def preinfer(
        self, fleet: ModelDeployment, user: str, history: History, now_ms: int, num_candidates: int, *, timeout_s: float
    ) -> Decision:
        expected = Candidates(items=_NO_ITEMS, now_ms=now_ms, num_best=num_candidates)
        replied = await self._asked(FrameKind.SIGNAL, fleet, user, history, expected, timeout_s=timeout_s)
        return Decision(replied.reason == "admitted", replied.reason)

    async def foresee(self, user: str, num_events: int, num_candidates: int) -> tuple[ModelDeployment, Decision]:
        body = orjson.dumps({"user": user, "events": num_events, "num_candidates": num_candidates})
        answered = await self.forward("POST", "/v1/preinfer", body, client=current_sender.get().client)
        reason = orjson.loads(answered.body).get("reason", "never")
        return self.known.in_service[self.ranker], Decision(False, reason)

    # What it asks with.

    async def forward(
        self, method: str, path: str, body: bytes = b"", *, raw_path: str = "", query: str = "", client: str = ""
    ) -> HttpResponse:
        """The answer of the process that computes to a request, as it came."""
        with tracing.sending(0) as trace:
            head = {
                "method": method,
                "path": path,
                "raw_path": raw_path or path,
                "query": query,
                "client": client,
                "id": current_request_id.get(),
                "trace": trace.decode(),
            }
            told = orjson.dumps(head)
            payload = await self._exchange(FrameKind.FORWARD, len(told).to_bytes(4, "little") + told + body, None)
        size = int.from_bytes(payload[:4], "little")
        about = orjson.loads(payload[4 : 4 + size])
        answered = HttpResponse(about["status"], payload[4 + size :])
        answered.is_counted = True
        answered.headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in about["headers"]]
        return answered

    async def _asked(
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
        asking = RankFrame(
            fleet=fleet.number,
            by=fleet.by,
            user=user,
            sender=replace(sender, back_s=self._back_s),
            timeout_s=timeout_s,
            history=history,
            candidates=candidates,
        )
        patience_s = timeout_s if kind == FrameKind.RANK else _PATIENCE_S
        replied = RankReply.unpacked(await self._exchange(kind, asking.packed(), patience_s))
        self._note_load(fleet.role, sender, replied)
        if replied.outcome == SWAPPED:
            await self._until_known(replied.fleet)
            if fleet.by == "session":
                self._sessions[user] = replied.fleet
            raise ModelSwappedError
        if replied.outcome in _REFUSED:
            raise _REFUSED[replied.outcome](replied.reason, replied.retry_after_s)
        if replied.outcome != OK:
            raise RuntimeError(replied.reason)
        return replied

    def _note_load(self, role: str, sender: RequestSource, replied: RankReply) -> None:
        if replied.is_full:
            until_s = time.monotonic() + _FULL_S
            self._full[role, sender.client] = _Full(sender.num_bytes, replied.queued_s, until_s)
        else:
            self._full.pop((role, sender.client), None)

    async def _exchange(self, kind: FrameKind, payload: bytes, patience_s: float | None) -> bytes:
        loop = asyncio.get_running_loop()
        self._number = number = (self._number + 1) & 0xFFFFFFFF
        waiter: asyncio.Future[bytes] = loop.create_future()
        self._waiting[number] = waiter
        timer = None if patience_s is None else loop.call_later(patience_s, _give_up, waiter)
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

    async def _until_known(self, number: int) -> None:
        async with self._are_known:
            await self._are_known.wait_for(lambda: self.known.last >= number)

    async def until_told(self) -> None:
        """Until it knows what is in service."""
        async with self._are_known:
            await self._are_known.wait_for(lambda: self.known.in_service)

    # What it is told.

    def _received(self, kind: int, number: int, payload: bytes) -> None:
        match kind:
            case FrameKind.ANSWER | FrameKind.FORWARD:
                waiter = self._waiting.get(number)
                if waiter is not None and not waiter.done():
                    waiter.set_result(payload)
            case FrameKind.TELL:
                self.control.send(FrameKind.TELL, number, orjson.dumps(self._tell()))
            case FrameKind.NAMES:
                self._untaken.append(payload)
                if self._taking is None or self._taking.done():
                    self._taking = asyncio.create_task(self._take_names())
                    self._taking.add_done_callback(reported("nestrec-names"))
            case FrameKind.STOP:
                self._stop()

    async def _take_names(self) -> None:
        """Beside requests: many names take a while to be ordered."""
        while self._untaken:
            await asyncio.to_thread(self.known.take, self._untaken.pop(0))
            async with self._are_known:
                self._are_known.notify_all()

    def _lost(self) -> None:
        """Whoever computes is gone."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(UnavailableError("the engine has ended", 1.0))
        self._stop()


def _give_up(waiter: "asyncio.Future[bytes]") -> None:
    if not waiter.done():
        waiter.set_exception(UnavailableError("the deadline passed", 0.05))
