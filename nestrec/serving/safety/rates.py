"""How often a key may ask: a bucket of tokens for each, filled at its rate."""

from dataclasses import dataclass

from nestrec.base.clock import Clock
from nestrec.serving.safety.keys import Key


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_s: float


class KeyRates:
    """Of all keys of a server. Used inside one event loop."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def wait_s(self, key: Key) -> float:
        """Take a token for a request; 0 where there is one, else the seconds after which there will be."""
        if key.requests_per_s == float("inf"):
            return 0.0
        now_s = self._clock.now_s()
        bucket = self._buckets.setdefault(key.name, _Bucket(key.burst, now_s))
        gained = (now_s - bucket.filled_s) * key.requests_per_s
        bucket.tokens, bucket.filled_s = min(key.burst, bucket.tokens + gained), now_s
        if bucket.tokens >= 1.0:
            bucket.tokens -= 1.0
            return 0.0
        return (1.0 - bucket.tokens) / key.requests_per_s
