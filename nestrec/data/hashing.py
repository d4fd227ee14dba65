"""The splitmix64 finaliser for compiled code."""

import numpy as np
from numba import njit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


@njit(cache=True, nogil=True)
def mix(x: np.uint64) -> np.uint64:
    """The same integers as `nestrec.base.random.mix64`."""
    y = x + _GOLDEN
    y = (y ^ (y >> np.uint64(30))) * _MULTIPLY_1
    y = (y ^ (y >> np.uint64(27))) * _MULTIPLY_2
    return y ^ (y >> np.uint64(31))
