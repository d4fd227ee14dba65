"""Bodies of the signals and ranking requests of returning users. The events of a user are a function of the user.

Events are encoded once as a long text, and the events of a user are a slice of it: encoding every request separately
would take longer than the server needs to answer it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from nestrec_bench.load_test.load_test import RequiredInputs

_BANK = 1 << 16
_EVERY_MS, _NOW_MS = 60_000, 1_700_000_000_000


class UserBodies:
    """Generator of request bodies.

    Args:
        items: Item ids.
        reads: Inputs that the model requires.
        new_events: Number of new events of a user between two visits.
        seed: Random seed.
    """

    def __init__(self, items: Sequence[str], reads: RequiredInputs, *, new_events: int, seed: int):
        rng = np.random.default_rng(seed)
        self._reads = reads
        self._new_events = new_events
        self._items = _EncodedValues([items[i] for i in rng.integers(0, len(items), _BANK)])
        self._actions = _EncodedValues(rng.choice(reads.actions, _BANK).tolist() if reads.actions else [])
        self._times = _EncodedValues((_NOW_MS + (np.arange(_BANK) - _BANK) * _EVERY_MS).tolist())

    def of(self, lengths: Sequence[int], num_candidates: int, user: int, visit: int) -> tuple[bytes, bytes, bytes]:
        """Return the bodies of three requests of a visit.

        The first one announces the ranking request without the history; the server responds whether it needs the
        pre-infer signal. The second one is the signal, and the third one is the ranking request.

        Args:
            lengths: Numbers of events at the first visit, assigned to users in turn.
            num_candidates: Number of candidates.
            user: Number of the user.
            visit: Number of the visit, from 0.
        """
        length = lengths[user * 7919 % len(lengths)] + visit * self._new_events
        first = user * 7919 % (_BANK // 2)
        columns = [b'"items":[%b]' % self._items.cut(first, length), b'"times_ms":[%b]' % self._times.cut(0, length)]
        if self._reads.actions:
            columns.append(b'"actions":[%b]' % self._actions.cut(first, length))
        if self._reads.features:
            columns.append(b'"features":%b' % orjson.dumps({name: [None] * length for name in self._reads.features}))
        of_user: dict[str, Any] = {"user": str(user), "now_ms": _NOW_MS}
        if self._reads.user_features:
            of_user["user_features"] = dict.fromkeys(self._reads.user_features)
        of_request: dict[str, Any] = {"timeout_ms": 10_000}
        if self._reads.features:
            of_request["context"] = dict.fromkeys(self._reads.features)
        common = b'%b,"history":{%b}' % (orjson.dumps(of_user)[:-1], b",".join(columns))
        candidates = self._items.cut(first // 2, num_candidates)
        rank = b'%b,"candidates":[%b]}' % (orjson.dumps(of_request)[1:-1], candidates)
        inquiry = orjson.dumps({"user": str(user), "num_events": length, "num_candidates": num_candidates})
        return inquiry, b'%b,"num_candidates":%d}' % (common, num_candidates), b"%b,%b" % (common, rank)


class _EncodedValues:
    """Values encoded as one JSON text, from which consecutive values are sliced."""

    def __init__(self, values: list[Any]):
        parts = [orjson.dumps(value) for value in values]
        self._text = b",".join(parts)
        self._ends = np.cumsum([0, *(len(part) + 1 for part in parts)])

    def cut(self, first: int, count: int) -> bytes:
        return self._text[self._ends[first] : max(self._ends[first], self._ends[first + count] - 1)]
