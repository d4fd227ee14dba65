"""Copies of rows between host arrays of int32 words; a negative slot is skipped."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.parallel import for_parts
from nestrec.ops.rows.prefetch import AHEAD, prefetch_row

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
