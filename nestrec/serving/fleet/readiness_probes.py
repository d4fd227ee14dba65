"""Readiness probes of instances, and free ports for their processes.

Ports of this machine for processes that are still to start, and whether somebody listens there.

A port that the system hands out by itself (of its ephemeral range) may be gone before the process takes it, and again
whenever the process is started anew: any connection of anybody may get it meanwhile. Those below that range are only
taken by whoever asks for them. One that is held is taken by nobody but processes of the same user that share it
(SO_REUSEPORT): those that it is held for.

Whether instances are ready: asked from time to time, and whenever something about one of them looks wrong.

Whatever an instance does (nothing, half an answer, none in HTTP, an end in the middle), its probe ends in time with yes
or no, and the next one begins anew, on a new connection where the last one failed.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import socket
from collections.abc import Callable
from pathlib import Path

import orjson

from nestrec.serving.core.background_tasks import guarded
from nestrec.serving.core.slot_router import Router
from nestrec.serving.fleet.upstream_connection import Upstream

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _EPHEMERAL_ELSEWHERE = 10_000, 32_768
_TRIES = 100


def free_port() -> int:
    """One that nobody listens on, chosen at random below those that the system hands out."""
    with held_port() as held:
        return int(held.getsockname()[1])


def held_port() -> socket.socket:
    """A socket that keeps such a port until it is closed. It does not listen: who connects is refused, as long as
    nobody whom the port is held for does."""
    own = random.SystemRandom()
    end = _first_ephemeral()
    for _ in range(_TRIES if end > _LOWEST else 0):
        with contextlib.suppress(OSError):
            return _held(own.randrange(_LOWEST, end))
    return _held(0)


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a connection comes about, with somebody else: one to a port of the ephemeral range where nobody listens
    may meet itself."""
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection:
            return bool(connection.getsockname() != connection.getpeername())
    except OSError:
        return False


def _first_ephemeral() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except OSError:  # not on Linux
        return _EPHEMERAL_ELSEWHERE


def _held(port: int) -> socket.socket:
    """On every address of this machine. OSError where somebody has it on one of them."""
    held = socket.socket()
    try:
        # Without SO_REUSEADDR, which any server has: it could take the port between two processes of ours.
        held.bind(("", port))
        # Only now: who shares a port can take one that is shared already, and hold what another front holds.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        held.close()
        raise
    return held


_LOG = logging.getLogger(__name__)
_TURN_S = 0.1
_TURNS_A_PROBE = 10
_TIMEOUT_S = 2.0
_OK = 200
Turn = tuple[int, int | None]
"""of a fleet that changes: how many turns have begun or ended, and the slot whose turn it is"""


class Probes:
    """Of all slots of a front. Used inside one event loop."""

    def __init__(self, upstreams: list[Upstream], router: Router, turn: Callable[[], Turn] = lambda: (0, None)):
        """upstreams: of the slots, as they are at any time. router: told what is found. turn: see `Turn`."""
        self._upstreams = upstreams
        self._router = router
        self._turn = turn
        self._tasks: dict[int, asyncio.Task[bool]] = {}
        self._why: dict[int, str] = {}  # by slot: why it is not ready
        self.signals_from: dict[int, int] = {}
        """by slot, as it last said: events from which on it has a use for a signal"""

    def begin(self, slot: int) -> "asyncio.Task[bool]":
        """Find out whether an instance is ready, once for all who want to know at a time; see `is_ready`."""
        task = self._tasks.get(slot)
        if task is None or task.done():
            task = self._tasks[slot] = asyncio.create_task(self._found(slot))
        return task

    async def is_ready(self, slot: int) -> bool:
        """As an instance says now. Who waits and is cancelled does not end the probe: others wait for it too."""
        return await asyncio.shield(self.begin(slot))

    async def is_ready_since(self, slot: int) -> bool:
        """As an instance says to a question of after this call: to one that is under way it may have said it before."""
        if (task := self._tasks.get(slot)) is not None:
            await asyncio.wait([task])
        return await self.is_ready(slot)

    async def watch(self) -> None:
        """Ask all of them from time to time whether they are ready, and those that were lost often; for ever."""
        for turn in itertools.count():
            guarded("nestrec-probes", lambda: self._begin_due(turn))  # noqa: B023 (called at once)
            await asyncio.sleep(_TURN_S)

    def _begin_due(self, turn: int) -> None:
        for slot, is_alive in enumerate(self._router.is_alive[: len(self._upstreams)]):
            if not is_alive or turn % _TURNS_A_PROBE == 0:
                self.begin(slot)

    def lost(self, slot: int) -> None:
        """An instance does not answer: nobody is sent to it until it does."""
        self._router.set_alive(slot, False)
        if slot < len(self._upstreams):
            self._upstreams[slot].drop()

    async def close(self) -> None:
        """End what is under way."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _found(self, slot: int) -> bool:
        if slot >= len(self._upstreams):  # it was taken away
            return False
        before = self._turn()
        try:
            response = await self._upstreams[slot].send("GET", b"/health/ready", timeout_s=_TIMEOUT_S)
            told = _told(response.body) if response.status == _OK else None
        except (OSError, EOFError, ValueError) as error:
            self._tell(slot, _in_words(error))
            self.lost(slot)
            return False
        self._tell(slot, f"status {response.status}" if told is None else "")
        self._router.set_alive(slot, told is not None)
        self.signals_from.pop(slot, None)
        if told is None:
            return False
        self.signals_from[slot], version = told
        if self._turn() == before and before[1] != slot:  # else it may have changed since it said so
            self._router.versions[slot] = version
        return True

    def _tell(self, slot: int, why: str) -> None:
        """Log why an instance is not ready, once for each reason, and that it is again."""
        if self._why.get(slot, "") == why:
            return
        self._why[slot] = why
        if why:
            _LOG.warning("instance %d is not ready: %s", slot, why)
        else:
            _LOG.info("instance %d is ready", slot)


def _in_words(error: Exception) -> str:
    """Why a probe had no answer, for people who read logs."""
    match error:
        case TimeoutError():  # says nothing of itself
            return f"no answer within {_TIMEOUT_S:g} s"
        case EOFError():
            return "it closed the connection before it had answered"
    return str(error) or type(error).__name__


def _told(body: bytes) -> tuple[int, str]:
    """(events from which on a signal is of use, version) as an instance says it; a ValueError where it is none of ours
    that answers."""
    match orjson.loads(body):  # what it raises is a ValueError
        case {"signals_from": int(signals_from), "models": dict(models)}:
            return signals_from, version_of(models)
    raise ValueError(f"{body[:40]!r} is not what an instance says")


def version_of(models: dict[str, str]) -> str:
    """Of all models of an instance."""
    return ",".join(f"{role}={version}" for role, version in sorted(models.items()))
