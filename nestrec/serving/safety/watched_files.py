"""Files that are read again when they change, by a thread that looks once in a while.

Not by a notification of the system: secrets that an orchestrator mounts are replaced by a symbolic link several folders
up, which a watch on the file does not see.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

_EVERY_S = 0.5
Mark = tuple[int, int, int]


class WatchedFiles:
    """Whether files are others than they were at the last look."""

    def __init__(self, paths: Sequence[Path]):
        self._paths = list(paths)
        self._seen = [_mark_of(path) for path in self._paths]

    def have_changed(self) -> bool:
        seen = [_mark_of(path) for path in self._paths]
        has_changed, self._seen = seen != self._seen, seen
        return has_changed


class Watcher:
    """A thread that lets each of its readers look, until it is closed."""

    def __init__(self, readers: Sequence[Callable[[], object]], every_s: float = _EVERY_S):
        """readers: must not raise."""
        self._readers, self._every_s, self._is_closed = list(readers), every_s, threading.Event()
        if self._readers:
            threading.Thread(target=self._look, name="nestrec-files", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    def _look(self) -> None:
        while not self._is_closed.wait(self._every_s):
            for read in self._readers:
                read()


def _mark_of(path: Path) -> Mark | None:
    """None where there is no such file now."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
