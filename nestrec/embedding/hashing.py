"""The one rule that says which shard owns a key."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.compiled_random import mix64


@njit(cache=True, nogil=True)
def _owners(keys: NDArray[np.int64], num_shards: np.uint64, out: NDArray[np.int32]) -> None:
    for i in range(len(keys)):
        out[i] = np.int32(mix64(np.uint64(keys[i])) % num_shards)


def owner_of(keys: NDArray[np.int64], num_shards: int) -> NDArray[np.int32]:
    """The shard of each key: splitmix64 of the key modulo the number of shards."""
    out = np.zeros(len(keys), np.int32)
    if num_shards > 1:
        _owners(keys, np.uint64(num_shards), out)
    return out
