"""Files that are read again when they change, by a thread that looks once in a while.

Not by a notification of the system: secrets that an orchestrator mounts are replaced by a symbolic link several folders
up, which a watch on the file does not see.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from nestrec.base.clock import Clock, RealClock
from nestrec.serving.background import FAILURES, BackgroundThread, guarded

_EVERY_S = 0.5
Mark = tuple[int, int, int]


class WatchedFiles:
    """Files that are read now, and again whenever they are different. If that fails, it is tried at each look."""

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], None], clock: Clock | None = None):
        """name: of their content, for the log and a metric. read: takes the files over, or raises an exception and
        keeps what was read before; what it raises here is for the caller."""
        self.name = name
        self._paths = list(paths)
        self._read = read
        self._clock = clock or RealClock()
        FAILURES.register(name)
        self._marks = self._marks_now()
        self._read()
        self._current_s = self._clock.now_s()

    @property
    def age_s(self) -> float:
        """Seconds since the last look that found the files as they were last read, or read them again."""
        return self._clock.now_s() - self._current_s

    def look(self) -> bool:
        """Read the files again if they have changed; whether that was done. Raises nothing."""
        marks = self._marks_now()
        has_changed = marks != self._marks
        if has_changed:
            try:
                self._read()
            except Exception as error:
                FAILURES.add(self.name, error, "what was read before stays in use", about=tuple(marks))
                return False
        self._marks = marks
        self._current_s = self._clock.now_s()
        return has_changed

    def _marks_now(self) -> list[Mark | None]:
        return [_mark_of(path) for path in self._paths]


class Watcher:
    """A thread that looks at files, until it is closed."""

    def __init__(self, files: Sequence[WatchedFiles], every_s: float = _EVERY_S):
        self._files = list(files)
        self._every_s = every_s
        self._is_closed = threading.Event()
        if self._files:
            BackgroundThread("nestrec-files", self._turn).start()

    def close(self) -> None:
        self._is_closed.set()

    def _turn(self) -> bool:
        if self._is_closed.wait(self._every_s):
            return False
        for files in self._files:
            guarded(files.name, files.look)
        return True


def _mark_of(path: Path) -> Mark | None:
    """None where there is no such file now."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
