"""By what bits the 16-bit weights of a row are rounded in a step: those of (seed of the table, its name, step, key).

Neither slot nor rank, schedule or thread is in them, so a row is rounded alike wherever and whenever it is updated. The
rounding itself is nestrec.ops.rows.round.
"""

import hashlib

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.compiled_random import mix64
from nestrec.base.random import fold
from nestrec.embedding.table import TableConfig


def draws_of(table: TableConfig, keys: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """For each row the key of its random bits: `fold(seed, name of the table, step, key)`."""
    draws = np.empty(len(keys), np.int64)
    name = int.from_bytes(hashlib.blake2b(table.name.encode(), digest_size=8).digest(), "little")
    _fold(np.uint64(fold(table.seed, name, step)), keys, draws)
    return draws


@njit(cache=True, nogil=True)
def _fold(start, keys, draws):  # type: ignore[no-untyped-def]
    for i in range(len(keys)):
        draws[i] = np.int64(mix64(start ^ np.uint64(keys[i])))
