"""Loops over flat arrays that numpy would do with large temporaries."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray


def offsets_of_lengths(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """(B,) lengths to (B + 1,) offsets."""
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@njit(cache=True, nogil=True)
def add_counts(ids: NDArray[Any], counts: NDArray[np.int64]) -> None:
    """Count each id; unlike `bincount`, it costs nothing for ids that do not occur."""
    for i in ids:
        counts[i] += 1


@njit(cache=True, nogil=True)
def copy_segments(  # noqa: PLR0917
    values: NDArray[Any],
    offsets: NDArray[np.int64],
    rows: NDArray[np.int64],
    out: NDArray[Any],
    out_offsets: NDArray[np.int64],
    out_rows: NDArray[np.int64],
) -> None:
    """Segment `rows[i]` of (values, offsets) to segment `out_rows[i]` of (out, out_offsets)."""
    for i in range(rows.size):
        source = offsets[rows[i]]
        target = out_offsets[out_rows[i]]
        for k in range(offsets[rows[i] + 1] - source):
            out[target + k] = values[source + k]
