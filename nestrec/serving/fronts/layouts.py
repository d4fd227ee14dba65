"""Ranking requests and their answers as bytes, in the ids of a model: arrays as they lie in memory, without a copy in
the interpreter's objects.

    request   head, user, client, names of features, then int64: items, times and actions of events, their features,
              candidates, their features, features of what is asked for, excluded items, allowed items
    answer    head, version, then int64 items and float32 scores
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nestrec.serving.client import Sender
from nestrec.serving.engine.work import Answer, Source
from nestrec.serving.model.inputs import Candidates, History, is_shared
from nestrec.serving.tracing import EngineTimes

Ids = NDArray[np.int64]
By = Literal["name", "session"]
_ASK = struct.Struct("<IBdqIddIiiiiiHHIII")
_BY: tuple[By, ...] = ("name", "session")
_ANSWER = struct.Struct("<BBdIIIBHddddIII")
_SOURCES: tuple[Source, ...] = ("none", "device", "dram")
_NOBODY = -1
_ONCE = "*"
"""before the name of a feature that has one value at all places, which is sent once; no feature's name begins so"""
OK, SWAPPED, OVERLOADED, UNAVAILABLE, FAILED = range(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """A ranking request, or a signal of one."""

    fleet: int
    """number of the model whose names it was read with"""
    by: By
    """name: that model answers it; session: the one that the user's signal went to, where there was one"""
    user: str
    sender: Sender
    timeout_s: float
    history: History
    candidates: Candidates
    """of a signal: so many of them are expected, as `num_best`"""

    def packed(self) -> bytes:
        history, candidates = self.history, self.candidates
        names = _names(history.features), _names(candidates.features), [*history.asked]
        texts = self.user.encode(), self.sender.client.encode(), *("\n".join(group).encode() for group in names)
        allowed = candidates.allowed
        head = _ASK.pack(
            self.fleet, _BY.index(self.by), self.timeout_s, candidates.now_ms, self.sender.num_bytes,
            self.sender.began_s, self.sender.back_s, candidates.num_best, len(history), len(candidates),
            len(candidates.excluded), _NOBODY if allowed is None else len(allowed), len(history.asked),
            *map(len, texts),
        )  # fmt: skip
        asked = np.array([*history.asked.values()], np.int64)
        arrays = (
            history.items, history.times_ms, history.actions, *_told(history.features), candidates.items,
            *_told(candidates.features), asked, candidates.excluded, *(() if allowed is None else (allowed,)),
        )  # fmt: skip
        return b"".join((head, *texts, *(np.ascontiguousarray(array, np.int64).tobytes() for array in arrays)))

    @staticmethod
    def unpacked(data: bytes) -> "Asking":
        """The arrays are views of the data, and are not to be changed."""
        fleet, by, timeout_s, now_ms, num_bytes, began_s, back_s, num_best, *rest = _ASK.unpack_from(data)
        num_events, num_candidates, num_excluded, num_allowed, num_asked, *sizes = rest
        place, texts = _ASK.size, []
        for size in sizes:
            texts.append(data[place : place + size].decode())
            place += size
        user, client, *groups = texts
        of_events, of_candidates, of_asked = (group.split("\n") if group else [] for group in groups)
        arrays = _Arrays(np.frombuffer(data, np.int64, offset=place))
        history = History(
            items=arrays.next(num_events),
            times_ms=arrays.next(num_events),
            actions=arrays.next(num_events),
            features=arrays.features(of_events, num_events),
        )
        items = arrays.next(num_candidates)
        features = arrays.features(of_candidates, num_candidates)
        if num_asked:
            asked = dict(zip(of_asked, arrays.next(num_asked).tolist(), strict=True))
            history = History(
                items=history.items, times_ms=history.times_ms, actions=history.actions, features=history.features,
                asked=asked,
            )  # fmt: skip
        candidates = Candidates(
            items=items,
            now_ms=now_ms,
            features=features,
            num_best=num_best,
            excluded=arrays.next(num_excluded),
            allowed=None if num_allowed == _NOBODY else arrays.next(num_allowed),
        )
        return Asking(
            fleet=fleet,
            by=_BY[by],
            user=user,
            sender=Sender(client, num_bytes, began_s, back_s),
            timeout_s=timeout_s,
            history=history,
            candidates=candidates,
        )


class _Arrays:
    def __init__(self, values: Ids):
        self._values, self._place = values, 0

    def next(self, count: int) -> Ids:
        self._place += count
        return self._values[self._place - count : self._place]

    def features(self, names: list[str], count: int) -> dict[str, Ids]:
        found: dict[str, Ids] = {}
        for name in names:
            is_once = name.startswith(_ONCE)
            found[name.removeprefix(_ONCE)] = np.broadcast_to(self.next(1), count) if is_once else self.next(count)
        return found


def _names(features: Mapping[str, Ids]) -> list[str]:
    return [_ONCE + name if is_shared(values) else name for name, values in features.items()]


def _told(features: Mapping[str, Ids]) -> list[Ids]:
    return [values[:1] if is_shared(values) else values for values in features.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replied:
    """What became of a request."""

    outcome: int
    """OK, or why not"""
    is_full: bool = False
    """another one of this client, as large as this one, would be refused now"""
    queued_s: float = 0.0
    """device seconds of the work that waits"""
    fleet: int = 0
    """of SWAPPED: number of the model to read it with"""
    answer: Answer | None = None
    times: EngineTimes | None = None
    reason: str = ""
    """why it was refused, or what was decided about a signal"""
    retry_after_s: float = 0.0

    def packed(self) -> bytes:
        answer, times = self.answer, self.times
        arrays: tuple[NDArray[Any], ...] = ()
        if answer is None or times is None:
            version, source, num_cached, shape = self.reason.encode(), 0, 0, (0, 0, 0)
            moments, num_tokens = (self.retry_after_s, 0.0, 0.0, 0.0), 0
        else:
            version, source, num_cached = answer.version.encode(), _SOURCES.index(answer.source), answer.num_cached
            shape = (len(answer.items), *answer.scores.shape)
            moments = (times.arrived_s, times.planned_s, times.computed_s, times.ended_s)
            num_tokens = times.num_tokens
            arrays = answer.items.astype(np.int64, copy=False), answer.scores.astype(np.float32, copy=False)
        head = _ANSWER.pack(
            self.outcome, self.is_full, self.queued_s, self.fleet, num_cached, num_tokens, source, len(version),
            *moments, *shape,
        )  # fmt: skip
        return b"".join((head, version, *(array.tobytes() for array in arrays)))

    @staticmethod
    def unpacked(data: bytes) -> "Replied":
        outcome, is_full, queued_s, fleet, num_cached, num_tokens, source, size, *rest = _ANSWER.unpack_from(data)
        arrived_s, planned_s, computed_s, ended_s, num_items, num_rows, num_outputs = rest
        place = _ANSWER.size
        text = data[place : place + size].decode()
        if not num_outputs:
            return Replied(
                outcome=outcome, is_full=bool(is_full), queued_s=queued_s, fleet=fleet, reason=text,
                retry_after_s=arrived_s,
            )  # fmt: skip
        place += size
        items = np.frombuffer(data, np.int64, num_items, place)
        scores = np.frombuffer(data, np.float32, num_rows * num_outputs, place + items.nbytes)
        answer = Answer(items, scores.reshape(num_rows, num_outputs), text, _SOURCES[source], num_cached)
        times = EngineTimes(arrived_s, planned_s, computed_s, ended_s, num_tokens)
        return Replied(
            outcome=outcome, is_full=bool(is_full), queued_s=queued_s, fleet=fleet, answer=answer, times=times
        )
