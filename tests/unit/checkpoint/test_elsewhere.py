"""Checkpoints at an address of fsspec: copies of those of a run, taken from there where its folder has none."""

import hashlib
import random
import secrets
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from nestrec.artifacts.storage import FsspecStorage, LocalStorage, storage_of
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.checkpoint import (
    CheckpointGroup,
    CheckpointManager,
    CheckpointSaveError,
    LoadedCheckpoint,
    RankCheckpoint,
    verify,
)
from support.checkpoint_contents import assert_same, make_content, make_rows, table_values, values_of
from support.fail_points import armed
from support.rank_pool import run_ranks


class CrashError(BaseException):
    pass


def crash() -> None:
    raise CrashError


@pytest.fixture
def address():
    name = f"memory://{secrets.token_hex(4)}/run"
    yield name
    fsspec.filesystem("memory").rm(name.rpartition("/")[0].removeprefix("memory:/"), recursive=True)


def files_of(address: str) -> dict[str, bytes]:
    files = fsspec.filesystem("memory")
    return {name: files.cat_file(name) for name in files.find(address.removeprefix("memory:/"))}


def test_a_run_goes_on_from_an_address_where_its_folder_has_nothing(tmp_path: Path, address: str) -> None:
    def save(peers: CheckpointGroup) -> None:
        checkpoints = CheckpointManager(tmp_path / "a", keep=2, peers=peers, address=address)
        for step in range(1, 5):
            rows = [make_rows(range(20 * peers.rank, 20 * peers.rank + 20), step)]
            checkpoints.save_async(step, RankCheckpoint(state={"step": step}, tables={"items": rows}))
        checkpoints.close()

    assert run_ranks(2, save) == [None, None]
    expected = values_of(CheckpointManager(tmp_path / "a").restore(4), "items")
    assert {name.split("/")[-2] for name in files_of(address)} == {"step-00000003", "step-00000004"}

    def load(peers: CheckpointGroup) -> LoadedCheckpoint | None:
        return CheckpointManager(tmp_path / "b", peers=peers, address=address).restore_latest()

    for restored in run_ranks(3, load):
        assert isinstance(restored, LoadedCheckpoint), restored
        assert restored.step == 4
        assert values_of(restored, "items") == expected
    assert CheckpointManager(tmp_path / "b").steps() == [4]


def test_a_chain_is_copied_with_what_it_builds_on_and_taken_back_whole(tmp_path: Path, address: str) -> None:
    draw = random.Random(1)
    rows = dict[int, tuple[float, ...]]()
    checkpoints = CheckpointManager(tmp_path / "a", keep=1, max_deltas=3, address=address)
    for step in range(1, 7):
        base = checkpoints.base_for_next()
        touched = [make_rows(draw.sample(range(30), 5), step)]
        rows |= table_values(touched)
        checkpoints.save(step, RankCheckpoint(state={}, tables={"items": touched}, base=base))
    shutil.rmtree(tmp_path / "a")
    restored = CheckpointManager(tmp_path / "a", max_deltas=3, address=address).restore_latest()
    assert restored is not None
    assert restored.manifest.base is not None
    assert values_of(restored, "items") == rows


def test_who_dies_while_a_chain_is_taken_back_takes_all_of_it_when_started_again(tmp_path: Path, address: str) -> None:
    checkpoints = CheckpointManager(tmp_path / "a", max_deltas=3, address=address)
    for step in range(1, 4):
        base = checkpoints.base_for_next()
        checkpoints.save(step, RankCheckpoint(state={}, tables={"items": [make_rows(range(step), step)]}, base=base))
    shutil.rmtree(tmp_path / "a")
    with armed("checkpoint.after_fetched", crash, at=2), pytest.raises(CrashError):
        CheckpointManager(tmp_path / "a", max_deltas=3, address=address).restore_latest()
    restored = CheckpointManager(tmp_path / "a", max_deltas=3, address=address).restore_latest()
    assert restored is not None
    assert restored.step == 3


def test_what_was_not_copied_to_its_end_or_is_damaged_there_is_not_taken(tmp_path: Path, address: str) -> None:
    checkpoints = CheckpointManager(tmp_path / "a", address=address)
    for step in (1, 2):
        checkpoints.save(step, make_content(step))
    with armed("checkpoint.before_sent_manifest", crash), pytest.raises(CrashError):
        checkpoints.save(3, make_content(3))
    damaged = next(name for name in files_of(address) if "step-00000002/rows" in name)
    fsspec.filesystem("memory").pipe_file(damaged, files_of(address)[damaged][:-1] + b"!")
    told: list[str] = []
    restored = CheckpointManager(tmp_path / "b", address=address, report=told.append).restore_latest()
    assert restored is not None
    assert_same(restored, make_content(1))
    assert len(told) == 1
    assert "does not match its digest" in told[0]
    assert verify(tmp_path / "a" / "step-00000003") == [], "what lies in the folder is whole"
    again = CheckpointManager(tmp_path / "a", address=address)
    again.save(4, make_content(4))
    assert {name.split("/")[-2] for name in files_of(address)} >= {"step-00000004"}
    assert CheckpointManager(tmp_path / "c", address=address).restore_latest().step == 4  # type: ignore[union-attr]


