"""A fleet that moves together: its front looks for newer versions, and takes all instances there, or none.

Instances are taken to a version by name, one after the other, as by `nestrec swap FRONT ADDRESS@VERSION`. Where one
does not take it, those before it get back what they had, and the front tries again with the next version.
"""

import threading
from collections.abc import Callable, Sequence

from nestrec.base.errors import DamagedError
from nestrec.serving.background import FAILURES, BackgroundThread
from nestrec.serving.versions.opening import Source, source_of
from nestrec.serving.versions.reader import Versions


class FrontFollower:
    """Looks on a thread of its own."""

    def __init__(
        self,
        models: Sequence[str],
        poll_s: float,
        swap: Callable[[list[str]], bool],
        followed: Callable[[Sequence[str]], Sequence[str]] = lambda models: models,
    ):
        """models: those of the instances; the ones that come from addresses are followed. swap: has all instances serve
        these, or none; whether they do. followed: what is to be followed by now, instead of those models."""
        self._models, self._followed = list(models), followed
        self._swap, self._poll_s = swap, poll_s
        self._tried: dict[str, str] = {}
        self._versions: dict[str, Versions] = {}
        """by address: kept, since a read that never returns keeps a thread"""
        self._is_closed = threading.Event()
        self._thread = BackgroundThread("nestrec-front-follow", self._turn)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """No further look. One that is under way is left alone: the process is ending."""
        self._is_closed.set()

    def look(self) -> bool:
        """Take the instances to the newest versions; whether all of them took what is new."""
        newer: list[str] = []
        for source in self._sources():
            try:
                newest = self._versions.setdefault(source.address, Versions(source.place)).newest()
            except (OSError, DamagedError) as error:
                FAILURES.add("nestrec-front-follow", error, "the instances stay at their version")
                return False
            if newest is not None and self._tried.get(source.address) != newest.version:
                self._tried[source.address] = newest.version
                newer.append(str(source.at(newest.folder)))
        return not newer or self._swap(newer)

    def _sources(self) -> list[Source]:
        found = (source_of(model) for model in self._followed(self._models))
        return [source for source in found if source is not None and source.version is None]

    def _turn(self) -> bool:
        if self._is_closed.wait(self._poll_s):
            return False
        self.look()
        return True
