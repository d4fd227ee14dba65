"""Runs a command, makes it fail at chosen moments, and starts it again until it ends well.

    history = run_with_faults(["nestrec", "train", ...], [FailPoint("checkpoint.before_rename@2=kill"), KillWhen(...)])

A fault that never fires is an error: a fault test must not pass because nothing happened.
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
"""for stacks to be written"""

Victim = Callable[[RunningProcess], int | None]
"""Given the started process, the id of the one to kill, or None while it does not exist."""


@dataclass(frozen=True, slots=True)
class FailPoint:
    """A fault at a place in the program."""

    points: str
    """As in NESTREC_FAIL_POINTS: `name@3=kill`."""


@dataclass(frozen=True, slots=True)
class KillWhen:
    """A signal from outside, as soon as a condition holds."""

    is_due: Callable[[], bool]
    """Polled every few milliseconds."""
    victim: Victim = lambda process: int(process.pid)
    """Which process; the started one by default, `rank_of(k)` for a rank under a launcher."""
    signal: int = signal.SIGKILL
    """What to send."""
    held_at: str = ""
    """`name@3` of a fail point: the process waits there, so that it cannot end before who watches it has looked."""


Fault = FailPoint | KillWhen


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the command."""

    exit_code: int
    duration_s: float
    output: str
    """The end of its standard output and error."""
    num_fired: int
    """Faults that fired in it; a launcher that restarts its ranks can survive several."""


def run_with_faults(
    command: Sequence[str],
    faults: Sequence[Fault],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    limit_s: float = 100.0,
    is_forked: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Attempt]:
    """Start the command until it exits with 0 and all faults have fired, in order; what happened.

    `limit_s` is for one attempt. Fails where a fault does not fire, or where an attempt fails without one.
    is_forked: the command is Python's and needs torch, which processes that are forked need not load.
    tell: is given a line after each attempt.
    """
    history: list[Attempt] = []
    remaining = list(faults)
    with tempfile.TemporaryDirectory(prefix="nestrec-faults-") as scratch:
        while not history or history[-1].exit_code != 0:
            whole_env = {"PYTHONFAULTHANDLER": "1", **os.environ, **(env or {})}
            starting = partial(start, command, is_forked=is_forked, cwd=cwd)
            attempt = _attempt(starting, remaining, env=whole_env, limit_s=limit_s, scratch=Path(scratch))
            history.append(attempt)
            del remaining[: attempt.num_fired]
            fired = f"{len(faults) - len(remaining)} of {len(faults)} faults fired"
            tell(f"start {len(history)} ended with {attempt.exit_code} after {attempt.duration_s:.1f} s: {fired}")
            if attempt.exit_code != 0 and attempt.num_fired == 0:
                raise AssertionError(f"failed with {attempt.exit_code} although no fault fired:\n{attempt.output}")
    if remaining:
        raise AssertionError(f"ended before these faults fired: {remaining}\n{history[-1].output}")
    return history


def lines_reach(path: Path, count: int, *, delay_s: float = 0.0) -> Callable[[], bool]:
    """A condition: the file has this many lines, and then some time has passed."""
    return delayed(lambda: path.exists() and path.read_bytes().count(b"\n") >= count, delay_s)


def saves_reach(checkpoints: Path, step: int, *, delay_s: float = 0.0) -> Callable[[], bool]:
    """A condition: a checkpoint of this step or a later one is in the folder, and then some time has passed."""
    return delayed(lambda: any(saved >= step for saved in committed_steps(checkpoints)), delay_s)


def delayed(is_reached: Callable[[], bool], delay_s: float) -> Callable[[], bool]:
    """A condition: another one held once, and then some time has passed."""
    reached_at: list[float] = []

    def is_due() -> bool:
        if not reached_at and is_reached():
            reached_at.append(time.monotonic())
        return bool(reached_at) and time.monotonic() >= reached_at[0] + delay_s

    return is_due


