"""What a run would ignore is refused with the reason; what is as by default, or was not given, is not."""

import json

import pytest

from nestrec import Table
from nestrec.base.config import to_plain
from nestrec.base.config_overrides import with_overrides
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding.row_optimizer import RowOptimizerConfig
from nestrec.tasks.task import Task
from nestrec.training.recipes import RECIPES, recipe
from nestrec.training.run_config import RunConfig
from nestrec.training.trainer import Trainer
from nestrec.training.training_session import Session
from nestrec.training.validation import check_options_are_used
from support.tiny_runs import config_of

REFUSED = {
    "task.item_optimizer.moment_scale": ({"task.item_optimizer.moment_scale": 2}, "the row optimiser adam does not"),
    "task.item_optimizer.beta1": (
        {"task.item_optimizer.kind": "rowwise_adagrad", "task.item_optimizer.beta1": 0.5},
        "take a row optimiser that uses it: adam, rowwise_adam",
    ),
    "task.item_optimizer.eps": ({"task.item_optimizer.kind": "sgd", "task.item_optimizer.eps": 0.1}, "leave it out"),
    "pipeline.clustering": ({"pipeline.clustering": "greedy", "batch.micro_batches": 1}, "batch.micro_batches"),
    "replica_sync.mode": ({"replica_sync.mode": "weights"}, "ranks.replicas"),
    "replica_sync.every": ({"ranks.replicas": 2, "replica_sync.every": 3}, "replica_sync.mode=weights"),
}


@pytest.fixture(scope="module")
def task(tiny_data) -> Task:
    return Session.open(config_of("hstu", tiny_data, {}), Topology.single()).task


@pytest.mark.parametrize("field", REFUSED)
def test_an_option_that_would_be_ignored_is_refused(tiny_data, task, field):
    given, remedy = REFUSED[field]
    with pytest.raises(UserError, match=remedy) as refused:
        check_options_are_used(config_of("hstu", tiny_data, given), task)
    assert refused.value.option == field


def test_the_training_loop_refuses_before_it_writes_anything(tiny_data, tmp_path):
    cfg = config_of(
        "hstu", tiny_data, {"replica_sync.mode": "weights", "pipeline.clustering": "greedy", "batch.micro_batches": 1}
    )
    with pytest.raises(UserError, match="2 mistakes"):
        Trainer(cfg, tmp_path / "run", Topology.single()).train()
    assert not (tmp_path / "run").exists()


def test_a_task_that_does_not_tell_its_keys_is_not_clustered(tiny_data, task, monkeypatch):
    cfg = config_of("hstu", tiny_data, {"pipeline.clustering": "greedy"})
    check_options_are_used(cfg, task)
    monkeypatch.delattr(type(task.assembler), "sample_keys")
    with pytest.raises(UserError, match="which keys its samples look up"):
        check_options_are_used(cfg, task)


def test_eight_bits_are_for_models_that_have_such_products(tiny_data, task):
    with pytest.raises(UserError, match="sasrec has no products of eight bits"):
        check_options_are_used(config_of("sasrec", tiny_data, {"training.precision": "fp8"}), task)
    check_options_are_used(config_of("hstu", tiny_data, {"training.precision": "fp8"}), task)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_set_nothing_that_is_ignored(task, name):
    check_options_are_used(recipe(name), task)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam"])
def test_another_row_optimiser_takes_over_only_the_numbers_that_it_uses(task, kind):
    cfg = with_overrides(recipe("demo"), {"task.item_optimizer.kind": kind})
    check_options_are_used(cfg, task)
    assert cfg.task.item_optimizer.beta2 == (0.98 if "adam" in kind else 0.999)
    assert from_plain(RunConfig, json.loads(json.dumps(to_plain(cfg)))) == cfg


def test_a_table_of_a_script_is_checked_too():
    with pytest.raises(UserError, match=r"optimizer of table t\.moment_scale = 2"):
        _ = Table("t", 10, 4, optimizer=RowOptimizerConfig(kind="adam", moment_scale=2)).config
