"""Edge cases of dynamic tables: eviction order, use counts, and capacity."""

import numpy as np
import pytest
import torch

from nestrec.embedding import StoreConfig, TableConfig
from nestrec.embedding.key_index import DynamicKeyIndex, StaticKeyIndex
from nestrec.embedding.table_shard import TableShard


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("uses", [2**23 - 1, 2**23, 2**40])
def test_key_index_lfu_keeps_most_used_row(uses):
    key_index = DynamicKeyIndex(StoreConfig(eviction_policy="lfu", max_rows=3), 1)
    key_index.restore(keys(1, 2, 3), keys(uses, 5, 5), keys(10, 10, 9))
    key_index.admit(keys(4), 20)
    assert key_index.evicted_since(0).tolist() == [3], "of rows with equal uses, the least recently used is evicted"
    key_index.admit(keys(5), 30)
    assert key_index.find(keys(1)).tolist() != [-1]


def test_key_index_eviction_ties_are_broken_by_key():
    for eviction in ("lfu", "lru"):
        key_index = DynamicKeyIndex(StoreConfig(eviction_policy=eviction, max_rows=4), 1)
        key_index.restore(keys(8, 6, 9, 7), keys(2, 2, 2, 2), keys(3, 3, 3, 3))
        key_index.admit(keys(1, 2), 20)
        assert key_index.evicted_since(0).tolist() == [6, 7]


def test_key_index_keeps_pending_keys_of_current_batch():
    key_index = DynamicKeyIndex(StoreConfig(admission_threshold=2, max_rows=4, eviction_policy="lru"), 1)
    key_index.admit(keys(50), 1)
    key_index.admit(keys(1, 2, 3, 4, 5, 6), 2)
    candidates = key_index.candidates
    assert sorted(candidates.key[candidates.live_slots()].tolist()) == [1, 2, 3, 4, 5, 6]
    key_index.admit(keys(1, 2, 3, 4), 3)
    assert (key_index.find(keys(1, 2, 3, 4)) >= 0).all(), "their second use admits them"


def test_key_index_averaged_rows_are_changed_but_not_used():
    shard = TableShard(TableConfig(name="t", dim=2), 0, 1, torch.device("cpu"))
    shard.write_back(shard.fetch_rows(keys(1, 2), 3))
    shard.write_back(shard.fetch_rows(keys(1, 2, 7), 5, num_used=1))
    [chunk] = shard.snapshot(since=4)
    assert chunk["keys"].tolist() == [1, 2, 7]
    assert chunk["uses"].tolist() == [2, 1, 0]
    assert chunk["last_step"].tolist() == [5, 3, 0]
    assert list(shard.snapshot(since=5)) == []


def test_key_index_static_keys_are_always_readable():
    key_index = StaticKeyIndex(6, 0, 1)
    key_index.admit(keys(2), 1)
    assert key_index.readable_keys().tolist() == [0, 1, 2, 3, 4, 5]
    assert key_index.filter_readable(keys(2, 4)).tolist() == [2, 4]
    key_index.delete_rows(keys(2))
    key_index.drop_eviction_log(9)
    key_index.rebalance_capacity([1, 5], 0)
    key_index.load_admission({})
    assert key_index.find(keys(2, 4)).tolist() == [2, -1]
    assert key_index.evicted_since(-1).dtype == key_index.deleted_since(-1).dtype == np.int64
    assert len(key_index.evicted_since(-1)) == len(key_index.deleted_since(-1)) == len(key_index.admission_state()) == 0


def test_key_index_dynamic_keys_are_readable_with_row():
    key_index = DynamicKeyIndex(StoreConfig(admission_threshold=2), 1)
    key_index.admit(keys(7, 3), 1)
    key_index.admit(keys(7), 2)
    key_index.grow(None, 0, 1)
    assert key_index.readable_keys().tolist() == [7]
    assert key_index.filter_readable(keys(3, 7)).tolist() == [7]
    state = key_index.admission_state()
    assert {name: values.tolist() for name, values in state.items()} == {
        "keys": [3], "uses": [1], "last_step": [1], "newest_step": [2],
    }  # fmt: skip
    other = DynamicKeyIndex(StoreConfig(admission_threshold=2), 1)
    other.load_admission(state)
    assert (other.admit(keys(3), 3).slots >= 0).all(), "this is the second use, as the loaded state has one"


def test_key_index_snapshot_restores_ttl_step():
    """No row was used in the last steps, so that the rows do not determine the step of the snapshot."""
    table = TableConfig(name="t", dim=2, store=StoreConfig(eviction_policy="ttl", ttl_steps=2, admission_threshold=2))
    first, resumed = (TableShard(table, 0, 1, torch.device("cpu")) for _ in range(2))
    for step in (1, 2):
        first.fetch_rows(keys(1), step)
    first.fetch_rows(keys(9), 4)
    resumed.load(first.snapshot())
    resumed.load_pending_key_state(first.pending_key_state())
    assert resumed.key_index.newest_step == 4
    first.fetch_rows(np.empty(0, np.int64), 5)
    assert first.key_index.find(keys(1)).tolist() == [-1]
    late = first.pending_key_state()
    other = TableShard(table, 0, 1, torch.device("cpu"))
    other.load([{**next(iter(resumed.snapshot()))}])
    assert other.key_index.find(keys(1)).tolist() != [-1]
    other.load_pending_key_state(late)
    assert other.key_index.find(keys(1)).tolist() == [-1], "the row expired after three steps without use"
