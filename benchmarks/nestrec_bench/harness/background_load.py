"""CPU load of other processes during a measurement; always 0 on systems other than Linux."""

import os
import time
from pathlib import Path

from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json

_STAT = Path("/proc/stat")


class BackgroundLoadMeter:
    """Meter of the CPU load of other processes since its creation.

    All ranks of a machine must create and read it at the same time.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._start_s = time.perf_counter()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    def cores(self) -> float:
        """Return the average number of cores that processes other than the ranks used, without interrupts.

        Collective.
        """
        elapsed_s = time.perf_counter() - self._start_s
        own_s = _own_s() - self._own_s
        of_all_ranks = all_gather_json(self._topology.control, [own_s, elapsed_s, _busy_s() - self._busy_s])
        total_s = sum(own for own, _, _ in of_all_ranks)
        return float(max((busy - total_s) / elapsed for _, elapsed, busy in of_all_ranks))


def _busy_s() -> float:
    """Return the time that all cores have spent in processes since the machine started, in seconds."""
    if not _STAT.exists():
        return 0.0
    user, nice, system = (int(value) for value in _STAT.read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system
