"""The DRAM tier: prefixes that left the device, kept a while for the user's next request.

Pure book-keeping under a given clock; the copies themselves are the engine's business. At most one copy of a user is
under way at a time (single flight), copies of a user end in the order in which they began, and what was forgotten while
it was being copied is dropped at its end. Bytes are bounded; an entry that is being read is never evicted.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from nestrec.base.clock import Clock
from nestrec.serving.prefix.cache import CacheKey, ContentOf

Payload = TypeVar("Payload")


@dataclass(eq=False, slots=True)
class Kept(Generic[Payload]):
    """A prefix in DRAM."""

    key: CacheKey
    length: int
    content: bytes
    num_bytes: int
    payload: Payload | None
    """none while the copy is under way"""
    expires_s: float
    pins: int = 0
    is_dropped: bool = False


class Expander(Generic[Payload]):
    """Entries within a bound of bytes. One thread uses it."""

    def __init__(self, *, max_bytes: int, ttl_s: float, clock: Clock, give: Callable[[Payload], None] = lambda _: None):
        """give: is handed the payload of an entry that is gone."""
        self.max_bytes, self._ttl_s, self._clock, self._give = max_bytes, ttl_s, clock, give
        self._kept: OrderedDict[CacheKey, Kept[Payload]] = OrderedDict()  # least recently used first
        self._in_flight: set[CacheKey] = set()
        self.num_bytes = 0

    def begin_spill(self, key: CacheKey, *, length: int, content: bytes, num_bytes: int) -> Kept[Payload] | None:
        """Room for a copy from the device; none where the user has one under way, has it already, or nothing fits."""
        known = self._kept.get(key)
        if key in self._in_flight or (known is not None and known.content == content and known.length == length):
            return None
        if known is not None:
            self._remove(key)
        if not self._make_room(num_bytes):
            return None
        kept: Kept[Payload] = Kept(key, length, content, num_bytes, None, self._clock.now_s() + self._ttl_s)
        self._kept[key] = kept
        self.num_bytes += num_bytes
        self._in_flight.add(key)
        kept.pins += 1
        return kept

    def finish_spill(self, kept: Kept[Payload], payload: Payload) -> None:
        self._in_flight.discard(kept.key)
        kept.payload = payload
        self._unpin(kept)

    def find(self, key: CacheKey, content_of: ContentOf) -> Kept[Payload] | None:
        """What is kept of the request's first tokens and not being copied; what no longer matches is forgotten."""
        kept = self._kept.get(key)
        if kept is None or key in self._in_flight:
            return None
        if self._clock.now_s() >= kept.expires_s or content_of(kept.length) != kept.content:
            self._remove(key)
            return None
        self._kept.move_to_end(key)
        return kept

    def begin_reload(self, kept: Kept[Payload]) -> None:
        """A copy to the device begins; `find` does not give the entry out again before its end."""
        assert kept.key not in self._in_flight
        self._in_flight.add(kept.key)
        kept.pins += 1

    def finish_reload(self, kept: Kept[Payload]) -> bool:
        """Whether the copy may be used: not where it was forgotten meanwhile."""
        self._in_flight.discard(kept.key)
        is_good = not kept.is_dropped
        self._unpin(kept)
        return is_good

    def drop(self, key: CacheKey) -> bool:
        if key not in self._kept:
            return False
        self._remove(key)
        return True

    def clear(self) -> None:
        """Forget every entry without handing its payload on."""
        self._kept.clear()
        self._in_flight.clear()
        self.num_bytes = 0

    def drop_entry(self, kept: Kept[Payload]) -> None:
        """Forget this very entry, where it is still there."""
        if self._kept.get(kept.key) is kept:
            self._remove(kept.key)

    def drop_oldest(self, is_doomed: Callable[[CacheKey], bool], most: int) -> int:
        """Forget keys that `is_doomed` names, the longest unused first, up to one that it does not name; how many."""
        keys: list[CacheKey] = []
        for key in self._kept:
            if len(keys) == most or not is_doomed(key):
                break
            keys.append(key)
        for key in keys:
            self._remove(key)
        return len(keys)

    def entries(self) -> list[Kept[Payload]]:
        return list(self._kept.values())

    def _make_room(self, num_bytes: int) -> bool:
        victims, gained = [], self.max_bytes - self.num_bytes
        for key, kept in self._kept.items():
            if gained >= num_bytes:
                break
            if kept.pins == 0:
                victims.append(key)
                gained += kept.num_bytes
        if gained < num_bytes:
            return False
        for key in victims:
            self._remove(key)
        return True

    def _remove(self, key: CacheKey) -> None:
        kept = self._kept.pop(key)
        kept.is_dropped = True
        if kept.pins == 0:
            self._release(kept)

    def _unpin(self, kept: Kept[Payload]) -> None:
        kept.pins -= 1
        if kept.pins == 0 and kept.is_dropped:
            self._release(kept)

    def _release(self, kept: Kept[Payload]) -> None:
        self.num_bytes -= kept.num_bytes
        if kept.payload is not None:
            self._give(kept.payload)
        kept.payload = None
