"""Whether float32 rows of the host hold an infinity or a NaN: one look at the bits of each element."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.parallel import for_parts

_EXPONENT = np.int32(0x7F800000)
"""All of its bits are set in infinities and NaNs, and in nothing else."""


def are_finite(words: NDArray[np.int32], width: int) -> bool:
    """The first `width` words of each of (n, num_words) rows, read as float32."""
    found: list[bool] = []
    for_parts(len(words), len(words), lambda first, end: found.append(_finite(words[first:end], width)))
    return all(found)


@njit(cache=True, nogil=True)
def _finite(words, width):  # type: ignore[no-untyped-def]
    largest = np.int32(0)
    for i in range(len(words)):
        for j in range(np.uint64(width)):
            largest = max(largest, words[i, j] & _EXPONENT)
    return largest != _EXPONENT
