"""Deduplication on a device, tested with its CPU fallback."""

import numpy as np
import pytest
import torch

from nestrec.embedding.hashing import owner_of
from nestrec.embedding.routing.deduplicated_keys import dedup_on_device
from nestrec.ops.embedding.dedup_host import dedup

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_rows", [None, 500])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_device_unique_keys_are_grouped_and_invertible(num_shards, num_rows):
    draw = np.random.default_rng(0)
    parts = [draw.integers(0, 500, size) for size in (300, 1, 900)]
    unique = dedup_on_device(parts, num_shards, CPU, num_rows, num_on_host=301)
    assert unique is not None
    assert unique.index is not None
    assert np.array_equal(unique.inverse, unique.index[:301].numpy())
    assert np.array_equal(unique.keys[unique.index.numpy()], np.concatenate(parts))
    expected = dedup(np.concatenate(parts), num_shards)
    assert np.array_equal(np.sort(unique.keys), np.sort(expected.keys))
    assert np.array_equal(unique.counts, expected.counts)
    assert np.array_equal(owner_of(unique.keys, num_shards), np.repeat(np.arange(num_shards), unique.counts))


@pytest.mark.parametrize("key", [-1, 500, 1 << 40])
def test_device_unique_keys_reject_key_outside_table(key):
    assert dedup_on_device([np.array([3, key, 3])], 1, CPU, 500) is None
    unique = dedup_on_device([np.array([3, key, 3])], 1, CPU, None)
    assert unique is not None
    assert sorted(unique.keys.tolist()) == sorted([3, key])
