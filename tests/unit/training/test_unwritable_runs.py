"""A full or read-only disk is an error that names the file and the remedy."""

import errno
import logging
import os
from pathlib import Path

import pytest

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.report.tensorboard_log import TensorBoardWriter
from nestrec.training.trainer import Trainer
from support.fail_points import armed
from support.tiny_runs import config_of

SHORT = {"training.max_steps": 21, "training.epochs": 9, "training.eval_every_epochs": 0}


def trainer_of(data: Path, run: Path) -> Trainer:
    return Trainer(config_of("rows", data, {**SHORT, "pipeline.schedule": "nested"}), run, Topology.single())


@pytest.mark.parametrize(("file", "step"), [("metrics.jsonl", 20), ("trace.jsonl", 20)])
def test_full_disk_error_names_file_and_remedy(tiny_data: Path, tmp_path: Path, file: str, step: int) -> None:
    (tmp_path / file).symlink_to("/dev/full")
    trainer = trainer_of(tiny_data, tmp_path)
    with pytest.raises(UserError, match=r"cannot write: No space left on device\. Free disk space"):
        trainer.train()
    assert trainer.state.step == step


def full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_error_names_the_run_folder_at_start(tiny_data: Path, tmp_path: Path) -> None:
    # Partial files of killed runs, as an earlier version and this one name them.
    for leftover in ("config.partial", ".config.json.12-ab.partial"):
        (tmp_path / leftover).write_text("")
    trainer = trainer_of(tiny_data, tmp_path)
    with (
        armed("file.before_rename", full_disk),
        pytest.raises(UserError, match=r"cannot write: No space left on device\. Free disk space"),
    ):
        trainer.train()
    assert trainer.state.step == 0
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".partial"]


def test_unwritable_run_folder_is_named(tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"RUN=.*/file/run: cannot write: Not a directory"):
        trainer_of(tiny_data, tmp_path / "file" / "run").train()


def test_tensorboard_write_error_does_not_stop_the_run(
    tiny_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING), TensorBoardWriter(tmp_path / "file" / "tensorboard") as writer:
        trainer = Trainer(config_of("rows", tiny_data, SHORT), tmp_path / "run", Topology.single(), writer)
        assert trainer.train().step == 21
    assert [record.getMessage()[:55] for record in caplog.records] == [
        "TensorBoard logging is disabled after a write error: [E"
    ]


@pytest.mark.parametrize(("name", "is_link"), [("checkpoints", False), ("checkpoints", True), ("best", True)])
def test_checkpoint_path_that_is_not_a_folder_is_rejected_early(
    tiny_data: Path, tmp_path: Path, name: str, is_link: bool
) -> None:
    checkpoint_path = tmp_path / name
    checkpoint_path.symlink_to(tmp_path / "not mounted") if is_link else checkpoint_path.write_text("")
    message = (
        "the checkpoint path is a link to .*not mounted, which does not exist"
        if is_link
        else "the checkpoint path is not a folder"
    )
    with pytest.raises(UserError, match=f"RUN=.*/{name}: {message}"):
        trainer_of(tiny_data, tmp_path).train()
    assert [path.name for path in tmp_path.iterdir()] == [name]
