"""Best weights of a run that are lost, corrupt, or stored in its checkpoint mirror only."""

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
"""Steps after the first and the last of three epochs; the learning rate is 0, so the first one stays the best."""


class WarningRecorder(TrainingCallback):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_warning(self, message: str) -> None:
        self.warnings.append(message)


@pytest.fixture(scope="module")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run; returns the folder of the run (`run`) and its checkpoint mirror (`mirror`)."""
    folder = tmp_path_factory.mktemp("trained")
    cfg = config_of_run(tiny_data, folder, epochs=3)
    Trainer(cfg, folder / "run", Topology.single("cpu")).train()
    return folder


@pytest.fixture
def run_copy(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["training"]["checkpoint_mirror"] = str(tmp_path / "mirror")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    return tmp_path


def config_of_run(data: Path, folder: Path, *, epochs: int, max_checkpoints: int = 1) -> RunConfig:
    overrides = {
        "training.epochs": epochs,
        "training.max_checkpoints": max_checkpoints,
        "training.checkpoint_mirror": str(folder / "mirror"),
        "optimizer.learning_rate": 0.0,
        "optimizer.table_learning_rate": 0.0,
    }
    return config_of("hstu", data, overrides)


def lose(run_copy: Path) -> None:
    shutil.rmtree(run_copy / "run" / "best")
    shutil.rmtree(run_copy / "mirror" / "best")


def damage(run_copy: Path) -> None:
    shutil.rmtree(run_copy / "run" / "best")
    for file in (run_copy / "mirror" / "best").rglob("tensors-*"):
        file.write_bytes(file.read_bytes()[:-1])


def step_for_use(run: Path) -> int:
    with restored_session(run, best=True) as (_, step):
        return step


@pytest.mark.parametrize("break_weights", [lose, damage])
def test_best_weights_lost_are_not_replaced_by_the_last(
    tiny_data: Path, run_copy: Path, break_weights: Callable[[Path], None]
) -> None:
    break_weights(run_copy)
    run = run_copy / "run"
    new = config_of_run(tiny_data, run_copy / "new", epochs=1)
    uses = [
        lambda: evaluate_run(run, "test", best=True),
        lambda: train_run(config_of_run(tiny_data, run_copy, epochs=3), run),
        lambda: nestrec.load(run),
        lambda: nestrec.export(run, run_copy / "model"),
        lambda: nestrec.publish(run, run_copy / "published"),
        lambda: Trainer(new, run_copy / "new", Topology.single("cpu"), warm_start=run).train(),
    ]
    for use in uses:
        with pytest.raises(CorruptFileError) as raised:
            use()
        assert raised.value.value == str(run / "best")
        assert re.search(r"\((--last|best=False)\)", str(raised.value.remedy))
    assert not (run / "eval" / "test.json").exists()
    nestrec.load(run, best=False)


def test_best_weights_in_the_mirror_are_used_by_every_command(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run_copy / "run" / "best")
    assert step_for_use(run_copy / "run") == BEST
    shutil.rmtree(run_copy / "run" / "best")
    evaluate_run(run_copy / "run", "test", best=True)
    assert f"best validation epoch (step {BEST})" in " ".join(capsys.readouterr().out.split())


def test_best_weights_are_fetched_by_a_resumed_run(tiny_data: Path, run_copy: Path) -> None:
    cfg = config_of_run(tiny_data, run_copy, epochs=3)
    Trainer(cfg, run_copy / "other", Topology.single("cpu")).train()
    shutil.rmtree(run_copy / "mirror")
    assert step_for_use(run_copy / "other") == BEST


@pytest.mark.parametrize("break_weights", [lose, damage])
def test_best_weights_lost_are_replaced_by_the_next_best(
    tiny_data: Path, run_copy: Path, break_weights: Callable[[Path], None]
) -> None:
    break_weights(run_copy)
    recorder = WarningRecorder()
    trainer = Trainer(config_of_run(tiny_data, run_copy, epochs=4), run_copy / "run", Topology.single("cpu"), recorder)
    state = trainer.train()
    assert (state.best_step, step_for_use(run_copy / "run")) == (12, 12)
    assert any(f"the best weights (step {BEST}) are lost" in warning for warning in recorder.warnings)
    assert CheckpointManager(run_copy / "mirror" / "best").steps() == [12]


def test_best_weights_among_retained_checkpoints_are_used(tiny_data: Path, tmp_path: Path) -> None:
    cfg = config_of_run(tiny_data, tmp_path, epochs=2, max_checkpoints=2)
    Trainer(cfg, tmp_path / "run", Topology.single("cpu")).train()
    lose(tmp_path)
    assert step_for_use(tmp_path / "run") == BEST
    Trainer(
        config_of_run(tiny_data, tmp_path, epochs=4, max_checkpoints=2), tmp_path / "run", Topology.single("cpu")
    ).train()
    assert CheckpointManager(tmp_path / "run" / "best").steps() == [BEST]
    assert step_for_use(tmp_path / "run") == BEST


def test_best_weights_are_not_claimed_for_last_weights(
    tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config_of("hstu", tiny_data, {"training.epochs": 1, "training.eval_every_epochs": 0})
    train_run(cfg, tmp_path)
    evaluate_run(tmp_path, "test", best=True)
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("last weights (step 3)") == 2
    assert "best validation epoch" not in shown
