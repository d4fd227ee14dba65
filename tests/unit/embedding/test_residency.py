"""Which keys have rows, at the edges: nothing admitted yet, more rows taken over than there is room for."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestrec.embedding import StoreConfig, TableConfig
from nestrec.embedding.key_index import room_of_shards
from nestrec.embedding.table_shard import TableShard


def shard_of(store: StoreConfig) -> TableShard:
    return TableShard(TableConfig(name="t", dim=2, store=store), 0, 1, torch.device("cpu"))


def test_a_table_with_a_time_to_live_is_read_before_it_has_any_row():
    shard = shard_of(StoreConfig(eviction="ttl", ttl_steps=3, admission_count=2))
    begins = shard_of(StoreConfig()).read(np.arange(4))
    assert torch.equal(shard.read(np.arange(4)), begins)
    for step in (1, 2):
        shard.fetch(np.array([2]), step)
    assert shard.residency.find(np.array([1, 2, 3])).tolist() == [-1, 0, -1]
    shard.fetch(np.array([9]), 6)
    assert shard.residency.find(np.array([1, 2, 3])).tolist() == [-1, -1, -1], "its time is over"


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 60))
def test_shards_share_the_room_that_a_bound_leaves_and_do_so_again_when_they_have_filled_it(rows, more):
    max_rows = sum(rows) + more + len(rows)
    room = room_of_shards(rows, max_rows)
    assert max_rows - len(rows) < sum(room) <= max_rows
    assert all(own <= bound for own, bound in zip(rows, room, strict=True))
    assert room_of_shards(room, max_rows) == room
    assert room_of_shards([0] * len(rows), max_rows) == [max_rows // len(rows)] * len(rows)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "none"])
def test_rows_that_were_loaded_past_the_bound_make_room_with_the_next_batch_and_not_before(eviction):
    saved = shard_of(StoreConfig(max_rows=40, eviction=eviction))
    for step, keys in ((1, np.arange(8)), (2, np.arange(30)), (3, np.arange(20, 40))):
        saved.fetch(keys, step)
    shard = shard_of(StoreConfig(max_rows=32, eviction=eviction))
    shard.load(saved.snapshot())
    assert shard.residency.num_rows == 40, "reading alone ends no row"
    shard.fetch(np.arange(36, 40), 4)
    kept = {"none": range(40), "lru": range(8, 40), "lfu": [*range(8), *range(16, 40)]}[eviction]
    assert shard.keys().tolist() == list(kept)
    shard.fetch(np.arange(50, 90), 5)
    assert shard.residency.num_rows == len(kept)
