"""Expected loads agree with loads counted in random batches of the same distributions, and conserve totals."""

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


def test_expected_loads_match_real_batches():
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
        keys_per_token=1.0,
        seen_keys=seen,
        distinct_keys=distinct,
    )
    load_inputs = Workload(
        name="w",
        batch_samples=SAMPLES * WORLD,
        lengths=(float(LENGTH),) * 2,
        tables=(load,),
        dense_parameters=1,
        flops_per_token=1.0,
        flops_per_token_squared=0.0,
        activation_bytes_per_token=1.0,
    )
    expected = expected_loads(load_inputs, Mesh(1, WORLD), micro_batches=PARTS, policy="fixed")
    for name in ("linear_flops", "keys", "requested_keys", "received_bytes", "served_bytes", "rows", "row_bytes"):
        mean = getattr(counted, name).mean()
        assert getattr(expected, name).mean() == pytest.approx(mean, rel=0.06), name
    # This is a difference of two large numbers, so errors of the curve have a larger effect.
    assert expected.shared_rows.mean() == pytest.approx(counted.shared_rows.mean(), rel=0.15)


def batch_of(draw, step):
    parts = []
    for samples in np.array_split(np.arange(SAMPLES), PARTS):
        keys = draw.integers(0, ROWS, (len(samples), LENGTH))
        parts.append(MicroBatch(samples, {"t": keys}, {}, LENGTH, keys.size))
    return Batch(BatchPosition(0, step), 1.0, np.arange(SAMPLES * WORLD), tuple(parts), tokens=np.full(SAMPLES, LENGTH))


@pytest.mark.parametrize("policy", ["fixed", "zigzag", "karmarkar_karp"])
def test_expected_loads_conserve_tokens(policy):
    load_inputs = workload(batch_samples=96)
    loads = expected_loads(load_inputs, Mesh(1, 4), micro_batches=3, policy=policy)
    drawn = [load_inputs.draw_lengths(96, (0, p)).sum() * load_inputs.flops_per_token for p in range(3)]
    assert loads.linear_flops.sum(axis=(1, 2)).tolist() == pytest.approx(drawn)


def test_expected_loads_balancing_reduces_imbalance():
    load_inputs = workload(batch_samples=256)
    uneven, even = (
        expected_loads(load_inputs, Mesh(1, 8), micro_batches=1, policy=policy).linear_flops.sum(axis=2)
        for policy in ("fixed", "karmarkar_karp")
    )
    assert (even.max() / even.mean() - 1) < 0.5 * (uneven.max() / uneven.mean() - 1)


def test_expected_loads_window_cache_sends_rows_once():
    load_inputs = workload()
    plain, cached = (
        expected_loads(load_inputs, Mesh(1, 4), micro_batches=4, policy="fixed", window_cache=cache)
        for cache in (False, True)
    )
    assert cached.requested_keys.sum() < plain.requested_keys.sum()
    unsplit = expected_loads(load_inputs, Mesh(1, 4), micro_batches=1, policy="fixed")
    assert cached.requested_keys.sum() == pytest.approx(unsplit.requested_keys.sum())
    assert cached.returned_bytes.sum() == pytest.approx(cached.received_bytes.sum())


def test_expected_loads_replicas_store_more_rows_per_rank():
    load_inputs = workload(batch_samples=256)
    one_replica, four_replicas = (
        expected_loads(load_inputs, Mesh(m, 8 // m), micro_batches=2, policy="fixed") for m in (1, 4)
    )
    assert four_replicas.row_bytes.mean() > 3 * one_replica.row_bytes.mean()
    assert four_replicas.received_bytes.sum() == pytest.approx(one_replica.received_bytes.sum())


def test_expected_loads_few_keys_increase_imbalance_of_owners():
    many = expected_loads(workload(rows=10_000_000), Mesh(1, 16), micro_batches=1, policy="fixed")
    few = expected_loads(workload(rows=200), Mesh(1, 16), micro_batches=1, policy="fixed")
    assert np.ptp(few.rows / few.rows.mean()) > np.ptp(many.rows / many.rows.mean()) > 0
