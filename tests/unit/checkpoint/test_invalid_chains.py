"""A checkpoint in the folder of another step, or with a base of a later step, is rejected."""

from pathlib import Path

import torch

from nestrec.checkpoint import CheckpointManager, RankCheckpoint, verify
from nestrec.checkpoint.checkpoint_manifest import (
    MANIFEST_NAME,
    BaseCheckpoint,
    Manifest,
    digest_of,
    encode,
    read_manifest,
)


def saved(folder: Path, step: int) -> Path:
    rows = {"keys": torch.arange(4), "weight": torch.full((4, 2), float(step))}
    return CheckpointManager(folder).save(step, RankCheckpoint(state={"step": step}, tables={"t": [rows]}))


def test_checkpoint_renamed_folder_is_rejected(tmp_path: Path) -> None:
    renamed = saved(tmp_path, 1).rename(tmp_path / "step-00000007")
    (problem,) = verify(renamed)
    assert "belongs to step 1" in problem


def test_checkpoint_base_must_be_earlier(tmp_path: Path) -> None:
    later = saved(tmp_path, 5)
    earlier = tmp_path / "step-00000003"
    earlier.mkdir()
    base = BaseCheckpoint(step=5, digest=digest_of(read_manifest(later)))
    (earlier / MANIFEST_NAME).write_bytes(encode(Manifest(step=3, num_ranks=1, files=(), base=base)))
    (problem,) = verify(earlier)
    assert "this is not the base of the later checkpoint" in problem
