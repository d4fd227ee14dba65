"""Rate limits of API keys: one token bucket per key, refilled at the key's rate.

`LocalRateLimiter` limits the requests of one process. `SharedRateLimiter` limits the requests of several processes
together: the buckets are in shared memory. Each process reloads the key file on its own, at a different moment, so
buckets are found by the names of the keys. They are protected by a file lock, which the operating system releases if
the process that holds it dies.
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
    """Rate limits of all API keys of a server."""

    def wait_s(self, key: ApiKey) -> float:
        """Take a token for a request and return 0, or return the seconds until a token will be available."""
        ...


@dataclass(slots=True)
class TokenBucket:
    """Token bucket of one key."""

    tokens: float
    """Number of available tokens at `filled_s`."""
    filled_s: float
    """Time of the last refill, in seconds of the clock."""

    def wait_s(self, key: ApiKey, now_s: float) -> float:
        """Refill the bucket, then take a token and return 0, or return the seconds until one will be available."""
        gained = (now_s - self.filled_s) * key.requests_per_s
        self.tokens, self.filled_s = min(key.burst, self.tokens + gained), now_s
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return 0.0
        return (1.0 - self.tokens) / key.requests_per_s


class LocalRateLimiter:
    """Rate limits of one process. Not thread-safe; use it from one event loop."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}

    def wait_s(self, key: ApiKey) -> float:
        if key.requests_per_s == float("inf"):
            return 0.0
        now_s = self._clock.now_s()
        return self._buckets.setdefault(key.name, TokenBucket(key.burst, now_s)).wait_s(key, now_s)


_ENTRY = struct.Struct("<64sdd")
"""Layout of an entry: name, number of tokens, time of the last refill in seconds."""
_NUM_ENTRIES = 1024
"""Number of entries: more than the maximum number of keys, because removed keys keep theirs until it is reused."""


class SharedRateLimiter:
    """Rate limits of a process and of those that are forked from it. Use it from one event loop per process."""

    def __init__(self, clock: Clock | None = None):
        """Allocate the shared memory.

        Args:
            clock: Clock that has the same time in all processes; None uses the real one.
        """
        self._clock = clock or RealClock()
        self._file = tempfile.TemporaryFile(prefix="nestrec-rates-")  # noqa: SIM115 (`close`)
        self._file.truncate(_ENTRY.size * _NUM_ENTRIES)
        self._memory = mmap.mmap(self._file.fileno(), 0)
        self._offsets: dict[str, int] = {}

    def wait_s(self, key: ApiKey) -> float:
        if key.requests_per_s == float("inf"):
            return 0.0
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            now_s = self._clock.now_s()
            offset, bucket = self._read_bucket(key, now_s)
            wait_s = bucket.wait_s(key, now_s)
            _ENTRY.pack_into(self._memory, offset, key.name.encode(), bucket.tokens, bucket.filled_s)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return wait_s

    def close(self) -> None:
        self._memory.close()
        self._file.close()

    def _read_bucket(self, key: ApiKey, now_s: float) -> tuple[int, TokenBucket]:
        """Return the offset of a key's entry and its bucket; a full bucket if the key has no entry yet."""
        name = key.name.encode().ljust(64, b"\0")
        offset = self._offsets.get(key.name)
        if offset is None or self._memory[offset : offset + 64] != name:
            offset = self._offsets[key.name] = self._find_offset(name)
        entry_name, tokens, filled_s = _ENTRY.unpack_from(self._memory, offset)
        return offset, TokenBucket(tokens, filled_s) if entry_name == name else TokenBucket(key.burst, now_s)

    def _find_offset(self, name: bytes) -> int:
        """Return the offset of the entry with this name, or of the least recently used entry, whose bucket is full."""
        entries = [_ENTRY.unpack_from(self._memory, offset) for offset in range(0, len(self._memory), _ENTRY.size)]
        matches = (index for index, (entry_name, _, _) in enumerate(entries) if entry_name == name)
        oldest = min(range(len(entries)), key=lambda index: entries[index][2])
        return next(matches, oldest) * _ENTRY.size