def random_kills(
    path: Path, *, seed: int, num_kills: int, num_lines: int, delay_s: float, held_at: str
) -> list[KillWhen]:
    """Kills at random moments of a run that writes `num_lines` lines: after one of them and up to `delay_s` more.

    held_at: a fail point of the program behind these lines.
    """
    random_ = random.Random(seed)
    lines = sorted(random_.sample(range(1, num_lines), num_kills))
    conditions = [lines_reach(path, line, delay_s=random_.uniform(0, delay_s)) for line in lines]
    return [KillWhen(condition, held_at=held_at) for condition in conditions]


def rank_of(rank: int) -> Victim:
    """The process of a rank below a launcher such as torchrun."""

    def find(process: RunningProcess) -> int | None:
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.environ().get("RANK") == str(rank):
                    return int(child.pid)
        return None

    return find


def _attempt(
    starting: Callable[..., RunningProcess],
    faults: Sequence[Fault],
    *,
    env: Mapping[str, str],
    limit_s: float,
    scratch: Path,
) -> Attempt:
    fail_log = scratch / "fired.txt"
    output = scratch / "output.txt"
    for path in (fail_log, output):  # a process that is ended at once has not begun to write
        path.write_text("")
    points = _points_of(faults[0]) if faults else ""
    armed = {**env, **fail_variables(points, fail_log, env.get("PYTHONPATH", ""))}
    start_s = time.monotonic()
    process = starting(env=armed, output=output)
    try:
        num_sent = _watch(process, faults, start_s + limit_s)
        if num_sent is None:
            _abort(process, fail_log)
    finally:
        _end(process, fail_log)
    said = output.read_text(errors="replace")
    if num_sent is None:
        raise AssertionError(f"not over after {limit_s} s:\n{said[-_STACKS_CHARACTERS:]}")
    assert process.returncode is not None
    return Attempt(
        process.returncode, time.monotonic() - start_s, said[-_TAIL_CHARACTERS:], num_sent + bool(fail_log.read_text())
    )


def _points_of(fault: Fault) -> str:
    if isinstance(fault, FailPoint):
        return fault.points
    return f"{fault.held_at}=wait" if fault.held_at else ""


def _watch(process: RunningProcess, faults: Sequence[Fault], deadline_s: float) -> int | None:
    """Wait for the end of the process, sending signals when they are due; how many hit, or None at the deadline."""
    kills = list(itertools.takewhile(lambda fault: isinstance(fault, KillWhen), faults))
    hit: list[int] = []
    while time.monotonic() < deadline_s:
        with contextlib.suppress(psutil.TimeoutExpired):
            exit_code = process.wait(timeout=_POLL_S)
            # A signal to a process that was just ending by itself is not a fault.
            return len(hit) - (exit_code == 0 and process.pid in hit[-1:])
        if len(hit) < len(kills):
            pid = _send_when_due(process, kills[len(hit)], hit)
            hit += [] if pid is None else [pid]
    return None


def _send_when_due(process: RunningProcess, fault: Fault, hit: Sequence[int]) -> int | None:
    assert isinstance(fault, KillWhen)
    pid = fault.victim(process) if fault.is_due() else None
    if pid is not None and pid not in hit:  # one that is dying already would count as two faults
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, fault.signal)
            return pid
    return None


def _abort(process: RunningProcess, fail_log: Path) -> None:
    """What is not over in time says where it stands: faulthandler writes the stacks of all threads at SIGABRT."""
    others = [other for other in _of_attempt(fail_log) if other.pid != process.pid]
    for pid in (process.pid, *(other.pid for other in others)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    psutil.wait_procs(others, _ABORT_S)
    with contextlib.suppress(psutil.TimeoutExpired):
        process.wait(timeout=_ABORT_S)


def _end(process: RunningProcess, fail_log: Path) -> None:
    """Nothing of the attempt survives it, not even ranks whose launcher was killed: they carry the name of its log."""
    if process.returncode is None:  # a process that was forked has the environment of its server for all who look
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
