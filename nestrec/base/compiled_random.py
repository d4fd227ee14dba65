"""Random integers for numba loops: the same as those of `nestrec.base.random`."""

import numpy as np
from numba import njit

from nestrec.base.random import GOLDEN32, GOLDEN64, MULTIPLIERS32, MULTIPLIERS64

_GOLDEN, _MULTIPLY_1, _MULTIPLY_2 = np.uint64(GOLDEN64), np.uint64(MULTIPLIERS64[0]), np.uint64(MULTIPLIERS64[1])
_GOLDEN_32, _MULTIPLY_1_32, _MULTIPLY_2_32 = (np.uint32(n) for n in (GOLDEN32, *MULTIPLIERS32))
_S8, _S15, _S16 = np.uint32(8), np.uint32(15), np.uint32(16)
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


@njit(cache=True, nogil=True, inline="always")
def draw24(low: np.uint32, high: np.uint32, channel: np.uint32) -> np.uint32:
    """An integer in [0, 2**24), as `draws24` gives it for a row key of these two words."""
    return _mix32(_mix32(low ^ np.uint32(channel * _GOLDEN_32)) ^ high) >> _S8


@njit(cache=True, nogil=True, inline="always")
def _mix32(x: np.uint32) -> np.uint32:
    # numba multiplies in 64 bits
    x = np.uint32((x ^ (x >> _S16)) * _MULTIPLY_1_32)
    x = np.uint32((x ^ (x >> _S15)) * _MULTIPLY_2_32)
    return x ^ (x >> _S16)
