"""splitmix64 for numba loops: the same integers as `nestrec.base.random.mix64`."""

import numpy as np
from numba import njit

from nestrec.base.random import GOLDEN64, MULTIPLIERS64

_GOLDEN, _MULTIPLY_1, _MULTIPLY_2 = np.uint64(GOLDEN64), np.uint64(MULTIPLIERS64[0]), np.uint64(MULTIPLIERS64[1])
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


@njit(cache=True, nogil=True, inline="always")
def finalise64(x: np.uint64) -> np.uint64:
    """What `mix64` makes of x + GOLDEN64: for loops that count on in steps of GOLDEN64."""
    x = (x ^ (x >> _S30)) * _MULTIPLY_1
    x = (x ^ (x >> _S27)) * _MULTIPLY_2
    return x ^ (x >> _S31)


@njit(cache=True, nogil=True, inline="always")
def mix64(x: np.uint64) -> np.uint64:
    """The finaliser of splitmix64, a bijection on 64-bit integers."""
    return finalise64(np.uint64(x) + _GOLDEN)
