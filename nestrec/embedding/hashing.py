"""Key hashing: assigns keys to shards (row-wise sharding by hash) and to the rows of hashed tables."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.random import mix64_jit
from nestrec.ops.embedding.dedup_host import hashes_of, owners_of


def owner_of(keys: NDArray[np.int64], num_shards: int) -> NDArray[np.int32]:
    """Return the shard that owns each key: the one whose hash range (`range_of_shard`) contains the key's hash."""
    out = np.zeros(len(keys), np.int32)
    if num_shards > 1:
        owners_of(keys, np.uint64(num_shards), out)
    return out


def hash_of(keys: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return the hash of each key: the upper 32 bits of splitmix64."""
    out = np.empty(len(keys), np.uint32)
    hashes_of(keys, out)
    return out


def range_of_shard(shard: int, num_shards: int) -> tuple[int, int]:
    """Return the half-open range of hashes that a shard owns, as (first, end)."""
    return -(-(shard << 32) // num_shards), -(-((shard + 1) << 32) // num_shards)


@njit(cache=True, nogil=True)
def _rows(keys: NDArray[np.int64], num_others: np.uint64, out: NDArray[np.int64]) -> None:
    for i in range(len(keys)):
        if keys[i] != 0:
            out[i] = np.int64(mix64_jit(np.uint64(keys[i])) % num_others) + 1


def hashed_rows(keys: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """Return the row of each key in a hashed table of `num_rows` rows, in the shape of the keys.

    Key 0 has row 0 to itself; all other keys share the remaining rows.
    """
    flat = np.ascontiguousarray(keys, np.int64).reshape(-1)
    out = np.zeros(len(flat), np.int64)
    if num_rows > 1:
        _rows(flat, np.uint64(num_rows - 1), out)
    return out.reshape(keys.shape)
