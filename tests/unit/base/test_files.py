"""Atomic writes: complete or not at all, flushed in an order that no crash can turn around, without leftovers."""

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
    """(what, inode) of flushes and renames, in order; the real ones are made as well."""
    seen: list[tuple[str, int]] = []
    fsync = os.fsync
    rename = os.rename
    replace = os.replace

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        seen.append(("flush", os.fstat(descriptor).st_ino))

    def watched(move: Callable[[Path, Path], None], source: Path, target: Path) -> None:
        move(source, target)
        seen.append(("rename", os.stat(target).st_ino))

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", lambda source, target: watched(rename, source, target))
    monkeypatch.setattr(os, "replace", lambda source, target: watched(replace, source, target))
    return seen


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
    assert [what for what, _ in events] == ["rename"]


@pytest.mark.usefixtures("umask")
def test_write_atomic_sets_the_mode_of_a_file_that_exists(tmp_path: Path) -> None:
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


def test_remove_partials_removes_those_of_one_file(tmp_path: Path) -> None:
    mine = tmp_path / ".a[1].json.12-ab.partial"
    other = tmp_path / ".b.json.12-ab.partial"
    kept = [tmp_path / "a[1].json", tmp_path / "a.partial", tmp_path / ".folder.12-ab.partial" / "file"]
    kept[-1].parent.mkdir()
    for path in (mine, other, *kept):
        path.write_text("")
    remove_partials(tmp_path, "a[1].json")
    assert (mine.exists(), other.exists()) == (False, True)
    remove_partials(tmp_path)
    assert not other.exists()
    assert all(path.exists() for path in kept)


def test_replaced_folder_clears_leftovers_of_all_versions(tmp_path: Path) -> None:
    for name in (".out.partial", ".out.preparing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "left").write_text("of a killed writer")
    with replaced_folder(tmp_path / "out", marker="card.json") as partial:
        (partial / "card.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["card.json"]


def test_replaced_folder_flushes_the_parent_after_rename(tmp_path: Path, events: list[tuple[str, int]]) -> None:
    with replaced_folder(tmp_path / "out", marker="card.json"):
        pass
    assert events == [("rename", inode(tmp_path / "out")), ("flush", inode(tmp_path))]
