"""Instances as processes: started together, each started again in its slot when it dies, stopped together.

Each slot has a thread that starts its process and watches it: one that ends, says that it is dead (an engine of it has
died) or does not answer for long is replaced, ever more slowly where it dies as soon as it starts. All of them end with
the process that started them.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from nestrec.base.errors import UserError
from nestrec.serving.core.background_tasks import FAILURES, BackgroundThread
from nestrec.serving.core.http_client import Request, send_blocking
from nestrec.serving.fleet.readiness_probes import held_port, listens
from nestrec.serving.http.signals import ParentDeathPipe
from nestrec.serving.security import security_config

_LOG = logging.getLogger(__name__)
_POLL_S = 0.05
_PROBE_EVERY_S = 0.5
_HANG_S = 15.0
"""without an answer to a probe: an interpreter may be busy for seconds, but not for so long"""
_SHORT_LIFE_S = 10.0
_LONGEST_PAUSE_S = 30.0
Health = Literal["live", "dead"]


class Instance:
    """A slot: its port, which is held for as long as there is the slot, and whichever process listens there."""

    def __init__(
        self,
        slot: int,
        models: Sequence[str],
        arguments: Sequence[str],
        tie: ParentDeathPipe,
        *,
        start_timeout_s: float,
        stop_timeout_s: float,
    ):
        self._held = held_port()
        self.slot = slot
        self.port = int(self._held.getsockname()[1])
        self.models = list(models)
        """folders that a process serves which is started from now on"""
        self._arguments = list(arguments)
        self._tie = tie
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        self.is_up = False
        """its process has listened"""
        self._up_s = 0.0
        self.num_failures = 0
        """processes in a row that did not come to serve, or not for long"""
        self._is_stopping = threading.Event()
        self._thread = BackgroundThread(f"nestrec-instance-{slot}", self._turn)

    def start(self) -> None:
        self._thread.start()

    def begin_stop(self) -> None:
        self._is_stopping.set()

    def wait(self) -> None:
        """Until its process has ended and its port is given back, after `begin_stop`."""
        self._thread.join()
        self._held.close()

    # Its thread.

    def _turn(self) -> bool:
        """Start a process and watch it until its end. Returns whether to start another one."""
        if self._is_stopping.is_set():
            return False
        try:
            code = self._lived()
        except Exception as error:
            FAILURES.add(f"nestrec-instance-{self.slot}", error, "its process is started again")
            code = None if self.process is None else self._ended(self.process)
        # However long it took to fail: a large model, or a busy machine, take longer than a short life.
        is_short = not self.is_up or time.monotonic() - self._up_s < _SHORT_LIFE_S
        self.is_up = False
        if self._is_stopping.is_set():
            return False
        self.num_failures = self.num_failures + 1 if is_short else 0
        pause_s = min(_LONGEST_PAUSE_S, 0.25 * 2**self.num_failures) if is_short else 0.0
        _LOG.warning("instance %d ended with code %s; starting it again in %.1f s", self.slot, code, pause_s)
        return not self._is_stopping.wait(pause_s)

    def _lived(self) -> int | None:
        """Start a process and return its exit code; None if it was stopped."""
        started_s = time.monotonic()
        self.process = None  # the one before has ended
        self.process = self._started()
        return self._watched(self.process, started_s)

    def _started(self) -> "subprocess.Popen[bytes]":
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        models = [word for folder in self.models for word in ("--model", folder)]
        command = [sys.executable, "-m", "nestrec", "serve", *models, *self._arguments, *place]
        secret = {security_config.VARIABLE: security_config.front_secret()}
        environment = {**os.environ, "NESTREC_SLOT": str(self.slot), **self._tie.environment, **secret}
        # A group of its own: Ctrl-C is for the front, which then stops its instances in order.
        return subprocess.Popen(command, env=environment, pass_fds=[self._tie.descriptor], process_group=0)

    def _watched(self, process: "subprocess.Popen[bytes]", started_s: float) -> int | None:
        """The code that it ended with by itself, or because it was of no use; none where it was stopped."""
        answered_s, probe_s = started_s, started_s
        while not self._is_stopping.wait(_POLL_S):
            if process.poll() is not None:
                return process.returncode
            now_s = time.monotonic()
            if not self.is_up:
                self.is_up = listens(self.port)
                self._up_s = answered_s = now_s
                if not self.is_up and now_s - started_s > self._start_timeout_s:
                    _LOG.error("instance %d does not come to serve", self.slot)
                    return self._ended(process)
            elif now_s - probe_s > _PROBE_EVERY_S:
                health = health_of(self.port, timeout_s=1.0)
                probe_s = time.monotonic()
                if health is not None:
                    answered_s = probe_s
                    if health == "dead":
                        _LOG.error("instance %d has lost an engine", self.slot)
                        return self._ended(process)
                elif probe_s - answered_s > _HANG_S:
                    _LOG.error("instance %d does not answer, or not to this front", self.slot)
                    process.kill()
                    return process.wait()
        self._ended(process)
        return None

    def _ended(self, process: "subprocess.Popen[bytes]") -> int:
        """Stopped in order, or by force where that takes too long."""
        process.terminate()
        try:
            return process.wait(self._stop_timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


class LocalSupervisor:
    """Slots of `nestrec serve` processes on ports of this machine. A context: they have all ended after it."""

    def __init__(
        self,
        models: Sequence[str],
        arguments: Sequence[str],
        count: int,
        *,
        start_timeout_s: float = 300.0,
        stop_timeout_s: float,
    ):
        """arguments: of `nestrec serve`, without models, host and port."""
        self._tie = ParentDeathPipe()
        self._arguments = arguments
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self.slots = [self._made(slot, models) for slot in range(count)]

    def __enter__(self) -> "LocalSupervisor":
        for instance in self.slots:
            instance.start()
        return self

    def __exit__(self, *_: object) -> None:
        for instance in self.slots:
            instance.begin_stop()
        for instance in self.slots:
            instance.wait()
        self._tie.close()

    @property
    def ports(self) -> list[int]:
        return [instance.port for instance in self.slots]

    def wait_until_up(self, is_stopping: Callable[[], bool]) -> bool:
        """Whether all of them serve; not where the front is to stop meanwhile. `UserError` where one does not start."""
        end_s = time.monotonic() + self._start_timeout_s
        while not all(instance.is_up for instance in self.slots):
            for instance in self.slots:
                if self.has_failed(instance.slot) or (not instance.is_up and time.monotonic() > end_s):
                    remedy = "see what it wrote above"
                    raise UserError("did not start", option="instance", value=instance.slot, remedy=remedy)
            if is_stopping():
                return False
            time.sleep(_POLL_S)
        return not is_stopping()

    def set_models(self, slot: int, folders: list[str]) -> None:
        """What a process that is started in the slot from now on is to serve."""
        self.slots[slot].models = list(folders)

    def add(self) -> int:
        """Start one more, which serves what the others do; its port."""
        instance = self._made(len(self.slots), self.slots[0].models)
        self.slots.append(instance)
        instance.start()
        return instance.port

    def has_failed(self, slot: int) -> bool:
        """Its last process did not come to serve, or not for long."""
        return self.slots[slot].num_failures > 0

    def remove(self) -> None:
        """Stop the last one, and wait for its end."""
        instance = self.slots.pop()
        instance.begin_stop()
        instance.wait()

    def _made(self, slot: int, models: Sequence[str]) -> Instance:
        return Instance(
            slot,
            models,
            self._arguments,
            self._tie,
            start_timeout_s=self._start_timeout_s,
            stop_timeout_s=self._stop_timeout_s,
        )


def health_of(port: int, *, timeout_s: float) -> Health | None:
    """What an instance says of itself; none where nobody answers, or somebody who does not know this front."""
    headers = {security_config.HEADER: security_config.front_secret().encode()}
    request = Request("GET", f"http://127.0.0.1:{port}/health/live", headers)
    try:
        answer = json.loads(send_blocking(request, timeout_s=timeout_s).body)
    except (OSError, EOFError, ValueError):
        return None
    status = answer.get("status") if isinstance(answer, dict) else None
    return status if status in ("live", "dead") else None
