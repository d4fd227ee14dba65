"""Prediction benchmark: a fit to serial runs of a known cost model predicts the times of other schedules."""

import numpy as np
import pytest

from nestrec.base.errors import UserError
from nestrec.pipeline import PipelineConfig
from nestrec.planning.hardware_profile import ComputeRates, LinearCost, Profile, StoreRates
from nestrec.planning.simulator.program_replay import Mesh
from nestrec.planning.simulator.rehearsal import rehearse
from nestrec.planning.simulator.shared_cores import Hosts, replay_shared
from nestrec.planning.simulator.step_costs import StepCosts
from nestrec_bench.planning import prediction_bench
from nestrec_bench.planning.prediction_bench import PredictionBenchConfig, predict, predict_rows
from nestrec_bench.planning.prediction_job import Bed, from_plain_bed, make_bed_batches, to_plain_bed
from nestrec_bench.planning.shared_fit import StageObservations, stage_times
from nestrec_bench.schedules.schedules_job import JobConfig

BENCH = PredictionBenchConfig(
    ranks=(2,),
    link_mbit=(8.0, 24.0),
    lengths=("skewed",),
    schedules=("serial", "frozen_window", "nested"),
    micro_batches=(2, 4),
    rounds=2,
    steps=5,
    emulated=True,
    job=JobConfig(samples=32, tokens=8, num_rows=2_000, dim=32),
)
TRUTH = Profile(
    exchange_keys=LinearCost(fixed_s=3e-4),
    dram=StoreRates(fetch=LinearCost(unit_s=5e-9), write_back=LinearCost(unit_s=2e-9)),
    exchange_vectors=LinearCost(fixed_s=2e-4),
    exchange_gradients=LinearCost(fixed_s=2e-4),
    update_rows=LinearCost(unit_s=1e-9),
    dense_reduce=LinearCost(fixed_s=1e-3),
    dense_apply=LinearCost(fixed_s=5e-4),
    compute=ComputeRates(fixed_s=1e-3, flop_s=5e-11),
)


def simulated_measurements(bench, cores):
    """Return the result of `measure_beds` on a machine that behaves exactly as the cost model."""
    found = {}
    for bed in bench.beds():
        found[bed] = [
            {"entry": entry, "rounds": [simulated_round(bench, bed, entry, cores, first) for first in (1, 6)]}
            for entry in bench.entries()
        ]
    return found


def simulated_round(bench, bed, entry, cores, first):
    loads = prediction_bench._loads(bed, entry, bench.options())
    program = rehearse(PipelineConfig(schedule=entry.schedule), micro_batches=entry.micro_batches, steps=bench.steps)
    mesh = Mesh(1, bed.ranks)
    links = StageObservations(loads, {}, bed.link_mbit / 8e3).links()
    costs = StepCosts(loads.starting_at(first - 1), TRUTH, links, mesh, store="dram", hands_over=True)
    done = replay_shared(program, costs, mesh, Hosts(ranks=bed.ranks, cores=cores))
    spans = [span for rank in range(bed.ranks) for span in done.spans(rank) if span.rank >= 0]
    stages = {
        name: {(step + first - 1, rank, part): s for (step, rank, part), s in times.items()}
        for name, times in stage_times(spans).items()
    }
    return {"first": first, "ms": {"step": float(done.step_s().max()) * 1e3}, "stages": stages}


def test_prediction_bench_fits_to_serial_runs_only(monkeypatch):
    monkeypatch.setattr(prediction_bench, "usable_cores", lambda: 8)
    rows, summary = predict(BENCH, simulated_measurements(BENCH, 8))
    assert {row["schedule"] for row in rows if row["used_to_fit"]} == {"serial"}
    assert summary["tested"] == 8
    assert summary["median_error"] < 0.03
    assert summary["is_within"]


def test_prediction_bench_requires_core_per_rank_for_fit(monkeypatch):
    monkeypatch.setattr(prediction_bench, "usable_cores", lambda: 1)
    with pytest.raises(UserError, match="each number of ranks exceeds the 1 usable cores"):
        predict(BENCH, simulated_measurements(BENCH, 8))


def test_prediction_bench_measurements_round_trip_json():
    bench = PredictionBenchConfig(
        ranks=(2,),
        link_mbit=(100.0,),
        lengths=("even",),
        schedules=("serial",),
        micro_batches=(2,),
        steps=4,
        emulated=True,
        job=BENCH.job,
    )
    (measured,) = simulated_measurements(bench, 8).values()
    assert from_plain_bed(to_plain_bed(measured)) == measured


@pytest.mark.parametrize("shape", ["even", "skewed"])
def test_prediction_bench_batches_are_deterministic(shape):
    bed = Bed(ranks=2, link_mbit=1.0, lengths=shape)
    first, again = (make_bed_batches(bed, 4, BENCH.options(), 1) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        for left, right in zip(one.micro_batches, other.micro_batches, strict=True):
            np.testing.assert_array_equal(left.keys["items"], right.keys["items"])
    assert len(first[0].tokens) == BENCH.job.samples
    lengths = [part.max_length for part in first[0].micro_batches]
    assert (len(set(lengths)) == 1) == (shape == "even")


def test_prediction_bench_predicts_rows_from_serial():
    serial = {"schedule": "serial", "ranks": 2, "micro_batches": 4, "window_cache": False, "link_mbit": 1.0,
              "step_ms": 19.0, "compute_ms": 10.0, "idle_ms": 0.0, "raw_comm_ms": 6.0,
              "raw_lookup_ms": 3.0}  # fmt: skip
    nested = {**serial, "schedule": "nested", "step_ms": 11.5, "step_ms_spread": [11.0, 12.0]}
    rows, summary = predict_rows([serial, nested])
    assert rows[0]["predicted_ms"] == pytest.approx(10.0 + 6.0 / 4, rel=0.02)
    assert summary["tested"] == 1
    with pytest.raises(UserError, match="do not contain serial and other schedules"):
        predict_rows([nested])
