"""Every row of a static table made at once, on all threads, instead of each at its first use."""

import numpy as np
import torch

from nestrec.base.thread_team import for_parts
from nestrec.embedding.initial import initial_vectors
from nestrec.embedding.key_index import StaticKeyIndex
from nestrec.embedding.stores.host_store import HostStore
from nestrec.embedding.table_shard import Keys, TableShard

_CHUNK_ROWS = 512


def create_all_rows(shard: TableShard, num_threads: int = 0) -> int:
    """Rows of all keys of this shard, as they begin; the shard has none before. Their bytes."""
    residency = shard.residency
    store = shard.store
    assert isinstance(residency, StaticKeyIndex), "a dynamic table has no list of keys"
    assert isinstance(store, HostStore), "meant for tables in host memory"
    keys = residency.owned()
    slots = residency.restore(keys, None, None)
    store.reserve(residency.num_slots)

    def create(first: int, end: int) -> None:
        for low in range(first, end, _CHUNK_ROWS):
            part = slice(low, min(low + _CHUNK_ROWS, end))
            store.write_chunk(slots[part], _first_rows(shard, keys[part]))

    for_parts(len(keys), len(keys), create, num_threads)
    return len(keys) * shard.layout.row_bytes


def _first_rows(shard: TableShard, keys: Keys) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """`initial_rows` on the host with numpy alone: torch would start threads of its own under each of ours."""
    rows = np.zeros((len(keys), shard.layout.num_words), np.int32)
    weight = initial_vectors(keys, shard.table).view(torch.uint8).numpy()
    rows.view(np.uint8)[:, : weight.shape[1]] = weight
    for column in shard.layout.columns[1:]:
        if column.initial:
            shard.layout.view(torch.from_numpy(rows), column.name).fill_(column.initial)
    return rows
