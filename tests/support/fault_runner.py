"""Runs a command, injects faults at chosen moments, and restarts it until it succeeds.

    history = run_with_faults(["nestrec", "train", ...], [FailPoint("checkpoint.before_rename@2=kill"), KillWhen(...)])

A fault that never fires is an error, because a fault test must not pass without a fault.
"""

import contextlib
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from nestrec.checkpoint.checkpoint_manifest import committed_steps
from support.command_runner import RunningProcess, start
from support.fail_points import fail_variables

_POLL_S = 0.005
_TAIL_CHARACTERS, _STACKS_CHARACTERS = 4000, 40_000
_ABORT_S = 10.0
"""Time for the processes to write their stacks."""

Victim = Callable[[RunningProcess], int | None]
"""Function from the started process to the id of the process to kill, or None while it does not exist."""


@dataclass(frozen=True, slots=True)
class FailPoint:
    """A fault that the program triggers itself, at a named fail point."""

    points: str
    """Fail point with hit count and action, in the syntax of NESTREC_FAIL_POINTS: `name@3=kill`."""


@dataclass(frozen=True, slots=True)
class KillWhen:
    """A signal that the test sends as soon as a condition holds."""

    is_due: Callable[[], bool]
    """Condition, polled every few milliseconds."""
    victim: Victim = lambda process: int(process.pid)
    """Process to signal: the started one by default, `rank_of(k)` for a rank under a launcher."""
    signal: int = signal.SIGKILL
    """Signal to send."""
    wait_at: str = ""
    """Fail point such as `name@3` at which the process waits, so that it cannot end before the condition is polled."""


