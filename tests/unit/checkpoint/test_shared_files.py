"""A checkpoint that is kept in two places takes the bytes of one."""

import os
from pathlib import Path

import pytest

from nestrec.checkpoint import CheckpointManager, verify
from support.checkpoint_contents import assert_same, make_content
from support.fail_points import armed


def places(tmp_path: Path) -> tuple[CheckpointManager, CheckpointManager]:
    return CheckpointManager(tmp_path / "last", keep=2, max_deltas=2), CheckpointManager(tmp_path / "best", keep=1)


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def test_the_best_shares_its_files_with_the_step_it_came_from_and_outlives_it(tmp_path: Path) -> None:
    last, best = places(tmp_path)
    last.save(1, make_content(1), also=best)
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
    last.save_async(4, make_content(4), also=best)
    last.close()
    assert best.steps() == [4]
    assert inodes(tmp_path / "best" / "step-00000004") == inodes(tmp_path / "last" / "step-00000004")


def test_where_a_disk_shares_nothing_the_best_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    last, best = places(tmp_path)
    last.save(1, make_content(1), also=best)
    assert verify(tmp_path / "best" / "step-00000001") == []
    assert not inodes(tmp_path / "best" / "step-00000001").items() & inodes(tmp_path / "last" / "step-00000001").items()


def test_a_crash_between_the_two_places_leaves_the_best_whole_and_a_save_again_completes_both(tmp_path: Path) -> None:
    class CrashError(BaseException):
        pass

    def crash() -> None:
        raise CrashError

    last, best = places(tmp_path)
    last.save(1, make_content(1), also=best)
    with armed("checkpoint.after_linked", crash), pytest.raises(CrashError):
        last.save(2, make_content(2), also=best)
    last, best = places(tmp_path)
    assert (last.steps(), best.steps()) == ([1], [1, 2])
    assert verify(tmp_path / "best" / "step-00000002") == []
    last.save(2, make_content(2), also=best)
    assert (last.steps(), best.steps()) == ([1, 2], [2])
    assert verify(tmp_path / "best" / "step-00000002") == []


def test_a_step_that_is_saved_already_reaches_the_best_as_well(tmp_path: Path) -> None:
    last, best = places(tmp_path)
    last.save(1, make_content(1))
    last.save(1, make_content(1), also=best)
    assert best.steps() == [1]
    assert verify(tmp_path / "best" / "step-00000001") == []


def test_best_that_has_the_step_already_is_left_alone(tmp_path: Path) -> None:
    told: list[str] = []
    last = CheckpointManager(tmp_path / "last", report=told.append)
    best = CheckpointManager(tmp_path / "best", keep=1, report=told.append)
    best.save(1, make_content(1))
    before = inodes(tmp_path / "best" / "step-00000001")
    last.save(1, make_content(1), also=best)
    assert inodes(tmp_path / "best" / "step-00000001") == before
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-00000001"]
    assert (last.steps(), told) == ([1], [])
