"""Plans keep the options that the user set, search the others, and report which is which."""

import json
import shlex

import pytest
from planning_workloads import cpu_cluster, gpu_cluster
from typer.testing import CliRunner

from nestrec.base.config import dumps
from nestrec.base.errors import UserError
from nestrec.cli.app import app
from nestrec.planning.plan import make_plan
from nestrec.planning.plan_constraints import SEARCHED, constraints_from_options
from nestrec.planning.predictor import Predictor
from nestrec.planning.recipe_workload import measure_workload
from nestrec.planning.search_space import Candidate
from nestrec.tasks.task_registry import store_option
from support.tiny_runs import config_of, make_datasets

OPEN = {"batch.num_micro_batches": "auto"}  # the small recipes set a number


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


def make_constraints(data, overrides, cluster=None, family="hstu"):
    cfg = config_of(family, data, {**OPEN, **overrides})
    return constraints_from_options(
        cfg, overrides, measure_workload(cfg), cluster or gpu_cluster(hosts=2), store_option(cfg.task)
    )


def tried_candidates(constraints, cluster=None):
    found = make_plan(constraints.workload, cluster or gpu_cluster(hosts=2), constraints.space).result
    return [outcome.candidate for outcome in (*found.best, *found.others)]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("pipeline.schedule", "stale"),
        ("pipeline.schedule", "nested"),
        ("batch.num_micro_batches", "1"),
        ("parallel.num_replicas", "2"),
        ("balance.policy", "greedy"),
        ("pipeline.window_cache", "true"),
        ("parallel.transport", "host"),
    ],
)
def test_plan_constraint_fixes_option(data, option, value):
    constraints = make_constraints(data, {option: value})
    field = SEARCHED[option][1]
    assert {str(getattr(candidate, field)).lower() for candidate in tried_candidates(constraints)} == {value}
    assert constraints.describe() == [f"set by the user, not searched: {option}={value}"]


@pytest.mark.parametrize("option", ["tables.items.store", "tables.*.store", "task.table_store.kind"])
def test_plan_constraint_fixes_table_store(data, option):
    constraints = make_constraints(data, {option: "dram"})
    assert {candidate.store for candidate in tried_candidates(constraints)} == {"dram"}
    assert constraints.fixed == {option: "dram"}


def test_plan_constraint_tables_count_in_their_tier(data):
    cluster = gpu_cluster(hosts=2)
    constraints = make_constraints(data, {"tables.topic.store": "dram"}, family="ranking")
    assert {candidate.store for candidate in tried_candidates(constraints)} >= {"device", "dram"}, (
        "the store of the largest table is not fixed"
    )
    predictor = Predictor(constraints.workload, cluster)
    items, topics = (table.rows * table.weight_bytes / cluster.world for table in constraints.workload.tables)
    memory = predictor.memory(Candidate(store="device"))
    assert (memory["device"].tables, memory["host"].tables) == (pytest.approx(items), pytest.approx(topics))
    memory = predictor.memory(Candidate(store="dram"))
    assert (memory["device"].tables, memory["host"].tables) == (0.0, pytest.approx(items + topics))


def test_plan_constraint_of_section_fixes_its_options(data):
    fixed = make_constraints(
        data, {"pipeline": json.dumps({"schedule": "nested"}), "tables.items.placement": "auto"}
    ).fixed
    assert fixed == {"pipeline.schedule": "nested"}


def test_plan_with_all_constraints_has_one_candidate(data):
    overrides = {
        "pipeline.schedule": "nested",
        "batch.num_micro_batches": "1",
        "parallel.num_replicas": "2",
        "balance.policy": "fixed",
        "pipeline.window_cache": "true",
        "parallel.transport": "shared_memory",
        "tables.items.store": "device",
    }
    cluster = cpu_cluster()
    assert len(tried_candidates(make_constraints(data, overrides, cluster), cluster)) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("parallel.num_replicas", "3"), ("parallel.transport", "copy_engine"), ("batch.num_micro_batches", "100000")],
)
def test_plan_rejects_impossible_constraints(data, option, value):
    with pytest.raises(UserError) as error:
        make_constraints(data, {option: value})
    assert (error.value.option, str(error.value.value), bool(error.value.remedy)) == (option, value, True)


def test_plan_command_keeps_constraints_and_reports_them(data, tmp_path):
    recipe = tmp_path / "config.json"
    file = tmp_path / "plan.json"
    recipe.write_text(dumps(config_of("hstu", data, {"pipeline.window_cache": True, "parallel.num_replicas": 2})))
    options = [
        "--tables.items.store",
        "disk",
        "--tables.items.store_folder",
        "/scratch",
        "--parallel.context_parallel",
        "2",
    ]
    options += ["--batch.num_micro_batches", "1", "--top", "1", "--json", str(file)]
    result = CliRunner().invoke(app, ["plan", str(recipe), "--cluster", "cpu-hosts", "--hosts", "1", *options])
    assert result.exit_code == 0, result.output
    assert "set by the user, not searched: batch.num_micro_batches=1, tables.items.store=disk" in result.output
    assert "not modeled by the planner: parallel.context_parallel=2" in result.output
    frame = json.loads(file.read_text())
    launch = shlex.split(frame["rows"][0]["launch"])
    chosen = dict(
        zip(launch[launch.index(str(recipe)) + 1 :: 2], launch[launch.index(str(recipe)) + 2 :: 2], strict=True)
    )
    assert frame["fixed"] == {"batch.num_micro_batches": 1, "tables.items.store": "disk"}
    assert (chosen["--tables.items.store"], chosen["--tables.items.store_folder"]) == ("disk", "/scratch")
    assert (chosen["--pipeline.window_cache"], chosen["--parallel.num_replicas"]) == ("false", "1")
    assert "--task.table_store.kind" not in chosen
