"""Compiled (numba) host loops on embedding rows: compare-and-swap, finite checks, row copies with software prefetch.

- `compare_and_swap`: atomic operation on an array element, for use inside numba loops.
- `are_finite`: checks float32 rows for infinities and NaNs by the bits of each element.
- `gather_rows_host`, `scatter_rows_host`: copy rows between arrays of int32 words; negative slots are skipped. Rows are
  at random addresses and a CPU looks only one or two of them ahead, so a copy mostly waits for memory, even more while
  other threads use it. Therefore `prefetch_row` requests rows before they are needed.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from nestrec.base.compat import numba_element_pointer, numba_prefetch
from nestrec.base.thread_team import parallel_for


def _compare_and_swap(typing_context, array, index, expected, new):  # type: ignore[no-untyped-def]
    """Set array[index] to `new` atomically if it equals `expected`; return whether it did.

    Sequentially consistent: other threads see the earlier reads and writes of this thread before it and the later ones
    after it.
    """
    signature = types.boolean(array, types.intp, array.dtype, array.dtype)

    def code(context, builder, signature, values):  # type: ignore[no-untyped-def]
        pointer = numba_element_pointer(context, builder, signature.args[0], values[0], [values[1]])
        return builder.extract_value(builder.cmpxchg(pointer, values[2], values[3], ordering="seq_cst"), 1)

    return signature, code


compare_and_swap: Any = intrinsic(_compare_and_swap)


_EXPONENT = np.int32(0x7F800000)
"""Exponent bits of float32; all of them are set only in infinities and NaNs."""


def are_finite(words: NDArray[np.int32], width: int) -> bool:
    """Return whether the first `width` words of each row, read as float32, are finite."""
    results: list[bool] = []
    parallel_for(len(words), len(words), lambda first, end: results.append(_finite(words[first:end], width)))
    return all(results)


@njit(cache=True, nogil=True)
def _finite(words, width):  # type: ignore[no-untyped-def]
    largest = np.int32(0)
    for i in range(len(words)):
        for j in range(np.uint64(width)):
            largest = max(largest, words[i, j] & _EXPONENT)
    return largest != _EXPONENT


AHEAD = 6
"""Prefetch distance in rows."""
_LINE_WORDS = 16


def _prefetch(typing_context, array, row, word):  # type: ignore[no-untyped-def]
    """Prefetch the cache line of array[row, word]."""
    signature = types.void(array, types.intp, types.intp)

    def code(context, builder, signature, values):  # type: ignore[no-untyped-def]
        numba_prefetch(builder, numba_element_pointer(context, builder, signature.args[0], values[0], list(values[1:])))

    return signature, code


_prefetch_word: Any = intrinsic(_prefetch)


@njit(cache=True, nogil=True, inline="always")
def prefetch_row(rows, row, width):  # type: ignore[no-untyped-def]
    """Prefetch rows[row, :width]; does nothing if `row` is negative."""
    if row >= 0:
        for word in range(0, width, _LINE_WORDS):
            _prefetch_word(rows, row, word)


Words = NDArray[np.int32]


def gather_rows_host(slab: Words, slots: NDArray[np.int64], out: Words, num_threads: int) -> None:
    """Gather rows, or only their first words: out[i, :] = slab[slots[i], : out.shape[1]]."""
    parallel_for(len(slots), len(slots), lambda a, b: _gather(slab, slots[a:b], out[a:b]), num_threads)


def scatter_rows_host(slab: Words, slots: NDArray[np.int64], rows: Words, num_threads: int) -> None:
    """Scatter rows: slab[slots[i]] = rows[i]. The slots must be unique."""
    parallel_for(len(slots), len(slots), lambda a, b: _scatter(slab, slots[a:b], rows[a:b]), num_threads)


@njit(cache=True, nogil=True)
def _gather(slab, slots, out):  # type: ignore[no-untyped-def]
    width = out.shape[1]
    for i in range(len(slots)):
        if i + AHEAD < len(slots):
            prefetch_row(slab, slots[i + AHEAD], width)
        slot = slots[i]
        if slot >= 0:
            for j in range(width):
                out[i, j] = slab[slot, j]


@njit(cache=True, nogil=True)
def _scatter(slab, slots, rows):  # type: ignore[no-untyped-def]
    width = rows.shape[1]
    for i in range(len(slots)):
        if i + AHEAD < len(slots):
            prefetch_row(slab, slots[i + AHEAD], width)
        slot = slots[i]
        if slot >= 0:
            for j in range(width):
                slab[slot, j] = rows[i, j]
