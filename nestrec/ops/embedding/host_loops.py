"""Compiled host loops of embedding rows: atomics, finite checks, copies, prefetch.

What threads may do to one element of an array at the same time, inside numba loops.

Whether float32 rows of the host hold an infinity or a NaN: one look at the bits of each element.

Rows of host memory that are asked for before they are needed, inside numba loops.

Rows lie at random places, and a processor sees one or two of them ahead: most of the time of a copy is waiting for
memory, all the more while other threads use it.

Copies of rows between host arrays of int32 words; a negative slot is skipped.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from nestrec.base.compat import numba_element_pointer, numba_prefetch
from nestrec.base.thread_team import for_parts


def _exchange_if(typing_context, array, index, expected, new):  # type: ignore[no-untyped-def]
    """array[index] = new where it is `expected`, in one step; whether it was.

    What the thread has read and written before is before it, and what comes after is after it, also for others.
    """
    signature = types.boolean(array, types.intp, array.dtype, array.dtype)

    def code(context, builder, signature, values):  # type: ignore[no-untyped-def]
        pointer = numba_element_pointer(context, builder, signature.args[0], values[0], [values[1]])
        return builder.extract_value(builder.cmpxchg(pointer, values[2], values[3], ordering="seq_cst"), 1)

    return signature, code


exchange_if: Any = intrinsic(_exchange_if)


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


AHEAD = 6
"""Rows."""
_LINE_WORDS = 16


def _prefetch(typing_context, array, row, word):  # type: ignore[no-untyped-def]
    """Ask for the cache line of array[row, word]."""
    signature = types.void(array, types.intp, types.intp)

    def code(context, builder, signature, values):  # type: ignore[no-untyped-def]
        numba_prefetch(builder, numba_element_pointer(context, builder, signature.args[0], values[0], list(values[1:])))

    return signature, code


_prefetch_word: Any = intrinsic(_prefetch)


@njit(cache=True, nogil=True, inline="always")
def prefetch_row(rows, row, width):  # type: ignore[no-untyped-def]
    """Ask for rows[row, :width]; nothing happens where the row is negative."""
    if row >= 0:
        for word in range(0, width, _LINE_WORDS):
            _prefetch_word(rows, row, word)


Words = NDArray[np.int32]


def gather_rows_host(slab: Words, slots: NDArray[np.int64], out: Words, num_threads: int) -> None:
    """out[i, :] = slab[slots[i], : out.shape[1]]: rows, or only their first words."""
    for_parts(len(slots), len(slots), lambda a, b: _gather(slab, slots[a:b], out[a:b]), num_threads)


def scatter_rows_host(slab: Words, slots: NDArray[np.int64], rows: Words, num_threads: int) -> None:
    """slab[slots[i]] = rows[i]; the slots are distinct."""
    for_parts(len(slots), len(slots), lambda a, b: _scatter(slab, slots[a:b], rows[a:b]), num_threads)


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
