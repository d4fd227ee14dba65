"""Starts, supervises and stops the frontend worker processes.

A frontend worker accepts HTTP connections on its own listening socket and sends the requests to the engine process. It
shuts down when it is asked to, after completing the requests that it has accepted, or when the engine process is gone.
`FrontendWorkerPool` starts the workers together, restarts each one that ends, and stops them together.

Workers are forked from a fork server (`ForkServer`): a process that has imported everything and does nothing else.
Imports take seconds and most of a worker's memory; a fork shares both. The engine process cannot be forked itself,
because it has threads and uses a device.
"""

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from nestrec.base.errors import UserError
from nestrec.serving.core import tracing
from nestrec.serving.core.background_tasks import reported
from nestrec.serving.frontend.deployment_names import NameSender
from nestrec.serving.frontend.frontend_app import FrontendApp, KeepAwake, WorkerCounters
from nestrec.serving.frontend.remote_service import RemoteScoringService
from nestrec.serving.frontend.wire_format import Channel, EngineSocket, EngineSocketLoop, FrameKind
from nestrec.serving.http.routes import all_endpoints
from nestrec.serving.http.serve_config import ServeConfig, create_security, process_name, uvicorn_config
from nestrec.serving.http.server_logging import install_nonblocking_log, wait_for_log
from nestrec.serving.http.signals import SignalHandler
from nestrec.serving.http.sockets import allow_open_files, close_all, run_server
from nestrec.serving.inputs.engine_request import EngineRequest
from nestrec.serving.security import security_config
from nestrec.serving.security.rate_limiter import RateLimiter

_HEAD = struct.Struct("<IBI")


def run_worker(control: socket.socket, quick: socket.socket, sockets: list[socket.socket], rates: RateLimiter) -> None:
    """Run a frontend worker until it is stopped.

    Args:
        control: Socket of the control channel to the engine process (`wire_format`).
        quick: Socket of the quick channel to the engine process.
        sockets: Listening sockets for HTTP.
        rates: Rate limiter per API key, shared by all workers.
    """
    signals = SignalHandler.installed()
    signals.on_reload(lambda: None)  # models are loaded by the engine process
    cfg = _per_worker_config(*pickle.loads(_read_config(control)))
    install_nonblocking_log(cfg.log, process_name())
    tracing.start(cfg.tracing)
    allow_open_files(cfg.limits.max_connections)
    sys.setswitchinterval(5e-5)
    security = create_security(cfg, rates)
    counters = WorkerCounters()

    def drain_counters() -> Mapping[str, Any]:
        unread, service.unread_rejections = service.unread_rejections, {}
        return {**counters.drain(), "unread_rejections": unread}

    async def connect() -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: service.quick, sock=quick)
        await loop.create_connection(lambda: service.control, sock=control)
        await service.wait_until_ready()

    def announce() -> None:
        service.control.send(FrameKind.LISTENING, os.getpid())

    service = RemoteScoringService(cfg.service, drain_counters, signals.stop)
    keep_awake = KeepAwake((cfg.keep_awake_ms or 0.0) / 1e3)
    app = FrontendApp(service, cfg.limits, all_endpoints(), counters, connect=connect, on_request=keep_awake.on_request)
    try:
        run_server(uvicorn_config(app, cfg, app, security), sockets, signals, announce)
    finally:
        tracing.stop()
        security.close()
    wait_for_log()


