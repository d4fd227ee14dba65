"""Fronts as processes: started together, each started again when it ends, stopped together."""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from nestrec.base.errors import UserError
from nestrec.serving.api.process.listening import close_all
from nestrec.serving.background import reported
from nestrec.serving.engine.work import Work
from nestrec.serving.fronts.frames import Channel, FrameKind
from nestrec.serving.fronts.names import TellNames
from nestrec.serving.fronts.wires import Wire, Wires

_LOG = logging.getLogger(__name__)
_SOCKET_BYTES = 4 << 20
_SHORT_LIFE_S, _LONGEST_PAUSE_S = 10.0, 30.0
_MOST_FAILURES = 3
"""of a front that has never listened"""


class Spawner(Protocol):
    """Starts fronts."""

    def spawn(self, sockets: list[socket.socket]) -> None: ...


@dataclass(eq=False, slots=True)
class FrontProcess:
    """One process, and what it waits for."""

    slot: int
    names: TellNames
    channel: Channel = field(init=False)
    wire: Wire = field(init=False)
    started_s: float = field(default_factory=time.monotonic)
    heard_s: float = field(default_factory=time.monotonic)
    pid: int = 0
    """0 until it listens"""
    works: dict[int, Work] = field(default_factory=dict)
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


class FrontListener(Protocol):
    """Whoever talks to fronts."""

    def names(self) -> TellNames:
        """For a front that has been told nothing yet."""
        ...

    def opened(self, front: FrontProcess) -> None:
        """It can be told things."""
        ...

    def received(self, front: FrontProcess, kind: int, number: int, payload: bytes) -> None: ...

    def asked(self, front: FrontProcess, kind: int, number: int, payload: bytes) -> None:
        """Of an engine; on the thread of `Wires`."""
        ...


class FrontProcesses:
    """From `start` to `stop`, inside one event loop."""

    def __init__(
        self,
        spawner: Spawner,
        sockets: Callable[[], list[socket.socket]],
        listener: FrontListener,
        *,
        count: int,
        config: bytes,
        drain_s: float,
        awake_s: float,
    ):
        """sockets: that one more front is to listen on. config: what a front is told first. awake_s: see `Wires`."""
        self._spawner, self._sockets, self._listener, self._awake_s = spawner, sockets, listener, awake_s
        self._count, self._config, self._drain_s = count, config, drain_s
        self.announce: Callable[[], None] = lambda: None
        """called when all of them listen"""
        self.end: Callable[[bool], None] = lambda _: None
        """called when they have ended after `stop`, or where nobody is to wait for that"""
        self.failure: UserError | None = None
        """why they were stopped"""
        self._fronts: dict[int, FrontProcess] = {}
        self._failures: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_announced = self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._wires: Wires | None = None

    @property
    def listening(self) -> list[FrontProcess]:
        return [front for front in self._fronts.values() if front.pid]

    def start(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            is_stopping = self._is_stopping
        if is_stopping:
            self.end(False)
            return
        self._wires = Wires(self._awake_s)
        for slot in range(self._count):
            self._spawn(slot)

    def stop(self, is_impatient: bool) -> None:
        """Have fronts answer what they have accepted, and end; from any thread."""
        with self._lock:
            loop, self._is_stopping = self._loop, True
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

    def listens(self, front: FrontProcess, pid: int) -> None:
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
        pairs, sockets = [socket.socketpair() for _ in range(2)], self._sockets()
        theirs = [one for _, one in pairs]
        try:
            for one in itertools.chain(*pairs):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            self._spawner.spawn([*theirs, *sockets])
        finally:
            close_all([*theirs, *sockets])
        (control, _), (quick, _) = pairs
        control.setblocking(False)
        front = FrontProcess(slot, self._listener.names())
        front.wire = self._wires.add(quick, partial(self._listener.asked, front))
        front.channel = Channel(partial(self._listener.received, front), partial(self._lost, front))
        self._fronts[slot] = front
        self.run(self._opened(front, control))

    async def _opened(self, front: FrontProcess, ours: socket.socket) -> None:
        await asyncio.get_running_loop().create_connection(lambda: front.channel, sock=ours)
        if self._is_stopping:
            front.channel.close()
            return
        front.channel.send(FrameKind.CONFIG, 0, self._config)
        self._listener.opened(front)

    def _lost(self, front: FrontProcess) -> None:
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
            self.failure = UserError("did not start", field="front process", value=front.slot, remedy=remedy)
            self.stop(False)
            return
        pause_s = min(_LONGEST_PAUSE_S, 0.02 * 4**failures) if is_short else 0.0
        _LOG.warning("front process %d has ended; starting it again in %.1f s", front.slot, pause_s)
        assert self._loop is not None
        self._loop.call_later(pause_s, self._spawn, front.slot)
