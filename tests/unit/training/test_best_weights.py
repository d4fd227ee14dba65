"""Best weights of a run that were lost, damaged or stored at its checkpoint address only."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import nestrec
from nestrec.base.errors import CorruptFileError
from nestrec.checkpoint import CheckpointManager
from nestrec.cli.training_output import evaluate_run, train_run
from nestrec.distributed import Topology
from nestrec.exporters.servable_writer import restored_session
from nestrec.training.callbacks import TrainingCallback
from nestrec.training.run_config import RunConfig
from nestrec.training.trainer import Trainer
from support.tiny_runs import config_of

BEST, LAST = 3, 9
"""Steps after the first and the last of three epochs; nothing is learned, so the first one stays the best."""


class Heard(TrainingCallback):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warned(self, message: str) -> None:
        self.warnings.append(message)


@pytest.fixture(scope="module")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a run, `run`, and its checkpoint address, `there`."""
    folder = tmp_path_factory.mktemp("trained")
    cfg = config_of_run(tiny_data, folder, epochs=3)
    Trainer(cfg, folder / "run", Topology.single("cpu")).train()
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["training"]["checkpoint_address"] = str(tmp_path / "there")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    return tmp_path


def config_of_run(data: Path, folder: Path, *, epochs: int, keep: int = 1) -> RunConfig:
    more = {
        "training.epochs": epochs,
        "training.keep_checkpoints": keep,
        "training.checkpoint_address": str(folder / "there"),
        "optimizer.learning_rate": 0.0,
        "optimizer.table_learning_rate": 0.0,
    }
    return config_of("hstu", data, more)


def lose(copied: Path) -> None:
    shutil.rmtree(copied / "run" / "best")
    shutil.rmtree(copied / "there" / "best")


def damage(copied: Path) -> None:
    shutil.rmtree(copied / "run" / "best")
    for file in (copied / "there" / "best").rglob("tensors-*"):
        file.write_bytes(file.read_bytes()[:-1])


def step_for_use(run: Path) -> int:
    with restored_session(run, best=True) as (_, step):
        return step


@pytest.mark.parametrize("do", [lose, damage])
def test_lost_best_weights_are_not_replaced_by_the_last(
    tiny_data: Path, copied: Path, do: Callable[[Path], None]
) -> None:
    do(copied)
    run = copied / "run"
    new = config_of_run(tiny_data, copied / "new", epochs=1)
    uses = [
        lambda: evaluate_run(run, "test", best=True),
        lambda: train_run(config_of_run(tiny_data, copied, epochs=3), run),
        lambda: nestrec.load(run),
        lambda: nestrec.export(run, copied / "model"),
        lambda: nestrec.publish(run, copied / "published"),
        lambda: Trainer(new, copied / "new", Topology.single("cpu"), start_from=run).train(),
    ]
    for use in uses:
        with pytest.raises(CorruptFileError) as refused:
            use()
        assert refused.value.value == str(run / "best")
        assert re.search(r"\((--last|best=False)\)", str(refused.value.remedy))
    assert not (run / "eval" / "test.json").exists()
    nestrec.load(run, best=False)


def test_best_weights_at_the_address_are_used_by_every_command(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copied / "run" / "best")
    assert step_for_use(copied / "run") == BEST
    shutil.rmtree(copied / "run" / "best")
    evaluate_run(copied / "run", "test", best=True)
    assert f"best validation epoch (step {BEST})" in " ".join(capsys.readouterr().out.split())


def test_resumed_run_fetches_its_best_weights(tiny_data: Path, copied: Path) -> None:
    cfg = config_of_run(tiny_data, copied, epochs=3)
    Trainer(cfg, copied / "other", Topology.single("cpu")).train()
    shutil.rmtree(copied / "there")
    assert step_for_use(copied / "other") == BEST


@pytest.mark.parametrize("do", [lose, damage])
def test_training_on_without_best_weights_keeps_the_next_best(
    tiny_data: Path, copied: Path, do: Callable[[Path], None]
) -> None:
    do(copied)
    heard = Heard()
    trainer = Trainer(config_of_run(tiny_data, copied, epochs=4), copied / "run", Topology.single("cpu"), heard)
    state = trainer.train()
    assert (state.best_step, step_for_use(copied / "run")) == (12, 12)
    assert any(f"the best weights (step {BEST}) are lost" in warning for warning in heard.warnings)
    assert CheckpointManager(copied / "there" / "best").steps() == [12]


def test_best_weights_among_the_kept_checkpoints_are_used(tiny_data: Path, tmp_path: Path) -> None:
    cfg = config_of_run(tiny_data, tmp_path, epochs=2, keep=2)
    Trainer(cfg, tmp_path / "run", Topology.single("cpu")).train()
    lose(tmp_path)
    assert step_for_use(tmp_path / "run") == BEST
    Trainer(config_of_run(tiny_data, tmp_path, epochs=4, keep=2), tmp_path / "run", Topology.single("cpu")).train()
    assert CheckpointManager(tmp_path / "run" / "best").steps() == [BEST]
    assert step_for_use(tmp_path / "run") == BEST


def test_last_weights_are_not_called_best(tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config_of("hstu", tiny_data, {"training.epochs": 1, "training.evaluate_every_epochs": 0})
    train_run(cfg, tmp_path)
    evaluate_run(tmp_path, "test", best=True)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("last weights (step 3)") == 2
    assert "best validation epoch" not in shown