def _per_worker_config(cfg: ServeConfig, count: int) -> ServeConfig:
    """Return the configuration of one of `count` workers.

    Connection limits apply to all workers together; the engine process serves the health port.
    """
    limits = cfg.limits
    limits = replace(
        limits,
        max_connections=-(-limits.max_connections // count),
        max_connections_per_address=-(-limits.max_connections_per_address // count),
    )
    return replace(cfg, limits=limits, health_port=None)


def _read_config(channel: socket.socket) -> bytes:
    """Read the configuration frame, blocking: there is no event loop yet."""
    size, kind, _ = _HEAD.unpack(_read_exactly(channel, _HEAD.size))
    assert kind == FrameKind.CONFIG
    return _read_exactly(channel, size + 4 - _HEAD.size)


def _read_exactly(channel: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        chunk = channel.recv(size - len(parts))
        if not chunk:
            raise EOFError
        parts += chunk
    return parts


_LOG = logging.getLogger(__name__)
_SOCKET_BYTES = 4 << 20
_SHORT_LIFE_S, _LONGEST_PAUSE_S = 10.0, 30.0
_MAX_START_FAILURES = 3
"""Consecutive failures of a worker before any start-up has succeeded, after which the server gives up."""


class Spawner(Protocol):
    """Starts worker processes."""

    def spawn(self, sockets: list[socket.socket]) -> None: ...


@dataclass(eq=False, slots=True)
class FrontendWorker:
    """Engine-process view of one worker process and of its requests in flight."""

    slot: int
    names: NameSender
    channel: Channel = field(init=False)
    engine_socket: EngineSocket = field(init=False)
    started_s: float = field(default_factory=time.monotonic)
    last_reply_s: float = field(default_factory=time.monotonic)
    pid: int = 0
    """Process id; 0 until the worker accepts connections."""
    engine_requests: dict[int, EngineRequest] = field(default_factory=dict)
    forwarded: dict[int, asyncio.Event] = field(default_factory=dict)
    """Forwarded requests in flight, by number; the event is set when the client has disconnected."""
    counter_waiters: dict[int, "asyncio.Future[None]"] = field(default_factory=dict)
    """Futures that complete when the worker has sent its counters, by number of the request for them."""

    def cancel_all(self) -> None:
        """Cancel all requests in flight: the worker process has ended."""
        self.engine_socket.shut_down()
        for request in list(self.engine_requests.values()):
            request.future.cancel()
        for disconnected in self.forwarded.values():
            disconnected.set()
        for waiter in self.counter_waiters.values():
            waiter.cancel()

    def kill(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.channel.close()  # this ends a worker whose process id is not known yet


class WorkerListener(Protocol):
    """Receiver of the frames of all workers."""

    def new_name_sender(self) -> NameSender:
        """Return a name sender for a new worker."""
        ...

    def on_worker_ready(self, worker: FrontendWorker) -> None:
        """Handle the connection of a worker: frames can be sent to it now."""
        ...

    def on_frame(self, worker: FrontendWorker, kind: int, number: int, payload: bytes) -> None:
        """Handle a frame of the control channel, on the event loop."""
        ...

    def on_engine_frame(self, worker: FrontendWorker, kind: int, number: int, payload: bytes) -> None:
        """Handle a frame of the quick channel, on the thread of `EngineSocketLoop`."""
        ...


class FrontendWorkerPool:
    """Supervisor of the worker processes. Use it from one event loop, except for `stop` and `close`."""

    def __init__(
        self,
        spawner: Spawner,
        sockets: Callable[[], list[socket.socket]],
        listener: WorkerListener,
        *,
        count: int,
        config: bytes,
        drain_s: float,
        awake_s: float,
    ):
        """Create the pool; `start` starts the workers.

        Args:
            spawner: Starts worker processes.
            sockets: Returns the listening sockets for one more worker.
            listener: Receives the frames of the workers.
            count: Number of workers.
            config: Pickled configuration, the first message to each worker.
            drain_s: Time for workers to complete their requests at shutdown, in seconds.
            awake_s: See `EngineSocketLoop`.
        """
        self._spawner = spawner
        self._sockets = sockets
        self._listener = listener
        self._awake_s = awake_s
        self._count = count
        self._config = config
        self._drain_s = drain_s
        self.announce: Callable[[], None] = lambda: None
        """Called once, when all workers accept connections."""
        self.end: Callable[[bool], None] = lambda _: None
        """Called when all workers have ended after `stop`; the argument is True if draining was skipped."""
        self.failure: UserError | None = None
        """Error because of which the pool stopped itself."""
        self._workers: dict[int, FrontendWorker] = {}
        self._failures: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_announced = self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._socket_loop: EngineSocketLoop | None = None

    @property
    def listening(self) -> list[FrontendWorker]:
        """Workers that accept connections."""
        return [worker for worker in self._workers.values() if worker.pid]

    def start(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            is_stopping = self._is_stopping
        if is_stopping:
            self.end(False)
            return
        self._socket_loop = EngineSocketLoop(self._awake_s)
        for slot in range(self._count):
            self._spawn(slot)

    def stop(self, is_immediate: bool) -> None:
        """Shut down the workers. Thread-safe.

        Args:
            is_immediate: Kill the workers instead of draining their accepted requests.
        """
        with self._lock:
            loop = self._loop
            self._is_stopping = True
        if loop is not None:
            loop.call_soon_threadsafe(self._stop_all, is_immediate)

    def close(self) -> None:
        """Stop the thread of the quick channels; call it after the event loop has ended."""
        if self._socket_loop is not None:
            self._socket_loop.close()

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task whose failure is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(reported("nestrec-frontend-workers"))

    def on_listening(self, worker: FrontendWorker, pid: int) -> None:
        """Set the process id of a worker that accepts connections."""
        worker.pid = pid
        if not self._is_announced and all(f.pid for f in self._workers.values()):
            self._is_announced = True
            self.announce()

    def _stop_all(self, is_immediate: bool) -> None:
        if not self._workers:
            self.end(is_immediate)
            return
        for worker in self._workers.values():
            if is_immediate or not worker.pid:
                worker.kill()
            else:
                worker.channel.send(FrameKind.STOP, 0)
        assert self._loop is not None
        self._loop.call_later(self._drain_s + 5.0, self._kill_all)

    def _kill_all(self) -> None:
        for worker in list(self._workers.values()):
            worker.kill()

    def _spawn(self, slot: int) -> None:
        if self._is_stopping or self._socket_loop is None:
            return
        pairs = [socket.socketpair() for _ in range(2)]
        sockets = self._sockets()
        worker_ends = [worker_end for _, worker_end in pairs]
        try:
            for end in itertools.chain(*pairs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            self._spawner.spawn([*worker_ends, *sockets])
        finally:
            close_all([*worker_ends, *sockets])
        (control, _), (quick, _) = pairs
        control.setblocking(False)
        worker = FrontendWorker(slot, self._listener.new_name_sender())
        worker.engine_socket = self._socket_loop.add(quick, partial(self._listener.on_engine_frame, worker))
        worker.channel = Channel(partial(self._listener.on_frame, worker), partial(self._on_exit, worker))
        self._workers[slot] = worker
        self.run_in_background(self._connect(worker, control))

    async def _connect(self, worker: FrontendWorker, control: socket.socket) -> None:
        await asyncio.get_running_loop().create_connection(lambda: worker.channel, sock=control)
        if self._is_stopping:
            worker.channel.close()
            return
        worker.channel.send(FrameKind.CONFIG, 0, self._config)
        self._listener.on_worker_ready(worker)

    def _on_exit(self, worker: FrontendWorker) -> None:
        """Handle the end of a worker process: restart it unless the pool is stopping."""
        worker.cancel_all()
        del self._workers[worker.slot]
        if self._is_stopping:
            if not self._workers:
                self.end(False)
            return
        is_short = time.monotonic() - worker.started_s < _SHORT_LIFE_S
        failures = self._failures[worker.slot] = self._failures.get(worker.slot, 0) + 1 if is_short else 0
        if failures >= _MAX_START_FAILURES and not self._is_announced:
            remedy = "check the log output above for its error"
            self.failure = UserError("did not start", option="frontend worker", value=worker.slot, remedy=remedy)
            self.stop(False)
            return
        pause_s = min(_LONGEST_PAUSE_S, 0.02 * 4**failures) if is_short else 0.0
        _LOG.warning("frontend worker %d exited; restarting in %.1f s", worker.slot, pause_s)
        assert self._loop is not None
        self._loop.call_later(pause_s, self._spawn, worker.slot)


_MAX_SOCKETS = 64


class ForkServer:
    """Client of the fork server process; restarts the process if it has ended.

    `close` ends the fork server, not the workers that were forked from it.
    """

    def __init__(self) -> None:
        self._start()

    def spawn(self, sockets: Sequence[socket.socket]) -> None:
        """Start a worker with these sockets, in the order of `run_worker`; the caller can close them afterwards."""
        descriptors = [sock.fileno() for sock in sockets]
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                socket.send_fds(self._control, [b"f"], descriptors)
                return
        self.close()
        self._start()
        socket.send_fds(self._control, [b"f"], descriptors)

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "nestrec.serving.frontend.worker_pool", str(server_end.fileno())]
        environment = {**os.environ, security_config.GATEWAY_SECRET_VARIABLE: security_config.gateway_secret()}
        # Its own process group: Ctrl-C signals only the engine process, which then drains its workers.
        self._process = subprocess.Popen(command, env=environment, pass_fds=[server_end.fileno()], process_group=0)
        server_end.close()


def _run(control: socket.socket) -> None:
    from nestrec.serving.inputs.json_long_lists import warm_up
    from nestrec.serving.security.rate_limiter import SharedRateLimiter

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit codes are not read: closed sockets show that a worker ended
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    security_config.gateway_secret()
    warm_up()
    rates = SharedRateLimiter()
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, _MAX_SOCKETS)
        if not data:
            rates.close()
            return
        if os.fork() == 0:
            code = 1
            try:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control, quick, *sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
                run_worker(control, quick, sockets, rates)
                code = 0
            except EOFError:
                code = 0
            except BaseException:
                _LOG.exception("a frontend worker failed")
            finally:
                os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    _run(socket.socket(fileno=int(sys.argv[1])))
