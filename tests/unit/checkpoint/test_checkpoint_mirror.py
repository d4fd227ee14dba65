"""Checkpoint mirrors at an fsspec address: a run uploads its checkpoints, and restores them if its folder has none."""

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


def test_mirror_resumes_run_without_local_checkpoints(tmp_path: Path, address: str) -> None:
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


def test_mirror_uploads_and_downloads_incremental_chain(tmp_path: Path, address: str) -> None:
    draw = random.Random(1)
    rows = dict[int, tuple[float, ...]]()
    checkpoints = CheckpointManager(tmp_path / "a", keep=1, max_deltas=3, address=address)
    for step in range(1, 7):
        base = checkpoints.next_base_step()
        touched = [make_rows(draw.sample(range(30), 5), step)]
        rows |= table_values(touched)
        checkpoints.save(step, RankCheckpoint(state={}, tables={"items": touched}, base=base))
    shutil.rmtree(tmp_path / "a")
    restored = CheckpointManager(tmp_path / "a", max_deltas=3, address=address).restore_latest()
    assert restored is not None
    assert restored.manifest.base is not None
    assert values_of(restored, "items") == rows


def test_mirror_download_restarts_after_kill(tmp_path: Path, address: str) -> None:
    checkpoints = CheckpointManager(tmp_path / "a", max_deltas=3, address=address)
    for step in range(1, 4):
        base = checkpoints.next_base_step()
        checkpoints.save(step, RankCheckpoint(state={}, tables={"items": [make_rows(range(step), step)]}, base=base))
    shutil.rmtree(tmp_path / "a")
    with armed("checkpoint.after_fetched", crash, at=2), pytest.raises(CrashError):
        CheckpointManager(tmp_path / "a", max_deltas=3, address=address).restore_latest()
    restored = CheckpointManager(tmp_path / "a", max_deltas=3, address=address).restore_latest()
    assert restored is not None
    assert restored.step == 3


def test_mirror_ignores_incomplete_or_corrupt_copies(tmp_path: Path, address: str) -> None:
    checkpoints = CheckpointManager(tmp_path / "a", address=address)
    for step in (1, 2):
        checkpoints.save(step, make_content(step))
    with armed("checkpoint.before_sent_manifest", crash), pytest.raises(CrashError):
        checkpoints.save(3, make_content(3))
    damaged = next(name for name in files_of(address) if "step-00000002/rows" in name)
    fsspec.filesystem("memory").pipe_file(damaged, files_of(address)[damaged][:-1] + b"!")
    messages: list[str] = []
    restored = CheckpointManager(tmp_path / "b", address=address, report=messages.append).restore_latest()
    assert restored is not None
    assert_same(restored, make_content(1))
    assert len(messages) == 1
    assert "does not match its digest" in messages[0]
    assert verify(tmp_path / "a" / "step-00000003") == [], "the checkpoint in the folder is complete"
    reopened = CheckpointManager(tmp_path / "a", address=address)
    reopened.save(4, make_content(4))
    assert {name.split("/")[-2] for name in files_of(address)} >= {"step-00000004"}
    assert CheckpointManager(tmp_path / "c", address=address).restore_latest().step == 4  # type: ignore[union-attr]


