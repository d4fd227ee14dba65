"""A digest of a table's rows that depends on their keys and bits alone, not on ranks, stores or order."""

import hashlib

import numpy as np
import torch
from numba import njit

from nestrec.base.compiled_random import mix64
from nestrec.distributed.exchange import all_reduce_sum
from nestrec.distributed.topology import Communicator
from nestrec.embedding.shard import TableShard

_LANES = 4
_CHUNK_ROWS = 1 << 16


def table_digest(shard: TableShard, shards: Communicator) -> str:
    """sha256 over the number of rows and four 64-bit sums of row hashes, each over all shards. Collective.

    A static table counts all its keys: rows that were never used count with their initial values.
    """
    keys, sums = shard.keys(), np.zeros(_LANES + 1, np.uint64)
    for start in range(0, len(keys), _CHUNK_ROWS):
        part = keys[start : start + _CHUNK_ROWS]
        words = shard.read(part).cpu().numpy().view(np.uint64)
        _add_hashes(part, words, sums)
    total = torch.from_numpy(sums.view(np.int64))
    all_reduce_sum(shards, total)
    return hashlib.sha256(total.numpy().tobytes()).hexdigest()


@njit(cache=True, nogil=True)
def _add_hashes(keys, words, sums):  # type: ignore[no-untyped-def]
    for i in range(len(keys)):
        hashed = mix64(np.uint64(keys[i]))
        for j in range(words.shape[1]):
            hashed = mix64(hashed ^ words[i, j])
        sums[0] += np.uint64(1)
        for lane in range(1, len(sums)):
            hashed = mix64(hashed)
            sums[lane] += hashed
