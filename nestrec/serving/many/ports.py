"""Ports of this machine for processes that are still to start, and whether somebody listens there.

A port that the system hands out by itself (of its ephemeral range) may be gone before the process takes it, and again
whenever the process is started anew: any connection of anybody may get it meanwhile. Those below that range are only
taken by whoever asks for them.
"""

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _EPHEMERAL_ELSEWHERE = 10_000, 32_768
_TRIES = 100


def free_port() -> int:
    """One that nobody listens on, chosen at random below those that the system hands out."""
    own, end = random.SystemRandom(), _first_ephemeral()
    for _ in range(_TRIES if end > _LOWEST else 0):
        if _is_free(port := own.randrange(_LOWEST, end)):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections of before do not matter
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
