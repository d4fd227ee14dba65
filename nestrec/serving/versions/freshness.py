"""How long it takes from an event to the first answer that has learnt from it, and what that time consists of.

    window     the event waits for the end of its window (mean over the events of a version)
    training   the window is trained on
    publish    what has changed is copied and written, until the version is there
    fetch      a server finds, fetches and verifies it
    apply      it waits for the end of a batch, and is copied
    answer     the next request comes and is answered

Clocks of several machines are taken at their word.
"""

from collections import deque
from dataclasses import dataclass, replace

from nestrec.serving.histogram import LONG_BOUNDS_S, Histogram
from nestrec.serving.versions.manifest import VersionManifest

PARTS = ("window", "training", "publish", "fetch", "apply", "answer")
_KEPT = 512


@dataclass(frozen=True, slots=True)
class Fresh:
    """Seconds of the parts of one version; none where a run does not tell, or nobody has asked yet."""

    number: int
    parts: tuple[tuple[str, float | None], ...]
    began_s: float | None
    """when its events came, on average; Unix seconds"""
    applied_s: float
    answered_s: float | None = None

    @property
    def seconds(self) -> float | None:
        """All of it; none where the times of events are not known, or nobody has been answered."""
        return None if self.began_s is None or self.answered_s is None else self.answered_s - self.began_s

    def told(self) -> dict[str, float | None]:
        answer = None if self.answered_s is None else self.answered_s - self.applied_s
        return {**dict(self.parts), "answer": answer}


class Freshness:
    """Of the versions that a server has served of late. One thread at a time changes it, any may read."""

    def __init__(self) -> None:
        self.recent: deque[Fresh] = deque(maxlen=_KEPT)
        self.times = Histogram(LONG_BOUNDS_S)
        """seconds from event to answer"""

    def began(self, manifest: VersionManifest, *, fetched_s: float, applied_s: float) -> None:
        """A version has come into service."""
        times = manifest.times
        came_s = times.mean_event_s if times.mean_event_s is not None else times.last_event_s
        closed_s = times.closed_s if times.closed_s is not None else times.last_event_s
        parts = (
            ("window", _between(came_s, closed_s)),
            ("training", _between(closed_s, times.trained_s)),
            ("publish", _between(times.trained_s, manifest.published_s)),
            ("fetch", _between(manifest.published_s, fetched_s)),
            ("apply", applied_s - fetched_s),
        )
        self.recent.append(Fresh(manifest.number, parts, came_s, applied_s))

    def answered(self, at_s: float | None) -> None:
        """When the version in service has first answered; none: not yet."""
        if at_s is None or not self.recent or self.recent[-1].answered_s is not None:
            return
        fresh = replace(self.recent[-1], answered_s=at_s)
        self.recent[-1] = fresh
        if fresh.seconds is not None:
            self.times.observe(fresh.seconds)

    @property
    def last(self) -> Fresh | None:
        """The newest that has answered, or the newest at all."""
        answered = [fresh for fresh in self.recent if fresh.answered_s is not None]
        return answered[-1] if answered else self.recent[-1] if self.recent else None


def _between(first_s: float | None, last_s: float | None) -> float | None:
    return None if first_s is None or last_s is None else last_s - first_s
