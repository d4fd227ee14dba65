"""Commands as processes of their own; those of Python need not load torch again, which takes seconds of each.

Forked ones come from the server of ranks, which has loaded torch and the trainer and computed nothing. They are killed
and waited for as others are. With NESTREC_RANKS_START=spawn they are interpreters of their own, as ranks are then.
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
from support.rank_pool import loaded_context


class RunningProcess(Protocol):
    """What the runner of faults asks of a process."""

    pid: int
    returncode: int | None
    """Known once it was waited for."""

    def wait(self, timeout: float | None = None) -> int: ...

    def children(self, *, recursive: bool = False) -> list[psutil.Process]: ...


class ForkedCommand:
    """`python -m MODULE ...` or `python -c CODE ...`."""

    def __init__(
        self,
        command: Sequence[str],
        context: ForkServerContext,
        env: Mapping[str, str],
        cwd: Path | None,
        output: Path | Connection,
    ) -> None:
        """output: file or pipe that takes what it says, on both streams."""
        assert command[0] == sys.executable
        self._process = context.Process(target=_run, args=(list(command[1:]), dict(env), cwd, output))
        self._process.start()
        self.pid = int(self._process.pid or 0)
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; psutil.TimeoutExpired where it is not over in time."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise psutil.TimeoutExpired(timeout, self.pid)
        self.returncode = self._process.exitcode
        return self.returncode

    def poll(self) -> int | None:
        """The exit code, where it has ended."""
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
    """is_forked: of a command of Python, unless ranks are interpreters of their own."""
    if is_forked and isinstance(context := loaded_context(), ForkServerContext):
        return ForkedCommand(command, context, env, cwd, output)
    with output.open("wb") as sink:
        started: RunningProcess = psutil.Popen(command, env=dict(env), cwd=cwd, stdout=sink, stderr=subprocess.STDOUT)
    return started


def piped(command: Sequence[str], env: Mapping[str, str]) -> "ForkedCommand | subprocess.Popen[bytes]":
    """A command of Python, forked as in `start`; what it says can be read from its `stdout`."""
    context = loaded_context()
    if not isinstance(context, ForkServerContext):
        return subprocess.Popen(command, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    reading, writing = os.pipe()
    with Connection(writing, readable=False) as theirs:
        process = ForkedCommand(command, context, env, None, theirs)
    process.stdout = os.fdopen(reading, "rb")
    return process


def _run(command: Sequence[str], env: Mapping[str, str], cwd: Path | None, output: Path | Connection) -> None:
    """As the interpreter would: the caller's environment, folder, path and arguments; one sink for both streams."""
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
    sys.path[:0] = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place and place not in sys.path]
    arm_from_environment()
    way, what, *arguments = command
    sys.argv = [what, *arguments]
    if way == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert way == "-c"
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
