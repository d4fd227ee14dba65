import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nestrec.artifacts.atomic_files import DTYPE_NAMES, write_file
from nestrec.artifacts.writer_group import NICENESS
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.base.thread_team import niceness, set_niceness
from nestrec.checkpoint import (
    CheckpointManager,
    CheckpointSaveError,
    RankCheckpoint,
    checkpoint_writer,
    join,
    split,
    verify,
)
from nestrec.checkpoint import loaded_checkpoint as reader
from support.checkpoint_contents import assert_same, make_content
from support.fail_points import armed


def full_disk() -> None:
    raise OSError(28, "No space left on device")


def has_cores(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for module in (checkpoint_writer, reader):
        monkeypatch.setattr(module, "cores_per_rank", lambda: number)


@pytest.mark.parametrize("cores", [1, 8])
def test_checkpoint_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    has_cores(monkeypatch, cores)
    checkpoints = CheckpointManager(tmp_path)
    content = make_content(100)
    path = checkpoints.save(100, content)
    assert path == tmp_path / "step-00000100"
    assert verify(path) == []
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    assert restored.step == 100
    assert_same(restored, content)


def test_checkpoint_write_overlaps_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_cores(monkeypatch, 4)
    is_second_read = threading.Event()
    keys = torch.arange(4)

    def write_late(path: Path, content: Iterator[memoryview], *, direct_io: bool = False) -> tuple[int, str]:
        assert not path.name.startswith("rows-") or is_second_read.wait(30), "the first file waits for the second chunk"
        return write_file(path, content, direct_io=direct_io)

    def chunks() -> Iterator[dict[str, torch.Tensor]]:
        yield {"keys": keys[:2]}
        is_second_read.set()
        yield {"keys": keys[2:]}

    monkeypatch.setattr(checkpoint_writer, "write_file", write_late)
    CheckpointManager(tmp_path).save(1, RankCheckpoint(tables={"t": chunks()}))
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    assert torch.equal(torch.cat([chunk["keys"] for chunk in restored.rows("t")]), keys)


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no niceness per thread")
def test_checkpoint_writer_threads_lower_their_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_cores(monkeypatch, 4)
    own = threading.get_native_id()
    has_started = threading.Event()
    seen = list[int]()
    if not set_niceness(own, 1) or not set_niceness(own, 0):
        pytest.skip("this user may not decrease the niceness of a thread")

    def write(path: Path, content: Iterator[memoryview], *, direct_io: bool = False) -> tuple[int, str]:
        if path.name.startswith("rows-"):
            seen.append(niceness(threading.get_native_id()))
            has_started.set()
            deadline = time.monotonic() + 30
            while niceness(threading.get_native_id()) and time.monotonic() < deadline:
                time.sleep(1e-3)
            seen.append(niceness(threading.get_native_id()))
        return write_file(path, content)

    monkeypatch.setattr(checkpoint_writer, "write_file", write)
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save_async(1, RankCheckpoint(tables={"t": [{"keys": torch.arange(4)}]}))
    assert has_started.wait(30)
    checkpoints.wait()
    assert seen == [min(NICENESS, 19 - os.getpriority(os.PRIO_PROCESS, os.getpid())), 0]


def test_checkpoint_restore_of_empty_folder_is_none(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path / "absent").restore_latest() is None


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_checkpoint_round_trip_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (5, 3)).to(dtype)
    content = RankCheckpoint(
        tensors={"transposed": tensor.t(), "single": tensor[0, 0], "none": tensor[:0], "shared": tensor}
    )
    CheckpointManager(tmp_path).save(1, content)
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    assert_same(restored, content)


def test_checkpoint_files_load_with_safetensors_library(tmp_path: Path) -> None:
    path = CheckpointManager(tmp_path).save(1, make_content(1))
    loaded = load_file(path / "tensors-00000.safetensors")
    assert torch.equal(loaded["model/weight"], make_content(1).tensors["model/weight"])


def test_checkpoint_keep_limits_number_of_checkpoints(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=2)
    for step in (10, 20, 30, 40):
        checkpoints.save(step, make_content(step))
    assert checkpoints.steps() == [30, 40]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000040"]


