"""A mistake or a loss on one rank is a clear error on every rank."""

import pytest
import torch
from engine_jobs import (
    bad_key_on_last_rank,
    dense_sums,
    die_in_step,
    disagree,
    other_config_on_last_rank,
    own_error,
    top_k,
    top_k_of_hashed,
    train,
)

from nestrec.distributed import Topology
from support.rank_pool import RankFailure, RankPool


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (other_config_on_last_rank, "tables"),
        (bad_key_on_last_rank, "is not a key of table 'item', which holds 0 to 59 (found on rank 3)"),
        (own_error, "disk=/data: is full (rank 1)"),
        (disagree, "rank 2 differs from rank 0"),
    ],
)
def test_a_mistake_on_one_rank_is_the_same_user_error_on_all(pools, job, words):
    outcomes = pools[4].outcomes(job)
    assert all(
        isinstance(o, RankFailure) and o.kind in ("UserError", "BatchError") and words in o.text for o in outcomes
    )
    assert len({o.text.split("Traceback")[0] for o in outcomes}) == 1
    assert pools[4].run(train, "sgd", 2)[0]["losses"] == pytest.approx(train(Topology.single(), "sgd", 2)["losses"])


def test_a_dead_peer_is_a_peer_lost_error_on_every_survivor():
    pool = RankPool(3, timeout_s=60)  # a death is heard of at once
    outcomes = pool.outcomes(die_in_step, timeout_s=100)
    pool.close()
    assert [o.kind for o in outcomes] == ["PeerLostError", "died", "PeerLostError"]


@pytest.mark.parametrize("num_rows", [1000, 17])
def test_top_k_of_hashed_ids_scores_the_rows_that_training_reads(pools, num_rows):
    """17: several ids share a row, and there are more ids than rows."""
    for found in [top_k_of_hashed(Topology.single(), num_rows), *pools[2].run(top_k_of_hashed, num_rows)]:
        scores, ids, every = found
        expected, order = every.sort(descending=True, stable=True)
        assert torch.equal(scores, expected[:5])
        assert torch.equal(ids, order[:5] + 1)


@pytest.mark.parametrize("with_exclusion", [False, True])
def test_top_k_on_shards_is_top_k_on_one_rank(pools, with_exclusion):
    scores, keys = top_k(Topology.single(), with_exclusion)
    assert keys[4].tolist() == sorted(keys[4].tolist())
    for world in (2, 4):
        results = pools[world].run(top_k, with_exclusion)
        assert [row for _, k in results for row in k.tolist()] == keys.tolist()
        assert sum(len(s) for s, _ in results) == len(scores)


def test_dense_gradients_are_summed_in_fixed_buckets_and_missing_ones_count_as_zero(pools):
    for grads, issued in pools[4].run(dense_sums):
        assert [g.tolist() for g in grads] == [[1111.0] * 3, [1111.0] * 5, [1101.0] * 2]
        assert issued == ["dense.all_reduce"] * 2
