"""Loads from distributions agree with loads counted from batches drawn from them, and keep what must be kept."""

import numpy as np
import pytest
from planning_workloads import workload

from nestrec.data.batch_loader import Batch, MicroBatch
from nestrec.data.batch_order import BatchPosition
from nestrec.embedding import TableConfig
from nestrec.planning.recipe_workload import expected_loads
from nestrec.planning.simulator.program_replay import Mesh
from nestrec.planning.workload import TableLoad, Workload
from nestrec_bench.planning.shared_fit import counted_loads

ROWS, SAMPLES, LENGTH, WORLD, PARTS = 5_000, 48, 20, 2, 3


def counted_curve(draw):
    sizes = (20, 200, 960, 1920, 3840, 7680)
    keys = [draw.integers(0, ROWS, n) for n in sizes]
    return tuple(map(float, sizes)), tuple(float(len(np.unique(k))) for k in keys)


def test_expected_loads_are_those_of_real_batches_with_the_same_distribution():
    draw = np.random.default_rng(0)
    table = TableConfig(name="t", dim=8, num_rows=ROWS)
    batches = [[batch_of(draw, step) for step in range(3)] for _ in range(WORLD)]
    counted = counted_loads(batches, [table], lambda part: (float(part.num_tokens), 0.0), dense_bytes=4.0)
    seen, distinct = counted_curve(draw)
    load = TableLoad(
        name="t",
        rows=ROWS,
        row_bytes=48,
        weight_bytes=32,
        gradient_bytes=32,
        keys_a_token=1.0,
        seen_keys=seen,
        distinct_keys=distinct,
    )
    given = Workload(
        name="w",
        batch_samples=SAMPLES * WORLD,
        lengths=(float(LENGTH),) * 2,
        tables=(load,),
        dense_parameters=1,
        flops_a_token=1.0,
        flops_a_token_squared=0.0,
        activation_bytes_a_token=1.0,
    )
    expected = expected_loads(given, Mesh(1, WORLD), micro_batches=PARTS, policy="fixed")
    for name in ("linear_flops", "keys", "asked", "received_bytes", "served_bytes", "rows", "row_bytes"):
        mean = getattr(counted, name).mean()
        assert getattr(expected, name).mean() == pytest.approx(mean, rel=0.06), name
    # A difference of two large numbers: the errors of the curve weigh more in it.
    assert expected.shared_rows.mean() == pytest.approx(counted.shared_rows.mean(), rel=0.15)


def batch_of(draw, step):
    parts = []
    for mine in np.array_split(np.arange(SAMPLES), PARTS):
        keys = draw.integers(0, ROWS, (len(mine), LENGTH))
        parts.append(MicroBatch(mine, {"t": keys}, {}, LENGTH, keys.size))
    return Batch(BatchPosition(0, step), 1.0, np.arange(SAMPLES * WORLD), tuple(parts), tokens=np.full(SAMPLES, LENGTH))


@pytest.mark.parametrize("policy", ["fixed", "zigzag", "karmarkar_karp"])
def test_no_token_is_lost_whoever_computes_it(policy):
    given = workload(batch_samples=96)
    loads = expected_loads(given, Mesh(1, 4), micro_batches=3, policy=policy)
    drawn = [given.draw_lengths(96, (0, p)).sum() * given.flops_a_token for p in range(3)]
    assert loads.linear_flops.sum(axis=(1, 2)).tolist() == pytest.approx(drawn)


def test_balance_makes_ranks_more_even():
    given = workload(batch_samples=256)
    uneven, even = (
        expected_loads(given, Mesh(1, 8), micro_batches=1, policy=policy).linear_flops.sum(axis=2)
        for policy in ("fixed", "karmarkar_karp")
    )
    assert (even.max() / even.mean() - 1) < 0.5 * (uneven.max() / uneven.mean() - 1)


def test_a_window_cache_sends_each_row_once():
    given = workload()
    plain, cached = (
        expected_loads(given, Mesh(1, 4), micro_batches=4, policy="fixed", window_cache=cache)
        for cache in (False, True)
    )
    assert cached.asked.sum() < plain.asked.sum()
    whole = expected_loads(given, Mesh(1, 4), micro_batches=1, policy="fixed")
    assert cached.asked.sum() == pytest.approx(whole.asked.sum())
    assert cached.returned_bytes.sum() == pytest.approx(cached.received_bytes.sum())


def test_replicas_keep_more_rows_a_rank_and_ask_fewer_peers():
    given = workload(batch_samples=256)
    one, four = (expected_loads(given, Mesh(m, 8 // m), micro_batches=2, policy="fixed") for m in (1, 4))
    assert four.row_bytes.mean() > 3 * one.row_bytes.mean()
    assert four.received_bytes.sum() == pytest.approx(one.received_bytes.sum())


def test_owners_differ_more_when_there_are_few_keys():
    many = expected_loads(workload(rows=10_000_000), Mesh(1, 16), micro_batches=1, policy="fixed")
    few = expected_loads(workload(rows=200), Mesh(1, 16), micro_batches=1, policy="fixed")
    assert np.ptp(few.rows / few.rows.mean()) > np.ptp(many.rows / many.rows.mean()) > 0
