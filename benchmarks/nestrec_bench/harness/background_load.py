"""How much of the machine others took while ranks measured. Linux only; elsewhere nothing is seen."""

import os
import time
from pathlib import Path

from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json

_STAT = Path("/proc/stat")


class BackgroundLoadMeter:
    """From its making on. All ranks of a machine make it, and ask it, at the same time."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._start_s = time.perf_counter()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    def cores(self) -> float:
        """Cores that processes beside the ranks took on average; interrupts are not counted. Collective."""
        seconds = time.perf_counter() - self._start_s
        mine = _own_s() - self._own_s
        everyone = all_gather_json(self._topology.control, [mine, seconds, _busy_s() - self._busy_s])
        total = sum(own for own, _, _ in everyone)
        return float(max((busy - total) / passed for _, passed, busy in everyone))


def _busy_s() -> float:
    """Seconds that all cores spent in processes since the machine started."""
    if not _STAT.exists():
        return 0.0
    user, nice, system = (int(value) for value in _STAT.read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system
