"""Key clusterings assign every sample once, balance cost, are deterministic, and reduce duplicate keys as declared."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestrec.base.errors import UserError
from nestrec.pipeline.key_clustering import SampleKeys, cluster, inflation

NAMES = ["contiguous", "random", "by_length", "greedy", "refined", "edges"]


def random_samples(num_samples: int, num_groups: int, seed: int) -> tuple[SampleKeys, np.ndarray]:
    """Return samples whose keys are partly those of their group and partly globally popular, and their lengths."""
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
def test_key_clustering_assigns_samples_once(name, num_samples, num_micro_batches, seed):
    keys, cost = random_samples(num_samples, 5, seed)
    groups = cluster(name, keys, cost, num_micro_batches)
    assert len(groups) == num_micro_batches
    assert np.array_equal(np.sort(np.concatenate(groups)), np.arange(num_samples))
    assert all((np.diff(group) > 0).all() for group in groups)
    again = cluster(name, keys, cost, num_micro_batches)
    assert all(np.array_equal(a, b) for a, b in zip(groups, again, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_micro_batches", [4, 8, 16])
def test_key_clustering_bounds_micro_batch_cost(name, num_micro_batches):
    keys, cost = random_samples(512, 20, 3)
    loads = [cost[group].sum() for group in cluster(name, keys, cost, num_micro_batches)]
    assert max(loads) <= 1.02 * cost.sum() / num_micro_batches + cost.max()


@pytest.mark.parametrize("num_micro_batches", [4, 8, 16])
def test_key_clustering_refined_beats_random_and_greedy(num_micro_batches):
    keys, cost = random_samples(512, 20, 1)
    sent = {name: inflation(keys, cluster(name, keys, cost, num_micro_batches)).sent for name in NAMES}
    assert sent["refined"] <= sent["greedy"]
    assert sent["refined"] < 0.9 * sent["random"]


@pytest.mark.parametrize("num_micro_batches", [4, 8, 16])
def test_key_clustering_edges_reduces_keys_at_both_ends(num_micro_batches):
    keys, cost = random_samples(512, 20, 1)
    found = {name: inflation(keys, cluster(name, keys, cost, num_micro_batches)) for name in ("random", "edges")}
    exposed = {name: rows.first + rows.last for name, rows in found.items()}
    assert exposed["edges"] < 0.95 * exposed["random"]


def test_key_clustering_finds_perfect_partition():
    values = np.concatenate([np.arange(50) + 1000 * (i % 4) for i in range(64)])
    keys = SampleKeys(values, np.arange(65) * 50)
    found = inflation(keys, cluster("refined", keys, np.full(64, 50.0), 4))
    assert found.ratio == 1.0


def test_key_clustering_rejects_invalid_arguments():
    keys, cost = random_samples(8, 2, 0)
    with pytest.raises(UserError, match="unknown clustering"):
        cluster("refind", keys, cost, 2)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="must be from 1 to 64"):
        cluster("greedy", keys, cost, 65)
