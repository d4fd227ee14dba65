"""How often a key may ask: a bucket of tokens for each, filled at its rate."""

from dataclasses import dataclass
from typing import Protocol

from nestrec.base.clock import Clock
from nestrec.serving.safety.keys import Key


class RatesOfKeys(Protocol):
    """Of all keys of a server."""

    def wait_s(self, key: Key) -> float:
        """Take a token for a request; 0 where there is one, else the seconds after which there will be."""
        ...


@dataclass(slots=True)
class Bucket:
    tokens: float
    filled_s: float

    def wait_s(self, key: Key, now_s: float) -> float:
        """See `RatesOfKeys`."""
        gained = (now_s - self.filled_s) * key.requests_per_s
        self.tokens, self.filled_s = min(key.burst, self.tokens + gained), now_s
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return 0.0
        return (1.0 - self.tokens) / key.requests_per_s


class KeyRates:
    """Of one process. Used inside one event loop."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}

    def wait_s(self, key: Key) -> float:
        if key.requests_per_s == float("inf"):
            return 0.0
        now_s = self._clock.now_s()
        return self._buckets.setdefault(key.name, Bucket(key.burst, now_s)).wait_s(key, now_s)
