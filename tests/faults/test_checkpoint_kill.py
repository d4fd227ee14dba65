"""kill -9 and a full disk in the middle of a save: the last whole checkpoint is always there."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nestrec.checkpoint import Checkpoints, verify
from nestrec.testing.contents import assert_same, make_content
from nestrec.testing.faults import FailPoint, run_with_faults

PLACES = ["before_first_file", "between_files", "before_manifest", "before_rename", "after_rename", "during_retention"]

TRAIN = """
import sys
from nestrec.checkpoint import Checkpoints
from nestrec.testing.contents import make_content
checkpoints = Checkpoints(sys.argv[1], keep=1)
restored = checkpoints.restore_latest()
for step in range(restored.step + 1 if restored else 1, 5):
    getattr(checkpoints, sys.argv[2])(step, make_content(step))
checkpoints.close()
"""


@pytest.mark.parametrize("way", ["save", "save_async"])
@pytest.mark.parametrize("place", PLACES)
def test_kill_during_a_save_leaves_the_previous_or_the_new_one(tmp_path: Path, place: str, way: str) -> None:
    """Killed during the save of step 3 (`between_files`: after its second file), with only one checkpoint kept."""
    hit = {"between_files": 5 * 2 + 2, "during_retention": 2}.get(place, 3)
    command = [sys.executable, "-c", TRAIN, str(tmp_path), way]
    env = {**os.environ, "NESTREC_FAIL_POINTS": f"checkpoint.{place}@{hit}=kill"}
    assert subprocess.run(command, env=env, check=False).returncode == -signal.SIGKILL
    restored = Checkpoints(tmp_path).restore_latest()
    assert restored is not None
    assert restored.step == (3 if place in ("after_rename", "during_retention") else 2)
    assert_same(restored, make_content(restored.step))
    run_with_faults(command, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    assert verify(tmp_path / "step-00000004") == []


def test_a_run_killed_again_and_again_gets_to_its_end(tmp_path: Path) -> None:
    faults = [FailPoint(f"checkpoint.{place}@2=kill") for place in ("before_rename", "before_manifest", "after_rename")]
    history = run_with_faults([sys.executable, "-c", TRAIN, str(tmp_path), "save"], faults)
    assert len(history) == 4
    assert Checkpoints(tmp_path).steps()[-1] == 4


FILL = """
import sys
import torch
from nestrec.checkpoint import Checkpoints, Content, SaveError
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, Content(tensors={"weight": torch.ones(1000)}))
try:
    checkpoints.save(2, Content(tensors={"weight": torch.ones(4_000_000)}))
except SaveError as error:
    print(error)
    sys.exit(checkpoints.restore_latest().step != 1)
sys.exit("the disk did not fill")
"""


def check_full_disk(folder: Path, problem: str, *, preamble: str = "") -> None:
    run = subprocess.run(
        [sys.executable, "-c", preamble + FILL, str(folder)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert problem in run.stdout
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


def test_a_full_disk_is_an_error_that_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        check_full_disk(tmp_path, "No space left on device")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_file_beyond_the_size_limit_is_an_error_that_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
    check_full_disk(tmp_path, "File too large", preamble=limit)
