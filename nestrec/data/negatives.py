"""Negative item ids, drawn by the counter-based generator: a pure function of (token key, index of the negative)."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.random import GOLDEN64


@njit(cache=True, nogil=True)
def _uniform(key_T, num_negatives, num_items):  # type: ignore[no-untyped-def]
    """Items 1..num_items; the high half of a 64-bit hash, multiplied into the range."""
    out = np.empty((key_T.shape[0], num_negatives), dtype=np.int64)
    golden = np.uint64(GOLDEN64)
    for t in range(key_T.shape[0]):
        x = key_T[t]
        for r in range(num_negatives):
            x = x + golden
            y = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            y = (y ^ (y >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            y = y ^ (y >> np.uint64(31))
            out[t, r] = 1 + np.int64(((y >> np.uint64(32)) * np.uint64(num_items)) >> np.uint64(32))
    return out


def uniform_negatives(key_T: NDArray[np.uint64], num_negatives: int, num_items: int) -> NDArray[np.int64]:
    """(T, R) item ids in 1..num_items, uniform with replacement; num_items below 2**32."""
    assert 0 < num_items < 1 << 32
    return _uniform(key_T, num_negatives, num_items)  # type: ignore[no-any-return]
