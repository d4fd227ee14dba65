"""Where versions and checkpoints lie: a folder, or any address that `fsspec` knows.

A file is written once and never changed, but for the one that says which version is the newest: that is replaced as a
whole. A folder of the file system replaces by renaming and flushes to the disk; an object store has an object when all
of it is there.
"""

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from nestrec.artifacts.atomic_files import remove_folder, write_file
from nestrec.base.errors import UserError
from nestrec.base.files import fsync_path, write_atomic


class Place(Protocol):
    """Names are relative, with slashes. What cannot be done raises an `OSError`."""

    address: str

    def write(self, name: str, content: Iterator[memoryview]) -> tuple[int, str]:
        """A new file; its size and SHA-256 (of what was meant to be written)."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """A small file, which readers find as it was before or as it is now."""
        ...

    def read(self, name: str) -> bytes:
        """`FileNotFoundError` where there is none."""
        ...

    def folders(self, name: str) -> list[str]:
        """Returns the names of the folders in a folder; none if it does not exist. A file or a dangling link in the
        place of the folder is an error: there may be folders that are not found."""
        ...

    def remove(self, name: str) -> None:
        """A file, or a folder with all that is in it; what is gone already is fine."""
        ...


class TimedReads:
    """Reads in bounded time, for processes that must not wait for storage that has stopped answering.

    A read of a file system cannot be interrupted. So each one runs on a daemon thread, and the caller gets a
    `TimeoutError` if it takes longer than `timeout_s`. The thread stays until the storage answers or the process ends;
    another read of the same name waits for it again instead of starting one more.
    """

    def __init__(self, storage: Place, timeout_s: float):
        self._storage = storage
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._under_way: dict[str, Future[Any]] = {}

    def read(self, name: str) -> bytes:
        """Read a file as `Place.read` does."""
        content: bytes = self._in_time(name, self._storage.read)
        return content

    def folders(self, name: str) -> list[str]:
        """List folders as `Place.folders` does."""
        names: list[str] = self._in_time(name, self._storage.folders)
        return names

    def _in_time(self, name: str, read: Callable[[str], Any]) -> Any:
        with self._lock:
            future = self._under_way.get(name)
            if future is None:
                future = self._under_way[name] = Future()
                thread = threading.Thread(target=self._run, args=(name, read, future), daemon=True, name="nestrec-read")
                thread.start()
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            if future.done():  # the storage itself raised it
                raise
            where = f"{self._storage.address}/{name}"
            raise TimeoutError(
                f"{where} was not read within {self._timeout_s:g} s: the storage does not answer"
            ) from None

    def _run(self, name: str, read: Callable[[str], Any], future: "Future[Any]") -> None:
        try:
            result = read(name)
        except BaseException as error:
            self._forget(name)
            future.set_exception(error)
        else:
            self._forget(name)
            future.set_result(result)

    def _forget(self, name: str) -> None:
        with self._lock:
            del self._under_way[name]


class FolderPlace:
    """A folder of the file system."""

    def __init__(self, folder: Path):
        self._folder, self.address = folder, str(folder)

    def write(self, name: str, content: Iterator[memoryview]) -> tuple[int, str]:
        path = self._folder / name
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            fsync_path(path.parent.parent)
        return write_file(path, content)

    def replace(self, name: str, content: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / name
        fsync_path(path.parent)  # the files that the content names are on the disk before the content is
        write_atomic(path, content)

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def folders(self, name: str) -> list[str]:
        path = self._folder / name
        try:
            with os.scandir(path) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            if any(part.is_symlink() and not part.exists() for part in (path, *path.parents)):
                raise NotADirectoryError(errno.ENOTDIR, "is behind a link that leads nowhere", str(path)) from None
            return []

    def remove(self, name: str) -> None:
        path = self._folder / name
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)


class FsspecPlace:
    """An address of another kind, such as s3://bucket/models or memory://models."""

    def __init__(self, address: str):
        self.address = address
        try:
            import fsspec  # type: ignore[import-untyped]

            self._files, self._root = fsspec.core.url_to_fs(address)
        except OSError:
            raise
        except Exception as error:  # each kind of address raises exceptions of its own
            remedy = (
                "install what its kind needs (pip install 'nestrec[addresses]', s3fs, gcsfs, ...), or name a folder"
            )
            raise UserError(f"cannot be opened: {error}", field="address", value=address, remedy=remedy) from error

    def write(self, name: str, content: Iterator[memoryview]) -> tuple[int, str]:
        digest, size = hashlib.sha256(), 0
        self._files.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
        with self._files.open(self._at(name), "wb") as file:
            for piece in content:
                digest.update(piece)
                file.write(piece)
                size += len(piece)
        return size, digest.hexdigest()

    def replace(self, name: str, content: bytes) -> None:
        self._files.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(self._at(name), content)

    def read(self, name: str) -> bytes:
        self._files.invalidate_cache()
        content: bytes = self._files.cat_file(self._at(name))
        return content

    def folders(self, name: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            found: list[dict[str, Any]] = self._files.ls(self._at(name), detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory")

    def remove(self, name: str) -> None:
        self._files.invalidate_cache()
        if self._files.exists(self._at(name)):
            self._files.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name


def place_of(address: str) -> Place:
    """The place that an address names; nothing is asked of it yet."""
    kind, separator, rest = address.partition("://")
    if not separator:
        return FolderPlace(Path(address))
    return FolderPlace(Path(rest)) if kind == "file" else FsspecPlace(address)
