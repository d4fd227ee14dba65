"""A recipe's workload is counted from its own data; the commands print plans and refuse what does not fit."""

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
from nestrec.planning.recipe_workload import workload_of
from nestrec.report.plan_page import render_plan
from support.tiny_runs import FAMILIES, config_of, make_datasets, overrides_of


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_recipes_has_a_workload(data, family):
    cfg = config_of(family, data)
    found = workload_of(cfg)
    assert found.batch_samples == 16
    assert found.dense_parameters > 0
    assert all(table.row_bytes > table.weight_bytes for table in found.tables)
    for table in found.tables:
        assert table.distinct(np.array([5.0]))[0] <= 5.0
        assert table.distinct(np.array([1e12]))[0] <= table.rows
    assert found.flops_a_token > 0


def test_lengths_are_those_of_the_samples(data):
    found = workload_of(config_of("hstu", data))
    drawn = found.draw_lengths(20_000, (0, 0))
    assert drawn.min() >= 1
    assert drawn.max() <= 12
    assert drawn.mean() == pytest.approx(found.mean_length, rel=0.05)


def command(data, *more):
    options = [f"--{name}={value}" for name, value in overrides_of("hstu", data).items()]
    return [*more, *options]


def test_plan_prints_the_best_few_and_writes_them(data, tmp_path):
    result = CliRunner().invoke(
        app, command(data, "plan", "demo", "--cluster", "cpu-hosts", "--json", str(tmp_path / "plan.json"), "--explain")
    )
    assert result.exit_code == 0, result.output
    assert "torchrun --nnodes 2" in result.output
    assert "why the others lost" in result.output
    frame = json.loads((tmp_path / "plan.json").read_text())
    assert frame["bench"] == "plan"
    assert frame["rows"][0]["launch"].startswith("torchrun")


def test_plan_only_says_that_a_run_fits_and_trains_nothing(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command(data, "train", "demo", "--plan-only"))
    assert result.exit_code == 0, result.output
    assert "fits: demo on this machine" in result.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("option", ["task.item_store.kind", "tables.items.store", "tables.*.store"])
def test_rows_are_looked_for_where_the_run_keeps_them(data, option):
    cfg = config_of("hstu", data, {option: "dram"})
    memory = check_fits(cfg, workload_of(cfg), load_cluster("h100-ib400")).memory
    assert (memory["device"].tables, memory["host"].tables > 0) == (0.0, True)


def test_a_profile_that_cannot_be_read_is_named(data, tmp_path):
    (tmp_path / "cut.json").write_text('{"profile": {"copy"')
    for name in ("cut.json", "none.json"):
        chosen = ["--profile", str(tmp_path / name)]
        error = CliRunner().invoke(app, command(data, "plan", "demo", "--cluster", "cpu-hosts", *chosen)).exception
        assert isinstance(error, UserError)
        assert error.option == "--profile"


def test_the_page_holds_curves_and_a_timeline(data):
    cfg = config_of("hstu", data)
    plan = make_plan(workload_of(cfg), load_cluster("cpu-hosts"))
    page = render_plan(plan, worlds=(4, 8, 16))
    for part in ("Scaling", "Timeline of one rank", "Efficiency", "nested", "communication", "Why others lost"):
        assert part in page
    assert "rank -1" not in page
    assert page.count('<table class="results plans">') == page.count('<div class="wide">') == 2, "cells are not broken"
    curves = re.findall(r'<span><i class="swatch (b\d+)"></i>(\w+)</span>', page[page.index("Efficiency") :])
    assert len({colour for colour, name in curves if name in SCHEDULES}) == len(SCHEDULES)


def test_the_report_of_a_run_shows_what_a_cluster_would_do(data, tmp_path):
    options = [f"--{name}={value}" for name, value in overrides_of("hstu", data, {"training.max_steps": 2}).items()]
    run = tmp_path / "run"
    trained = CliRunner().invoke(app, ["train", "demo", "--output", str(run), *options])
    assert trained.exit_code == 0, trained.output
    result = CliRunner().invoke(app, ["report", str(run), "--cluster", "cpu-hosts"])
    assert result.exit_code == 0, result.output
    page = (run / "report.html").read_text()
    assert "Scaling on CPU hosts" in page
    assert "Timeline of one rank on CPU hosts" in page
