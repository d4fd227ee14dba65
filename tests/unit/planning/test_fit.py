"""Fits of a hardware profile recover the lines that generated the stages, even if a few stages are outliers."""

import numpy as np
import pytest
from planning_workloads import workload

from nestrec.planning.hardware_profile import LinearCost, Profile
from nestrec.planning.recipe_workload import expected_loads
from nestrec.planning.simulator.program_replay import Mesh
from nestrec.trace import Span
from nestrec_bench.planning.shared_fit import StageObservations, fit_line, fit_profile, ratios_of, stage_times

TRUE = LinearCost(fixed_s=2e-4, unit_s=3e-9)


def observed_of(batch_samples, disturbed=False):
    loads = expected_loads(workload(batch_samples=batch_samples), Mesh(1, 2), micro_batches=2, policy="fixed")
    stages = {"train.embedding.read_rows": {}, "train.forward_backward": {}}
    for step in range(1, 7):
        for rank in range(2):
            late = 50.0 if disturbed and step == 3 else 1.0
            amount = loads.row_bytes[loads.pattern_index(step)][rank]
            stages["train.embedding.read_rows"][step, rank, 0] = TRUE.of(amount) * late
            for part in range(2):
                flops = loads.linear_flops[loads.pattern_index(step)][rank, part]
                stages["train.forward_backward"][step, rank, part] = 1e-3 + 1e-12 * flops
    return StageObservations(loads, stages)


def test_fit_recovers_profile():
    found = fit_profile([observed_of(16), observed_of(64)], Profile(copy=LinearCost(unit_s=1.0)))
    assert found.dram.fetch.fixed_s == pytest.approx(TRUE.fixed_s, rel=1e-6)
    assert found.dram.fetch.unit_s == pytest.approx(TRUE.unit_s, rel=1e-6)
    assert found.compute.flop_s == pytest.approx(1e-12, rel=1e-6)
    assert found.copy == LinearCost(unit_s=1.0)


def test_fit_ignores_outliers():
    runs = [observed_of(16, disturbed=True), observed_of(64, disturbed=True)]
    robust, mean = (fit_profile(runs, Profile(), by_medians=by_medians).dram.fetch for by_medians in (True, False))
    amount = float(runs[1].loads.row_bytes.mean())
    assert robust.of(amount) == pytest.approx(TRUE.of(amount), rel=0.1)
    assert mean.of(amount) > 3 * TRUE.of(amount)


def test_fit_coefficients_are_not_negative():
    falling = fit_line([(3.0, 1.0), (2.0, 2.0), (1.0, 3.0)])
    assert falling is not None
    assert falling.unit_s == 0.0
    assert fit_line([]) is None


def test_fit_ratios_of_exact_stages_are_one():
    ratios = ratios_of([observed_of(16)], "train.embedding.read_rows", "row_bytes", TRUE)
    np.testing.assert_allclose(ratios, 1.0)


def test_fit_collective_starts_at_last_entry():
    spans = [
        Span(
            id=rank,
            name="train.embedding.exchange_vectors",
            kind="communication",
            lane="communication",
            start_ns=start,
            end_ns=9_000,
            rank=rank,
            step=1,
            micro_batch=0,
            is_collective=True,
        )
        for rank, start in ((0, 1_000), (1, 4_000))
    ]
    times = stage_times(spans)["train.embedding.exchange_vectors"]
    assert times[1, 0, 0] == times[1, 1, 0] == pytest.approx(5e-6)
