"""Signals and ranking requests of users who come back, as bytes. A user's events are a function of the user.

Events are written once, as one long text of which those of a user are a piece: to write each request anew would take
longer than to answer it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from nestrec_bench.load_test.load_test import RequiredInputs

_BANK = 1 << 16
_EVERY_MS, _NOW_MS = 60_000, 1_700_000_000_000


class UserBodies:
    """For a model that reads so much. new_events: of a user between two visits."""

    def __init__(self, items: Sequence[str], reads: RequiredInputs, *, new_events: int, seed: int):
        rng = np.random.default_rng(seed)
        self._reads = reads
        self._new_events = new_events
        self._items = _Written([items[i] for i in rng.integers(0, len(items), _BANK)])
        self._actions = _Written(rng.choice(reads.actions, _BANK).tolist() if reads.actions else [])
        self._times = _Written((_NOW_MS + (np.arange(_BANK) - _BANK) * _EVERY_MS).tolist())

    def of(self, lengths: Sequence[int], asked: int, user: int, visit: int) -> tuple[bytes, bytes, bytes]:
        """(whether a signal is wanted, signal, ranking request). lengths: events at the first visit, by turns of
        users."""
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
        of_asked: dict[str, Any] = {"timeout_ms": 10_000}
        if self._reads.features:
            of_asked["context"] = dict.fromkeys(self._reads.features)
        common = b'%b,"history":{%b}' % (orjson.dumps(of_user)[:-1], b",".join(columns))
        rank = b'%b,"candidates":[%b]}' % (orjson.dumps(of_asked)[1:-1], self._items.cut(first // 2, asked))
        asks = orjson.dumps({"user": str(user), "events": length, "num_candidates": asked})
        return asks, b'%b,"num_candidates":%d}' % (common, asked), b"%b,%b" % (common, rank)


class _Written:
    """Values as JSON, of which any run is a piece of one text."""

    def __init__(self, values: list[Any]):
        parts = [orjson.dumps(value) for value in values]
        self._text = b",".join(parts)
        self._ends = np.cumsum([0, *(len(part) + 1 for part in parts)])

    def cut(self, first: int, count: int) -> bytes:
        return self._text[self._ends[first] : max(self._ends[first], self._ends[first + count] - 1)]
