"""SIGKILL and a full disk during a save: the last complete checkpoint remains."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nestrec.checkpoint import CheckpointManager, verify
from support.checkpoint_contents import assert_same, make_content, save_steps
from support.fail_points import armed
from support.fault_runner import FailPoint, random_kills, run_with_faults
from support.rank_pool import preloaded_context

FAIL_POINTS = [
    "before_first_file",
    "between_files",
    "before_manifest",
    "before_rename",
    "after_rename",
    "during_retention",
]

SAVE_STEPS = "import sys; from support.checkpoint_contents import save_steps; save_steps(*sys.argv[1:])"


def save_until_killed(folder: str, method: str, point: str, hit: int) -> None:
    with armed(f"checkpoint.{point}", lambda: os.kill(os.getpid(), signal.SIGKILL), at=hit):
        save_steps(folder, method)


@pytest.mark.parametrize("method", ["save", "save_async"])
@pytest.mark.parametrize("point", FAIL_POINTS)
def test_checkpoint_kill_leaves_previous_or_new_checkpoint(tmp_path: Path, point: str, method: str) -> None:
    """Kill the process in the save of step 3 (`between_files`: after its second file); one checkpoint is retained."""
    hit = {"between_files": 5 * 2 + 2, "during_retention": 2}.get(point, 3)
    process = preloaded_context().Process(target=save_until_killed, args=(str(tmp_path), method, point, hit))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    assert restored.step == (3 if point in ("after_rename", "during_retention") else 2)
    assert_same(restored, make_content(restored.step))
    save_steps(str(tmp_path), method)  # in this process, because another process would take seconds to start
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    assert verify(tmp_path / "step-00000004") == []


def test_checkpoint_run_survives_repeated_kills(tmp_path: Path) -> None:
    faults = [FailPoint(f"checkpoint.{point}@2=kill") for point in ("before_rename", "after_rename")]
    history = run_with_faults([sys.executable, "-c", SAVE_STEPS, str(tmp_path), "save"], faults, is_forked=True)
    assert len(history) == 3
    assert CheckpointManager(tmp_path).steps()[-1] == 4


FILL = """
import sys
import torch
from nestrec.checkpoint import CheckpointManager, CheckpointSaveError, RankCheckpoint
checkpoints = CheckpointManager(sys.argv[1])
checkpoints.save(1, RankCheckpoint(tensors={"weight": torch.ones(1000)}))
try:
    checkpoints.save(2, RankCheckpoint(tensors={"weight": torch.ones(4_000_000)}))
except CheckpointSaveError as error:
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


def test_checkpoint_full_disk_keeps_last_checkpoint(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        check_full_disk(tmp_path, "No space left on device")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_checkpoint_file_size_limit_keeps_last_checkpoint(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
    check_full_disk(tmp_path, "File too large", preamble=limit)


SAVE_AND_LOG = """
import sys
import torch
from nestrec.base.failpoints import fail_point
from nestrec.checkpoint import CheckpointManager, RankCheckpoint
checkpoints = CheckpointManager(sys.argv[1] + "/checkpoints", keep=2, max_deltas=2)
restored = checkpoints.restore_latest()
total = restored.tensors["total"] if restored else torch.zeros((), dtype=torch.int64)
rows = {}
for chunk in restored.rows("items") if restored else []:
    rows |= dict(zip(chunk["keys"].tolist(), chunk["weight"].tolist(), strict=True))
with open(sys.argv[1] + "/lines.txt", "a") as log:
    for step in range(restored.step + 1 if restored else 1, int(sys.argv[2]) + 1):
        base = checkpoints.next_base_step()
        total = total + step
        rows[step % 7] = rows.get(step % 7, 0.0) + step
        touched = [step % 7] if base is not None else list(rows)
        chunk = {"keys": torch.tensor(touched), "weight": torch.tensor([rows[key] for key in touched])}
        ballast = torch.full((50_000,), step)
        content = RankCheckpoint(tensors={"total": total, "ballast": ballast}, tables={"items": [chunk]}, base=base)
        checkpoints.save_async(step, content)
        print(step, file=log, flush=True)
fail_point("all steps logged")
checkpoints.close()
"""


def check_random_kills(folder: Path, seed: int, num_kills: int) -> None:
    """Kill a simple training loop at random moments, and check that it ends like an uninterrupted one."""
    num_steps = 12 * num_kills
    lines = folder / "lines.txt"
    wait_at = "all steps logged"
    kills = random_kills(lines, seed=seed, num_kills=num_kills, num_lines=num_steps - 6, delay_s=0.02, wait_at=wait_at)
    command = [sys.executable, "-c", SAVE_AND_LOG, str(folder), str(num_steps)]
    history = run_with_faults(command, kills, is_forked=True)
    assert len(history) == num_kills + 1
    restored = CheckpointManager(folder / "checkpoints").restore_latest()
    assert restored is not None
    assert restored.step == num_steps
    assert int(restored.tensors["total"]) == num_steps * (num_steps + 1) // 2
    rows: dict[int, float] = {}
    for chunk in restored.rows("items"):
        rows |= dict(zip(chunk["keys"].tolist(), chunk["weight"].tolist(), strict=True))
    assert rows == {key: float(sum(range(key or 7, num_steps + 1, 7))) for key in range(7)}


def test_checkpoint_2_random_kills_resume_exactly(tmp_path: Path) -> None:
    check_random_kills(tmp_path, seed=0, num_kills=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 6))
def test_checkpoint_50_random_kills_resume_exactly(tmp_path: Path, seed: int) -> None:
    check_random_kills(tmp_path, seed=seed, num_kills=10)
