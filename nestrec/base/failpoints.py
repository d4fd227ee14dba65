"""Named places where a test can make the program fail. Inert unless armed; never reachable from user options.

In the same process a test arms a point with `armed("checkpoint.before_rename", raise_error)`. In another process it
sets `NESTREC_FAIL_POINTS="name@3=kill,other=raise"`: the third time `name` is reached the process kills itself with
SIGKILL. Each point that fires appends its name to the file named by `NESTREC_FAIL_LOG`, so that a fault test can assert
that it fired; but for one that only waits (`name=wait`) for whoever is to kill the process from outside.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

Action = Callable[[], None]
_armed: dict[str, tuple[int, Action]] = {}
_hits: dict[str, int] = {}


def fail_point(name: str) -> None:
    """Do nothing, or what a test has armed `name` to do."""
    if not _armed or name not in _armed:
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
    path = os.environ.get("NESTREC_FAIL_LOG")
    if path:
        with open(path, "a") as log:
            log.write(name + "\n")


def arm_from_environment() -> None:
    """What NESTREC_FAIL_POINTS names; done once here, and by a forked process that is given another environment."""
    for part in filter(None, os.environ.get("NESTREC_FAIL_POINTS", "").split(",")):
        place, _, action = part.partition("=")
        name, _, at = place.partition("@")
        _armed[name] = (int(at or 0), _ACTIONS[action])


arm_from_environment()
