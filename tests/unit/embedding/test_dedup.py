import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nestrec.embedding.hashing import hash_of, owner_of, range_of_shard
from nestrec.ops.embedding.dedup_host import dedup

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(arrays(np.int64, st.integers(0, 300), elements=st.one_of(INT64, st.integers(0, 20))), st.integers(1, 5))
def test_unique_keys_are_grouped_by_owner_in_order(keys, num_shards):
    unique = dedup(keys, num_shards)
    assert (unique.keys[unique.inverse] == keys).all()
    owners = owner_of(unique.keys, num_shards)
    assert (np.diff(owners) >= 0).all()
    assert unique.counts.tolist() == np.bincount(owners, minlength=num_shards).tolist()
    for shard in range(num_shards):
        shard_keys = unique.keys[owners == shard].tolist()
        assert shard_keys == list(dict.fromkeys(k for k in keys.tolist() if k in set(shard_keys)))


@pytest.mark.parametrize("num_shards", [1, 3, 8])
@pytest.mark.parametrize("spread", [1, 40, 2**17, 2**62])
@pytest.mark.parametrize("size", [5000, 300_000])
def test_unique_keys_of_large_batch_equal_numpy(size, spread, num_shards):
    keys = np.random.default_rng(0).integers(-spread, spread, size)
    unique = dedup(keys, num_shards)
    assert sorted(unique.keys.tolist()) == np.unique(keys).tolist()
    assert (unique.keys[unique.inverse] == keys).all()
    owners = owner_of(unique.keys, num_shards)
    assert (np.diff(owners) >= 0).all()
    assert unique.counts.tolist() == np.bincount(owners, minlength=num_shards).tolist()


def test_owners_are_even_and_fixed():
    keys = np.arange(100_000)
    shares = np.bincount(owner_of(keys, 7)) / len(keys)
    assert abs(shares - 1 / 7).max() < 0.005
    assert owner_of(np.array([0, 1, -1, 2**63 - 1]), 1000).tolist() == [883, 566, 893, 165]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 60, 1000])
def test_key_routing_shard_owns_range_of_hashes(num_shards):
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 20_000)
    owners = owner_of(keys, num_shards)
    hashes = hash_of(keys)
    ranges = [range_of_shard(shard, num_shards) for shard in range(num_shards)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == 2**32
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    first, end = np.array(ranges).T
    assert ((first[owners] <= hashes) & (hashes < end[owners])).all()
