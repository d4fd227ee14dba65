"""Atomic writes: files are complete or absent, flushed in a crash-safe order, and leave no partial files."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nestrec.base.files import remove_partials, replaced_file, replaced_folder, write_atomic
from support.fail_points import armed


class CrashError(BaseException):
    pass


def crash() -> None:
    raise CrashError


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record the flushes and renames as (operation, inode), in order; they are also executed."""
    recorded: list[tuple[str, int]] = []
    fsync = os.fsync
    rename = os.rename
    replace = os.replace

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        recorded.append(("flush", os.fstat(descriptor).st_ino))

    def recorded_move(move: Callable[[Path, Path], None], source: Path, target: Path) -> None:
        move(source, target)
        recorded.append(("rename", os.stat(target).st_ino))

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", lambda source, target: recorded_move(rename, source, target))
    monkeypatch.setattr(os, "replace", lambda source, target: recorded_move(replace, source, target))
    return recorded


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_write_atomic_flushes_file_then_rename_then_folder(tmp_path: Path, events: list[tuple[str, int]]) -> None:
    path = tmp_path / "card.json"
    write_atomic(path, "text")
    assert path.read_text() == "text"
    assert events == [("flush", inode(path)), ("rename", inode(path)), ("flush", inode(tmp_path))]


def test_write_atomic_flushes_nothing_if_not_durable(tmp_path: Path, events: list[tuple[str, int]]) -> None:
    write_atomic(tmp_path / "page.html", b"text", durable=False)
    assert [operation for operation, _ in events] == ["rename"]


@pytest.mark.usefixtures("umask")
def test_write_atomic_sets_mode_of_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    write_atomic(path, "open to all")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    write_atomic(path, "for the owner", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_replaced_file_keeps_the_old_content_on_an_error(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    write_atomic(path, "old")
    with armed("file.before_rename", crash), pytest.raises(CrashError):
        write_atomic(path, "new")
    with pytest.raises(CrashError), replaced_file(path):
        crash()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_replaced_file_allows_two_writers(tmp_path: Path) -> None:
    path = tmp_path / "newest.json"
    with replaced_file(path) as first, replaced_file(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_replaced_file_names_the_target_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "card.json"
    with pytest.raises(FileNotFoundError) as caught:
        write_atomic(path, "text")
    assert caught.value.filename == str(path)
    folder = tmp_path / "config.json"
    folder.mkdir()
    with pytest.raises(IsADirectoryError) as raised:
        write_atomic(folder, "text")
    assert (raised.value.filename, raised.value.filename2) == (str(folder), None)


def test_remove_partials_removes_partials_of_one_file(tmp_path: Path) -> None:
    own = tmp_path / ".a[1].json.12-ab.partial"
    other = tmp_path / ".b.json.12-ab.partial"
    others = [tmp_path / "a[1].json", tmp_path / "a.partial", tmp_path / ".folder.12-ab.partial" / "file"]
    others[-1].parent.mkdir()
    for path in (own, other, *others):
        path.write_text("")
    remove_partials(tmp_path, "a[1].json")
    assert (own.exists(), other.exists()) == (False, True)
    remove_partials(tmp_path)
    assert not other.exists()
    assert all(path.exists() for path in others)


def test_replaced_folder_clears_leftovers_of_all_versions(tmp_path: Path) -> None:
    for name in (".out.partial", ".out.preparing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "left").write_text("by a killed writer")
    with replaced_folder(tmp_path / "out", marker="card.json") as partial:
        (partial / "card.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["card.json"]


def test_replaced_folder_flushes_the_parent_after_rename(tmp_path: Path, events: list[tuple[str, int]]) -> None:
    with replaced_folder(tmp_path / "out", marker="card.json"):
        pass
    assert events == [("rename", inode(tmp_path / "out")), ("flush", inode(tmp_path))]
