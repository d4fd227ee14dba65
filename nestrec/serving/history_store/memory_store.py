"""History store in the memory of this process: bounded in size (LRU eviction) and lost when the process exits."""

import threading
from collections import OrderedDict

from nestrec.base.clock import Clock, RealClock
from nestrec.base.lazy import import_extra
from nestrec.serving.history_store.history_codec import decode_parts, encode_events, encode_newest, merge_parts
from nestrec.serving.history_store.history_store import HistoryStore, HistoryStoreConfig, RawHistory


def make_store(cfg: HistoryStoreConfig) -> HistoryStore:
    """Create the history store that the options select.

    Raises:
        UserError: The URL is invalid, or the `redis` package is not installed.
    """

    if not cfg.is_shared:
        return MemoryHistoryStore(cfg)
    import_extra("redis", "redis", "is needed for this store")
    from nestrec.serving.history_store.redis_store import RedisHistoryStore

    return RedisHistoryStore(cfg)


_USER_BYTES, _PART_BYTES = 400, 50
"""Estimated memory overhead in bytes of a user and of a part of a history, in addition to their content."""
_MAX_PARTS = 64


class MemoryHistoryStore:
    """History store in process memory. Thread-safe.

    Histories contain the ids of the source, not of a model, so that every model and every later version can read them.
    They are encoded, so that their size in bytes is known.
    """

    def __init__(self, cfg: HistoryStoreConfig, clock: Clock | None = None):
        self._cfg = cfg
        self._clock = clock or RealClock()
        self._users: OrderedDict[str, _StoredEvents] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Size of all stored histories in bytes, including the estimated overhead."""
        return self._num_bytes

    async def get(self, user: str, timeout_s: float = 0.0) -> RawHistory | None:
        with self._lock:
            stored = self._find(user)
            if stored is None:
                return None
            self._users.move_to_end(user)
            parts = list(stored.parts)
        return merge_parts(decode_parts(user, b"".join(parts)), self._cfg.max_events)

    async def append(self, user: str, events: RawHistory, timeout_s: float = 0.0) -> int:
        with self._lock:
            stored = self._find(user) or _StoredEvents()
            self._drop(user)
            stored.add(encode_events(user, events), len(events["items"]), self._clock.now_s())
            if stored.exceeds_limits(self._cfg):
                stored.compact(user, self._cfg)
            self._users[user] = stored
            self._num_bytes += _num_bytes(user, stored)
            while len(self._users) > 1 and (
                len(self._users) > self._cfg.max_users or self._num_bytes > self._cfg.max_bytes
            ):
                self._drop(next(iter(self._users)))
            return min(stored.num_events, self._cfg.max_events)

    async def forget(self, user: str, timeout_s: float = 0.0) -> None:
        with self._lock:
            self._drop(user)

    async def close(self) -> None:
        """Do nothing: this store has no connections."""

    def _find(self, user: str) -> "_StoredEvents | None":
        stored = self._users.get(user)
        if stored is not None and self._cfg.ttl_s is not None and self._clock.now_s() - stored.last_s > self._cfg.ttl_s:
            self._drop(user)
            return None
        return stored

    def _drop(self, user: str) -> None:
        stored = self._users.pop(user, None)
        if stored is not None:
            self._num_bytes -= _num_bytes(user, stored)


class _StoredEvents:
    """Encoded events of a user, one part per append, so that an append does not decode the earlier parts."""

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

    def exceeds_limits(self, cfg: HistoryStoreConfig) -> bool:
        is_too_large = self.num_events > cfg.max_events or self.num_bytes > cfg.max_user_bytes
        return is_too_large or len(self.parts) > _MAX_PARTS

    def compact(self, user: str, cfg: HistoryStoreConfig) -> None:
        """Replace all parts by one part with the newest events."""
        history = merge_parts(decode_parts(user, b"".join(self.parts)), cfg.max_events)
        part, self.num_events = encode_newest(user, history, cfg.max_user_bytes - _PART_BYTES)
        self.parts = [part]
        self.num_bytes = len(part) + _PART_BYTES


def _num_bytes(user: str, stored: _StoredEvents) -> int:
    return _USER_BYTES + 4 * len(user) + stored.num_bytes
