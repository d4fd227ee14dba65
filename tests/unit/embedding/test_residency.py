"""Which keys have rows, at the edges: nothing admitted yet, more rows taken over than there is room for."""

import numpy as np
import pytest
import torch

from nestrec.embedding import StoreConfig, TableConfig
from nestrec.embedding.shard import TableShard


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
