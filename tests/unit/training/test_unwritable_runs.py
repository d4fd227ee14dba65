"""A disk that is full or may not be written to is an error that names the file and the remedy."""

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

SHORT = {"training.max_steps": 21, "training.epochs": 9, "training.evaluate_every_epochs": 0}


def trainer_of(data: Path, run: Path) -> Trainer:
    return Trainer(config_of("rows", data, {**SHORT, "pipeline.schedule": "nested"}), run, Topology.single())


@pytest.mark.parametrize(("file", "step"), [("metrics.jsonl", 20), ("trace.jsonl", 20)])
def test_a_full_disk_is_named_with_the_file_and_a_remedy(tiny_data: Path, tmp_path: Path, file: str, step: int) -> None:
    (tmp_path / file).symlink_to("/dev/full")
    trainer = trainer_of(tiny_data, tmp_path)
    with pytest.raises(UserError, match=r"cannot be written: No space left on device\. Free disk space"):
        trainer.train()
    assert trainer.state.step == step


def full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_run_folder_on_a_full_disk_is_named_at_the_start(tiny_data: Path, tmp_path: Path) -> None:
    for left in ("config.partial", ".config.json.12-ab.partial"):  # of killed runs, of earlier versions and of this one
        (tmp_path / left).write_text("")
    trainer = trainer_of(tiny_data, tmp_path)
    with (
        armed("file.before_rename", full_disk),
        pytest.raises(UserError, match=r"cannot be written: No space left on device\. Free disk space"),
    ):
        trainer.train()
    assert trainer.state.step == 0
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".partial"]


def test_a_run_folder_that_cannot_be_made_is_named(tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"RUN=.*/file/run: cannot be written: Not a directory"):
        trainer_of(tiny_data, tmp_path / "file" / "run").train()


def test_a_run_goes_on_where_tensorboard_cannot_write(
    tiny_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING), TensorBoardWriter(tmp_path / "file" / "tensorboard") as heard:
        trainer = Trainer(config_of("rows", tiny_data, SHORT), tmp_path / "run", Topology.single(), heard)
        assert trainer.train().step == 21
    assert [record.getMessage()[:43] for record in caplog.records] == ["nothing more is written for TensorBoard: [E"]


@pytest.mark.parametrize(("name", "is_link"), [("checkpoints", False), ("checkpoints", True), ("best", True)])
def test_a_name_of_checkpoints_that_is_no_folder_is_told_before_anything_is_computed(
    tiny_data: Path, tmp_path: Path, name: str, is_link: bool
) -> None:
    place = tmp_path / name
    place.symlink_to(tmp_path / "not mounted") if is_link else place.write_text("")
    words = "is a link to .*not mounted, which is not there" if is_link else "is no folder"
    with pytest.raises(UserError, match=f"RUN=.*/{name}: {words}"):
        trainer_of(tiny_data, tmp_path).train()
    assert [path.name for path in tmp_path.iterdir()] == [name]
