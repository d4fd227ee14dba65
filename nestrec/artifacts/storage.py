"""Storage backends of checkpoints and published versions: a folder, or any address that `fsspec` can open.

A file is written once and does not change, except the small files that `replace` writes, such as the one that names the
newest version. A local folder replaces a file by a rename and flushes it to the disk; in an object store an object
appears when it is complete. Packages add backends by entry points of the group `nestrec.storage`: the name is the
scheme of the address, the object a class or function that takes the address and returns a `Storage`.
"""

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from nestrec.artifacts.atomic_files import remove_folder, rename_folder, write_file
from nestrec.base.errors import UserError
from nestrec.base.files import fsync_path, write_atomic
from nestrec.base.lazy import import_extra
from nestrec.base.plugins import PluginRegistry


class Reads(Protocol):
    """The reading half of a storage. Names are relative, with slashes."""

    def read(self, name: str) -> bytes | bytearray:
        """Return the content of a file; `FileNotFoundError` if it does not exist, another `OSError` if it cannot be
        read."""
        ...

    def list_folders(self, name: str) -> list[str]:
        """Return the names of the folders in a folder, sorted; an empty list if the folder does not exist.

        A file or a dangling link under the name of the folder is an error: there may be folders that are not found.
        """
        ...


class Storage(Reads, Protocol):
    """Files at an address. A method that fails raises an `OSError`."""

    address: str

    def write(self, name: str, content: Iterator[memoryview]) -> tuple[int, str]:
        """Write a new file; return the size and SHA-256 of the content that was given."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file; readers see the old content or the new content."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content; do nothing if it does not exist."""
        ...


T = TypeVar("T")
RETRY_AFTER_S = (0.05, 0.2, 1.0)
"""Waits before a read that failed is repeated."""


class RetriedReads:
    """Repeats reads that fail, because a storage may fail for a moment."""

    def __init__(self, storage: Reads):
        self._storage = storage

    def read(self, name: str) -> bytes | bytearray:
        """Read a file as `Storage.read` does."""
        return _retried(partial(self._storage.read, name))

    def list_folders(self, name: str) -> list[str]:
        """List folders as `Storage.list_folders` does."""
        return _retried(partial(self._storage.list_folders, name))


def _retried(read: Callable[[], T]) -> T:
    for wait_s in RETRY_AFTER_S:
        try:
            return read()
        except (FileNotFoundError, IsADirectoryError):
            raise  # the storage has answered
        except Exception:  # some file systems of fsspec raise errors of their own
            time.sleep(wait_s)
    return read()


class TimedReads:
    """Reads in bounded time, for processes that must not wait for storage that has stopped answering.

    A read of a file system cannot be interrupted. So each one runs on a daemon thread, and the caller gets a
    `TimeoutError` if it takes longer than `timeout_s`. The thread stays until the storage answers or the process ends;
    another read of the same name waits for it again instead of starting one more.
    """

    def __init__(self, storage: Storage, timeout_s: float):
        self._storage = storage
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._under_way: dict[str, Future[Any]] = {}

    def read(self, name: str) -> bytes | bytearray:
        """Read a file as `Storage.read` does."""
        content: bytes | bytearray = self._in_time(name, self._storage.read)
        return content

    def list_folders(self, name: str) -> list[str]:
        """List folders as `Storage.folders` does."""
        names: list[str] = self._in_time(name, self._storage.list_folders)
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


class LocalStorage:
    """A folder of the file system."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.address = str(folder)

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

    def read(self, name: str) -> bytearray:
        with (self._folder / name).open("rb", buffering=0) as file:
            content = bytearray(os.fstat(file.fileno()).st_size)  # of its own, so that tensors can share this memory
            size = 0
            with memoryview(content) as view:
                while num_read := file.readinto(view[size:]):
                    size += num_read
            del content[size:]
            content += file.readall()
            return content

    def list_folders(self, name: str) -> list[str]:
        path = self._folder / name
        try:
            with os.scandir(path) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            if any(part.is_symlink() and not part.exists() for part in (path, *path.parents)):
                raise NotADirectoryError(errno.ENOTDIR, "is behind a link that leads nowhere", str(path)) from None
            return []

    def commit_folder(self, partial: str, name: str) -> None:
        """Rename a folder whose files are written; it appears with all of its names."""
        fsync_path(self._folder / partial)
        rename_folder(self._folder / partial, self._folder / name)

    def remove(self, name: str) -> None:
        path = self._folder / name
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)


class FsspecStorage:
    """An address of another kind, such as s3://bucket/models or memory://models."""

    def __init__(self, address: str):
        self.address = address
        fsspec = import_extra("fsspec", "addresses", "cannot be opened without fsspec", field="address", value=address)
        try:
            self._files, self._root = fsspec.core.url_to_fs(address)
        except OSError:
            raise
        except Exception as error:  # each kind of address raises exceptions of its own
            remedy = (
                "install what its kind needs (pip install 'nestrec[addresses]', s3fs, gcsfs, ...), or name a folder"
            )
            raise UserError(f"cannot be opened: {error}", option="address", value=address, remedy=remedy) from error

    def write(self, name: str, content: Iterator[memoryview]) -> tuple[int, str]:
        digest = hashlib.sha256()
        size = 0
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

    def list_folders(self, name: str) -> list[str]:
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


BACKENDS: PluginRegistry[Callable[[str], Storage]] = PluginRegistry(
    "nestrec.storage", "storage backend", {}, of=Callable
)


def storage_of(address: str) -> Storage:
    """Return the storage at an address, a path or SCHEME://REST; nothing is read or written yet."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme == "file":
        return LocalStorage(Path(rest if separator else address))
    return BACKENDS.find(scheme)(address) if scheme in BACKENDS else FsspecStorage(address)