def test_an_address_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    told: list[str] = []
    checkpoints = CheckpointManager(tmp_path / "a", address=str(tmp_path / "file" / "run"), report=told.append)
    checkpoints.save(1, make_content(1))
    assert checkpoints.steps() == [1]
    (problem,) = told
    assert "step-00000001 could not be copied to" in problem


def test_best_weights_that_did_not_reach_the_second_place_are_sent_with_the_next_save(tmp_path: Path) -> None:
    there = tmp_path / "there"
    told = list[str]()

    def places() -> tuple[CheckpointManager, CheckpointManager]:
        best = CheckpointManager(tmp_path / "best", keep=1, report=told.append, address=str(there / "best"))
        last = CheckpointManager(
            tmp_path / "last", report=told.append, address=str(there / "last"), max_deltas=2, beside=best
        )
        return last, best

    there.write_text("no folder, as a network may be gone")
    last, best = places()
    last.save(1, make_content(1), also=best)
    assert len(told) == 2
    there.unlink()
    last.save(2, make_content(2))
    assert CheckpointManager(there / "best").steps() == [1]

    with armed("checkpoint.before_sent_manifest", crash, at=2), pytest.raises(CrashError):
        last.save(3, make_content(3), also=best)
    assert CheckpointManager(there / "last").steps() == [2, 3]
    assert verify(there / "best" / "step-00000003") != []
    last, best = places()
    last.save(3, make_content(3))
    assert verify(there / "best" / "step-00000003") == []


def test_best_weights_that_are_damaged_are_told_and_end_no_save(tmp_path: Path) -> None:
    told: list[str] = []
    best = CheckpointManager(tmp_path / "best", keep=1, report=told.append, address=str(tmp_path / "there"))
    last = CheckpointManager(tmp_path / "last", report=told.append, beside=best)
    last.save(1, make_content(1), also=best)
    shutil.rmtree(tmp_path / "there")
    (tmp_path / "best" / "step-00000001" / "manifest.json").unlink()
    last.save(2, make_content(2))
    assert last.steps() == [1, 2]
    (problem,) = told
    assert "step-00000001 could not be copied" in problem


class FlakyFiles(MemoryFileSystem):  # type: ignore[misc]
    """The files of memory://, in a storage whose next reads fail."""

    protocol = "flaky"
    num_failures = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = MemoryFileSystem._strip_protocol(path.replace("flaky://", "memory://"))
        return stripped

    def cat_file(self, path: str, **options: Any) -> bytes:
        if FlakyFiles.num_failures and path.endswith(".json"):
            FlakyFiles.num_failures -= 1
            raise OSError(5, "the storage does not answer")
        content: bytes = super().cat_file(path, **options)
        return content


@pytest.fixture
def flaky(address: str) -> Any:
    """Returns the same address in a storage that can be made to fail."""
    fsspec.register_implementation("flaky", FlakyFiles, clobber=True)
    yield address.replace("memory:", "flaky:")
    FlakyFiles.num_failures = 0


def damage(content: bytes) -> bytes:
    return content[:-2] + b"!" + content[-1:]


@pytest.mark.parametrize("files", ["state.json", "manifest.json", "no manifest.json"])
def test_address_whose_copies_are_all_damaged_is_refused(tmp_path: Path, address: str, files: str) -> None:
    checkpoints = CheckpointManager(tmp_path / "a", address=address)
    for step in (1, 2):
        checkpoints.save(step, make_content(step))
    memory = fsspec.filesystem("memory")
    for name, content in files_of(address).items():
        if name.endswith(files.removeprefix("no ")):
            memory.rm(name) if files.startswith("no ") else memory.pipe_file(name, damage(content))
    before = files_of(address)
    again = CheckpointManager(tmp_path / "b", address=address)
    with pytest.raises(CorruptFileError, match=r"none of the checkpoints there is whole \(steps 1, 2\)") as refused:
        again.restore_latest()
    assert (refused.value.option, refused.value.value) == ("training.checkpoint_address", address)
    assert [(copy.step, copy.state) for copy in again.copies()] == [(1, None), (2, None)]
    assert files_of(address) == before


