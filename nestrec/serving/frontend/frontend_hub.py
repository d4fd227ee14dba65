"""Engine-process side of the frontend workers: passes their requests to the engines and sends back the results.

Ranking requests arrive as arrays. Parsing, id lookup and JSON encoding happen in the workers, so that the interpreter
of this process is free for the thread that launches batches. The event loop is not involved either: a separate thread
reads the requests (`EngineSocketLoop`). A worker process that dies is replaced (`FrontendWorkerPool`); only the
requests that it was processing are lost.
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
_COUNTERS_TIMEOUT_S = 1.0
_HANG_S = 15.0
"""A worker that has not replied for this long is killed; a busy interpreter can be unresponsive for a few seconds."""


@dataclass(frozen=True, slots=True)
class _RankCompletion:
    """Context of a ranking request, needed to send its reply when the engine has completed it."""

    worker: FrontendWorker
    number: int
    slot: int
    deployment: ModelDeployment
    sender: RequestSource
    request: EngineRequest


class FrontendHub:
    """ASGI application of the engine process; its requests come from frontend workers, which it starts and stops."""

    def __init__(
        self,
        app: App,
        spawner: Spawner,
        sockets: Callable[[], list[socket.socket]],
        *,
        count: int,
        config: bytes,
        drain_s: float,
        auth_failures: dict[str, int],
        awake_s: float = 0.0,
    ):
        """Create the hub; the workers are started by `run`.

        Args:
            app: Application that answers all requests except ranking and pre-infer requests.
            spawner: Starts worker processes.
            sockets: Returns the listening sockets for one more worker.
            count: Number of workers.
            config: Pickled configuration, the first message to each worker.
            drain_s: Time for workers to complete their requests at shutdown, in seconds.
            auth_failures: Rejected requests by reason; the counts of the workers are added to it.
            awake_s: See `EngineSocketLoop`.
        """
        self._app = app
        self._service = app.context.service
        self._auth_failures = auth_failures
        self._access = AccessRules(app.context.endpoints.values())
        self._pool = FrontendWorkerPool(
            spawner, sockets, self, count=count, config=config, drain_s=drain_s, awake_s=awake_s
        )
        self._numbers = DeploymentNumbers()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._counters_number = 0
        app.metrics.before_collect = self._gather_counters

    def run(
        self, config: uvicorn.Config, sockets: list[socket.socket], signals: SignalHandler, announce: Callable[[], None]
    ) -> None:
        """Serve until a termination signal.

        Args:
            config: uvicorn configuration of this application.
            sockets: Bound sockets that reserve the port; this process does not listen on them.
            signals: Signal handler of the process.
            announce: Called when all workers accept connections.

        Raises:
            UserError: The workers did not start.
        """
        server = Server(config, lambda: None)
        pool = self._pool
        pool.announce = announce
        pool.end = server.end
        signals.on_stop(pool.stop)
        try:
            server.run([])
        finally:
            pool.close()
            close_all(sockets)
        if pool.failure is not None:
            raise pool.failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def send_and_start(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._loop = asyncio.get_running_loop()
                self._pool.start()
            await send(message)

        await self._app(scope, receive, send_and_start)

    # `WorkerListener`: frames of the control channel, on the event loop.

    def new_name_sender(self) -> NameSender:
        return NameSender(self._numbers)

    def on_worker_ready(self, worker: FrontendWorker) -> None:
        self._send_names(worker)

    def on_frame(self, worker: FrontendWorker, kind: int, number: int, payload: bytes) -> None:
        match kind:
            case FrameKind.CANCEL:
                if (disconnected := worker.forwarded.get(number)) is not None:
                    disconnected.set()
            case FrameKind.FORWARD:
                self._pool.run_in_background(self._serve_forwarded(worker, number, payload))
            case FrameKind.COUNTERS:
                self._on_counters(worker, number, payload)
            case FrameKind.LISTENING:
                self._pool.on_listening(worker, number)

    # `WorkerListener`: requests for engines, on the thread of `EngineSocketLoop`.

    def on_engine_frame(self, worker: FrontendWorker, kind: int, number: int, payload: bytes) -> None:
        if kind == FrameKind.CANCEL:
            if (request := worker.engine_requests.get(number)) is not None:
                request.future.cancel()
            return
        try:
            frame = RankFrame.decode(payload)
            deployment = self._resolve_deployment(frame, is_preinfer=kind == FrameKind.PREINFER)
            if kind == FrameKind.PREINFER:
                self._send_reply(worker, number, self._preinfer_reply(deployment, frame))
            else:
                self._begin_rank(worker, number, deployment, frame)
        except _DeploymentChangedError as change:
            self._send_reply(worker, number, self._swapped_reply(worker, change.deployment))
        except Exception as error:
            self._send_reply(worker, number, _rejection_reply(error))

    def _resolve_deployment(self, frame: RankFrame, *, is_preinfer: bool) -> ModelDeployment:
        """Return the deployment that must answer a request.

        Raises:
            _DeploymentChangedError: It is not the deployment whose names the worker used to decode the request.
        """
        service = self._service
        used = self._numbers.find(frame.deployment)
        if frame.resolved_by == "session":
            current = service.session_deployment(frame.user) if is_preinfer else service.ranking_deployment(frame.user)
        else:
            current = (
                used
                if used in service.deployments.values() and used is not None
                else _newest_deployment(service, self._numbers)
            )
        if current is not used:
            raise _DeploymentChangedError(current)
        return current

    def _begin_rank(self, worker: FrontendWorker, number: int, deployment: ModelDeployment, frame: RankFrame) -> None:
        sender = frame.sender
        try:
            slot, request = self._service.submit_rank(
                deployment, frame.user, frame.history, frame.candidates, timeout_s=frame.timeout_s, sender=sender
            )
        except ModelSwappedError:
            raise _DeploymentChangedError(_newest_deployment(self._service, self._numbers)) from None
        except OverloadedError as error:
            self._send_reply(
                worker, number, _rejection_reply(error, is_full=self._service.is_overloaded(deployment, sender))
            )
            return
        worker.engine_requests[number] = request
        completion = _RankCompletion(worker, number, slot, deployment, sender, request)
        request.future.add_done_callback(lambda _: self._on_rank_done(completion))

    def _preinfer_reply(self, deployment: ModelDeployment, frame: RankFrame) -> RankReply:
        try:
            decision = self._service.submit_preinfer(
                deployment,
                frame.user,
                frame.history,
                frame.candidates.now_ms,
                frame.candidates.num_best,
                timeout_s=frame.timeout_s,
                sender=frame.sender,
            )
        except ModelSwappedError:
            raise _DeploymentChangedError(_newest_deployment(self._service, self._numbers)) from None
        return RankReply(outcome=OK, reason=decision.reason)

    # Replies: on the thread of an engine, or on the thread that cancels a request.

    def _on_rank_done(self, completion: _RankCompletion) -> None:
        self._service.release_slot(completion.slot)
        completion.worker.engine_requests.pop(completion.number, None)
        if not completion.request.future.cancelled():
            self._send_reply(completion.worker, completion.number, self._rank_reply(completion))

    def _rank_reply(self, completion: _RankCompletion) -> RankReply:
        error = completion.request.future.exception()
        if error is not None:
            return _rejection_reply(error)
        result: RankResult = completion.request.future.result()
        try:
            self._service.check_vocabulary(completion.deployment, result)
        except ModelSwappedError:
            return self._swapped_reply(completion.worker, _newest_deployment(self._service, self._numbers))
        return RankReply(
            outcome=OK,
            is_full=self._service.is_overloaded(completion.deployment, completion.sender),
            queued_s=completion.deployment.engines[completion.slot].queued_s,
            result=result,
            times=completion.request.times(),
        )

    def _swapped_reply(self, worker: FrontendWorker, deployment: ModelDeployment) -> RankReply:
        """Ask the worker to decode the request again with the names of this deployment, which are sent to it."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is shutting down
            self._loop.call_soon_threadsafe(self._send_names, worker, deployment)
        return RankReply(outcome=SWAPPED, deployment=self._numbers.number_of(deployment))

    def _send_reply(self, worker: FrontendWorker, number: int, reply: RankReply) -> None:
        worker.engine_socket.send(FrameKind.REPLY, number, reply.encode())

    def _send_names(self, worker: FrontendWorker, *others: ModelDeployment) -> None:
        worker.channel.send(FrameKind.NAMES, 0, worker.names.message(self._service.deployments, others))

    # Forwarded requests and counters.

    async def _serve_forwarded(self, worker: FrontendWorker, number: int, payload: bytes) -> None:
        """Answer a forwarded request with the application, as if this process had received it."""
        size = int.from_bytes(payload[:4], "little")
        head = orjson.loads(payload[4 : 4 + size])
        body = payload[4 + size :]
        disconnected = worker.forwarded[number] = asyncio.Event()
        response = _ResponseCollector()
        current_request_id.set(head["id"])
        incoming = RequestHead(
            head["id"],
            head["client"],
            None,
            route=self._access.route_of(head["path"], head["raw_path"]),
            traceparent=head["trace"].encode(),
            is_forwarded=True,
        )
        served = self._app(_scope(head, body, incoming), _receiver(body, disconnected), response.send)
        try:
            await (incoming.traced(served) if incoming.is_traced else served)
        finally:
            del worker.forwarded[number]
        if not disconnected.is_set():
            head_json = orjson.dumps({"status": response.status, "headers": response.headers})
            parts = len(head_json).to_bytes(4, "little"), head_json, b"".join(response.body)
            worker.channel.send(FrameKind.FORWARD, number, *parts)

    async def _gather_counters(self) -> None:
        """Collect the counters of all workers; kill the workers that have not replied for a long time."""
        waiting = {}
        for worker in self._pool.listening:
            self._counters_number += 1
            waiting[worker] = worker.counter_waiters[self._counters_number] = asyncio.get_running_loop().create_future()
            worker.channel.send(FrameKind.COUNTERS, self._counters_number)
        if waiting:
            await asyncio.wait(waiting.values(), timeout=_COUNTERS_TIMEOUT_S)
        for worker, waiter in waiting.items():
            if not waiter.done() and time.monotonic() - worker.last_reply_s > _HANG_S:
                _LOG.error("frontend worker %d is not responding", worker.slot)
                worker.kill()

    def _on_counters(self, worker: FrontendWorker, number: int, payload: bytes) -> None:
        """Add the counters of a worker, even if `_gather_counters` stopped waiting: they are sent only once."""
        worker.last_reply_s = time.monotonic()
        waiter = worker.counter_waiters.pop(number, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        counts = orjson.loads(payload)
        for route, status, times in counts["responses"]:
            for seconds in times:
                self._app.metrics.observe(route, status, seconds)
        for reason, count in counts["auth_failures"].items():
            self._auth_failures[reason] = self._auth_failures.get(reason, 0) + count
        FAILURES.merge(counts["failures"])
        for role, count in counts["unread_rejections"].items():
            if (deployment := self._service.deployments.get(role)) is not None:
                deployment.engines[0].count_unread_rejections(count)


class _DeploymentChangedError(Exception):
    """A request was decoded with the names of a different deployment than the one that must answer it."""

    def __init__(self, deployment: ModelDeployment):
        super().__init__()
        self.deployment = deployment


class _ResponseCollector:
    """Collects the response that an ASGI application sends."""

    def __init__(self) -> None:
        self.status = 500
        self.headers = list[tuple[str, str]]()
        self.body = list[bytes]()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            tracing.set_span_attributes(http__response__status_code=self.status)
            self.headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
        else:
            self.body.append(message.get("body", b""))


def _scope(head: Mapping[str, str], body: bytes, incoming: RequestHead) -> Scope:
    """Return the ASGI scope of a forwarded request, whose body has been read and which passed access control."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope: Scope = {
        "type": "http",
        "method": head["method"],
        "path": head["path"],
        "raw_path": head["raw_path"].encode("latin-1"),
        "query_string": head["query"].encode("latin-1"),
        "headers": headers,
    }
    incoming.store_in(scope)
    return scope


def _receiver(body: bytes, disconnected: asyncio.Event) -> Receive:
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    return receive


def _newest_deployment(service: Service, numbers: DeploymentNumbers) -> ModelDeployment:
    """Return the newest deployment in service: a worker that knows its names knows those of all older ones."""
    return max(service.deployments.values(), key=numbers.number_of)


def _rejection_reply(error: BaseException, *, is_full: bool = False) -> RankReply:
    if not isinstance(error, RequestRejectedError):
        _LOG.error("a request failed", exc_info=error)
        return RankReply(outcome=FAILED, reason="the request failed in the engine process; see its log")
    outcome = UNAVAILABLE if isinstance(error, UnavailableError) else OVERLOADED
    return RankReply(
        outcome=outcome,
        is_full=is_full,
        queued_s=error.retry_after_s,
        reason=error.reason,
        retry_after_s=error.retry_after_s,
    )
