"""Histories that the server keeps, for clients that send events as they happen instead of whole histories.

They are kept as they came, in the ids of the source, so that any model and any later version of it can read them.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

from nestrec.base.bounds import Count
from nestrec.base.config import config

RawHistory = Mapping[str, Any]
"""`items`, `times_ms`, `actions` and `features` as in the `history` of a request."""


@config
class HistoryStoreConfig:
    max_users: Count = 100_000
    """the least recently used are forgotten beyond it"""
    max_events: Count = 20_000
    """newest events kept of a user"""


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
        self._users: OrderedDict[str, RawHistory] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, user: str) -> RawHistory | None:
        with self._lock:
            history = self._users.get(user)
            if history is not None:
                self._users.move_to_end(user)
            return history

    def append(self, user: str, events: RawHistory) -> int:
        with self._lock:
            joined = joined_history(self._users.get(user), events, self._cfg.max_events)
            self._users[user] = joined
            self._users.move_to_end(user)
            while len(self._users) > self._cfg.max_users:
                self._users.popitem(last=False)
            return len(joined["items"])

    def forget(self, user: str) -> None:
        with self._lock:
            self._users.pop(user, None)


def joined_history(first: RawHistory | None, second: RawHistory, most: int) -> RawHistory:
    """Events of `second` after those of `first`, the newest `most` of them; neither is changed."""
    first = first or {"items": []}
    num_first, num_second = len(first["items"]), len(second["items"])
    if num_first and num_second and second["times_ms"][0] < first["times_ms"][-1]:
        raise ValueError("events must not be older than those that are there")

    def column(before: list[Any] | None, after: list[Any] | None, missing: Any) -> list[Any]:
        joined = [*(before or [missing] * num_first), *(after or [missing] * num_second)]
        return joined[max(0, len(joined) - most) :]

    old, new = first.get("features") or {}, second.get("features") or {}
    return {
        "items": column(first["items"], second["items"], None),
        "times_ms": column(first.get("times_ms"), second["times_ms"], 0),
        "actions": column(first.get("actions"), second.get("actions"), None),
        "features": {name: column(old.get(name), new.get(name), None) for name in dict.fromkeys([*old, *new])},
    }
