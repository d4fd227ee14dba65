"""Cost model of the engine: predicts the device time of a batch and learns from measured batches.

    seconds = a + b * tokens + c * pairs          pairs: (query token, key token) pairs that attention multiplies

The coefficients are fitted by least squares over recent batches, with exponentially decaying weights, under
a, b, c >= 0 and a weak prior. Both conditions are needed: requests that are all alike do not determine how their cost
is split between tokens and pairs, and without the conditions the split drifts until predictions for other requests are
wrong. The tail factor accounts for the tail latency: it is the 99th percentile of measured over predicted time of
recent batches.

`Histogram` is a duration histogram with fixed bucket bounds, for Prometheus.
"""

import itertools
import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

_DECAY = 0.995
_PRIOR = 1e-3
"""Weight of the prior, in batches."""
_SWEEPS = 4
_WINDOW = 512
_REFRESH_EVERY = 32
_MAX_OUTLIER = 4.0
_SMOOTH = 0.05
_LONGEST_S = 1e12
"""Finite substitute for the time limit of a batch without one, in seconds."""
_SCALE = (1.0, 1e-3, 1e-6)
"""Units of the three coefficients: batches, thousands of tokens, millions of pairs."""

Costs = tuple[float, float, float]


class EngineCostModel:
    """Learned device time of a batch. Predictions are thread-safe; only one thread may call `observe`."""

    def __init__(
        self,
        *,
        step_s: float = 1e-3,
        token_s: float = 1e-5,
        pair_s: float = 1e-9,
        max_keys_per_layer: Sequence[int] = (),
    ):
        """Start from the given coefficients.

        Args:
            step_s: Initial estimate of the fixed seconds per batch.
            token_s: Initial estimate of the seconds per token.
            pair_s: Initial estimate of the seconds per (query, key) pair.
            max_keys_per_layer: Maximum number of keys that a token attends to, per layer. If empty, every token attends
                to all earlier tokens in every layer.
        """
        self._max_keys_per_layer = tuple(max_keys_per_layer)
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
        """Return the number of tokens and of attention pairs of a request, with the pairs averaged over the layers.

        Args:
            prefix: Number of cached tokens.
            history: Number of history tokens to prefill.
            candidates: Number of candidate tokens to score.
        """
        tokens, pairs = work_of(prefix, history, candidates)
        if self._max_keys_per_layer:
            limited = (_pairs(prefix, history, candidates, max_keys) for max_keys in self._max_keys_per_layer)
            pairs = sum(limited) // len(self._max_keys_per_layer)
        return tokens, pairs

    def predict_s(self, tokens: int, pairs: int, steps: float = 1.0) -> float:
        """Return the expected device seconds of work that takes `steps` batches."""
        a, b, c = self._costs
        return max(a * steps + b * _SCALE[1] * tokens + c * _SCALE[2] * pairs, 1e-6)

    def share_s(self, tokens: int, pairs: int) -> float:
        """Return the expected device seconds of a request that shares a batch of the recent average size."""
        return self.predict_s(tokens, pairs, steps=1.0 / self._batch_size)

    def tokens_within(self, seconds: float, prefix: int) -> int:
        """Return how many history tokens after a prefix can be prefilled within `seconds`.

        Args:
            seconds: Device seconds to add to a batch; may be infinite or negative.
            prefix: Number of cached tokens before the new ones.
        """
        seconds = min(max(0.0, seconds), _LONGEST_S)  # inf / inf below would be NaN, and NaN has no integer
        _, b, c = self._costs
        token_s, pair_s = max(b * _SCALE[1], 1e-18), max(c * _SCALE[2], 1e-18)
        if self._max_keys_per_layer:
            mean = sum(self._max_keys_per_layer) / len(self._max_keys_per_layer)
            prefix = round(
                sum(min(prefix, max_keys) for max_keys in self._max_keys_per_layer) / len(self._max_keys_per_layer)
            )
        first_s = token_s + pair_s * prefix  # for one token; each following token has one more pair
        growing = int(2 * seconds / (first_s + math.sqrt(first_s**2 + 2 * pair_s * seconds)))
        return max(growing, int(seconds / (token_s + pair_s * mean))) if self._max_keys_per_layer else growing

    @property
    def tail(self) -> float:
        """Factor from a predicted time to its 99th percentile."""
        return self._tail

    def observe(self, tokens: int, pairs: int, seconds: float, batch_size: int = 1) -> None:
        """Learn from a measured batch.

        Args:
            tokens: Number of computed tokens.
            pairs: Number of attention pairs.
            seconds: Measured device seconds.
            batch_size: Number of requests in the batch.
        """
        self._batch_size += _SMOOTH * (batch_size - self._batch_size)
        with self._lock:
            if self.num_observed >= 8:
                predicted_s = self.predict_s(tokens, pairs)
                self._ratios.append(seconds / predicted_s)
                seconds = min(seconds, _MAX_OUTLIER * predicted_s)  # an outlier is caused by the machine, not the work
            self._learn((_SCALE[0], _SCALE[1] * tokens, _SCALE[2] * pairs), seconds)
            self.num_observed += 1
            if self.num_observed % _REFRESH_EVERY == 0 and self._ratios:
                self._tail = float(np.clip(np.quantile(self._ratios, 0.99), 1.0, 10.0))

    def _learn(self, work: Costs, seconds: float) -> None:
        """Add one equation, then run a few sweeps of coordinate descent from the previous costs.

        The arithmetic is unrolled because it runs for every batch: loops over three unknowns, or arrays of three, take
        twice as long.
        """
        (w0, w1, w2) = work
        (e0, e1, e2) = self._expected
        decay = _DECAY
        g00, g11, g22, g01, g02, g12 = self._gram
        m0, m1, m2 = self._moment
        prior = (1.0 - _DECAY) * _PRIOR  # keeps the weight of the prior constant under the decay
        g00, g11, g22 = decay * g00 + w0 * w0 + prior, decay * g11 + w1 * w1 + prior, decay * g22 + w2 * w2 + prior
        g01, g02, g12 = decay * g01 + w0 * w1, decay * g02 + w0 * w2, decay * g12 + w1 * w2
        m0, m1 = decay * m0 + prior * e0 + w0 * seconds, decay * m1 + prior * e1 + w1 * seconds
        m2 = decay * m2 + prior * e2 + w2 * seconds
        self._gram, self._moment = (g00, g11, g22, g01, g02, g12), (m0, m1, m2)
        c0, c1, c2 = self._costs
        for _ in range(_SWEEPS):
            c0 = max(0.0, (m0 - g01 * c1 - g02 * c2) / g00)
            c1 = max(0.0, (m1 - g01 * c0 - g12 * c2) / g11)
            c2 = max(0.0, (m2 - g02 * c0 - g12 * c1) / g22)
        self._costs = (c0, c1, c2)


