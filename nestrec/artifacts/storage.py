"""Storage backends of checkpoints and published versions: a local folder, or any URL that fsspec can open.

Files are written once and do not change, except for the small files that `replace` writes, such as the pointer to the
newest version. A local folder replaces a file by a rename and flushes it to disk (fsync); in an object store an object
becomes visible when it is complete. Plugin packages add backends by entry points of the group `nestrec.storage`: the
name is the URL scheme, the object a class or function that takes the address and returns a `Storage`.
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
    """Read operations of a storage. Names are relative paths with slashes."""

    def read(self, name: str) -> bytes | bytearray:
        """Return the content of a file.

        Raises:
            FileNotFoundError: The file does not exist.
            OSError: The file cannot be read.
        """
        ...

    def list_folders(self, name: str) -> list[str]:
        """Return the sorted names of the folders in a folder; an empty list if the folder does not exist.

        Raises:
            OSError: The name belongs to a file or a dangling link, so folders may be missed.
        """
        ...


class Storage(Reads, Protocol):
    """Files at an address (path or URL). Methods raise an `OSError` on failure."""

    address: str

    def write(self, name: str, content: Iterator[memoryview]) -> tuple[int, str]:
        """Write a new file; return the size and SHA-256 digest of the given content."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Replace a small file atomically: readers see the old content or the new content."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content; do nothing if it does not exist."""
        ...


T = TypeVar("T")
RETRY_AFTER_S = (0.05, 0.2, 1.0)
"""Delays before the retries of a failed read, in seconds."""


class RetriedReads:
    """Read operations that are retried, because a storage may fail temporarily."""

    def __init__(self, storage: Reads):
        self._storage = storage

    def read(self, name: str) -> bytes | bytearray:
        """Read a file; see `Reads.read`."""
        return _with_retries(partial(self._storage.read, name))

    def list_folders(self, name: str) -> list[str]:
        """List folders; see `Reads.list_folders`."""
        return _with_retries(partial(self._storage.list_folders, name))


def _with_retries(read: Callable[[], T]) -> T:
    for wait_s in RETRY_AFTER_S:
        try:
            return read()
        except (FileNotFoundError, IsADirectoryError):
            raise  # the storage has responded, so a retry would give the same result
        except Exception:  # some fsspec file systems raise their own exception types
            time.sleep(wait_s)
    return read()


class TimedReads:
    """Read operations with a timeout, for processes that must not wait for storage that has stopped responding.

    A read of a file system cannot be interrupted. So each read runs on a daemon thread, and the caller gets a
    `TimeoutError` if it takes longer than `timeout_s`. The thread remains until the storage responds or the process
    exits; another read of the same name waits for this thread instead of starting another one.
    """

    def __init__(self, storage: Storage, timeout_s: float):
        self._storage = storage
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pending: dict[str, Future[Any]] = {}

    def read(self, name: str) -> bytes | bytearray:
        """Read a file; see `Reads.read`."""
        content: bytes | bytearray = self._read_with_timeout(name, self._storage.read)
        return content

    def list_folders(self, name: str) -> list[str]:
        """List folders; see `Reads.list_folders`."""
        names: list[str] = self._read_with_timeout(name, self._storage.list_folders)
        return names

    def _read_with_timeout(self, name: str, read: Callable[[str], Any]) -> Any:
        with self._lock:
            future = self._pending.get(name)
            if future is None:
                future = self._pending[name] = Future()
                thread = threading.Thread(target=self._run, args=(name, read, future), daemon=True, name="nestrec-read")
                thread.start()
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            if future.done():  # the storage itself raised the TimeoutError
                raise
            where = f"{self._storage.address}/{name}"
            raise TimeoutError(
                f"reading {where} timed out after {self._timeout_s:g} s: the storage is not responding"
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
            del self._pending[name]


class LocalStorage:
    """Storage in a local folder."""

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
        fsync_path(path.parent)  # flush the files to which the content refers before the content itself
        write_atomic(path, content)

    def read(self, name: str) -> bytearray:
        with (self._folder / name).open("rb", buffering=0) as file:
            content = bytearray(os.fstat(file.fileno()).st_size)  # writable, so that tensors can share this memory
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
                raise NotADirectoryError(errno.ENOTDIR, "the path contains a dangling link", str(path)) from None
            return []

    def commit_folder(self, partial: str, name: str) -> None:
        """Commit a folder whose files are written: rename it, so that it appears with all of its files."""
        fsync_path(self._folder / partial)
        rename_folder(self._folder / partial, self._folder / name)

    def remove(self, name: str) -> None:
        path = self._folder / name
        if path.is_dir():
            remove_folder(path)
        else:
            path.unlink(missing_ok=True)


class FsspecStorage:
    """Storage at a URL that fsspec can open, such as s3://bucket/models or memory://models."""

    def __init__(self, address: str):
        self.address = address
        fsspec = import_extra("fsspec", "addresses", "the address requires fsspec", field="address", value=address)
        try:
            self._files, self._root = fsspec.core.url_to_fs(address)
        except OSError:
            raise
        except Exception as error:  # every fsspec file system raises its own exception types
            remedy = "install the package of its scheme, such as s3fs, or set a folder"
            raise UserError(
                f"the address cannot be opened: {error}", option="address", value=address, remedy=remedy
            ) from error

    def write(self, name: str, content: Iterator[memoryview]) -> tuple[int, str]:
        digest = hashlib.sha256()
        size = 0
        self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
        with self._files.open(self._path(name), "wb") as file:
            for block in content:
                digest.update(block)
                file.write(block)
                size += len(block)
        return size, digest.hexdigest()

    def replace(self, name: str, content: bytes) -> None:
        self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(self._path(name), content)

    def read(self, name: str) -> bytes:
        self._files.invalidate_cache()
        content: bytes = self._files.cat_file(self._path(name))
        return content

    def list_folders(self, name: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            entries: list[dict[str, Any]] = self._files.ls(self._path(name), detail=True)
        except FileNotFoundError:
            return []
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")

    def remove(self, name: str) -> None:
        self._files.invalidate_cache()
        if self._files.exists(self._path(name)):
            self._files.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
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
