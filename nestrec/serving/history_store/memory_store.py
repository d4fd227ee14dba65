"""The embedded store: bounded, in the memory of this process, gone when it ends."""

import threading
from collections import OrderedDict

from nestrec.base.clock import Clock, RealClock
from nestrec.base.lazy import import_extra
from nestrec.serving.history_store.history_codec import cut, merged, packed, unpacked
from nestrec.serving.history_store.history_store import HistoryStore, HistoryStoreConfig, RawHistory


def make_store(cfg: HistoryStoreConfig) -> HistoryStore:
    """The store that a server is told to use."""

    if not cfg.is_shared:
        return MemoryHistoryStore(cfg)
    import_extra("redis", "redis", "is needed for this store")
    from nestrec.serving.history_store.redis_store import RedisHistoryStore

    return RedisHistoryStore(cfg)


_USER_BYTES, _PART_BYTES = 400, 50
"""that a user, and a part of a history, take beside what they hold"""
_MOST_PARTS = 64


class MemoryHistoryStore:
    """Histories are kept as they came, in the ids of the source, so that any model and any later version of it can read
    them, and packed, so that their bytes can be counted. Thread safe."""

    def __init__(self, cfg: HistoryStoreConfig, clock: Clock | None = None):
        self._cfg = cfg
        self._clock = clock or RealClock()
        self._users: OrderedDict[str, _StoredEvents] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Of all that is kept, with what keeping it takes."""
        return self._num_bytes

    async def get(self, user: str, timeout_s: float = 0.0) -> RawHistory | None:
        with self._lock:
            kept = self._found(user)
            if kept is None:
                return None
            self._users.move_to_end(user)
            parts = list(kept.parts)
        return merged(unpacked(user, b"".join(parts)), self._cfg.max_events)

    async def append(self, user: str, events: RawHistory, timeout_s: float = 0.0) -> int:
        with self._lock:
            kept = self._found(user) or _StoredEvents()
            self._drop(user)
            kept.add(packed(user, events), len(events["items"]), self._clock.now_s())
            if kept.is_beyond(self._cfg):
                kept.cut(user, self._cfg)
            self._users[user] = kept
            self._num_bytes += _size(user, kept)
            while len(self._users) > 1 and (
                len(self._users) > self._cfg.max_users or self._num_bytes > self._cfg.max_bytes
            ):
                self._drop(next(iter(self._users)))
            return min(kept.num_events, self._cfg.max_events)

    async def forget(self, user: str, timeout_s: float = 0.0) -> None:
        with self._lock:
            self._drop(user)

    async def close(self) -> None:
        """Nothing is open."""

    def _found(self, user: str) -> "_StoredEvents | None":
        kept = self._users.get(user)
        if kept is not None and self._cfg.ttl_s is not None and self._clock.now_s() - kept.last_s > self._cfg.ttl_s:
            self._drop(user)
            return None
        return kept

    def _drop(self, user: str) -> None:
        kept = self._users.pop(user, None)
        if kept is not None:
            self._num_bytes -= _size(user, kept)


class _StoredEvents:
    """The events of a user, in parts as they came: adding one need not read the others."""

    __slots__ = ("last_s", "num_bytes", "num_events", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.num_bytes = self.num_events = 0
        self.last_s = 0.0

    def add(self, part: bytes, count: int, now_s: float) -> None:
        self.parts.append(part)
        self.num_bytes += len(part) + _PART_BYTES
        self.num_events += count
        self.last_s = now_s

    def is_beyond(self, cfg: HistoryStoreConfig) -> bool:
        is_more = self.num_events > cfg.max_events or self.num_bytes > cfg.max_user_bytes
        return is_more or len(self.parts) > _MOST_PARTS

    def cut(self, user: str, cfg: HistoryStoreConfig) -> None:
        """One part of the newest events."""
        history = merged(unpacked(user, b"".join(self.parts)), cfg.max_events)
        part, self.num_events = cut(user, history, cfg.max_user_bytes - _PART_BYTES)
        self.parts = [part]
        self.num_bytes = len(part) + _PART_BYTES


def _size(user: str, kept: _StoredEvents) -> int:
    return _USER_BYTES + 4 * len(user) + kept.num_bytes
