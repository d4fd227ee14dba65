"""Runs commands as separate processes; Python commands can be forked, because loading torch takes seconds.

Forked commands come from the server that ranks are forked from, which has loaded torch and the trainer and has not
computed anything. They are killed and waited for like other processes. With NESTREC_RANKS_START=spawn, commands are
started as new interpreters, like ranks.
"""

import faulthandler
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import IO, Protocol

import psutil

from support.fail_points import arm_from_environment
from support.rank_pool import preloaded_context


class RunningProcess(Protocol):
    """Interface of a process that the fault runner needs."""

    pid: int
    returncode: int | None
    """Exit code, set by `wait`."""

    def wait(self, timeout: float | None = None) -> int: ...

    def children(self, *, recursive: bool = False) -> list[psutil.Process]: ...


class ForkedCommand:
    """A forked process that runs `python -m MODULE ...` or `python -c CODE ...`."""

    def __init__(
        self,
        command: Sequence[str],
        context: ForkServerContext,
        env: Mapping[str, str],
        cwd: Path | None,
        output: Path | Connection,
    ) -> None:
        """Start the process; standard output and error go to `output`."""
        assert command[0] == sys.executable
        self._process = context.Process(target=_run, args=(list(command[1:]), dict(env), cwd, output))
        self._process.start()
        self.pid = int(self._process.pid or 0)
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, which is negative for a signal.

        Raises:
            psutil.TimeoutExpired: If the process is still running after `timeout` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise psutil.TimeoutExpired(timeout, self.pid)
        self.returncode = self._process.exitcode
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None if the process is running."""
        self.returncode = self._process.exitcode
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def children(self, *, recursive: bool = False) -> list[psutil.Process]:
        return list(psutil.Process(self.pid).children(recursive=recursive))


def start(
    command: Sequence[str], *, is_forked: bool, env: Mapping[str, str], cwd: Path | None, output: Path
) -> RunningProcess:
    """Start a command; `is_forked` forks a Python command unless NESTREC_RANKS_START is spawn."""
    if is_forked and isinstance(context := preloaded_context(), ForkServerContext):
        return ForkedCommand(command, context, env, cwd, output)
    with output.open("wb") as sink:
        started: RunningProcess = psutil.Popen(command, env=dict(env), cwd=cwd, stdout=sink, stderr=subprocess.STDOUT)
    return started


def start_piped(command: Sequence[str], env: Mapping[str, str]) -> "ForkedCommand | subprocess.Popen[bytes]":
    """Start a Python command, forked as in `start`, whose output can be read from `stdout`."""
    context = preloaded_context()
    if not isinstance(context, ForkServerContext):
        return subprocess.Popen(command, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    read_end, write_end = os.pipe()
    with Connection(write_end, readable=False) as child_end:
        process = ForkedCommand(command, context, env, None, child_end)
    process.stdout = os.fdopen(read_end, "rb")
    return process


def _run(command: Sequence[str], env: Mapping[str, str], cwd: Path | None, output: Path | Connection) -> None:
    """Run a Python command in this process with the given environment, folder, module path, arguments and output."""
    if isinstance(output, Path):
        sink = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    else:
        sink = os.dup(output.fileno())
        output.close()
    for stream in (1, 2):
        os.dup2(sink, stream)
    os.close(sink)
    if "PYTHONFAULTHANDLER" in env:
        faulthandler.enable(file=2)
    os.environ.clear()
    os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    arm_from_environment()
    option, module_or_code, *arguments = command
    sys.argv = [module_or_code, *arguments]
    if option == "-m":
        runpy.run_module(module_or_code, run_name="__main__", alter_sys=True)
    else:
        assert option == "-c"
        exec(compile(module_or_code, "<string>", "exec"), {"__name__": "__main__"})
