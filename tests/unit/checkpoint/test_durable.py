"""What a checkpoint says is on the disk has been flushed to it, in an order that no crash can turn around."""

import os
from pathlib import Path

import pytest
import torch

from nestrec.checkpoint import CheckpointManager, RankCheckpoint
from nestrec.checkpoint.checkpoint_manifest import MANIFEST_NAME


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(what, inode) of flushes and renames, in order; the real ones are made as well."""
    seen: list[tuple[str, int]] = []
    fsync = os.fsync
    rename = os.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        seen.append(("flush", os.fstat(descriptor).st_ino))

    def watched_rename(source: Path, target: Path) -> None:
        rename(source, target)
        seen.append(("rename", os.stat(target).st_ino))

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    return seen


def test_every_file_then_its_folder_are_flushed_before_the_rename_and_the_parent_after_it(
    tmp_path: Path, flushed: list[tuple[str, int]]
) -> None:
    content = RankCheckpoint(
        tensors={"w": torch.ones(3)},
        state={"step": 1},
        tables={"t": [{"keys": torch.arange(4), "weight": torch.ones(4, 2)}]},
    )
    folder = CheckpointManager(tmp_path).save(1, content)
    renamed = flushed.index(("rename", folder.stat().st_ino))
    before, after = flushed[:renamed], flushed[renamed + 1 :]
    files = {path.name: ("flush", path.stat().st_ino) for path in folder.iterdir()}
    assert len(files) == 4, "tensors, state, rows and the manifest"
    assert set(files.values()) <= set(before)
    assert before[-2:] == [files[MANIFEST_NAME], ("flush", folder.stat().st_ino)], "the manifest last, then its name"
    assert ("flush", tmp_path.stat().st_ino) in after
