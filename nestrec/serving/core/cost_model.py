"""Seconds of a batch of work, learned while serving.

    seconds = a + b * tokens + c * pairs          pairs: (query token, key token) that attention multiplies

Least squares over the batches of late (older ones count for less) with a, b, c >= 0, held weakly to what is expected
before anything is known: requests that are all alike say nothing about how their cost divides over tokens and pairs,
and without either condition such a division drifts until it predicts nonsense. The tail is the 99th percentile of
measured over predicted of late.

Counts of seconds between fixed bounds, for Prometheus.
"""

import itertools
import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

_FORGET = 0.995
_PRIOR = 1e-3
"""batches that the expectation counts for"""
_SWEEPS = 4
_WINDOW = 512
_REFRESH_EVERY = 32
_MOST_SURPRISE = 4.0
_SMOOTH = 0.05
_LONGEST_S = 1e12
"""finite stand-in for a batch without a time limit"""
_SCALE = (1.0, 1e-3, 1e-6)
"""work is measured in batches, thousands of tokens and millions of pairs"""

Costs = tuple[float, float, float]


class EngineCostModel:
    """Safe to ask from any thread; one thread observes."""

    def __init__(
        self, *, step_s: float = 1e-3, token_s: float = 1e-5, pair_s: float = 1e-9, most_seen: Sequence[int] = ()
    ):
        """most_seen: keys that a token meets at most in each layer; none: all of them in every layer."""
        self._most_seen = tuple(most_seen)
        self._expected: Costs = (step_s / _SCALE[0], token_s / _SCALE[1], pair_s / _SCALE[2])
        self._costs = self._expected
        # The normal equations, G costs = m: the diagonal of G, then G01, G02, G12.
        self._gram = (_PRIOR, _PRIOR, _PRIOR, 0.0, 0.0, 0.0)
        self._moment = (_PRIOR * self._expected[0], _PRIOR * self._expected[1], _PRIOR * self._expected[2])
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._tail = 1.5
        self._batch_size = 1.0
        self._lock = threading.Lock()
        self.num_observed = 0

    def work(self, prefix: int, history: int, candidates: int) -> tuple[int, int]:
        """(tokens, pairs) of new tokens against a prefix; pairs are a mean over the layers."""
        tokens, pairs = work_of(prefix, history, candidates)
        if self._most_seen:
            limited = (_pairs(prefix, history, candidates, most) for most in self._most_seen)
            pairs = sum(limited) // len(self._most_seen)
        return tokens, pairs

    def predict_s(self, tokens: int, pairs: int, steps: float = 1.0) -> float:
        """Expected seconds of work that takes `steps` batches."""
        a, b, c = self._costs
        return max(a * steps + b * _SCALE[1] * tokens + c * _SCALE[2] * pairs, 1e-6)

    def share_s(self, tokens: int, pairs: int) -> float:
        """Expected seconds of a request in a batch with as many others as of late."""
        return self.predict_s(tokens, pairs, steps=1.0 / self._batch_size)

    def tokens_within(self, seconds: float, prefix: int) -> int:
        """Return how many new history tokens after a prefix add at most `seconds` to a batch; `seconds` may be
        infinite or negative."""
        seconds = min(max(0.0, seconds), _LONGEST_S)  # inf / inf below would be NaN, and NaN has no integer
        _, b, c = self._costs
        token_s, pair_s = max(b * _SCALE[1], 1e-18), max(c * _SCALE[2], 1e-18)
        if self._most_seen:
            mean = sum(self._most_seen) / len(self._most_seen)
            prefix = round(sum(min(prefix, most) for most in self._most_seen) / len(self._most_seen))
        first_s = token_s + pair_s * prefix  # of one token; each of the next has one pair more
        growing = int(2 * seconds / (first_s + math.sqrt(first_s**2 + 2 * pair_s * seconds)))
        return max(growing, int(seconds / (token_s + pair_s * mean))) if self._most_seen else growing

    @property
    def tail(self) -> float:
        """What a prediction is multiplied by for its 99th percentile."""
        return self._tail

    def observe(self, tokens: int, pairs: int, seconds: float, batch_size: int = 1) -> None:
        """A batch of so many requests took so long."""
        self._batch_size += _SMOOTH * (batch_size - self._batch_size)
        with self._lock:
            if self.num_observed >= 8:
                predicted_s = self.predict_s(tokens, pairs)
                self._ratios.append(seconds / predicted_s)
                seconds = min(seconds, _MOST_SURPRISE * predicted_s)  # a hiccup of the machine is not the work's cost
            self._learn((_SCALE[0], _SCALE[1] * tokens, _SCALE[2] * pairs), seconds)
            self.num_observed += 1
            if self.num_observed % _REFRESH_EVERY == 0 and self._ratios:
                self._tail = float(np.clip(np.quantile(self._ratios, 0.99), 1.0, 10.0))

    def _learn(self, work: Costs, seconds: float) -> None:
        """One more equation, then a few sweeps of coordinate descent from the costs of before.

        Written out, since it runs with every batch: loops over three unknowns, or arrays of three, take twice as long.
        """
        (w0, w1, w2) = work
        (e0, e1, e2) = self._expected
        keep = _FORGET
        g00, g11, g22, g01, g02, g12 = self._gram
        m0, m1, m2 = self._moment
        back = (1.0 - _FORGET) * _PRIOR  # what is forgotten of the expectation comes back
        g00, g11, g22 = keep * g00 + w0 * w0 + back, keep * g11 + w1 * w1 + back, keep * g22 + w2 * w2 + back
        g01, g02, g12 = keep * g01 + w0 * w1, keep * g02 + w0 * w2, keep * g12 + w1 * w2
        m0, m1 = keep * m0 + back * e0 + w0 * seconds, keep * m1 + back * e1 + w1 * seconds
        m2 = keep * m2 + back * e2 + w2 * seconds
        self._gram, self._moment = (g00, g11, g22, g01, g02, g12), (m0, m1, m2)
        c0, c1, c2 = self._costs
        for _ in range(_SWEEPS):
            c0 = max(0.0, (m0 - g01 * c1 - g02 * c2) / g00)
            c1 = max(0.0, (m1 - g01 * c0 - g12 * c2) / g11)
            c2 = max(0.0, (m2 - g02 * c0 - g12 * c1) / g22)
        self._costs = (c0, c1, c2)


