"""Initialization of all rows of a static table at once, on all threads, instead of at the first use of each row."""

import numpy as np
import torch

from nestrec.base.thread_team import parallel_for
from nestrec.embedding.initial import initial_vectors
from nestrec.embedding.key_index import StaticKeyIndex
from nestrec.embedding.stores.host_store import HostStore
from nestrec.embedding.table_shard import Keys, TableShard

_CHUNK_ROWS = 512


def create_all_rows(shard: TableShard, num_threads: int = 0) -> int:
    """Create the initial rows of all keys of an empty shard, and return their number of bytes."""
    key_index = shard.key_index
    store = shard.store
    assert isinstance(key_index, StaticKeyIndex), "a dynamic table does not have a list of keys"
    assert isinstance(store, HostStore), "only tables in host memory are supported"
    keys = key_index.owned()
    slots = key_index.restore(keys, None, None)
    store.reserve(key_index.num_slots)

    def create(first: int, end: int) -> None:
        for low in range(first, end, _CHUNK_ROWS):
            part = slice(low, min(low + _CHUNK_ROWS, end))
            store.write_chunk(slots[part], _initial_rows(shard, keys[part]))

    parallel_for(len(keys), len(keys), create, num_threads)
    return len(keys) * shard.layout.row_bytes


def _initial_rows(shard: TableShard, keys: Keys) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Return the rows of `initial_rows`, computed by numpy: torch would start its own threads in each thread."""
    rows = np.zeros((len(keys), shard.layout.num_words), np.int32)
    weight = initial_vectors(keys, shard.table).view(torch.uint8).numpy()
    rows.view(np.uint8)[:, : weight.shape[1]] = weight
    for column in shard.layout.columns[1:]:
        if column.initial:
            shard.layout.view(torch.from_numpy(rows), column.name).fill_(column.initial)
    return rows
