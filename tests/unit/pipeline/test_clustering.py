"""Clusterings deal every sample once, balance cost, repeat themselves, and save what they promise to save."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.base.errors import UserError
from nestrec.pipeline.key_clustering import SampleKeys, cluster, inflation

NAMES = ["contiguous", "random", "by_length", "greedy", "refined", "edges"]


def made_up(num_samples: int, num_groups: int, seed: int) -> tuple[SampleKeys, np.ndarray]:
    """Samples of some groups with tastes of their own, and some keys that everybody likes."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(3.0, 1.0, num_samples), 1, 200).astype(np.int64)
    group = draw.integers(0, num_groups, num_samples)
    values = [
        np.where(draw.random(n) < 0.7, g * 1000 + draw.integers(0, 150, n), -draw.zipf(1.3, n) % 97)
        for g, n in zip(group, lengths, strict=True)
    ]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    keys = np.concatenate(values) if values else np.empty(0)
    return SampleKeys(keys.astype(np.int64), offsets.astype(np.int64)), lengths.astype(np.float64)


@pytest.mark.parametrize("name", NAMES)
@given(num_samples=st.integers(0, 60), num_micro_batches=st.integers(1, 12), seed=st.integers(0, 2**20))
def test_every_sample_is_dealt_once_and_the_result_repeats(name, num_samples, num_micro_batches, seed):
    keys, cost = made_up(num_samples, 5, seed)
    groups = cluster(name, keys, cost, num_micro_batches)
    assert len(groups) == num_micro_batches
    assert np.array_equal(np.sort(np.concatenate(groups)), np.arange(num_samples))
    assert all((np.diff(group) > 0).all() for group in groups)
    again = cluster(name, keys, cost, num_micro_batches)
    assert all(np.array_equal(a, b) for a, b in zip(groups, again, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_micro_batches", [4, 8, 16])
def test_no_micro_batch_costs_more_than_the_mean_and_a_sample(name, num_micro_batches):
    keys, cost = made_up(512, 20, 3)
    loads = [cost[group].sum() for group in cluster(name, keys, cost, num_micro_batches)]
    assert max(loads) <= 1.02 * cost.sum() / num_micro_batches + cost.max()


@pytest.mark.parametrize("num_micro_batches", [4, 8, 16])
def test_refined_saves_rows_over_random_and_is_never_worse_than_greedy(num_micro_batches):
    keys, cost = made_up(512, 20, 1)
    sent = {name: inflation(keys, cluster(name, keys, cost, num_micro_batches)).sent for name in NAMES}
    assert sent["refined"] <= sent["greedy"]
    assert sent["refined"] < 0.9 * sent["random"]


@pytest.mark.parametrize("num_micro_batches", [4, 8, 16])
def test_edges_lowers_the_keys_of_the_first_and_last_micro_batch(num_micro_batches):
    keys, cost = made_up(512, 20, 1)
    found = {name: inflation(keys, cluster(name, keys, cost, num_micro_batches)) for name in ("random", "edges")}
    exposed = {name: rows.first + rows.last for name, rows in found.items()}
    assert exposed["edges"] < 0.95 * exposed["random"]


def test_a_perfect_partition_is_found_where_groups_share_nothing():
    values = np.concatenate([np.arange(50) + 1000 * (i % 4) for i in range(64)])
    keys = SampleKeys(values, np.arange(65) * 50)
    found = inflation(keys, cluster("refined", keys, np.full(64, 50.0), 4))
    assert found.ratio == 1.0


def test_mistakes_are_named():
    keys, cost = made_up(8, 2, 0)
    with pytest.raises(UserError, match="is no clustering"):
        cluster("refind", keys, cost, 2)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="must be 1 to 64"):
        cluster("greedy", keys, cost, 65)