def work_of(prefix: int, history: int, candidates: int) -> tuple[int, int]:
    """Return the number of tokens and of attention pairs of new tokens that attend to a cached prefix."""
    pairs = history * prefix + history * (history + 1) // 2 + candidates * (prefix + history + 1)
    return history + candidates, pairs


def _pairs(prefix: int, history: int, candidates: int, max_keys: int) -> int:
    """Return the number of attention pairs if a token attends to at most `max_keys` keys."""
    before, end = (_sum_of_keys(count, max_keys) for count in (prefix, prefix + history))
    return end - before + candidates * min(prefix + history + 1, max_keys)


def _sum_of_keys(count: int, max_keys: int) -> int:
    """Return min(1, max_keys) + min(2, max_keys) + ... + min(count, max_keys)."""
    rising = min(count, max_keys)
    return rising * (rising + 1) // 2 + (count - rising) * max_keys


BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Bucket bounds in seconds for durations that a user waits for."""
LONG_BOUNDS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Bucket bounds in seconds for the delay between an event and the model that learned from it: seconds to a day."""


class Histogram:
    """Histogram of durations with fixed buckets. One thread may call `observe`; any thread may read."""

    __slots__ = ("bounds_s", "counts", "seconds")

    def __init__(self, bounds_s: tuple[float, ...] = BOUNDS_S) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.seconds += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative buckets of Prometheus: each bound and the number of durations up to it."""
        names = (*map(str, self.bounds_s), "+Inf")
        return list(zip(names, map(float, itertools.accumulate(self.counts)), strict=True))

    @staticmethod
    def sum_of(histograms: "Iterable[Histogram]") -> "Histogram":
        total = Histogram()
        for histogram in histograms:
            total.counts = [a + b for a, b in zip(total.counts, histogram.counts, strict=True)]
            total.seconds += histogram.seconds
        return total
