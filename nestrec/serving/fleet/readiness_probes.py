"""Readiness probes (health checks) of instances, and free ports for their processes.

Ports. A port from the ephemeral range of the system can be lost before a process binds it, and whenever the process is
restarted: any connection may get it in the meantime. Therefore, ports are chosen below that range, where only a process
that requests a specific port gets it. A reserved port (`reserve_port`) can be bound only by processes of the same user
that share it with SO_REUSEPORT.

Probes. Instances are probed periodically, and immediately when a request to one of them fails. Whatever an instance
does (no response, half a response, no HTTP, a closed connection), its probe ends in time with a result, and after a
failure the next one uses a new connection.
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
    """Return a random port below the ephemeral range on which no process listens."""
    with reserve_port() as held:
        return int(held.getsockname()[1])


def reserve_port() -> socket.socket:
    """Return a bound socket that reserves a free port until it is closed.

    The socket does not listen, so connections are refused until the process that the port is for listens on it.
    """
    own = random.SystemRandom()
    end = _first_ephemeral()
    for _ in range(_TRIES if end > _LOWEST else 0):
        with contextlib.suppress(OSError):
            return _bind(own.randrange(_LOWEST, end))
    return _bind(0)


def is_listening(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a process listens on a port.

    A TCP connection to an ephemeral port without a listener can connect to itself, which does not count.
    """
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


def _bind(port: int) -> socket.socket:
    """Return a socket bound to a port on all addresses.

    Raises:
        OSError: Another process uses the port on one of the addresses.
    """
    held = socket.socket()
    try:
        # Without SO_REUSEADDR, which servers usually set: such a server could take the port between two processes
        # of ours.
        held.bind(("", port))
        # Set after bind: with SO_REUSEPORT, bind would succeed on a port that another gateway has reserved.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        held.close()
        raise
    return held


_LOG = logging.getLogger(__name__)
_TICK_S = 0.1
_TICKS_PER_PROBE = 10
_TIMEOUT_S = 2.0
_OK = 200
Turn = tuple[int, int | None]
"""State of a rolling update: number of turns started or ended so far, and the slot being updated (None if none is)."""


class Probes:
    """Readiness probes of all slots of a gateway. Use them from one event loop."""

    def __init__(self, upstreams: list[Upstream], router: Router, turn: Callable[[], Turn] = lambda: (0, None)):
        """Create the probes; `watch` runs them periodically.

        Args:
            upstreams: Connections to the instances, by slot; the list may change while the probes run.
            router: Receives the results: which slots are alive and which versions they serve.
            turn: Returns the state of a rolling update, see `Turn`.
        """
        self._upstreams = upstreams
        self._router = router
        self._turn = turn
        self._tasks: dict[int, asyncio.Task[bool]] = {}
        self._reasons: dict[int, str] = {}  # why an instance is not ready, by slot
        self.min_preinfer_events: dict[int, int] = {}
        """Minimum history length for which a pre-infer request pays off, by slot, from the last probe."""

    def begin(self, slot: int) -> "asyncio.Task[bool]":
        """Start a readiness probe of an instance, or return the one in progress; see `is_ready`."""
        task = self._tasks.get(slot)
        if task is None or task.done():
            task = self._tasks[slot] = asyncio.create_task(self._probe(slot))
        return task

    async def is_ready(self, slot: int) -> bool:
        """Return whether an instance is ready. Canceling the caller does not cancel the probe, which may be shared."""
        return await asyncio.shield(self.begin(slot))

    async def is_ready_since(self, slot: int) -> bool:
        """Return whether an instance is ready, by a probe started after this call and not by one in progress."""
        if (task := self._tasks.get(slot)) is not None:
            await asyncio.wait([task])
        return await self.is_ready(slot)

    async def watch(self) -> None:
        """Probe all instances periodically, and lost ones more often; runs until it is cancelled."""
        for tick in itertools.count():
            guarded("nestrec-probes", lambda: self._begin_due(tick))  # noqa: B023 (called at once)
            await asyncio.sleep(_TICK_S)

    def _begin_due(self, tick: int) -> None:
        for slot, is_alive in enumerate(self._router.is_alive[: len(self._upstreams)]):
            if not is_alive or tick % _TICKS_PER_PROBE == 0:
                self.begin(slot)

    def mark_lost(self, slot: int) -> None:
        """Mark an instance as unreachable: it receives no requests until a probe succeeds."""
        self._router.set_alive(slot, False)
        if slot < len(self._upstreams):
            self._upstreams[slot].drop()

    async def close(self) -> None:
        """Cancel the probes in progress."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _probe(self, slot: int) -> bool:
        if slot >= len(self._upstreams):  # the slot was removed
            return False
        before = self._turn()
        try:
            response = await self._upstreams[slot].send("GET", b"/health/ready", timeout_s=_TIMEOUT_S)
            readiness = _parse_readiness(response.body) if response.status == _OK else None
        except (OSError, EOFError, ValueError) as error:
            self._log_change(slot, _describe_error(error))
            self.mark_lost(slot)
            return False
        self._log_change(slot, f"status {response.status}" if readiness is None else "")
        self._router.set_alive(slot, readiness is not None)
        self.min_preinfer_events.pop(slot, None)
        if readiness is None:
            return False
        self.min_preinfer_events[slot], version = readiness
        if self._turn() == before and before[1] != slot:  # otherwise the version may have changed after this response
            self._router.versions[slot] = version
        return True

    def _log_change(self, slot: int, reason: str) -> None:
        """Log when an instance becomes not ready or the reason changes, and when it is ready again."""
        if self._reasons.get(slot, "") == reason:
            return
        self._reasons[slot] = reason
        if reason:
            _LOG.warning("instance %d is not ready: %s", slot, reason)
        else:
            _LOG.info("instance %d is ready", slot)


def _describe_error(error: Exception) -> str:
    """Return the reason of a failed probe, for the log."""
    match error:
        case TimeoutError():  # has no message of its own
            return f"no response within {_TIMEOUT_S:g} s"
        case EOFError():
            return "it closed the connection before it sent a response"
    return str(error) or type(error).__name__


def _parse_readiness(body: bytes) -> tuple[int, str]:
    """Return (minimum history length for pre-inference, version) of a readiness response.

    Raises:
        ValueError: The response is not from an instance of nestrec.
    """
    match orjson.loads(body):  # its error is a ValueError
        case {"min_preinfer_events": int(min_preinfer_events), "models": dict(models)}:
            return min_preinfer_events, version_of(models)
    raise ValueError(f"{body[:40]!r} is not a readiness response of nestrec")


def version_of(models: dict[str, str]) -> str:
    """Return one version string for all models of an instance, from their versions by role."""
    return ",".join(f"{role}={version}" for role, version in sorted(models.items()))
