"""Ports of this machine for processes that are still to start, and whether somebody listens there.

A port that the system hands out by itself (of its ephemeral range) may be gone before the process takes it, and again
whenever the process is started anew: any connection of anybody may get it meanwhile. Those below that range are only
taken by whoever asks for them. One that is held is taken by nobody but processes of the same user that share it
(SO_REUSEPORT): those that it is held for.
"""

import contextlib
import random
import socket
from pathlib import Path

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
    own, end = random.SystemRandom(), _first_ephemeral()
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