Fault = FailPoint | KillWhen


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the command."""

    exit_code: int
    duration_s: float
    output: str
    """Last part of its standard output and error."""
    num_fired: int
    """Number of faults that fired in it; a launcher that restarts its ranks can survive several."""


def run_with_faults(
    command: Sequence[str],
    faults: Sequence[Fault],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    limit_s: float = 100.0,
    is_forked: bool = False,
    on_attempt: Callable[[str], None] = lambda line: None,
) -> list[Attempt]:
    """Start the command until it exits with 0 and all faults have fired, in order.

    Args:
        command: Arguments of the command.
        faults: Faults, in the order in which they fire.
        env: Environment variables in addition to those of this process.
        cwd: Working directory.
        limit_s: Time limit of one attempt.
        is_forked: Whether to fork a Python command from a process that has loaded torch, so that it need not load it.
        on_attempt: Called with a line of text after each attempt.

    Returns:
        All attempts.

    Raises:
        AssertionError: If a fault does not fire, or an attempt fails without one.
    """
    history: list[Attempt] = []
    remaining = list(faults)
    with tempfile.TemporaryDirectory(prefix="nestrec-faults-") as scratch:
        while not history or history[-1].exit_code != 0:
            full_env = {"PYTHONFAULTHANDLER": "1", **os.environ, **(env or {})}
            start_command = partial(start, command, is_forked=is_forked, cwd=cwd)
            attempt = _attempt(start_command, remaining, env=full_env, limit_s=limit_s, scratch=Path(scratch))
            history.append(attempt)
            del remaining[: attempt.num_fired]
            fired = f"{len(faults) - len(remaining)} of {len(faults)} faults fired"
            on_attempt(
                f"start {len(history)} exited with {attempt.exit_code} after {attempt.duration_s:.1f} s: {fired}"
            )
            if attempt.exit_code != 0 and attempt.num_fired == 0:
                raise AssertionError(f"failed with {attempt.exit_code} although no fault fired:\n{attempt.output}")
    if remaining:
        raise AssertionError(f"ended before these faults fired: {remaining}\n{history[-1].output}")
    return history


def lines_reach(path: Path, count: int, *, delay_s: float = 0.0) -> Callable[[], bool]:
    """Return a condition that holds `delay_s` after the file has reached this number of lines."""
    return delayed(lambda: path.exists() and path.read_bytes().count(b"\n") >= count, delay_s)


def saves_reach(checkpoints: Path, step: int, *, delay_s: float = 0.0) -> Callable[[], bool]:
    """Return a condition that holds `delay_s` after a checkpoint of this step or a later one was committed."""
    return delayed(lambda: any(saved >= step for saved in committed_steps(checkpoints)), delay_s)


def delayed(is_reached: Callable[[], bool], delay_s: float) -> Callable[[], bool]:
    """Return a condition that holds `delay_s` after another one has held for the first time."""
    reached_at: list[float] = []

    def is_due() -> bool:
        if not reached_at and is_reached():
            reached_at.append(time.monotonic())
        return bool(reached_at) and time.monotonic() >= reached_at[0] + delay_s

    return is_due


def random_kills(
    path: Path, *, seed: int, num_kills: int, num_lines: int, delay_s: float, wait_at: str
) -> list[KillWhen]:
    """Return kills at random moments of a run that writes `num_lines` lines.

    Args:
        path: File that the run writes lines to.
        seed: Seed of the moments.
        num_kills: Number of kills.
        num_lines: Number of lines.
        delay_s: Each kill is between 0 and `delay_s` after one of the lines.
        wait_at: Fail point that the program reaches after these lines.
    """
    random_ = random.Random(seed)
    lines = sorted(random_.sample(range(1, num_lines), num_kills))
    conditions = [lines_reach(path, line, delay_s=random_.uniform(0, delay_s)) for line in lines]
    return [KillWhen(condition, wait_at=wait_at) for condition in conditions]


def rank_of(rank: int) -> Victim:
    """Return a function that finds the process of a rank below a launcher such as torchrun."""

    def find(process: RunningProcess) -> int | None:
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.environ().get("RANK") == str(rank):
                    return int(child.pid)
        return None

    return find


def _attempt(
    start_command: Callable[..., RunningProcess],
    faults: Sequence[Fault],
    *,
    env: Mapping[str, str],
    limit_s: float,
    scratch: Path,
) -> Attempt:
    fail_log = scratch / "fired.txt"
    output = scratch / "output.txt"
    for path in (fail_log, output):  # a process that is killed at once has not written them
        path.write_text("")
    points = _points_of(faults[0]) if faults else ""
    armed = {**env, **fail_variables(points, fail_log, env.get("PYTHONPATH", ""))}
    start_s = time.monotonic()
    process = start_command(env=armed, output=output)
    try:
        num_sent = _watch(process, faults, start_s + limit_s)
        if num_sent is None:
            _abort(process, fail_log)
    finally:
        _end(process, fail_log)
    text = output.read_text(errors="replace")
    if num_sent is None:
        raise AssertionError(f"still running after {limit_s} s:\n{text[-_STACKS_CHARACTERS:]}")
    assert process.returncode is not None
    return Attempt(
        process.returncode, time.monotonic() - start_s, text[-_TAIL_CHARACTERS:], num_sent + bool(fail_log.read_text())
    )


def _points_of(fault: Fault) -> str:
    if isinstance(fault, FailPoint):
        return fault.points
    return f"{fault.wait_at}=wait" if fault.wait_at else ""


def _watch(process: RunningProcess, faults: Sequence[Fault], deadline_s: float) -> int | None:
    """Wait for the end of the process and send signals when they are due.

    Returns:
        Number of signals that hit, or None at the deadline.
    """
    kills = list(itertools.takewhile(lambda fault: isinstance(fault, KillWhen), faults))
    hit: list[int] = []
    while time.monotonic() < deadline_s:
        with contextlib.suppress(psutil.TimeoutExpired):
            exit_code = process.wait(timeout=_POLL_S)
            # A signal to a process that was already exiting with 0 is not a fault.
            return len(hit) - (exit_code == 0 and process.pid in hit[-1:])
        if len(hit) < len(kills):
            pid = _send_when_due(process, kills[len(hit)], hit)
            hit += [] if pid is None else [pid]
    return None


def _send_when_due(process: RunningProcess, fault: Fault, hit: Sequence[int]) -> int | None:
    assert isinstance(fault, KillWhen)
    pid = fault.victim(process) if fault.is_due() else None
    if pid is not None and pid not in hit:  # a process that is already dying would count as two faults
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, fault.signal)
            return pid
    return None


def _abort(process: RunningProcess, fail_log: Path) -> None:
    """Send SIGABRT to the processes of the attempt, so that faulthandler writes the stacks of their threads."""
    others = [other for other in _of_attempt(fail_log) if other.pid != process.pid]
    for pid in (process.pid, *(other.pid for other in others)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    psutil.wait_procs(others, _ABORT_S)
    with contextlib.suppress(psutil.TimeoutExpired):
        process.wait(timeout=_ABORT_S)


def _end(process: RunningProcess, fail_log: Path) -> None:
    """Kill all processes of the attempt, including ranks whose launcher was killed.

    They are found by the path of the log in their environment. For a forked process, the system reports the environment
    of the server that it was forked from, so it is killed by its id.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    for other in _of_attempt(fail_log):
        with contextlib.suppress(psutil.Error):
            other.kill()
    process.wait()


def _of_attempt(fail_log: Path) -> list[psutil.Process]:
    found = []
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if other.pid != os.getpid() and other.environ().get("NESTREC_FAIL_LOG") == str(fail_log):
                found.append(other)
    return found
