"""The files of a checkpoint are flushed to disk in an order that is safe in a crash."""

import os
from pathlib import Path

import pytest
import torch

from nestrec.checkpoint import CheckpointManager, RankCheckpoint
from nestrec.checkpoint.checkpoint_manifest import MANIFEST_NAME


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record the flushes and renames as (operation, inode), in order; they are also executed."""
    recorded: list[tuple[str, int]] = []
    fsync = os.fsync
    rename = os.rename

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        recorded.append(("flush", os.fstat(descriptor).st_ino))

    def recorded_rename(source: Path, target: Path) -> None:
        rename(source, target)
        recorded.append(("rename", os.stat(target).st_ino))

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    return recorded


def test_checkpoint_fsync_order(tmp_path: Path, flushed: list[tuple[str, int]]) -> None:
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
    assert before[-2:] == [files[MANIFEST_NAME], ("flush", folder.stat().st_ino)], (
        "the manifest is flushed last, then the folder that contains it"
    )
    assert ("flush", tmp_path.stat().st_ino) in after
