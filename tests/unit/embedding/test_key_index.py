"""Edge cases of key indices: no admitted key, and more loaded rows than the capacity."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestrec.embedding import StoreConfig, TableConfig
from nestrec.embedding.key_index import capacity_per_shard
from nestrec.embedding.table_shard import TableShard


def shard_of(store: StoreConfig) -> TableShard:
    return TableShard(TableConfig(name="t", dim=2, store=store), 0, 1, torch.device("cpu"))


def test_key_index_ttl_before_first_row():
    shard = shard_of(StoreConfig(eviction_policy="ttl", ttl_steps=3, admission_threshold=2))
    initial = shard_of(StoreConfig()).read(np.arange(4))
    assert torch.equal(shard.read(np.arange(4)), initial)
    for step in (1, 2):
        shard.fetch_rows(np.array([2]), step)
    assert shard.key_index.find(np.array([1, 2, 3])).tolist() == [-1, 0, -1]
    shard.fetch_rows(np.array([9]), 6)
    assert shard.key_index.find(np.array([1, 2, 3])).tolist() == [-1, -1, -1], "the row expired"


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 60))
def test_key_index_max_rows_is_rebalanced_over_shards(rows, spare):
    max_rows = sum(rows) + spare + len(rows)
    capacity = capacity_per_shard(rows, max_rows)
    assert max_rows - len(rows) < sum(capacity) <= max_rows
    assert all(own <= bound for own, bound in zip(rows, capacity, strict=True))
    assert capacity_per_shard(capacity, max_rows) == capacity
    assert capacity_per_shard([0] * len(rows), max_rows) == [max_rows // len(rows)] * len(rows)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "none"])
def test_key_index_loaded_rows_above_bound_are_evicted(eviction):
    saved = shard_of(StoreConfig(max_rows=40, eviction_policy=eviction))
    for step, keys in ((1, np.arange(8)), (2, np.arange(30)), (3, np.arange(20, 40))):
        saved.fetch_rows(keys, step)
    shard = shard_of(StoreConfig(max_rows=32, eviction_policy=eviction))
    shard.load(saved.snapshot())
    assert shard.key_index.num_rows == 40, "loading does not evict rows"
    shard.fetch_rows(np.arange(36, 40), 4)
    remaining = {"none": range(40), "lru": range(8, 40), "lfu": [*range(8), *range(16, 40)]}[eviction]
    assert shard.keys().tolist() == list(remaining)
    shard.fetch_rows(np.arange(50, 90), 5)
    assert shard.key_index.num_rows == len(remaining)