def work_of(prefix: int, history: int, candidates: int) -> tuple[int, int]:
    """(tokens, pairs) of new tokens against a prefix."""
    pairs = history * prefix + history * (history + 1) // 2 + candidates * (prefix + history + 1)
    return history + candidates, pairs


def _pairs(prefix: int, history: int, candidates: int, most: int) -> int:
    """The same where a token meets at most so many keys."""
    before, end = (_sum_of_least(count, most) for count in (prefix, prefix + history))
    return end - before + candidates * min(prefix + history + 1, most)


def _sum_of_least(count: int, most: int) -> int:
    """min(1, most) + min(2, most) + ... up to `count`."""
    rising = min(count, most)
    return rising * (rising + 1) // 2 + (count - rising) * most


BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""of what a user waits for"""
LONG_BOUNDS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""of what goes by between an event and what is learnt from it: windows may be seconds or a day"""


class Histogram:
    """One thread observes, any may read."""

    __slots__ = ("bounds_s", "counts", "seconds")

    def __init__(self, bounds_s: tuple[float, ...] = BOUNDS_S) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, how many were at most that)"""
        names = (*map(str, self.bounds_s), "+Inf")
        return list(zip(names, map(float, itertools.accumulate(self.counts)), strict=True))

    @staticmethod
    def sum_of(histograms: "Iterable[Histogram]") -> "Histogram":
        total = Histogram()
        for histogram in histograms:
            total.counts = [a + b for a, b in zip(total.counts, histogram.counts, strict=True)]
            total.seconds += histogram.seconds
        return total
