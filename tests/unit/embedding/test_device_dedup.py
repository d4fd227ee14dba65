"""Deduplication on a device, on the fallback of a CPU."""

import numpy as np
import pytest
import torch

from nestrec.embedding.hashing import owner_of
from nestrec.embedding.routing.deduplicated_keys import dedup_on_device
from nestrec.ops.embedding.dedup_host import dedup

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_rows", [None, 500])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_distinct_keys_are_grouped_by_owner_and_give_the_sequence_back(num_shards, num_rows):
    draw = np.random.default_rng(0)
    pieces = [draw.integers(0, 500, size) for size in (300, 1, 900)]
    found = dedup_on_device(pieces, num_shards, CPU, num_rows, num_on_host=301)
    assert found is not None
    assert found.index is not None
    assert np.array_equal(found.inverse, found.index[:301].numpy())
    assert np.array_equal(found.keys[found.index.numpy()], np.concatenate(pieces))
    expected = dedup(np.concatenate(pieces), num_shards)
    assert np.array_equal(np.sort(found.keys), np.sort(expected.keys))
    assert np.array_equal(found.counts, expected.counts)
    assert np.array_equal(owner_of(found.keys, num_shards), np.repeat(np.arange(num_shards), found.counts))


@pytest.mark.parametrize("key", [-1, 500, 1 << 40])
def test_a_key_outside_the_table_is_told(key):
    assert dedup_on_device([np.array([3, key, 3])], 1, CPU, 500) is None
    found = dedup_on_device([np.array([3, key, 3])], 1, CPU, None)
    assert found is not None
    assert sorted(found.keys.tolist()) == sorted([3, key])
