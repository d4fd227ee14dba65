"""The side of the process that computes: what its fronts ask goes to the engines, and answers go back.

Of a ranking request this process has the arrays alone: nothing is parsed, looked up or written as JSON here, so that
the interpreter is free for the thread that launches batches. The event loop has no part in it either (`wires`). A front
that dies is replaced (`processes`), and costs the requests that it was answering.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import orjson
import uvicorn

from nestrec.serving.core import tracing
from nestrec.serving.core.asgi import Message, Receive, Scope, Send
from nestrec.serving.core.background_tasks import FAILURES
from nestrec.serving.core.rejections import OverloadedError, RequestRejectedError, UnavailableError
from nestrec.serving.core.request_limits import RequestSource, current_request_id
from nestrec.serving.frontend.deployment_names import DeploymentNumbers, NameSender
from nestrec.serving.frontend.wire_format import (
    FAILED,
    OK,
    OVERLOADED,
    SWAPPED,
    UNAVAILABLE,
    FrameKind,
    RankFrame,
    RankReply,
)
from nestrec.serving.frontend.worker_pool import FrontendWorker, FrontendWorkerPool, Spawner
from nestrec.serving.http.fast_request import RequestHead
from nestrec.serving.http.http_app import App
from nestrec.serving.http.signals import SignalHandler
from nestrec.serving.http.sockets import Server, close_all
from nestrec.serving.inputs.engine_request import EngineRequest, RankResult
from nestrec.serving.security.auth import AccessRules
from nestrec.serving.service.inference_service import ModelDeployment, ModelSwappedError, Service

_LOG = logging.getLogger(__name__)
_TELL_S = 1.0
_HANG_S = 15.0
"""without a word: an interpreter may be busy for seconds, but not for so long"""


@dataclass(frozen=True, slots=True)
class _Ended:
    """A ranking request whose work has ended."""

    front: FrontendWorker
    number: int
    slot: int
    fleet: ModelDeployment
    sender: RequestSource
    work: EngineRequest


class FrontendHub:
    """An ASGI application whose requests come through fronts, from its start to its end."""

    def __init__(
        self,
        app: App,
        spawner: Spawner,
        sockets: Callable[[], list[socket.socket]],
        *,
        count: int,
        config: bytes,
        drain_s: float,
        refusals: dict[str, int],
        awake_s: float = 0.0,
    ):
        """sockets: that one more front is to listen on. config: what a front is told first. refusals: counts of the
        gates are added to them. awake_s: see `EngineSocketLoop`."""
        self._app = app
        self._service = app.front.service
        self._refusals = refusals
        self._access = AccessRules(app.front.endpoints.values())
        self._processes = FrontendWorkerPool(
            spawner, sockets, self, count=count, config=config, drain_s=drain_s, awake_s=awake_s
        )
        self._numbers = DeploymentNumbers()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tell_number = 0
        app.metrics.gather = self._gather

    def run(
        self, config: uvicorn.Config, sockets: list[socket.socket], signals: SignalHandler, announce: Callable[[], None]
    ) -> None:
        """Serve until a signal. config: of this application. sockets: hold the port, and nobody listens on them.
        announce: called when all fronts listen."""
        server = Server(config, lambda: None)
        processes = self._processes
        processes.announce = announce
        processes.end = server.end
        signals.when_stopped(processes.stop)
        try:
            server.run([])
        finally:
            processes.close()
            close_all(sockets)
        if processes.failure is not None:
            raise processes.failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._loop = asyncio.get_running_loop()
                self._processes.start()
            await send(message)

        await self._app(scope, receive, told)

    # What fronts say.

    def names(self) -> NameSender:
        return NameSender(self._numbers)

    def opened(self, front: FrontendWorker) -> None:
        self._tell_names(front)

    def received(self, front: FrontendWorker, kind: int, number: int, payload: bytes) -> None:
        match kind:
            case FrameKind.CANCEL:
                if (gone := front.forwarded.get(number)) is not None:
                    gone.set()
            case FrameKind.FORWARD:
                self._processes.run(self._forwarded(front, number, payload))
            case FrameKind.TELL:
                self._told(front, number, payload)
            case FrameKind.LISTENING:
                self._processes.listens(front, number)

    # What fronts ask of engines: the thread of `EngineSocketLoop`.

    def asked(self, front: FrontendWorker, kind: int, number: int, payload: bytes) -> None:
        if kind == FrameKind.CANCEL:
            if (work := front.works.get(number)) is not None:
                work.future.cancel()
            return
        try:
            asking = RankFrame.unpacked(payload)
            fleet = self._fleet_of(asking, is_signal=kind == FrameKind.SIGNAL)
            if kind == FrameKind.SIGNAL:
                self._reply(front, number, self._decided(fleet, asking))
            else:
                self._begin(front, number, fleet, asking)
        except _OtherFleetError as other:
            self._reply(front, number, self._swapped(front, other.fleet))
        except Exception as error:
            self._reply(front, number, _refused(error))

    def _fleet_of(self, asking: RankFrame, *, is_signal: bool) -> ModelDeployment:
        """The one that it was read with, which is the one that is to answer it."""
        service = self._service
        named = self._numbers.find(asking.fleet)
        if asking.by == "session":
            right = service.announced_fleet(asking.user) if is_signal else service.ranking_fleet(asking.user)
        else:
            right = named if named in service.fleets.values() and named is not None else _newest(service, self._numbers)
        if right is not named:
            raise _OtherFleetError(right)
        return right

    def _begin(self, front: FrontendWorker, number: int, fleet: ModelDeployment, asking: RankFrame) -> None:
        sender = asking.sender
        try:
            slot, work = self._service.begin_rank(
                fleet, asking.user, asking.history, asking.candidates, timeout_s=asking.timeout_s, sender=sender
            )
        except ModelSwappedError:
            raise _OtherFleetError(_newest(self._service, self._numbers)) from None
        except OverloadedError as error:
            self._reply(front, number, _refused(error, is_full=self._service.is_full(fleet, sender)))
            return
        front.works[number] = work
        ended = _Ended(front, number, slot, fleet, sender, work)
        work.future.add_done_callback(lambda _: self._has_ended(ended))

    def _decided(self, fleet: ModelDeployment, asking: RankFrame) -> RankReply:
        try:
            decision = self._service.signal(
                fleet,
                asking.user,
                asking.history,
                asking.candidates.now_ms,
                asking.candidates.num_best,
                timeout_s=asking.timeout_s,
                sender=asking.sender,
            )
        except ModelSwappedError:
            raise _OtherFleetError(_newest(self._service, self._numbers)) from None
        return RankReply(outcome=OK, reason=decision.reason)

    # What has been computed: the thread of an engine, or of whoever gives a request up.

    def _has_ended(self, ended: _Ended) -> None:
        self._service.end_rank(ended.slot)
        ended.front.works.pop(ended.number, None)
        if not ended.work.future.cancelled():
            self._reply(ended.front, ended.number, self._outcome(ended))

    def _outcome(self, ended: _Ended) -> RankReply:
        error = ended.work.future.exception()
        if error is not None:
            return _refused(error)
        answer: RankResult = ended.work.future.result()
        try:
            self._service.check_names(ended.fleet, answer)
        except ModelSwappedError:
            return self._swapped(ended.front, _newest(self._service, self._numbers))
        return RankReply(
            outcome=OK,
            is_full=self._service.is_full(ended.fleet, ended.sender),
            queued_s=ended.fleet.engines[ended.slot].queued_s,
            answer=answer,
            times=ended.work.times(),
        )

    def _swapped(self, front: FrontendWorker, fleet: ModelDeployment) -> RankReply:
        """Read it again, by the names of this fleet; they are on their way."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._tell_names, front, fleet)
        return RankReply(outcome=SWAPPED, fleet=self._numbers.of(fleet))

    def _reply(self, front: FrontendWorker, number: int, replied: RankReply) -> None:
        front.wire.send(FrameKind.ANSWER, number, replied.packed())

    def _tell_names(self, front: FrontendWorker, *others: ModelDeployment) -> None:
        front.channel.send(FrameKind.NAMES, 0, front.names.message(self._service.fleets, others))

    # Everything else.

    async def _forwarded(self, front: FrontendWorker, number: int, payload: bytes) -> None:
        """A request that the application answers as if it had come here."""
        size = int.from_bytes(payload[:4], "little")
        head = orjson.loads(payload[4 : 4 + size])
        body = payload[4 + size :]
        gone = front.forwarded[number] = asyncio.Event()
        answer = _Collected()
        current_request_id.set(head["id"])
        incoming = RequestHead(
            head["id"],
            head["client"],
            None,
            route=self._access.route_of(head["path"], head["raw_path"]),
            traceparent=head["trace"].encode(),
            is_forwarded=True,
        )
        served = self._app(_scope(head, body, incoming), _receiver(body, gone), answer.send)
        try:
            await (incoming.traced(served) if incoming.is_traced else served)
        finally:
            del front.forwarded[number]
        if not gone.is_set():
            about = orjson.dumps({"status": answer.status, "headers": answer.headers})
            parts = len(about).to_bytes(4, "little"), about, b"".join(answer.body)
            front.channel.send(FrameKind.FORWARD, number, *parts)

    async def _gather(self) -> None:
        """Have all fronts tell what they have counted, and end those that say nothing any more."""
        waiting = {}
        for front in self._processes.listening:
            self._tell_number += 1
            waiting[front] = front.tells[self._tell_number] = asyncio.get_running_loop().create_future()
            front.channel.send(FrameKind.TELL, self._tell_number)
        if waiting:
            await asyncio.wait(waiting.values(), timeout=_TELL_S)
        for front, waiter in waiting.items():
            if not waiter.done() and time.monotonic() - front.heard_s > _HANG_S:
                _LOG.error("front process %d does not answer", front.slot)
                front.kill()

    def _told(self, front: FrontendWorker, number: int, payload: bytes) -> None:
        """What a front has counted since it told it last; taken also where nobody waits for it any more."""
        front.heard_s = time.monotonic()
        waiter = front.tells.pop(number, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        told = orjson.loads(payload)
        for route, status, times in told["answers"]:
            for seconds in times:
                self._app.metrics.observe(route, status, seconds)
        for reason, count in told["refusals"].items():
            self._refusals[reason] = self._refusals.get(reason, 0) + count
        FAILURES.merge(told["failures"])
        for role, count in told["unread"].items():
            if (fleet := self._service.fleets.get(role)) is not None:
                fleet.engines[0].refused_unread(count)


class _OtherFleetError(Exception):
    """A request was read with other names than those of the fleet that is to answer it."""

    def __init__(self, fleet: ModelDeployment):
        super().__init__()
        self.fleet = fleet


class _Collected:
    """An answer as an application sends it."""

    def __init__(self) -> None:
        self.status = 500
        self.headers = list[tuple[str, str]]()
        self.body = list[bytes]()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            tracing.note(http__response__status_code=self.status)
            self.headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
        else:
            self.body.append(message.get("body", b""))


def _scope(head: Mapping[str, str], body: bytes, incoming: RequestHead) -> Scope:
    """A request that a front has let in, with its body already read."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope: Scope = {
        "type": "http",
        "method": head["method"],
        "path": head["path"],
        "raw_path": head["raw_path"].encode("latin-1"),
        "query_string": head["query"].encode("latin-1"),
        "headers": headers,
    }
    incoming.put_into(scope)
    return scope


def _receiver(body: bytes, gone: asyncio.Event) -> Receive:
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive


def _newest(service: Service, numbers: DeploymentNumbers) -> ModelDeployment:
    """Of the fleets in service, the one that came last: who knows it knows all of them."""
    return max(service.fleets.values(), key=numbers.of)


def _refused(error: BaseException, *, is_full: bool = False) -> RankReply:
    if not isinstance(error, RequestRejectedError):
        _LOG.error("a request failed", exc_info=error)
        return RankReply(outcome=FAILED, reason="the request failed here")
    outcome = UNAVAILABLE if isinstance(error, UnavailableError) else OVERLOADED
    return RankReply(
        outcome=outcome,
        is_full=is_full,
        queued_s=error.retry_after_s,
        reason=error.reason,
        retry_after_s=error.retry_after_s,
    )
