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
        monkeypatch.setattr(module, "cores_of_rank", lambda: number)


@pytest.mark.parametrize("cores", [1, 8])
def test_what_is_saved_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
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


def test_rows_are_written_while_the_next_ones_are_read_where_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_cores(monkeypatch, 4)
    is_second_read = threading.Event()
    keys = torch.arange(4)

    def write_late(path: Path, content: Iterator[memoryview], *, past_cache: bool = False) -> tuple[int, str]:
        assert not path.name.startswith("rows-") or is_second_read.wait(30), "the first file waits for the second chunk"
        return write_file(path, content, past_cache=past_cache)

    def chunks() -> Iterator[dict[str, torch.Tensor]]:
        yield {"keys": keys[:2]}
        is_second_read.set()
        yield {"keys": keys[2:]}

    monkeypatch.setattr(checkpoint_writer, "write_file", write_late)
    CheckpointManager(tmp_path).save(1, RankCheckpoint(tables={"t": chunks()}))
    found = CheckpointManager(tmp_path).restore_latest()
    assert found is not None
    assert torch.equal(torch.cat([chunk["keys"] for chunk in found.rows("t")]), keys)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_threads_that_write_are_nice_until_somebody_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_cores(monkeypatch, 4)
    own = threading.get_native_id()
    is_asked = threading.Event()
    seen = list[int]()
    if not set_niceness(own, 1) or not set_niceness(own, 0):
        pytest.skip("this user may not make a thread less nice again")

    def write(path: Path, content: Iterator[memoryview], *, past_cache: bool = False) -> tuple[int, str]:
        if path.name.startswith("rows-"):
            seen.append(niceness(threading.get_native_id()))
            is_asked.set()
            deadline = time.monotonic() + 30
            while niceness(threading.get_native_id()) and time.monotonic() < deadline:
                time.sleep(1e-3)
            seen.append(niceness(threading.get_native_id()))
        return write_file(path, content)

    monkeypatch.setattr(checkpoint_writer, "write_file", write)
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save_async(1, RankCheckpoint(tables={"t": [{"keys": torch.arange(4)}]}))
    assert is_asked.wait(30)
    checkpoints.wait()
    assert seen == [min(NICENESS, 19 - os.getpriority(os.PRIO_PROCESS, os.getpid())), 0]


def test_nothing_saved_restores_none(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path / "absent").restore_latest() is None


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_every_type_of_tensor_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (5, 3)).to(dtype)
    content = RankCheckpoint(
        tensors={"transposed": tensor.t(), "single": tensor[0, 0], "none": tensor[:0], "shared": tensor}
    )
    CheckpointManager(tmp_path).save(1, content)
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    assert_same(restored, content)


def test_files_are_safetensors_as_the_library_writes_them(tmp_path: Path) -> None:
    path = CheckpointManager(tmp_path).save(1, make_content(1))
    loaded = load_file(path / "tensors-00000.safetensors")
    assert torch.equal(loaded["model/weight"], make_content(1).tensors["model/weight"])


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=2)
    for step in (10, 20, 30, 40):
        checkpoints.save(step, make_content(step))
    assert checkpoints.steps() == [30, 40]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000040"]


def test_a_step_saved_twice_is_left_as_it_is(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(10, make_content(10))
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "step-00000010").iterdir()}
    checkpoints.save(10, make_content(10))
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "step-00000010").iterdir()}


def test_a_damaged_step_is_written_again(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = CheckpointManager(tmp_path, report=said.append)
    checkpoints.save(10, make_content(10))
    (tmp_path / "step-00000010" / "state.json").unlink()
    checkpoints.save(10, make_content(10))
    assert verify(tmp_path / "step-00000010") == []
    assert "set aside" in said[0]


def test_going_on_from_an_earlier_step_sets_the_later_ones_aside(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, report=lambda message: None)
    for step in (10, 20, 30):
        checkpoints.save(step, make_content(step))
    again = CheckpointManager(tmp_path, report=lambda message: None)
    assert again.restore(10).step == 10
    again.save(15, make_content(15))
    assert again.steps() == [10, 15]
    assert (tmp_path / "step-00000030.abandoned").is_dir()


def test_a_damaged_one_is_named_and_the_one_before_it_is_used(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = CheckpointManager(tmp_path, report=said.append)
    checkpoints.save(10, make_content(10))
    damaged = checkpoints.save(20, make_content(20)) / "state.json"
    damaged.write_bytes(damaged.read_bytes() + b" ")
    restored = checkpoints.restore_latest()
    assert restored is not None
    assert_same(restored, make_content(10))
    assert "step 20" in said[0]
    assert "state.json" in said[0]


def test_starting_over_when_all_are_damaged_is_left_to_the_user(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, report=lambda message: None)
    (checkpoints.save(10, make_content(10)) / "manifest.json").unlink()
    with pytest.raises(CorruptFileError, match="no checkpoint is whole"):
        checkpoints.restore_latest()
    with pytest.raises(CorruptFileError, match="take an earlier step"):
        checkpoints.restore(10)


def test_an_unknown_step_and_a_bad_keep_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint of this step"):
        CheckpointManager(tmp_path).restore(3)
    with pytest.raises(UserError, match="keep"):
        CheckpointManager(tmp_path, keep=0)


@pytest.mark.parametrize("place", ["before_first_file", "between_files", "before_manifest", "before_rename"])
def test_a_failed_save_leaves_the_last_one_and_no_rubbish(tmp_path: Path, place: str) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(10, make_content(10))
    with armed(f"checkpoint.{place}", full_disk), pytest.raises(CheckpointSaveError, match="No space left"):
        checkpoints.save(20, make_content(20))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    restored = checkpoints.restore_latest()
    assert restored is not None
    assert_same(restored, make_content(10))
    checkpoints.save(20, make_content(20))
    assert checkpoints.steps() == [10, 20]


def test_a_manifest_that_points_outside_is_refused(tmp_path: Path) -> None:
    from nestrec.artifacts.manifest import FileEntry
    from nestrec.checkpoint.checkpoint_manifest import Manifest, decode, encode

    entry = FileEntry(name="../../secret", bytes=1, sha256="0", kind="state")
    with pytest.raises(CorruptFileError, match="outside"):
        decode(encode(Manifest(step=1, num_ranks=1, files=(entry,))), "x")


def test_big_models_are_split_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestrec.checkpoint.checkpoint_writer.PART_BYTES", 100)
    content = RankCheckpoint(tensors={str(index): torch.full((index + 1, 5), float(index)) for index in range(9)})
    path = CheckpointManager(tmp_path).save(1, content)
    assert len(list(path.glob("tensors-*.safetensors"))) > 5
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    assert_same(restored, content)


def test_an_optimiser_state_survives_split_and_join(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensors, skeleton = split("optimizer", optimizer.state_dict())
    CheckpointManager(tmp_path).save(1, RankCheckpoint(tensors=tensors, state={"optimizer": skeleton}))
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    again = join(restored.state["optimizer"], restored.tensors)
    before = optimizer.state_dict()
    assert again["param_groups"] == before["param_groups"]
    assert all(torch.equal(again["state"][0][name], tensor) for name, tensor in before["state"][0].items())
