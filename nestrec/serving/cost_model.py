"""Seconds of a batch of work, learned while serving.

    seconds = a + b * tokens + c * pairs          pairs: (query token, key token) that attention multiplies

Recursive least squares with forgetting; the tail is the 99th percentile of measured over predicted of late.
"""

import threading
from collections import deque

import numpy as np

_FORGET = 0.995
_WINDOW = 512
_REFRESH_EVERY = 32
_MOST_SURPRISE = 4.0
_SMOOTH = 0.05


class CostModel:
    """Safe to ask from any thread; one thread observes."""

    def __init__(self, *, step_s: float = 1e-3, token_s: float = 1e-5, pair_s: float = 1e-9):
        self._scale = np.array([1.0, 1e-3, 1e-6])  # work is measured in thousands of tokens, millions of pairs
        self._theta = np.array([step_s, token_s, pair_s]) / self._scale
        self._covariance = np.eye(3) * 10.0
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._tail = 1.5
        self._batch_size = 1.0
        self._lock = threading.Lock()
        self.num_observed = 0

    def predict_s(self, tokens: int, pairs: int, steps: float = 1.0) -> float:
        """Expected seconds of work that takes `steps` batches."""
        work = np.array([steps, tokens, pairs]) * self._scale
        return float(max(work @ np.maximum(self._theta, 0.0), 1e-6))

    def share_s(self, tokens: int, pairs: int) -> float:
        """Expected seconds of a request in a batch with as many others as of late."""
        return self.predict_s(tokens, pairs, steps=1.0 / self._batch_size)

    def tokens_within(self, seconds: float, prefix: int) -> int:
        """New history tokens after a prefix that add at most so many seconds to a batch."""
        _, token_s, pair_s = np.maximum(self._theta * self._scale, 1e-18)
        first_s = token_s + pair_s * prefix  # of one token; each of the next has one pair more
        return int(2 * seconds / (first_s + np.sqrt(first_s**2 + 2 * pair_s * seconds)))

    @property
    def tail(self) -> float:
        """What a prediction is multiplied by for its 99th percentile."""
        return self._tail

    def observe(self, tokens: int, pairs: int, seconds: float, batch_size: int = 1) -> None:
        """A batch of so many requests took so long."""
        self._batch_size += _SMOOTH * (batch_size - self._batch_size)
        work = np.array([1.0, tokens, pairs]) * self._scale
        with self._lock:
            if self.num_observed >= 8:
                predicted_s = self.predict_s(tokens, pairs)
                self._ratios.append(seconds / predicted_s)
                seconds = min(seconds, _MOST_SURPRISE * predicted_s)  # a hiccup of the machine is not the work's cost
            gain = self._covariance @ work / (_FORGET + work @ self._covariance @ work)
            self._theta = self._theta + gain * (seconds - work @ self._theta)
            self._covariance = (self._covariance - np.outer(gain, work @ self._covariance)) / _FORGET
            np.clip(self._covariance, -1e6, 1e6, out=self._covariance)
            self.num_observed += 1
            if self.num_observed % _REFRESH_EVERY == 0 and self._ratios:
                self._tail = float(np.clip(np.quantile(self._ratios, 0.99), 1.0, 10.0))


def work_of(prefix: int, history: int, candidates: int) -> tuple[int, int]:
    """(tokens, pairs) of new tokens against a prefix."""
    pairs = history * prefix + history * (history + 1) // 2 + candidates * (prefix + history + 1)
    return history + candidates, pairs
