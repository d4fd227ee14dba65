"""A plan keeps what it is given, searches the rest, and says which is which."""

import json
import shlex

import pytest
from planning_workloads import cpu_cluster, gpu_cluster
from typer.testing import CliRunner

from nestrec.base.config import dumps
from nestrec.base.errors import UserError
from nestrec.cli.app import app
from nestrec.planning.plan import make_plan
from nestrec.planning.plan_constraints import SEARCHED, given_by
from nestrec.planning.predictor import Predictor
from nestrec.planning.recipe_workload import workload_of
from nestrec.planning.search_space import Candidate
from nestrec.tasks.task_registry import store_option
from support.tiny_runs import config_of, make_datasets

OPEN = {"batch.micro_batches": "auto"}  # the small recipes give a number


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


def limits(data, overrides, cluster=None, family="hstu"):
    cfg = config_of(family, data, {**OPEN, **overrides})
    return given_by(cfg, overrides, workload_of(cfg), cluster or gpu_cluster(hosts=2), store_option(cfg.task))


def tried(given, cluster=None):
    found = make_plan(given.workload, cluster or gpu_cluster(hosts=2), given.space).found
    return [outcome.candidate for outcome in (*found.best, *found.others)]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("pipeline.schedule", "stale"),
        ("pipeline.schedule", "nested"),
        ("batch.micro_batches", "1"),
        ("ranks.replicas", "2"),
        ("balance.policy", "greedy"),
        ("pipeline.window_cache", "true"),
        ("ranks.exchange", "host"),
    ],
)
def test_an_option_that_is_given_is_not_searched(data, option, value):
    given = limits(data, {option: value})
    field = SEARCHED[option][1]
    assert {str(getattr(candidate, field)).lower() for candidate in tried(given)} == {value}
    assert given.said() == [f"held as given, not searched: {option}={value}"]


@pytest.mark.parametrize("option", ["tables.items.store", "tables.*.store", "task.item_store.kind"])
def test_a_store_that_is_given_is_not_searched_and_holds_the_memory(data, option):
    given = limits(data, {option: "dram"})
    assert {candidate.store for candidate in tried(given)} == {"dram"}
    assert given.held == {option: "dram"}


def test_tables_that_a_plan_does_not_move_need_memory_where_they_are(data):
    cluster = gpu_cluster(hosts=2)
    given = limits(data, {"tables.topic.store": "dram"}, family="ranking")
    assert {candidate.store for candidate in tried(given)} >= {"device", "dram"}, "that of the largest table is open"
    predictor = Predictor(given.workload, cluster)
    items, topics = (table.rows * table.weight_bytes / cluster.world for table in given.workload.tables)
    memory = predictor.memory(Candidate(store="device"))
    assert (memory["device"].tables, memory["host"].tables) == (pytest.approx(items), pytest.approx(topics))
    memory = predictor.memory(Candidate(store="dram"))
    assert (memory["device"].tables, memory["host"].tables) == (0.0, pytest.approx(items + topics))


def test_a_part_given_as_a_whole_holds_the_options_in_it_and_no_others(data):
    held = limits(data, {"pipeline": json.dumps({"schedule": "nested"}), "tables.items.placement": "auto"}).held
    assert held == {"pipeline.schedule": "nested"}


def test_everything_given_leaves_one_plan(data):
    overrides = {
        "pipeline.schedule": "nested",
        "batch.micro_batches": "1",
        "ranks.replicas": "2",
        "balance.policy": "fixed",
        "pipeline.window_cache": "true",
        "ranks.exchange": "shared_memory",
        "tables.items.store": "device",
    }
    cluster = cpu_cluster()
    assert len(tried(limits(data, overrides, cluster), cluster)) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("ranks.replicas", "3"), ("ranks.exchange", "copy_engine"), ("batch.micro_batches", "100000")],
)
def test_what_no_run_on_the_cluster_could_do_is_refused_by_name(data, option, value):
    with pytest.raises(UserError) as error:
        limits(data, {option: value})
    assert (error.value.option, str(error.value.value), bool(error.value.remedy)) == (option, value, True)


def test_the_command_keeps_what_was_given_takes_back_what_the_recipe_had_and_says_so(data, tmp_path):
    recipe = tmp_path / "config.json"
    file = tmp_path / "plan.json"
    recipe.write_text(dumps(config_of("hstu", data, {"pipeline.window_cache": True, "ranks.replicas": 2})))
    options = ["--tables.items.store", "disk", "--tables.items.folder", "/scratch", "--ranks.context", "2"]
    options += ["--batch.micro_batches", "1", "--most", "1", "--json", str(file)]
    result = CliRunner().invoke(app, ["plan", str(recipe), "--cluster", "cpu-hosts", "--hosts", "1", *options])
    assert result.exit_code == 0, result.output
    assert "held as given, not searched: batch.micro_batches=1, tables.items.store=disk" in result.output
    assert "not reckoned with by plans: ranks.context=2" in result.output
    frame = json.loads(file.read_text())
    launch = shlex.split(frame["rows"][0]["launch"])
    chosen = dict(
        zip(launch[launch.index(str(recipe)) + 1 :: 2], launch[launch.index(str(recipe)) + 2 :: 2], strict=True)
    )
    assert frame["held"] == {"batch.micro_batches": 1, "tables.items.store": "disk"}
    assert (chosen["--tables.items.store"], chosen["--tables.items.folder"]) == ("disk", "/scratch")
    assert (chosen["--pipeline.window_cache"], chosen["--ranks.replicas"]) == ("false", "1")
    assert "--task.item_store.kind" not in chosen
