"""Actions at the fail points of the package, for fault injection tests.

In this process a test arms a point with `armed("checkpoint.before_rename", raise_error)`. In another process it sets
`NESTREC_FAIL_POINTS="name@3=kill,other=raise"` in the variables that `fail_variables` returns: the third time that
`name` is reached the process kills itself with SIGKILL. Each point that fires appends its name to the file named by
`NESTREC_FAIL_LOG`, so that a fault test can assert that its fault fired. A point that only waits (`name=wait`) for the
test to kill the process is not logged.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nestrec.base.failpoints import install

Action = Callable[[], None]
POINTS_VARIABLE = "NESTREC_FAIL_POINTS"
LOG_VARIABLE = "NESTREC_FAIL_LOG"
_SITE = Path(__file__).resolve().parent / "site"
_armed: dict[str, tuple[int, Action]] = {}
_hits: dict[str, int] = {}


def fail_variables(points: str, log: Path, python_path: str | None = None) -> dict[str, str]:
    """Return environment variables with which a process and its children arm fail points at their start.

    Args:
        points: Such as `checkpoint.before_rename@3=kill`.
        log: File that the names of fired points are appended to.
        python_path: `PYTHONPATH` of the process without these variables; by default that of this process.
    """
    base = os.environ.get("PYTHONPATH", "") if python_path is None else python_path
    path = [str(_SITE), str(_SITE.parents[1]), *filter(None, [base])]
    return {"PYTHONPATH": os.pathsep.join(path), POINTS_VARIABLE: points, LOG_VARIABLE: str(log)}


def _fire(name: str) -> None:
    if name not in _armed:
        return
    at, action = _armed[name]
    _hits[name] = _hits.get(name, 0) + 1
    if at in (0, _hits[name]):
        if action is not _wait:
            _log(name)
        action()


@contextlib.contextmanager
def armed(name: str, action: Action | None = None, *, at: int = 0) -> Iterator[None]:
    """Arm `name` inside a `with` block; `at` counts hits from 1, and 0 means every hit."""
    _armed[name] = (at, action or (lambda: None))
    _hits.pop(name, None)
    try:
        yield
    finally:
        _armed.pop(name, None)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise RuntimeError("a fail point fired")


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _wait() -> None:
    while True:
        time.sleep(60.0)


_ACTIONS: dict[str, Action] = {"kill": _kill, "raise": _raise, "terminate": _terminate, "wait": _wait}


def _log(name: str) -> None:
    path = os.environ.get(LOG_VARIABLE)
    if path:
        with open(path, "a") as log:
            log.write(name + "\n")


def arm_from_environment() -> None:
    """Arm the fail points of the environment, at the start of a process or after a fork that changed it."""
    for part in filter(None, os.environ.get(POINTS_VARIABLE, "").split(",")):
        point, _, action = part.partition("=")
        name, _, at = point.partition("@")
        _armed[name] = (int(at or 0), _ACTIONS[action])


install(_fire)
arm_from_environment()