def test_address_with_one_interrupted_copy_is_empty(tmp_path: Path, address: str) -> None:
    with armed("checkpoint.before_sent_manifest", crash), pytest.raises(CrashError):
        CheckpointManager(tmp_path / "a", address=address).save(1, make_content(1))
    assert CheckpointManager(tmp_path / "b", address=address).restore_latest() is None


def test_storage_that_fails_for_a_moment_is_read_again(tmp_path: Path, flaky: str) -> None:
    CheckpointManager(tmp_path / "a", address=flaky).save(1, make_content(1))
    again = CheckpointManager(tmp_path / "b", address=flaky)
    FlakyFiles.num_failures = 1
    (copy,) = again.copies()
    assert copy.state == make_content(1).state
    FlakyFiles.num_failures = 2
    assert_same(again.restore_latest(), make_content(1))  # type: ignore[arg-type]
    assert FlakyFiles.num_failures == 0


def test_storage_that_fails_is_not_taken_for_empty(tmp_path: Path, flaky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestrec.artifacts.storage.RETRY_AFTER_S", (0.0,))
    CheckpointManager(tmp_path / "a", address=flaky).save(1, make_content(1))
    again = CheckpointManager(tmp_path / "b", address=flaky)
    FlakyFiles.num_failures = 1000
    with pytest.raises(UserError, match="the storage does not answer") as refused:
        again.copies()
    assert refused.value.option == "training.checkpoint_address"
    with pytest.raises(CheckpointSaveError, match="the storage does not answer"):
        again.restore_latest()


@pytest.mark.parametrize("is_link", [False, True])
def test_address_that_is_no_folder_is_not_taken_for_empty(tmp_path: Path, is_link: bool) -> None:
    there = tmp_path / "there"
    there.symlink_to(tmp_path / "not mounted") if is_link else there.write_text("no folder")
    checkpoints = CheckpointManager(tmp_path / "a", address=str(there / "checkpoints"))
    with pytest.raises(CheckpointSaveError, match="could not be looked into: rank 0: NotADirectoryError"):
        checkpoints.restore_latest()


def test_step_saved_again_replaces_its_copy(tmp_path: Path, address: str) -> None:
    checkpoints = CheckpointManager(tmp_path / "a", address=address)
    checkpoints.save(1, make_content(1))
    checkpoints.set_aside(1)
    checkpoints.save(1, make_content(2))
    restored = CheckpointManager(tmp_path / "b", address=address).restore_latest()
    assert restored is not None
    assert restored.step == 1
    assert_same(restored, make_content(2))


@pytest.mark.parametrize("kind", ["folder", "file", "memory"])
def test_places_write_list_replace_and_remove(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    nested = tmp_path / "not" / "there" / "yet"
    address = request.getfixturevalue("address") if kind == "memory" else str(nested)
    there = storage_of(f"file://{nested}" if kind == "file" else address)
    assert there.address == address
    assert isinstance(there, FsspecStorage if kind == "memory" else LocalStorage)
    assert there.list_folders("") == there.list_folders("a") == []
    there.replace("newest", b"1")
    pieces = [memoryview(b"one "), memoryview(b"two")]
    assert there.write("b/c/file", iter(pieces)) == (7, hashlib.sha256(b"one two").hexdigest())
    there.write("a/file", iter(pieces[:1]))
    assert there.read("b/c/file") == b"one two"
    there.replace("newest", b"22")
    assert there.read("newest") == b"22"
    assert (there.list_folders(""), there.list_folders("b"), there.list_folders("a")) == (["a", "b"], ["c"], [])
    with pytest.raises(FileNotFoundError):
        there.read("a/other")
    for name in ("b", "newest", "never there"):
        there.remove(name)
    assert there.list_folders("") == ["a"]
    with pytest.raises(FileNotFoundError):
        there.read("newest")
    if kind != "memory":
        assert sorted(path.name for path in nested.rglob("*")) == ["a", "file"], "nothing partial is left"


def test_address_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(UserError, match=r"address=nowhere://x: cannot be opened"):
        storage_of("nowhere://x")


def test_copy_whose_manifest_is_a_folder_is_damaged(tmp_path: Path) -> None:
    address = str(tmp_path / "copies")
    CheckpointManager(tmp_path / "a", address=address).save(1, make_content(1))
    (manifest,) = (tmp_path / "copies").rglob("manifest.json")
    manifest.unlink()
    manifest.mkdir()
    with pytest.raises(CorruptFileError, match="none of the checkpoints there is whole"):
        CheckpointManager(tmp_path / "b", address=address).restore_latest()
