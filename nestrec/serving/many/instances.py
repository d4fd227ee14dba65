"""Instances as processes: started together, each started again in its slot when it dies, stopped together."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from nestrec.base.errors import UserError

_LOG = logging.getLogger(__name__)
_POLL_S = 0.05
_SHORT_LIFE_S = 10.0
_MOST_FAILURES = 5


class Instances:
    """Slots of `nestrec serve` processes on ports of this machine. A context: all are ready inside it."""

    def __init__(self, arguments: Sequence[str], count: int, *, start_timeout_s: float = 300.0, stop_timeout_s: float):
        """arguments: of `nestrec serve`, without host and port."""
        self._arguments, self._start_timeout_s, self._stop_timeout_s = list(arguments), start_timeout_s, stop_timeout_s
        self.ports = [free_port() for _ in range(count)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.num_restarted = 0
        self._started_s = [0.0] * count
        self._failures = [0] * count
        self._is_stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="nestrec-instances", daemon=True)

    def __enter__(self) -> "Instances":
        self.processes = [self._start(slot) for slot in range(len(self.ports))]
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping.set()
        self._watcher.join()
        self._stop()

    def _start(self, slot: int) -> "subprocess.Popen[bytes]":
        self._started_s[slot] = time.monotonic()
        place = ["--host", "127.0.0.1", "--port", str(self.ports[slot])]
        command = [sys.executable, "-m", "nestrec", "serve", *self._arguments, *place]
        # A group of its own: Ctrl-C is for the front, which then stops its instances in order.
        return subprocess.Popen(command, env={**os.environ, "NESTREC_SLOT": str(slot)}, process_group=0)

    def _wait_until_ready(self) -> None:
        end_s = time.monotonic() + self._start_timeout_s
        for process, port in zip(self.processes, self.ports, strict=True):
            while not listens(port):
                if process.poll() is not None or time.monotonic() > end_s:
                    raise UserError(
                        "did not start", field="instance", value=str(port), remedy="see what it wrote above"
                    )
                time.sleep(_POLL_S)

    def _watch(self) -> None:
        while not self._is_stopping.wait(_POLL_S):
            for slot, process in enumerate(self.processes):
                if process.poll() is not None and self._failures[slot] < _MOST_FAILURES:
                    self._replace(slot, process.returncode)

    def _replace(self, slot: int, code: int) -> None:
        lived_s = time.monotonic() - self._started_s[slot]
        self._failures[slot] = self._failures[slot] + 1 if lived_s < _SHORT_LIFE_S else 0
        if self._failures[slot] == _MOST_FAILURES:
            _LOG.error("instance %d dies as soon as it starts and is left out", slot)
            return
        _LOG.warning("instance %d ended with code %d; starting it again", slot, code)
        self.processes[slot] = self._start(slot)
        self.num_restarted += 1

    def _stop(self) -> None:
        for process in self.processes:
            process.terminate()
        end_s = time.monotonic() + self._stop_timeout_s
        for process in self.processes:
            try:
                process.wait(max(0.1, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False
