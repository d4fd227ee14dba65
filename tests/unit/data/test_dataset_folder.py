"""Datasets are written atomically: a folder has a complete dataset or none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nestrec.base.errors import DataError
from nestrec.base.files import replaced_folder
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import CARD_FILE
from nestrec.data.formats.format_registry import prepare
from nestrec.data.formats.log_format import LogOptions
from support.fail_points import armed, fail_variables


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    path.write_text("user,item\n" + "".join(f"{i % 7},{i % 5}\n" for i in range(100)))
    return path


def fail() -> None:
    raise OSError("disk full")


@pytest.mark.parametrize("point", ["data.after_split", "folder.before_rename"])
def test_prepare_error_leaves_no_dataset_or_partial_files(log: Path, point: str) -> None:
    with armed(point, fail), pytest.raises(OSError, match="disk full"):
        prepare("log", log, log.parent / "out")
    assert [p.name for p in log.parent.iterdir()] == ["log.csv"]


def test_prepare_killed_leaves_no_dataset_and_can_be_repeated(log: Path) -> None:
    code = (
        "import sys; from nestrec.data.formats.format_registry import prepare; prepare('log', sys.argv[1], sys.argv[2])"
    )
    fired = log.parent / "fired"
    environment = {**os.environ, **fail_variables("folder.before_rename=kill", fired)}
    ended = subprocess.run([sys.executable, "-c", code, log, log.parent / "out"], env=environment, check=False)
    assert ended.returncode == -9
    assert fired.read_text() == "folder.before_rename\n"
    assert not (log.parent / "out").exists()
    prepare("log", log, log.parent / "out")
    assert Dataset.open(log.parent / "out").num_samples == 7
    assert not list(log.parent.glob(".out*"))


def test_prepare_replaces_existing_dataset_only_with_force(log: Path) -> None:
    out = log.parent / "out"
    prepare("log", log, out)
    before = Dataset.open(out).digest
    with pytest.raises(DataError, match="--force"):
        prepare("log", log, out)
    assert Dataset.open(out).digest == before
    prepare("log", log, out, options=LogOptions(force=True, final_min_events_per_user=15))
    assert Dataset.open(out).num_samples == 2
    assert sorted(p.name for p in out.parent.iterdir()) == ["log.csv", "out"]


def test_prepare_failed_replacement_leaves_the_old_dataset(log: Path) -> None:
    out = log.parent / "out"
    prepare("log", log, out)
    with armed("folder.before_rename", fail), pytest.raises(OSError, match="disk full"):
        prepare("log", log, out, options=LogOptions(force=True))
    Dataset.open(out).verify()


def test_prepare_never_replaces_a_folder_without_dataset(log: Path) -> None:
    with pytest.raises(DataError, match="not a prepared dataset"):
        prepare("log", log, log.parent, options=LogOptions(force=True))
    assert log.exists()


def test_prepare_writes_into_an_empty_folder(log: Path) -> None:
    (log.parent / "out").mkdir()
    prepare("log", log, log.parent / "out")
    assert Dataset.open(log.parent / "out").num_samples == 7


def test_prepare_rejects_a_second_writer_of_one_output(log: Path) -> None:
    with replaced_folder(log.parent / "out", marker=CARD_FILE, force=False) as folder:
        (folder / "mine").write_text("x")
        with pytest.raises(DataError, match="another process"):
            prepare("log", log, log.parent / "out")
        assert (folder / "mine").exists()
