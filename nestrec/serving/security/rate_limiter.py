"""How often a key may ask: a bucket of tokens for each, filled at its rate.

How often a key may ask several processes together: their buckets lie in memory that they share.

Each process reads keys for itself and sees changes of the file at another moment, so buckets are found by the names of
keys. The lock is one of the system's for files: whoever dies has given it back.
"""

import fcntl
import mmap
import struct
import tempfile
from dataclasses import dataclass
from typing import Protocol

from nestrec.base.clock import Clock, RealClock
from nestrec.serving.security.auth import ApiKey


class RateLimiter(Protocol):
    """Of all keys of a server."""

    def wait_s(self, key: ApiKey) -> float:
        """Take a token for a request; 0 where there is one, else the seconds after which there will be."""
        ...


@dataclass(slots=True)
class TokenBucket:
    tokens: float
    filled_s: float

    def wait_s(self, key: ApiKey, now_s: float) -> float:
        """See `RateLimiter`."""
        gained = (now_s - self.filled_s) * key.requests_per_s
        self.tokens, self.filled_s = min(key.burst, self.tokens + gained), now_s
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return 0.0
        return (1.0 - self.tokens) / key.requests_per_s


class LocalRateLimiter:
    """Of one process. Used inside one event loop."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}

    def wait_s(self, key: ApiKey) -> float:
        if key.requests_per_s == float("inf"):
            return 0.0
        now_s = self._clock.now_s()
        return self._buckets.setdefault(key.name, TokenBucket(key.burst, now_s)).wait_s(key, now_s)


_ENTRY = struct.Struct("<64sdd")
"""name, tokens, and the moment that they are of"""
_NUM_ENTRIES = 1024
"""more than there are keys at a time: those that are gone have one until it is needed"""


class SharedRateLimiter:
    """Made by one process, and shared with all that are forked from it. In each, used inside one event loop."""

    def __init__(self, clock: Clock | None = None):
        """clock: one that the processes share, as the real one is."""
        self._clock = clock or RealClock()
        self._file = tempfile.TemporaryFile(prefix="nestrec-rates-")  # noqa: SIM115 (`close`)
        self._file.truncate(_ENTRY.size * _NUM_ENTRIES)
        self._memory = mmap.mmap(self._file.fileno(), 0)
        self._places: dict[str, int] = {}

    def wait_s(self, key: ApiKey) -> float:
        """See `RateLimiter`."""
        if key.requests_per_s == float("inf"):
            return 0.0
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            now_s = self._clock.now_s()
            place, bucket = self._found(key, now_s)
            wait_s = bucket.wait_s(key, now_s)
            _ENTRY.pack_into(self._memory, place, key.name.encode(), bucket.tokens, bucket.filled_s)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return wait_s

    def close(self) -> None:
        self._memory.close()
        self._file.close()

    def _found(self, key: ApiKey, now_s: float) -> tuple[int, TokenBucket]:
        """The place of its entry, and what is in it; a full one where it has none."""
        name = key.name.encode().ljust(64, b"\0")
        place = self._places.get(key.name)
        if place is None or self._memory[place : place + 64] != name:
            place = self._places[key.name] = self._place_of(name)
        found, tokens, filled_s = _ENTRY.unpack_from(self._memory, place)
        return place, TokenBucket(tokens, filled_s) if found == name else TokenBucket(key.burst, now_s)

    def _place_of(self, name: bytes) -> int:
        """Its own, or that which nobody has asked with for longest: an unused one, or one that is full again."""
        entries = [_ENTRY.unpack_from(self._memory, place) for place in range(0, len(self._memory), _ENTRY.size)]
        own = (number for number, (other, _, _) in enumerate(entries) if other == name)
        oldest = min(range(len(entries)), key=lambda number: entries[number][2])
        return next(own, oldest) * _ENTRY.size