def test_mirror_upload_failure_warns_and_continues(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    messages: list[str] = []
    checkpoints = CheckpointManager(tmp_path / "a", address=str(tmp_path / "file" / "run"), report=messages.append)
    checkpoints.save(1, make_content(1))
    assert checkpoints.steps() == [1]
    (problem,) = messages
    assert "step-00000001 could not be uploaded to" in problem


def test_mirror_retries_upload_of_best_weights(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    messages = list[str]()

    def make_managers() -> tuple[CheckpointManager, CheckpointManager]:
        best = CheckpointManager(tmp_path / "best", keep=1, report=messages.append, address=str(mirror / "best"))
        last = CheckpointManager(
            tmp_path / "last", report=messages.append, address=str(mirror / "last"), max_deltas=2, sibling=best
        )
        return last, best

    mirror.write_text("not a folder, so that uploads fail")
    last, best = make_managers()
    last.save(1, make_content(1), link_to=best)
    assert len(messages) == 2
    mirror.unlink()
    last.save(2, make_content(2))
    assert CheckpointManager(mirror / "best").steps() == [1]

    with armed("checkpoint.before_sent_manifest", crash, at=2), pytest.raises(CrashError):
        last.save(3, make_content(3), link_to=best)
    assert CheckpointManager(mirror / "last").steps() == [2, 3]
    assert verify(mirror / "best" / "step-00000003") != []
    last, best = make_managers()
    last.save(3, make_content(3))
    assert verify(mirror / "best" / "step-00000003") == []


def test_mirror_corrupt_best_weights_warn_and_save_continues(tmp_path: Path) -> None:
    messages: list[str] = []
    best = CheckpointManager(tmp_path / "best", keep=1, report=messages.append, address=str(tmp_path / "mirror"))
    last = CheckpointManager(tmp_path / "last", report=messages.append, sibling=best)
    last.save(1, make_content(1), link_to=best)
    shutil.rmtree(tmp_path / "mirror")
    (tmp_path / "best" / "step-00000001" / "manifest.json").unlink()
    last.save(2, make_content(2))
    assert last.steps() == [1, 2]
    (problem,) = messages
    assert "step-00000001 could not be uploaded" in problem


class FlakyFiles(MemoryFileSystem):  # type: ignore[misc]
    """The memory file system, with a configurable number of failing reads."""

    protocol = "flaky"
    num_failures = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = MemoryFileSystem._strip_protocol(path.replace("flaky://", "memory://"))
        return stripped

    def cat_file(self, path: str, **options: Any) -> bytes:
        if FlakyFiles.num_failures and path.endswith(".json"):
            FlakyFiles.num_failures -= 1
            raise OSError(5, "the storage does not respond")
        content: bytes = super().cat_file(path, **options)
        return content


@pytest.fixture
def flaky(address: str) -> Any:
    """Return the same address in a storage whose reads can fail."""
    fsspec.register_implementation("flaky", FlakyFiles, clobber=True)
    yield address.replace("memory:", "flaky:")
    FlakyFiles.num_failures = 0


def corrupt(content: bytes) -> bytes:
    return content[:-2] + b"!" + content[-1:]


@pytest.mark.parametrize("files", ["state.json", "manifest.json", "no manifest.json"])
def test_mirror_with_only_corrupt_copies_is_error(tmp_path: Path, address: str, files: str) -> None:
    checkpoints = CheckpointManager(tmp_path / "a", address=address)
    for step in (1, 2):
        checkpoints.save(step, make_content(step))
    memory = fsspec.filesystem("memory")
    for name, content in files_of(address).items():
        if name.endswith(files.removeprefix("no ")):
            memory.rm(name) if files.startswith("no ") else memory.pipe_file(name, corrupt(content))
    before = files_of(address)
    reopened = CheckpointManager(tmp_path / "b", address=address)
    with pytest.raises(CorruptFileError, match=r"all checkpoints in the mirror are corrupt \(steps 1, 2\)") as raised:
        reopened.restore_latest()
    assert (raised.value.option, raised.value.value) == ("training.checkpoint_mirror", address)
    assert [(copy.step, copy.state) for copy in reopened.copies()] == [(1, None), (2, None)]
    assert files_of(address) == before


def test_mirror_with_one_interrupted_copy_is_empty(tmp_path: Path, address: str) -> None:
    with armed("checkpoint.before_sent_manifest", crash), pytest.raises(CrashError):
        CheckpointManager(tmp_path / "a", address=address).save(1, make_content(1))
    assert CheckpointManager(tmp_path / "b", address=address).restore_latest() is None


def test_mirror_transient_read_error_is_retried(tmp_path: Path, flaky: str) -> None:
    CheckpointManager(tmp_path / "a", address=flaky).save(1, make_content(1))
    reopened = CheckpointManager(tmp_path / "b", address=flaky)
    FlakyFiles.num_failures = 1
    (copy,) = reopened.copies()
    assert copy.state == make_content(1).state
    FlakyFiles.num_failures = 2
    assert_same(reopened.restore_latest(), make_content(1))  # type: ignore[arg-type]
    assert FlakyFiles.num_failures == 0


def test_mirror_read_error_is_not_empty_mirror(tmp_path: Path, flaky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestrec.artifacts.storage.RETRY_AFTER_S", (0.0,))
    CheckpointManager(tmp_path / "a", address=flaky).save(1, make_content(1))
    reopened = CheckpointManager(tmp_path / "b", address=flaky)
    FlakyFiles.num_failures = 1000
    with pytest.raises(UserError, match="the storage does not respond") as raised:
        reopened.copies()
    assert raised.value.option == "training.checkpoint_mirror"
    with pytest.raises(CheckpointSaveError, match="the storage does not respond"):
        reopened.restore_latest()


@pytest.mark.parametrize("is_link", [False, True])
def test_mirror_address_of_a_file_is_error(tmp_path: Path, is_link: bool) -> None:
    mirror = tmp_path / "mirror"
    mirror.symlink_to(tmp_path / "not mounted") if is_link else mirror.write_text("not a folder")
    checkpoints = CheckpointManager(tmp_path / "a", address=str(mirror / "checkpoints"))
    with pytest.raises(CheckpointSaveError, match="could not be listed: rank 0: NotADirectoryError"):
        checkpoints.restore_latest()


def test_mirror_replaces_copy_of_step_saved_again(tmp_path: Path, address: str) -> None:
    checkpoints = CheckpointManager(tmp_path / "a", address=address)
    checkpoints.save(1, make_content(1))
    checkpoints.quarantine(1)
    checkpoints.save(1, make_content(2))
    restored = CheckpointManager(tmp_path / "b", address=address).restore_latest()
    assert restored is not None
    assert restored.step == 1
    assert_same(restored, make_content(2))


@pytest.mark.parametrize("kind", ["folder", "file", "memory"])
def test_storage_writes_lists_replaces_and_removes(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    nested = tmp_path / "does" / "not" / "exist"
    address = request.getfixturevalue("address") if kind == "memory" else str(nested)
    mirror = storage_of(f"file://{nested}" if kind == "file" else address)
    assert mirror.address == address
    assert isinstance(mirror, FsspecStorage if kind == "memory" else LocalStorage)
    assert mirror.list_folders("") == mirror.list_folders("a") == []
    mirror.replace("newest", b"1")
    blocks = [memoryview(b"one "), memoryview(b"two")]
    assert mirror.write("b/c/file", iter(blocks)) == (7, hashlib.sha256(b"one two").hexdigest())
    mirror.write("a/file", iter(blocks[:1]))
    assert mirror.read("b/c/file") == b"one two"
    mirror.replace("newest", b"22")
    assert mirror.read("newest") == b"22"
    assert (mirror.list_folders(""), mirror.list_folders("b"), mirror.list_folders("a")) == (["a", "b"], ["c"], [])
    with pytest.raises(FileNotFoundError):
        mirror.read("a/other")
    for name in ("b", "newest", "missing"):
        mirror.remove(name)
    assert mirror.list_folders("") == ["a"]
    with pytest.raises(FileNotFoundError):
        mirror.read("newest")
    if kind != "memory":
        assert sorted(path.name for path in nested.rglob("*")) == ["a", "file"], "no partial files remain"


def test_storage_of_unknown_protocol_is_error() -> None:
    with pytest.raises(UserError, match=r"address=nowhere://x: the address cannot be opened"):
        storage_of("nowhere://x")


def test_mirror_copy_with_folder_as_manifest_is_corrupt(tmp_path: Path) -> None:
    address = str(tmp_path / "copies")
    CheckpointManager(tmp_path / "a", address=address).save(1, make_content(1))
    (manifest,) = (tmp_path / "copies").rglob("manifest.json")
    manifest.unlink()
    manifest.mkdir()
    with pytest.raises(CorruptFileError, match="all checkpoints in the mirror are corrupt"):
        CheckpointManager(tmp_path / "b", address=address).restore_latest()
