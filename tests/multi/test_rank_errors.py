"""An invalid argument on one rank, or the death of a rank, is a clear error on every rank."""

import pytest
import torch
from engine_jobs import (
    bad_key_on_last_rank,
    dense_sums,
    die_in_step,
    different_values,
    error_on_rank_1,
    other_config_on_last_rank,
    top_k,
    top_k_of_hashed,
    train,
)

from nestrec.distributed import Topology
from support.rank_pool import RankFailure, RankPool


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (other_config_on_last_rank, "tables"),
        (bad_key_on_last_rank, "not a valid key of table 'item', whose keys are 0 to 59 (detected on rank 3)"),
        (error_on_rank_1, "disk=/data: is full (rank 1)"),
        (different_values, "rank 2 differs from rank 0"),
    ],
)
def test_rank_error_is_raised_on_all_ranks(pools, job, message):
    outcomes = pools[4].outcomes(job)
    assert all(
        isinstance(o, RankFailure) and o.kind in ("UserError", "BatchError") and message in o.text for o in outcomes
    )
    assert len({o.text.split("Traceback")[0] for o in outcomes}) == 1
    assert pools[4].run(train, "sgd", 2)[0]["losses"] == pytest.approx(train(Topology.single(), "sgd", 2)["losses"])


def test_rank_death_is_peer_lost_error_on_survivors():
    pool = RankPool(3, timeout_s=60)  # a death is detected at once
    outcomes = pool.outcomes(die_in_step, timeout_s=100)
    pool.close()
    assert [o.kind for o in outcomes] == ["PeerLostError", "died", "PeerLostError"]


@pytest.mark.parametrize("num_rows", [1000, 17])
def test_top_k_of_hashed_table_uses_trained_rows(pools, num_rows):
    """With 17 rows, several ids share a row, because there are more ids than rows."""
    for result in [top_k_of_hashed(Topology.single(), num_rows), *pools[2].run(top_k_of_hashed, num_rows)]:
        scores, ids, all_scores = result
        expected, order = all_scores.sort(descending=True, stable=True)
        assert torch.equal(scores, expected[:5])
        assert torch.equal(ids, order[:5] + 1)


@pytest.mark.parametrize("with_exclusion", [False, True])
def test_top_k_on_shards_equals_one_rank(pools, with_exclusion):
    scores, keys = top_k(Topology.single(), with_exclusion)
    assert keys[4].tolist() == sorted(keys[4].tolist())
    for world in (2, 4):
        results = pools[world].run(top_k, with_exclusion)
        assert [row for _, k in results for row in k.tolist()] == keys.tolist()
        assert sum(len(s) for s, _ in results) == len(scores)


def test_dense_all_reduce_uses_fixed_buckets(pools):
    for grads, issued in pools[4].run(dense_sums):
        assert [g.tolist() for g in grads] == [[1111.0] * 3, [1111.0] * 5, [1101.0] * 2]
        assert issued == ["dense.all_reduce"] * 2
