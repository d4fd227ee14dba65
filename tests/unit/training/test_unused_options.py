"""Options that a run would ignore are rejected with the reason, unless they have their default value."""

import json

import pytest

from nestrec import Table
from nestrec.base.config import to_plain
from nestrec.base.config_overrides import apply_overrides
from nestrec.base.config_values import from_plain
from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding.row_optimizer import RowOptimizerConfig
from nestrec.tasks.task import Task
from nestrec.training.recipes import RECIPES, recipe
from nestrec.training.run_config import RunConfig
from nestrec.training.trainer import Trainer
from nestrec.training.training_session import Session
from nestrec.training.validation import check_no_unused_options
from support.tiny_runs import config_of

REJECTED = {
    "task.table_optimizer.moment_scale": (
        {"task.table_optimizer.moment_scale": 2},
        "not used by the row optimizer adam",
    ),
    "task.table_optimizer.beta1": (
        {"task.table_optimizer.kind": "rowwise_adagrad", "task.table_optimizer.beta1": 0.5},
        "use a row optimizer that supports it: adam, rowwise_adam",
    ),
    "task.table_optimizer.eps": ({"task.table_optimizer.kind": "sgd", "task.table_optimizer.eps": 0.1}, "Remove it"),
    "pipeline.clustering": ({"pipeline.clustering": "greedy", "batch.num_micro_batches": 1}, "batch.num_micro_batches"),
    "replica_sync.mode": ({"replica_sync.mode": "weights"}, "parallel.num_replicas"),
    "replica_sync.every_steps": (
        {"parallel.num_replicas": 2, "replica_sync.every_steps": 3},
        "replica_sync.mode=weights",
    ),
}


@pytest.fixture(scope="module")
def task(tiny_data) -> Task:
    return Session.open(config_of("hstu", tiny_data, {}), Topology.single()).task


@pytest.mark.parametrize("option", REJECTED)
def test_unused_option_is_rejected_with_reason(tiny_data, task, option):
    overrides, remedy = REJECTED[option]
    with pytest.raises(UserError, match=remedy) as raised:
        check_no_unused_options(config_of("hstu", tiny_data, overrides), task)
    assert raised.value.option == option


def test_unused_options_are_rejected_before_writing(tiny_data, tmp_path):
    cfg = config_of(
        "hstu",
        tiny_data,
        {"replica_sync.mode": "weights", "pipeline.clustering": "greedy", "batch.num_micro_batches": 1},
    )
    with pytest.raises(UserError, match="2 mistakes"):
        Trainer(cfg, tmp_path / "run", Topology.single()).train()
    assert not (tmp_path / "run").exists()


def test_clustering_requires_sample_keys_of_the_task(tiny_data, task, monkeypatch):
    cfg = config_of("hstu", tiny_data, {"pipeline.clustering": "greedy"})
    check_no_unused_options(cfg, task)
    monkeypatch.delattr(type(task.collator), "sample_keys")
    with pytest.raises(UserError, match="the keys that its samples look up"):
        check_no_unused_options(cfg, task)


def test_fp8_precision_of_ctr_model_is_rejected(tiny_data, task):
    cfg = apply_overrides(RECIPES["criteo_dlrm"](), {"training.precision": "fp8"})
    with pytest.raises(UserError, match=r"training\.precision=fp8: dlrm does not support 8-bit matrix products"):
        check_no_unused_options(cfg, task)


def test_fp8_precision_requires_model_support(tiny_data, task):
    with pytest.raises(UserError, match="sasrec does not support 8-bit matrix products"):
        check_no_unused_options(config_of("sasrec", tiny_data, {"training.precision": "fp8"}), task)
    check_no_unused_options(config_of("hstu", tiny_data, {"training.precision": "fp8"}), task)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_sets_no_unused_options(task, name):
    check_no_unused_options(recipe(name), task)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam"])
def test_row_optimizer_change_keeps_only_the_options_it_uses(task, kind):
    cfg = apply_overrides(recipe("demo"), {"task.table_optimizer.kind": kind})
    check_no_unused_options(cfg, task)
    assert cfg.task.table_optimizer.beta2 == (0.98 if "adam" in kind else 0.999)
    assert from_plain(RunConfig, json.loads(json.dumps(to_plain(cfg)))) == cfg


def test_unused_option_of_a_python_table_is_rejected():
    with pytest.raises(UserError, match=r"optimizer of table t\.moment_scale=2"):
        _ = Table("t", 10, 4, optimizer=RowOptimizerConfig(kind="adam", moment_scale=2)).config
