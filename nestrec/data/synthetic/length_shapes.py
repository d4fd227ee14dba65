"""Named shapes of jagged batches for benchmarks: 131,072 tokens each, whatever the lengths.

u1024 and u4096 are uniform. logn, shortvid and kuai1k are lognormal with the count, the largest length and the mean or
median that each name stands for; the lengths are quantiles, so a shape is the same everywhere, and stand in a shuffled
order, as a batch would.
"""

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import UserError, did_you_mean

TOKENS = 131_072
_LOGNORMAL = {"logn": (224, 1.0, 4096), "shortvid": (480, 1.15, 2048), "kuai1k": (32, 0.95, 14_704)}
"""sequences, standard deviation of the logarithm, longest"""
_UNIFORM = {"u1024": 1024, "u4096": 4096}
LENGTH_SHAPES = (*_UNIFORM, *_LOGNORMAL)


def lengths_of(name: str, tokens: int = TOKENS) -> NDArray[np.int64]:
    """Lengths of the sequences of a shape; other token counts scale the number of sequences."""
    if name in _UNIFORM:
        return np.full(tokens // _UNIFORM[name], _UNIFORM[name], np.int64)
    if name not in _LOGNORMAL:
        raise UserError("no such length shape", field="lengths", value=name, remedy=did_you_mean(name, LENGTH_SHAPES))
    count, deviation, longest = _LOGNORMAL[name]
    count = max(1, round(count * tokens / TOKENS))
    normal = NormalDist()
    spread = np.exp(deviation * np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)]))
    lengths = _scaled(spread, tokens, longest)
    return np.random.default_rng(0).permutation(lengths)


def _scaled(spread: NDArray[np.float64], tokens: int, longest: int) -> NDArray[np.int64]:
    """Lengths in proportion to `spread`, at most `longest`, that sum to `tokens`."""
    low, high = 0.0, float(tokens)
    for _ in range(64):
        middle = (low + high) / 2
        total = np.clip(np.round(spread * middle), 1, longest).sum()
        low, high = (middle, high) if total < tokens else (low, middle)
    lengths = np.clip(np.round(spread * low), 1, longest).astype(np.int64)
    short = tokens - int(lengths.sum())
    lengths[np.argsort(lengths, kind="stable")[: abs(short)]] += np.sign(short)
    return lengths
