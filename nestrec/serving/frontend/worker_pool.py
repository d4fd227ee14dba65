"""Starts, supervises and stops frontend worker processes.

One front: a process that takes requests on a socket of its own, and has them computed by another one.

It ends when it is told to, after answering what it has accepted, and when the process that computes is gone.

Fronts as processes: started together, each started again when it ends, stopped together.

The process that fronts are forked from: it has imported everything, and does nothing else.

Importing takes seconds and most of a front's memory; a fork has both at once. The process that computes cannot be
forked itself: it has threads, and a device.
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
from nestrec.serving.http.serve_config import ServeConfig, name_of_process, safety_of, uvicorn_config
from nestrec.serving.http.server_logging import log_without_waiting, wait_for_log
from nestrec.serving.http.signals import SignalHandler
from nestrec.serving.http.sockets import allow_open_files, close_all, run_server
from nestrec.serving.inputs.engine_request import EngineRequest
from nestrec.serving.security import security_config
from nestrec.serving.security.rate_limiter import RateLimiter

_HEAD = struct.Struct("<IBI")


def run_front(control: socket.socket, quick: socket.socket, sockets: list[socket.socket], rates: RateLimiter) -> None:
    """Serve until it is told to stop. control, quick: to the process that computes (`frames`). rates: of keys, of all
    fronts together."""
    signals = SignalHandler.installed()
    signals.when_reloaded(lambda: None)  # models are loaded by the process that computes
    cfg = _share_of(*pickle.loads(_first_frame(control)))
    log_without_waiting(cfg.log, name_of_process())
    tracing.start(cfg.tracing)
    allow_open_files(cfg.limits.max_connections)
    sys.setswitchinterval(5e-5)
    safety = safety_of(cfg, rates)
    observed = WorkerCounters()

    def tell() -> Mapping[str, Any]:
        unread, service.unread = service.unread, {}
        return {**observed.told(), "unread": unread}

    async def connect() -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: service.quick, sock=quick)
        await loop.create_connection(lambda: service.control, sock=control)
        await service.until_told()

    def announce() -> None:
        service.control.send(FrameKind.LISTENING, os.getpid())

    service = RemoteScoringService(cfg.service, tell, signals.stop)
    awake = KeepAwake((cfg.front_awake_ms or 0.0) / 1e3)
    app = FrontendApp(service, cfg.limits, all_endpoints(), observed, connect=connect, called=awake.called)
    try:
        run_server(uvicorn_config(app, cfg, app, safety), sockets, signals, announce)
    finally:
        tracing.stop()
        safety.close()
    wait_for_log()


def _share_of(cfg: ServeConfig, count: int) -> ServeConfig:
    """Limits of connections are those of all fronts together; the port for health is the other process's."""
    limits = cfg.limits
    limits = replace(
        limits,
        max_connections=-(-limits.max_connections // count),
        max_connections_an_address=-(-limits.max_connections_an_address // count),
    )
    return replace(cfg, limits=limits, health_port=None)


def _first_frame(channel: socket.socket) -> bytes:
    """Before there is an event loop."""
    size, kind, _ = _HEAD.unpack(_read(channel, _HEAD.size))
    assert kind == FrameKind.CONFIG
    return _read(channel, size + 4 - _HEAD.size)


def _read(channel: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        piece = channel.recv(size - len(parts))
        if not piece:
            raise EOFError
        parts += piece
    return parts


_LOG = logging.getLogger(__name__)
_SOCKET_BYTES = 4 << 20
_SHORT_LIFE_S, _LONGEST_PAUSE_S = 10.0, 30.0
_MOST_FAILURES = 3
"""of a front that has never listened"""


class Spawner(Protocol):
    """Starts fronts."""

    def spawn(self, sockets: list[socket.socket]) -> None: ...


@dataclass(eq=False, slots=True)
class FrontendWorker:
    """One process, and what it waits for."""

    slot: int
    names: NameSender
    channel: Channel = field(init=False)
    wire: EngineSocket = field(init=False)
    started_s: float = field(default_factory=time.monotonic)
    heard_s: float = field(default_factory=time.monotonic)
    pid: int = 0
    """0 until it listens"""
    works: dict[int, EngineRequest] = field(default_factory=dict)
    forwarded: dict[int, asyncio.Event] = field(default_factory=dict)
    """set when nobody waits any more"""
    tells: dict[int, "asyncio.Future[None]"] = field(default_factory=dict)
    """done when it has told what it counted"""

    def give_up(self) -> None:
        """Its process has ended: nobody waits any more, here or there."""
        self.wire.give_up()
        for work in list(self.works.values()):
            work.future.cancel()
        for gone in self.forwarded.values():
            gone.set()
        for waiter in self.tells.values():
            waiter.cancel()

    def kill(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.channel.close()  # one that does not listen yet ends by this


class WorkerListener(Protocol):
    """Whoever talks to fronts."""

    def names(self) -> NameSender:
        """For a front that has been told nothing yet."""
        ...

    def opened(self, front: FrontendWorker) -> None:
        """It can be told things."""
        ...

    def received(self, front: FrontendWorker, kind: int, number: int, payload: bytes) -> None: ...

    def asked(self, front: FrontendWorker, kind: int, number: int, payload: bytes) -> None:
        """Of an engine; on the thread of `EngineSocketLoop`."""
        ...


class FrontendWorkerPool:
    """From `start` to `stop`, inside one event loop."""

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
        """sockets: that one more front is to listen on. config: what a front is told first. awake_s: see
        `EngineSocketLoop`."""
        self._spawner = spawner
        self._sockets = sockets
        self._listener = listener
        self._awake_s = awake_s
        self._count = count
        self._config = config
        self._drain_s = drain_s
        self.announce: Callable[[], None] = lambda: None
        """called when all of them listen"""
        self.end: Callable[[bool], None] = lambda _: None
        """called when they have ended after `stop`, or where nobody is to wait for that"""
        self.failure: UserError | None = None
        """why they were stopped"""
        self._fronts: dict[int, FrontendWorker] = {}
        self._failures: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_announced = self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._wires: EngineSocketLoop | None = None

    @property
    def listening(self) -> list[FrontendWorker]:
        return [front for front in self._fronts.values() if front.pid]

    def start(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            is_stopping = self._is_stopping
        if is_stopping:
            self.end(False)
            return
        self._wires = EngineSocketLoop(self._awake_s)
        for slot in range(self._count):
            self._spawn(slot)

    def stop(self, is_impatient: bool) -> None:
        """Have fronts answer what they have accepted, and end; from any thread."""
        with self._lock:
            loop = self._loop
            self._is_stopping = True
        if loop is not None:
            loop.call_soon_threadsafe(self._stop_all, is_impatient)

    def close(self) -> None:
        """After the event loop."""
        if self._wires is not None:
            self._wires.close()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """In a task of its own."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(reported("nestrec-front-processes"))

    def listens(self, front: FrontendWorker, pid: int) -> None:
        """It has said so."""
        front.pid = pid
        if not self._is_announced and all(f.pid for f in self._fronts.values()):
            self._is_announced = True
            self.announce()

    def _stop_all(self, is_impatient: bool) -> None:
        if not self._fronts:
            self.end(is_impatient)
            return
        for front in self._fronts.values():
            if is_impatient or not front.pid:
                front.kill()
            else:
                front.channel.send(FrameKind.STOP, 0)
        assert self._loop is not None
        self._loop.call_later(self._drain_s + 5.0, self._kill_all)

    def _kill_all(self) -> None:
        for front in list(self._fronts.values()):
            front.kill()

    def _spawn(self, slot: int) -> None:
        if self._is_stopping or self._wires is None:
            return
        pairs = [socket.socketpair() for _ in range(2)]
        sockets = self._sockets()
        theirs = [one for _, one in pairs]
        try:
            for one in itertools.chain(*pairs):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            self._spawner.spawn([*theirs, *sockets])
        finally:
            close_all([*theirs, *sockets])
        (control, _), (quick, _) = pairs
        control.setblocking(False)
        front = FrontendWorker(slot, self._listener.names())
        front.wire = self._wires.add(quick, partial(self._listener.asked, front))
        front.channel = Channel(partial(self._listener.received, front), partial(self._lost, front))
        self._fronts[slot] = front
        self.run(self._opened(front, control))

    async def _opened(self, front: FrontendWorker, ours: socket.socket) -> None:
        await asyncio.get_running_loop().create_connection(lambda: front.channel, sock=ours)
        if self._is_stopping:
            front.channel.close()
            return
        front.channel.send(FrameKind.CONFIG, 0, self._config)
        self._listener.opened(front)

    def _lost(self, front: FrontendWorker) -> None:
        """Its process has ended."""
        front.give_up()
        del self._fronts[front.slot]
        if self._is_stopping:
            if not self._fronts:
                self.end(False)
            return
        is_short = time.monotonic() - front.started_s < _SHORT_LIFE_S
        failures = self._failures[front.slot] = self._failures.get(front.slot, 0) + 1 if is_short else 0
        if failures >= _MOST_FAILURES and not self._is_announced:
            remedy = "see what it wrote above"
            self.failure = UserError("did not start", option="front process", value=front.slot, remedy=remedy)
            self.stop(False)
            return
        pause_s = min(_LONGEST_PAUSE_S, 0.02 * 4**failures) if is_short else 0.0
        _LOG.warning("front process %d has ended; starting it again in %.1f s", front.slot, pause_s)
        assert self._loop is not None
        self._loop.call_later(pause_s, self._spawn, front.slot)


_MOST_SOCKETS = 64


class ForkServer:
    """The side of whoever wants fronts; the process is started again where it is gone. `close` ends it, not them."""

    def __init__(self) -> None:
        self._start()

    def spawn(self, sockets: Sequence[socket.socket]) -> None:
        """A front that has these sockets (`run_front`, in that order); they can be closed here afterwards."""
        descriptors = [one.fileno() for one in sockets]
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
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "nestrec.serving.frontend.worker_pool", str(theirs.fileno())]
        environment = {**os.environ, security_config.VARIABLE: security_config.front_secret()}
        # A group of its own: Ctrl-C is for the process that computes, which then stops its fronts in order.
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], process_group=0)
        theirs.close()


def _run(control: socket.socket) -> None:
    from nestrec.serving.inputs.json_long_lists import warm_up
    from nestrec.serving.security.rate_limiter import SharedRateLimiter

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a front has ended: its sockets tell that it has
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    security_config.front_secret()
    warm_up()
    rates = SharedRateLimiter()
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, _MOST_SOCKETS)
        if not data:
            rates.close()
            return
        if os.fork() == 0:
            code = 1
            try:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control, quick, *sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
                run_front(control, quick, sockets, rates)
                code = 0
            except EOFError:
                code = 0
            except BaseException:
                _LOG.exception("a front failed")
            finally:
                os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    _run(socket.socket(fileno=int(sys.argv[1])))
