from pathlib import Path

import pytest

from nestrec.distributed import Topology
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of, make_datasets


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_datasets(folder)
    return folder


@pytest.fixture(scope="session")
def base(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A trained run and its data; tests train copies of it on streams."""
    run = tmp_path_factory.mktemp("base") / "run"
    more = {"training.max_steps": 3, "training.eval_every_epochs": 0}
    Trainer(config_of("ranking", tiny_data, more), run, Topology.single()).train()
    return run, tiny_data / "sequences"
