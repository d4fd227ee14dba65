"""Trained and exported models, shared by the tests of serving."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from nestrec.data.batches import BatchConfig
from nestrec.data.samples.ranking import RankingInputConfig
from nestrec.data.samples.split import SplitConfig
from nestrec.data.synthetic.logs import generate, preset
from nestrec.distributed import Topology
from nestrec.models import HSTUConfig
from nestrec.serving.model.export import export_run
from nestrec.tasks.ranking import RankingTaskConfig
from nestrec.tasks.table_options import TableOptions
from nestrec.training.config import DataConfig, RunConfig, TrainingConfig
from nestrec.training.recipes import recipe
from nestrec.training.trainer import Trainer

LENGTH = 32


@dataclass(frozen=True)
class Exported:
    trainer: Trainer
    run: Path
    folder: Path


def ranking_recipe(folder: Path) -> RunConfig:
    encoder = HSTUConfig(dim=16, head_dim=8, num_heads=2, num_layers=2, max_length=2 * LENGTH, time_bias=True)
    inputs = RankingInputConfig(labels=("click", "long_view"), item_features=("topic",), max_events=LENGTH)
    task = RankingTaskConfig(
        encoder=encoder,
        inputs=inputs,
        split=SplitConfig(valid_from="2022-01-16T02:26:40", test_from="2022-01-17T06:13:20"),
        baselines=("logistic",),
    )
    return RunConfig(
        name="small_ranking", task=task, data=DataConfig(folder=str(folder)), batch=BatchConfig(batch_samples=64)
    )


def train_and_export(cfg: RunConfig, root: Path) -> Exported:
    cfg = replace(cfg, training=TrainingConfig(epochs=1, max_steps=12, evaluate_every_epochs=0))
    trainer = Trainer(cfg, root / "run", Topology.from_environment("cpu"))
    trainer.train()
    export_run(root / "run", root / "model")
    return Exported(trainer, root / "run", root / "model")


@pytest.fixture(scope="session")
def dataset_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "small"
    generate(replace(preset("tiny"), num_users=300, num_items=200), folder)
    return folder


@pytest.fixture(scope="session")
def retrieval(tmp_path_factory, dataset_folder) -> Exported:
    cfg = recipe("demo")
    encoder = replace(cfg.task.encoder, max_length=LENGTH)
    task = replace(cfg.task, encoder=encoder, history=replace(cfg.task.history, max_length=LENGTH))
    cfg = replace(cfg, task=task, data=DataConfig(folder=str(dataset_folder)))
    return train_and_export(cfg, tmp_path_factory.mktemp("retrieval"))


@pytest.fixture(scope="session")
def ranking(tmp_path_factory, dataset_folder) -> Exported:
    return train_and_export(ranking_recipe(dataset_folder), tmp_path_factory.mktemp("ranking"))


@pytest.fixture(scope="session")
def half_ranking(tmp_path_factory, dataset_folder) -> Exported:
    """Rows of 16 bits, of both kinds."""
    tables = {"items": TableOptions(dtype="bfloat16"), "item_topic": TableOptions(dtype="float16")}
    cfg = replace(ranking_recipe(dataset_folder), tables=tables)
    return train_and_export(cfg, tmp_path_factory.mktemp("half_ranking"))
