"""Workloads are measured from the data of a recipe; commands print plans and reject runs that do not fit."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from nestrec.base.errors import UserError
from nestrec.cli.app import app
from nestrec.pipeline import SCHEDULES
from nestrec.planning.cluster_config import load_cluster
from nestrec.planning.plan import make_plan
from nestrec.planning.plan_constraints import check_fits
from nestrec.planning.recipe_workload import measure_workload
from nestrec.report.plan_page import render_plan
from support.tiny_runs import FAMILIES, config_of, make_datasets, overrides_of


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_workload_exists_for_every_recipe_family(data, family):
    cfg = config_of(family, data)
    found = measure_workload(cfg)
    assert found.batch_samples == 16
    assert found.dense_parameters > 0
    assert all(table.row_bytes > table.weight_bytes for table in found.tables)
    for table in found.tables:
        assert table.distinct(np.array([5.0]))[0] <= 5.0
        assert table.distinct(np.array([1e12]))[0] <= table.rows
    assert found.flops_per_token > 0


def test_workload_lengths_match_samples(data):
    found = measure_workload(config_of("hstu", data))
    drawn = found.draw_lengths(20_000, (0, 0))
    assert drawn.min() >= 1
    assert drawn.max() <= 12
    assert drawn.mean() == pytest.approx(found.mean_length, rel=0.05)


def command(data, *more):
    options = [f"--{name}={value}" for name, value in overrides_of("hstu", data).items()]
    return [*more, *options]


def test_plan_prints_best_plans_and_writes_json(data, tmp_path):
    result = CliRunner().invoke(
        app, command(data, "plan", "demo", "--cluster", "cpu-hosts", "--json", str(tmp_path / "plan.json"), "--explain")
    )
    assert result.exit_code == 0, result.output
    assert "torchrun --nnodes 2" in result.output
    assert "rejected candidates" in result.output
    frame = json.loads((tmp_path / "plan.json").read_text())
    assert frame["bench"] == "plan"
    assert frame["rows"][0]["launch"].startswith("torchrun")


def test_plan_only_reports_fit_without_training(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command(data, "train", "demo", "--plan-only"))
    assert result.exit_code == 0, result.output
    assert "fits: demo on this machine" in result.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("option", ["task.table_store.kind", "tables.items.store", "tables.*.store"])
def test_workload_rows_are_in_the_store_of_the_run(data, option):
    cfg = config_of("hstu", data, {option: "dram"})
    memory = check_fits(cfg, measure_workload(cfg), load_cluster("h100-ib400")).memory
    assert (memory["device"].tables, memory["host"].tables > 0) == (0.0, True)


def test_plan_names_unreadable_profile(data, tmp_path):
    (tmp_path / "truncated.json").write_text('{"profile": {"copy"')
    for name in ("truncated.json", "none.json"):
        chosen = ["--profile", str(tmp_path / name)]
        error = CliRunner().invoke(app, command(data, "plan", "demo", "--cluster", "cpu-hosts", *chosen)).exception
        assert isinstance(error, UserError)
        assert error.option == "--profile"


def test_plan_page_shows_curves_and_timeline(data):
    cfg = config_of("hstu", data)
    plan = make_plan(measure_workload(cfg), load_cluster("cpu-hosts"))
    page = render_plan(plan, worlds=(4, 8, 16))
    for part in ("Scaling", "Timeline of one rank", "Efficiency", "nested", "communication", "Rejected candidates"):
        assert part in page
    assert "rank -1" not in page
    assert page.count('<table class="results plans">') == page.count('<div class="wide">') == 2, (
        "each plan table must be in a scrollable container"
    )
    curves = re.findall(r'<span><i class="swatch (b\d+)"></i>(\w+)</span>', page[page.index("Efficiency") :])
    assert len({color for color, name in curves if name in SCHEDULES}) == len(SCHEDULES)


def test_report_with_cluster_shows_simulation(data, tmp_path):
    options = [f"--{name}={value}" for name, value in overrides_of("hstu", data, {"training.max_steps": 2}).items()]
    run = tmp_path / "run"
    train_result = CliRunner().invoke(app, ["train", "demo", "--output", str(run), *options])
    assert train_result.exit_code == 0, train_result.output
    result = CliRunner().invoke(app, ["report", str(run), "--cluster", "cpu-hosts"])
    assert result.exit_code == 0, result.output
    page = (run / "report.html").read_text()
    assert "Scaling on CPU hosts" in page
    assert "Timeline of one rank on CPU hosts" in page
