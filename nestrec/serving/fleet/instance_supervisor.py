"""Process supervisor: starts the instances of a fleet, restarts each one that dies, and stops them together.

Each slot has a thread that starts its process and watches it. The process is replaced if it exits, if its liveness
probe reports that it is dead (it has lost an engine), or if it does not respond for a long time. Restarts are delayed
with exponential backoff if a process dies right after its start. All instances end with the process that started them.
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
from nestrec.serving.fleet.readiness_probes import is_listening, reserve_port
from nestrec.serving.http.signals import ParentDeathPipe
from nestrec.serving.security import security_config

_LOG = logging.getLogger(__name__)
_POLL_S = 0.05
_PROBE_EVERY_S = 0.5
_HANG_S = 15.0
"""An instance that has not answered a probe for this long is killed; a busy interpreter can hang for a few seconds."""
_SHORT_LIFE_S = 10.0
_LONGEST_PAUSE_S = 30.0
Health = Literal["live", "dead"]


class Instance:
    """A slot of the fleet: a port, reserved as long as the slot exists, and the process that listens on it."""

    def __init__(
        self,
        slot: int,
        models: Sequence[str],
        arguments: Sequence[str],
        death_pipe: ParentDeathPipe,
        *,
        start_timeout_s: float,
        stop_timeout_s: float,
    ):
        self._port_holder = reserve_port()
        self.slot = slot
        self.port = int(self._port_holder.getsockname()[1])
        self.models = list(models)
        """Folders or addresses of the models that the next process of this slot will serve."""
        self._arguments = list(arguments)
        self._death_pipe = death_pipe
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        self.is_up = False
        """Whether the current process has accepted connections."""
        self._up_s = 0.0
        self.num_failures = 0
        """Number of consecutive processes that ended before or shortly after they accepted connections."""
        self._is_stopping = threading.Event()
        self._thread = BackgroundThread(f"nestrec-instance-{slot}", self._run_once)

    def start(self) -> None:
        self._thread.start()

    def begin_stop(self) -> None:
        self._is_stopping.set()

    def wait(self) -> None:
        """Wait until the process has ended, then release the port. Call `begin_stop` first."""
        self._thread.join()
        self._port_holder.close()

    # Called by the thread of the slot.

    def _run_once(self) -> bool:
        """Start a process and watch it until its end. Returns whether to start another one."""
        if self._is_stopping.is_set():
            return False
        try:
            code = self._run_process()
        except Exception as error:
            FAILURES.add(f"nestrec-instance-{self.slot}", error, "the process of this instance is restarted")
            code = None if self.process is None else self._terminate(self.process)
        # Measured from the start of serving: loading a large model can take longer than a short life.
        is_short = not self.is_up or time.monotonic() - self._up_s < _SHORT_LIFE_S
        self.is_up = False
        if self._is_stopping.is_set():
            return False
        self.num_failures = self.num_failures + 1 if is_short else 0
        pause_s = min(_LONGEST_PAUSE_S, 0.25 * 2**self.num_failures) if is_short else 0.0
        _LOG.warning("instance %d exited with code %s; restarting in %.1f s", self.slot, code, pause_s)
        return not self._is_stopping.wait(pause_s)

    def _run_process(self) -> int | None:
        """Start a process and return its exit code; None if it was stopped."""
        started_s = time.monotonic()
        self.process = None  # the previous process has ended
        self.process = self._spawn()
        return self._watch(self.process, started_s)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        listen_options = ["--host", "127.0.0.1", "--port", str(self.port)]
        models = [word for folder in self.models for word in ("--model", folder)]
        command = [sys.executable, "-m", "nestrec", "serve", *models, *self._arguments, *listen_options]
        secret = {security_config.GATEWAY_SECRET_VARIABLE: security_config.gateway_secret()}
        environment = {**os.environ, "NESTREC_SLOT": str(self.slot), **self._death_pipe.environment, **secret}
        # Its own process group: Ctrl-C signals only the gateway, which then drains its instances.
        return subprocess.Popen(command, env=environment, pass_fds=[self._death_pipe.descriptor], process_group=0)

    def _watch(self, process: "subprocess.Popen[bytes]", started_s: float) -> int | None:
        """Watch a process until it exits or must be replaced.

        Returns:
            Its exit code; None if the slot was stopped.
        """
        last_response_s, probe_s = started_s, started_s
        while not self._is_stopping.wait(_POLL_S):
            if process.poll() is not None:
                return process.returncode
            now_s = time.monotonic()
            if not self.is_up:
                self.is_up = is_listening(self.port)
                self._up_s = last_response_s = now_s
                if not self.is_up and now_s - started_s > self._start_timeout_s:
                    _LOG.error("instance %d did not accept connections in time", self.slot)
                    return self._terminate(process)
            elif now_s - probe_s > _PROBE_EVERY_S:
                health = health_of(self.port, timeout_s=1.0)
                probe_s = time.monotonic()
                if health is not None:
                    last_response_s = probe_s
                    if health == "dead":
                        _LOG.error("instance %d has lost an engine", self.slot)
                        return self._terminate(process)
                elif probe_s - last_response_s > _HANG_S:
                    _LOG.error("instance %d is not responding to liveness probes of this gateway", self.slot)
                    process.kill()
                    return process.wait()
        self._terminate(process)
        return None

    def _terminate(self, process: "subprocess.Popen[bytes]") -> int:
        """Terminate a process gracefully; kill it if that takes too long. Return its exit code."""
        process.terminate()
        try:
            return process.wait(self._stop_timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


class LocalSupervisor:
    """Supervisor of `nestrec serve` processes on this machine, one per slot.

    Use it as a context manager: all processes have ended when the context is left.
    """

    def __init__(
        self,
        models: Sequence[str],
        arguments: Sequence[str],
        count: int,
        *,
        start_timeout_s: float = 300.0,
        stop_timeout_s: float,
    ):
        """Create the slots; entering the context starts the processes.

        Args:
            models: Folders or addresses of the models.
            arguments: Command-line options of `nestrec serve` without models, host and port.
            count: Number of instances.
            start_timeout_s: Time within which an instance must accept connections, in seconds.
            stop_timeout_s: Time for a graceful shutdown before an instance is killed, in seconds.
        """
        self._death_pipe = ParentDeathPipe()
        self._arguments = arguments
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self.slots = [self._create_instance(slot, models) for slot in range(count)]

    def __enter__(self) -> "LocalSupervisor":
        for instance in self.slots:
            instance.start()
        return self

    def __exit__(self, *_: object) -> None:
        for instance in self.slots:
            instance.begin_stop()
        for instance in self.slots:
            instance.wait()
        self._death_pipe.close()

    @property
    def ports(self) -> list[int]:
        """Ports of the instances, by slot."""
        return [instance.port for instance in self.slots]

    def wait_until_up(self, is_stopping: Callable[[], bool]) -> bool:
        """Wait until all instances accept connections.

        Args:
            is_stopping: Returns whether the server has been asked to stop.

        Returns:
            False if the server was asked to stop before.

        Raises:
            UserError: An instance did not start.
        """
        end_s = time.monotonic() + self._start_timeout_s
        while not all(instance.is_up for instance in self.slots):
            for instance in self.slots:
                if self.has_failed(instance.slot) or (not instance.is_up and time.monotonic() > end_s):
                    remedy = "check the log output above for its error"
                    raise UserError("did not start", option="instance", value=instance.slot, remedy=remedy)
            if is_stopping():
                return False
            time.sleep(_POLL_S)
        return not is_stopping()

    def set_models(self, slot: int, folders: list[str]) -> None:
        """Set the models that the next process of a slot will serve."""
        self.slots[slot].models = list(folders)

    def add(self) -> int:
        """Start one more instance with the models of the others and return its port."""
        instance = self._create_instance(len(self.slots), self.slots[0].models)
        self.slots.append(instance)
        instance.start()
        return instance.port

    def has_failed(self, slot: int) -> bool:
        """Return whether the last process of a slot ended before or shortly after it accepted connections."""
        return self.slots[slot].num_failures > 0

    def remove(self) -> None:
        """Stop the instance of the last slot and wait until its process has ended."""
        instance = self.slots.pop()
        instance.begin_stop()
        instance.wait()

    def _create_instance(self, slot: int, models: Sequence[str]) -> Instance:
        return Instance(
            slot,
            models,
            self._arguments,
            self._death_pipe,
            start_timeout_s=self._start_timeout_s,
            stop_timeout_s=self._stop_timeout_s,
        )


def health_of(port: int, *, timeout_s: float) -> Health | None:
    """Query the liveness endpoint of an instance.

    Args:
        port: Port of the instance on this machine.
        timeout_s: Timeout in seconds.

    Returns:
        The reported status; None if no instance of this gateway answers on the port.
    """
    headers = {security_config.GATEWAY_SECRET_HEADER: security_config.gateway_secret().encode()}
    request = Request("GET", f"http://127.0.0.1:{port}/health/live", headers)
    try:
        payload = json.loads(send_blocking(request, timeout_s=timeout_s).body)
    except (OSError, EOFError, ValueError):
        return None
    status = payload.get("status") if isinstance(payload, dict) else None
    return status if status in ("live", "dead") else None
