"""Integer hashing inside numba loops, and the one rule that says which shard owns a key."""

import numpy as np
from numba import njit
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


@njit(cache=True, nogil=True, inline="always")
def mix64(x: np.uint64) -> np.uint64:
    """The splitmix64 finaliser; the same integers as `nestrec.base.random.mix64`."""
    x = np.uint64(x) + _GOLDEN
    x = (x ^ (x >> _S30)) * _MIX1
    x = (x ^ (x >> _S27)) * _MIX2
    return x ^ (x >> _S31)


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
