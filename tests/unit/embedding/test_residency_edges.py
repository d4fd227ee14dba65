"""Bounds, orders and counts of dynamic tables at their edges."""

import numpy as np
import pytest
import torch

from nestrec.embedding import StoreConfig, TableConfig
from nestrec.embedding.key_index import DynamicKeyIndex, StaticKeyIndex
from nestrec.embedding.table_shard import TableShard


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("uses", [2**23 - 1, 2**23, 2**40])
def test_lfu_keeps_the_hottest_row_however_often_it_was_used(uses):
    residency = DynamicKeyIndex(StoreConfig(eviction="lfu", max_rows=3), 1)
    residency.restore(keys(1, 2, 3), keys(uses, 5, 5), keys(10, 10, 9))
    residency.admit(keys(4), 20)
    assert residency.evicted_since(0).tolist() == [3], "equal uses: the one that was used longer ago goes"
    residency.admit(keys(5), 30)
    assert residency.find(keys(1)).tolist() != [-1]


def test_lfu_and_lru_take_the_smaller_key_where_all_else_is_equal():
    for eviction in ("lfu", "lru"):
        residency = DynamicKeyIndex(StoreConfig(eviction=eviction, max_rows=4), 1)
        residency.restore(keys(8, 6, 9, 7), keys(2, 2, 2, 2), keys(3, 3, 3, 3))
        residency.admit(keys(1, 2), 20)
        assert residency.evicted_since(0).tolist() == [6, 7]


def test_waiting_keys_of_the_batch_itself_are_never_forgotten():
    residency = DynamicKeyIndex(StoreConfig(admission_count=2, max_rows=4, eviction="lru"), 1)
    residency.admit(keys(50), 1)
    residency.admit(keys(1, 2, 3, 4, 5, 6), 2)
    waiting = residency.candidates
    assert sorted(waiting.key[waiting.live_slots()].tolist()) == [1, 2, 3, 4, 5, 6]
    residency.admit(keys(1, 2, 3, 4), 3)
    assert (residency.find(keys(1, 2, 3, 4)) >= 0).all(), "their second use earns them a row"


def test_rows_that_are_averaged_are_saved_as_changed_and_not_counted_as_used():
    shard = TableShard(TableConfig(name="t", dim=2), 0, 1, torch.device("cpu"))
    shard.write_back(shard.fetch(keys(1, 2), 3))
    shard.write_back(shard.fetch(keys(1, 2, 7), 5, num_used=1))
    [chunk] = shard.snapshot(since=4)
    assert chunk["keys"].tolist() == [1, 2, 7]
    assert chunk["uses"].tolist() == [2, 1, 0]
    assert chunk["last_step"].tolist() == [5, 3, 0]
    assert list(shard.snapshot(since=5)) == []


def test_static_keys_are_readable_and_never_gone():
    residency = StaticKeyIndex(6, 0, 1)
    residency.admit(keys(2), 1)
    assert residency.readable_keys().tolist() == [0, 1, 2, 3, 4, 5]
    assert residency.only_readable(keys(2, 4)).tolist() == [2, 4]
    residency.forget(keys(2))
    residency.drop_eviction_log(9)
    residency.divide_room([1, 5], 0)
    residency.load_admission({})
    assert residency.find(keys(2, 4)).tolist() == [2, -1]
    assert residency.evicted_since(-1).dtype == residency.gone_since(-1).dtype == np.int64
    assert len(residency.evicted_since(-1)) == len(residency.gone_since(-1)) == len(residency.admission_state()) == 0


def test_dynamic_keys_are_readable_with_a_row():
    residency = DynamicKeyIndex(StoreConfig(admission_count=2), 1)
    residency.admit(keys(7, 3), 1)
    residency.admit(keys(7), 2)
    residency.grow(None, 0, 1)
    assert residency.readable_keys().tolist() == [7]
    assert residency.only_readable(keys(3, 7)).tolist() == [7]
    state = residency.admission_state()
    assert {name: values.tolist() for name, values in state.items()} == {
        "keys": [3], "uses": [1], "last_step": [1], "newest_step": [2],
    }  # fmt: skip
    other = DynamicKeyIndex(StoreConfig(admission_count=2), 1)
    other.load_admission(state)
    assert (other.admit(keys(3), 3).slots >= 0).all(), "the second use, after the one that was loaded"


def test_a_snapshot_restores_the_step_that_a_time_to_live_counts_from():
    """No row was used in the last steps, so no row tells how far the run had come."""
    table = TableConfig(name="t", dim=2, store=StoreConfig(eviction="ttl", ttl_steps=2, admission_count=2))
    first, resumed = (TableShard(table, 0, 1, torch.device("cpu")) for _ in range(2))
    for step in (1, 2):
        first.fetch(keys(1), step)
    first.fetch(keys(9), 4)
    resumed.load(first.snapshot())
    resumed.load_unsettled(first.unsettled())
    assert resumed.residency.newest_step == 4
    first.fetch(np.empty(0, np.int64), 5)
    assert first.residency.find(keys(1)).tolist() == [-1]
    late = first.unsettled()
    other = TableShard(table, 0, 1, torch.device("cpu"))
    other.load([{**next(iter(resumed.snapshot()))}])
    assert other.residency.find(keys(1)).tolist() != [-1]
    other.load_unsettled(late)
    assert other.residency.find(keys(1)).tolist() == [-1], "three steps without a use: its time is over"
