"""A checkpoint in a folder that is not its own, or that builds on what came after it, is refused."""

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


def test_a_folder_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    renamed = saved(tmp_path, 1).rename(tmp_path / "step-00000007")
    (problem,) = verify(renamed)
    assert "belongs to step 1" in problem


def test_a_base_that_is_no_earlier_than_what_builds_on_it_is_refused(tmp_path: Path) -> None:
    later = saved(tmp_path, 5)
    earlier = tmp_path / "step-00000003"
    earlier.mkdir()
    base = BaseCheckpoint(step=5, digest=digest_of(read_manifest(later)))
    (earlier / MANIFEST_NAME).write_bytes(encode(Manifest(step=3, num_ranks=1, files=(), base=base)))
    (problem,) = verify(earlier)
    assert "is not the checkpoint that the later one builds on" in problem
