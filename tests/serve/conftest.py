"""Fixtures of the serving tests: a dataset, and models that were trained and exported."""

from dataclasses import replace
from pathlib import Path

import pytest
from featured_runs import Runs
from small_recipes import LENGTH, ExportedRun, ranking_recipe, train_and_export

from nestrec.data.synthetic.synthetic_logs import generate, preset
from nestrec.tasks.table_overrides import TableOverrides
from nestrec.training.recipes import recipe
from nestrec.training.run_config import DataConfig


@pytest.fixture(scope="session")
def dataset_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "small"
    generate(replace(preset("tiny"), num_users=300, num_items=200), folder)
    return folder


@pytest.fixture(scope="session")
def retrieval(tmp_path_factory, dataset_folder) -> ExportedRun:
    cfg = recipe("demo")
    encoder = replace(cfg.task.encoder, max_length=LENGTH)
    task = replace(cfg.task, encoder=encoder, history=replace(cfg.task.history, max_events=LENGTH))
    cfg = replace(cfg, task=task, data=DataConfig(folder=str(dataset_folder)))
    return train_and_export(cfg, tmp_path_factory.mktemp("retrieval"))


@pytest.fixture(scope="session")
def ranking(tmp_path_factory, dataset_folder) -> ExportedRun:
    return train_and_export(ranking_recipe(dataset_folder), tmp_path_factory.mktemp("ranking"))


@pytest.fixture(scope="session")
def half_ranking(tmp_path_factory, dataset_folder) -> ExportedRun:
    """Return a ranking model with one table in bfloat16 and one in float16."""
    tables = {"items": TableOverrides(dtype="bfloat16"), "item_topic": TableOverrides(dtype="float16")}
    cfg = replace(ranking_recipe(dataset_folder), tables=tables)
    return train_and_export(cfg, tmp_path_factory.mktemp("half_ranking"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    """Return the runs on a log with features of every kind."""
    return Runs(tmp_path_factory.mktemp("featured"))
