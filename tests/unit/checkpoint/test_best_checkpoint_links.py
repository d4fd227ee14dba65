"""The best checkpoint shares the files of the last checkpoint through hard links."""

import os
from pathlib import Path

import pytest

from nestrec.checkpoint import CheckpointManager, verify
from support.checkpoint_contents import assert_same, make_content
from support.fail_points import armed


def make_managers(tmp_path: Path) -> tuple[CheckpointManager, CheckpointManager]:
    return CheckpointManager(tmp_path / "last", keep=2, max_deltas=2), CheckpointManager(tmp_path / "best", keep=1)


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def test_best_checkpoint_shares_files_with_its_step(tmp_path: Path) -> None:
    last, best = make_managers(tmp_path)
    last.save(1, make_content(1), link_to=best)
    first = inodes(tmp_path / "best" / "step-00000001")
    assert first == inodes(tmp_path / "last" / "step-00000001")
    last.save_async(2, make_content(2))
    last.save(3, make_content(3))
    assert last.steps() == [2, 3]
    assert best.steps() == [1]
    assert verify(tmp_path / "best" / "step-00000001") == []
    restored = best.restore_latest()
    assert restored is not None
    assert_same(restored, make_content(1))
    last.save_async(4, make_content(4), link_to=best)
    last.close()
    assert best.steps() == [4]
    assert inodes(tmp_path / "best" / "step-00000004") == inodes(tmp_path / "last" / "step-00000004")


def test_best_checkpoint_is_copied_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", fail)
    last, best = make_managers(tmp_path)
    last.save(1, make_content(1), link_to=best)
    assert verify(tmp_path / "best" / "step-00000001") == []
    assert not inodes(tmp_path / "best" / "step-00000001").items() & inodes(tmp_path / "last" / "step-00000001").items()


def test_best_checkpoint_survives_crash_between_folders(tmp_path: Path) -> None:
    class CrashError(BaseException):
        pass

    def crash() -> None:
        raise CrashError

    last, best = make_managers(tmp_path)
    last.save(1, make_content(1), link_to=best)
    with armed("checkpoint.after_linked", crash), pytest.raises(CrashError):
        last.save(2, make_content(2), link_to=best)
    last, best = make_managers(tmp_path)
    assert (last.steps(), best.steps()) == ([1], [1, 2])
    assert verify(tmp_path / "best" / "step-00000002") == []
    last.save(2, make_content(2), link_to=best)
    assert (last.steps(), best.steps()) == ([1, 2], [2])
    assert verify(tmp_path / "best" / "step-00000002") == []


def test_best_checkpoint_of_saved_step_is_linked(tmp_path: Path) -> None:
    last, best = make_managers(tmp_path)
    last.save(1, make_content(1))
    last.save(1, make_content(1), link_to=best)
    assert best.steps() == [1]
    assert verify(tmp_path / "best" / "step-00000001") == []


def test_best_checkpoint_with_same_step_is_unchanged(tmp_path: Path) -> None:
    messages: list[str] = []
    last = CheckpointManager(tmp_path / "last", report=messages.append)
    best = CheckpointManager(tmp_path / "best", keep=1, report=messages.append)
    best.save(1, make_content(1))
    before = inodes(tmp_path / "best" / "step-00000001")
    last.save(1, make_content(1), link_to=best)
    assert inodes(tmp_path / "best" / "step-00000001") == before
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-00000001"]
    assert (last.steps(), messages) == ([1], [])
