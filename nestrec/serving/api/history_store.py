"""Histories that the server keeps, for clients that send events as they happen instead of whole histories.

They are kept as they came, in the ids of the source and as JSON, so that any model and any later version of it can read
them, and so that their bytes can be counted.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import orjson

from nestrec.base.bounds import Count
from nestrec.base.config import config

RawHistory = Mapping[str, Any]
"""`items`, `times_ms`, `actions` and `features` as in the `history` of a request."""
_USER_BYTES, _PART_BYTES = 400, 50
"""that a user, and a part of a history, take beside what they hold"""
_MOST_PARTS = 64
_SPARE = 0.875


@config
class HistoryStoreConfig:
    max_users: Count = 100_000
    """the least recently used are forgotten beyond it"""
    max_events: Count = 20_000
    """newest events kept of a user"""
    max_user_bytes: Count = 1 << 20
    """of the newest events of a user"""
    max_bytes: Count = 1 << 28
    """of all users; the least recently used are forgotten beyond it"""


class HistoryStore(Protocol):
    """Where histories come from when a request brings none. Thread safe."""

    def get(self, user: str) -> RawHistory | None:
        """The events of a user, oldest first; none where nothing is known."""
        ...

    def append(self, user: str, events: RawHistory) -> int:
        """Add events and return how many the user has now. `ValueError` where they are older than what is there."""
        ...

    def forget(self, user: str) -> None: ...


class MemoryHistoryStore:
    """The embedded store: bounded, in this process, gone when it ends."""

    def __init__(self, cfg: HistoryStoreConfig):
        self._cfg = cfg
        self._users: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Of all that is kept, with what keeping it takes."""
        return self._num_bytes

    def get(self, user: str) -> RawHistory | None:
        with self._lock:
            kept = self._users.get(user)
            if kept is None:
                return None
            self._users.move_to_end(user)
            parts = list(kept.parts)
        return newest(joined_history([orjson.loads(part) for part in parts]), self._cfg.max_events)

    def append(self, user: str, events: RawHistory) -> int:
        with self._lock:
            kept = self._users.get(user) or _Kept()
            if events["items"] and events["times_ms"][0] < kept.last_ms:
                raise ValueError("events must not be older than those that are there")
            self._drop(user)
            kept.add(events)
            if kept.is_beyond(self._cfg):
                kept.cut(self._cfg)
            self._users[user] = kept
            self._num_bytes += _size(user, kept)
            while len(self._users) > 1 and (
                len(self._users) > self._cfg.max_users or self._num_bytes > self._cfg.max_bytes
            ):
                self._drop(next(iter(self._users)))
            return min(kept.num_events, self._cfg.max_events)

    def forget(self, user: str) -> None:
        with self._lock:
            self._drop(user)

    def _drop(self, user: str) -> None:
        kept = self._users.pop(user, None)
        if kept is not None:
            self._num_bytes -= _size(user, kept)


class _Kept:
    """The events of a user, in parts as they came: adding one need not read the others."""

    __slots__ = ("last_ms", "num_bytes", "num_events", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.num_bytes = self.num_events = 0
        self.last_ms = 0

    def add(self, events: RawHistory) -> None:
        part = orjson.dumps({name: values for name, values in events.items() if values is not None})
        self.parts.append(part)
        self.num_bytes += len(part) + _PART_BYTES
        self.num_events += len(events["items"])
        self.last_ms = events["times_ms"][-1] if events["items"] else self.last_ms

    def is_beyond(self, cfg: HistoryStoreConfig) -> bool:
        is_more = self.num_events > cfg.max_events or self.num_bytes > cfg.max_user_bytes
        return is_more or len(self.parts) > _MOST_PARTS

    def cut(self, cfg: HistoryStoreConfig) -> None:
        """One part of the newest events; where bytes are beyond the most, a little below it, to last a while."""
        history = newest(joined_history([orjson.loads(part) for part in self.parts]), cfg.max_events)
        part = orjson.dumps(history)
        while len(part) + _PART_BYTES > cfg.max_user_bytes and history["items"]:
            fits = cfg.max_user_bytes / (len(part) + _PART_BYTES)
            count = len(history["items"])
            history = newest(history, max(count // 2, int(_SPARE * fits * count)))
            part = orjson.dumps(history)
        self.parts, self.num_bytes, self.num_events = [part], len(part) + _PART_BYTES, len(history["items"])


def _size(user: str, kept: _Kept) -> int:
    return _USER_BYTES + 4 * len(user) + kept.num_bytes


def joined_history(parts: Sequence[RawHistory]) -> RawHistory:
    """Events one part after the other."""
    counts = [len(part["items"]) for part in parts]

    def column(columns: Iterable[list[Any] | None], missing: Any) -> list[Any]:
        joined: list[Any] = []
        for values, count in zip(columns, counts, strict=True):
            joined += [missing] * count if values is None else values
        return joined

    features = [part.get("features") or {} for part in parts]
    return {
        "items": column((part["items"] for part in parts), None),
        "times_ms": column((part["times_ms"] for part in parts), 0),
        "actions": column((part.get("actions") for part in parts), None),
        "features": {
            name: column((of_part.get(name) for of_part in features), None)
            for name in dict.fromkeys(name for of_part in features for name in of_part)
        },
    }


def newest(history: RawHistory, most: int) -> RawHistory:
    """The last events, at most so many."""
    first = max(0, len(history["items"]) - most)
    if first == 0:
        return history
    plain = {name: values[first:] for name, values in history.items() if name != "features"}
    return {**plain, "features": {name: values[first:] for name, values in history["features"].items()}}