def test_checkpoint_saved_twice_is_unchanged(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(10, make_content(10))
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "step-00000010").iterdir()}
    checkpoints.save(10, make_content(10))
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "step-00000010").iterdir()}


def test_checkpoint_corrupt_step_is_written_again(tmp_path: Path) -> None:
    messages: list[str] = []
    checkpoints = CheckpointManager(tmp_path, report=messages.append)
    checkpoints.save(10, make_content(10))
    (tmp_path / "step-00000010" / "state.json").unlink()
    checkpoints.save(10, make_content(10))
    assert verify(tmp_path / "step-00000010") == []
    assert "it was renamed to" in messages[0]


def test_checkpoint_resume_from_earlier_step_quarantines_later(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, report=lambda message: None)
    for step in (10, 20, 30):
        checkpoints.save(step, make_content(step))
    reopened = CheckpointManager(tmp_path, report=lambda message: None)
    assert reopened.restore(10).step == 10
    reopened.save(15, make_content(15))
    assert reopened.steps() == [10, 15]
    assert (tmp_path / "step-00000030.abandoned").is_dir()


def test_checkpoint_corrupt_latest_falls_back_to_previous(tmp_path: Path) -> None:
    messages: list[str] = []
    checkpoints = CheckpointManager(tmp_path, report=messages.append)
    checkpoints.save(10, make_content(10))
    corrupt = checkpoints.save(20, make_content(20)) / "state.json"
    corrupt.write_bytes(corrupt.read_bytes() + b" ")
    restored = checkpoints.restore_latest()
    assert restored is not None
    assert_same(restored, make_content(10))
    assert "step 20" in messages[0]
    assert "state.json" in messages[0]


def test_checkpoint_restore_fails_if_all_are_corrupt(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, report=lambda message: None)
    (checkpoints.save(10, make_content(10)) / "manifest.json").unlink()
    with pytest.raises(CorruptFileError, match="all checkpoints are corrupt"):
        checkpoints.restore_latest()
    with pytest.raises(CorruptFileError, match="Restore an earlier step"):
        checkpoints.restore(10)


def test_checkpoint_unknown_step_is_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint of this step"):
        CheckpointManager(tmp_path).restore(3)
    with pytest.raises(UserError, match="keep"):
        CheckpointManager(tmp_path, keep=0)


@pytest.mark.parametrize("point", ["before_first_file", "between_files", "before_manifest", "before_rename"])
def test_checkpoint_failed_save_leaves_no_partial_files(tmp_path: Path, point: str) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(10, make_content(10))
    with armed(f"checkpoint.{point}", full_disk), pytest.raises(CheckpointSaveError, match="No space left"):
        checkpoints.save(20, make_content(20))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    restored = checkpoints.restore_latest()
    assert restored is not None
    assert_same(restored, make_content(10))
    checkpoints.save(20, make_content(20))
    assert checkpoints.steps() == [10, 20]


def test_checkpoint_manifest_outside_folder_is_rejected(tmp_path: Path) -> None:
    from nestrec.artifacts.manifest import FileEntry
    from nestrec.checkpoint.checkpoint_manifest import Manifest, decode, encode

    entry = FileEntry(name="../../secret", bytes=1, sha256="0", kind="state")
    with pytest.raises(CorruptFileError, match="outside"):
        decode(encode(Manifest(step=1, num_ranks=1, files=(entry,))), "x")


def test_checkpoint_large_model_is_split_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestrec.checkpoint.checkpoint_writer.PART_BYTES", 100)
    content = RankCheckpoint(tensors={str(index): torch.full((index + 1, 5), float(index)) for index in range(9)})
    path = CheckpointManager(tmp_path).save(1, content)
    assert len(list(path.glob("tensors-*.safetensors"))) > 5
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    assert_same(restored, content)


def test_checkpoint_optimizer_state_round_trip(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensors, skeleton = split("optimizer", optimizer.state_dict())
    CheckpointManager(tmp_path).save(1, RankCheckpoint(tensors=tensors, state={"optimizer": skeleton}))
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    reopened = join(restored.state["optimizer"], restored.tensors)
    before = optimizer.state_dict()
    assert reopened["param_groups"] == before["param_groups"]
    assert all(torch.equal(reopened["state"][0][name], tensor) for name, tensor in before["state"][0].items())
