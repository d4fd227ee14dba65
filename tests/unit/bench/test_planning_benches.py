"""Benchmarks of the planner: simulator speed, comparison with papers, calibration."""

import json

import pytest
from typer.testing import CliRunner

from nestrec.cli.app import app
from nestrec.distributed import Topology
from nestrec_bench.harness.background_load import BackgroundLoadMeter
from nestrec_bench.planning.calibrate_bench import CalibrateBenchConfig, calibrate
from nestrec_bench.planning.simulator_bench import simulate_once
from nestrec_bench.schedules.schedules_job import JobConfig


@pytest.mark.parametrize("schedule", ["serial", "nested", "priority"])
def test_simulator_bench_reports_time_and_memory(schedule):
    found = simulate_once(schedule, 64, 6, 4, 2)
    assert found["stages"] > 0
    assert 0 < found["peak_gib"] < 4


def test_papers_bench_writes_rows_and_assumptions(tmp_path):
    result = CliRunner().invoke(app, ["bench", "papers", "2d", "--json", str(tmp_path / "2d.json")])
    assert result.exit_code == 0, result.output
    frame = json.loads((tmp_path / "2d.json").read_text())
    assert {"table", "quantity", "method", "published", "predicted"} <= set(frame["rows"][0])
    assert frame["assumptions"]


def test_background_load_meter_works_with_one_rank():
    load = BackgroundLoadMeter(Topology.single())
    sum(range(2_000_000))
    assert load.cores() > -1.0


@pytest.mark.slow
def test_calibrate_bench_measures_every_operation():
    small = CalibrateBenchConfig(
        samples=(16, 48),
        steps=4,
        lengths=(8, 32),
        tokens=128,
        exchange_bytes=(1 << 12, 1 << 16),
        repeats=2,
        job=JobConfig(num_rows=2_000, dim=16, tokens=8, hidden=16),
    )
    rows, profile = calibrate(small)
    assert {"deduplicate", "fetch, dram", "compute", "host copy"} <= {row["operation"] for row in rows}
    # On a busy machine, the division into fixed and proportional costs is not reliable.
    assert profile.compute.fixed_s + profile.compute.flop_s * 1e6 > 0
    assert profile.dram.fetch.of(1e6) > 0
