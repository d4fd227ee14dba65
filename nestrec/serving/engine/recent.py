"""The last requests of an engine, for a picture of the relay: when each came, waited and was computed, and from what.

Nothing of who asked or for what: a ranking request names its signal by a running number alone.
"""

import itertools
from collections import OrderedDict, deque
from typing import Any

from nestrec.serving.engine.work import Work
from nestrec.serving.prefix.cache import CacheKey

_MOST = 64


class RecentRequests:
    """One thread writes, any may read."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._done: deque[dict[str, Any]] = deque(maxlen=_MOST)
        self._signals: OrderedDict[CacheKey, int] = OrderedDict()
        """numbers of those whose ranking request may still come"""

    def signalled(self, work: Work, now_s: float) -> None:
        """A prefix was computed ahead."""
        self._signals[work.key] = self._add("signal", work, now_s, None)
        while len(self._signals) > _MOST:
            self._signals.popitem(last=False)

    def ranked(self, work: Work, now_s: float) -> None:
        """A request was answered."""
        self._add("rank", work, now_s, self._signals.pop(work.key, None))

    def told(self, now_s: float) -> list[dict[str, Any]]:
        """Newest last; now_s: `perf_counter`, from which times are counted back."""
        return [
            {**one, "came_s": round(one["came_s"] - now_s, 6), "ended_s": round(one["ended_s"] - now_s, 6)}
            for one in list(self._done)
        ]

    def _add(self, kind: str, work: Work, now_s: float, signal: int | None) -> int:
        number = next(self._numbers)
        one = {
            "number": number,
            "kind": kind,
            "signal": signal,
            "came_s": work.arrived_s,
            "ended_s": now_s,
            "computed_s": round(work.computed_s, 6),
            "parts_ms": parts_ms(work, now_s),
            "prefix": work.source,
            "tokens": work.tokens.length,
            "cached": work.num_cached,
            "candidates": 0 if work.candidates is None else len(work.candidates),
        }
        self._done.append(one)
        return number


def parts_ms(work: Work, ended_s: float) -> dict[str, float]:
    """Where the time of a request went, but for the wire: `in` from its front, which had read all of it, to the engine,
    `queue` until its last batch was begun, `launch` until the device had that, `compute` until it was answered (with
    the batches' work on the device), `back` to the front, as long as the answer before it took. Without what nobody
    knows."""
    if not work.launched_s:  # a signal of what was there
        return {}
    sender = work.sender
    parts = {
        "in": work.arrived_s - sender.began_s if sender.began_s else None,
        "queue": work.planned_s - work.arrived_s,
        "launch": work.launched_s - work.planned_s,
        "compute": ended_s - work.launched_s,
        "back": sender.back_s or None,
    }
    return {name: round(1e3 * seconds, 3) for name, seconds in parts.items() if seconds is not None}
