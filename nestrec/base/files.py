"""Atomic writes: files and folders that appear complete or not at all, and checks of paths that a user names.

A file or folder is written under a temporary name next to its target, flushed to the disk, and renamed. All temporary
names begin with a dot and end with `.partial`.
"""

import contextlib
import errno
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nestrec.base.errors import DataError, UserError, require
from nestrec.base.failpoints import fail_point

PARTIAL = ".partial"
"""Suffix of all temporary names."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG)
_SHORT_OF_NUMPY = " requested and "
"""Part of numpy's error message for a short write, which has no error number."""


def parse_path(value: Any, field: str) -> Path:
    """Return the path that a Python caller passed as text or as a path object.

    Raises:
        UserError: The value is neither; `field` is the name of the argument.
    """
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        remedy = 'pass text or a Path, such as "data/mine"'
        if hasattr(value, "to_parquet") or hasattr(value, "write_parquet"):  # a data frame of pandas or polars
            remedy = 'write the table to a file first, such as "events.parquet", and pass its path'
        raise UserError("must be a path", option=field, value=value, remedy=remedy)
    return Path(value)


def check_folder(path: Path, field: str) -> None:
    """Raise a `UserError` unless `path` is a writable folder, or a folder that could be created."""
    ancestor = next(parent for parent in (path.absolute(), *path.absolute().parents) if _path_exists(parent))
    if not ancestor.is_dir():
        problem = "is a file" if ancestor == path.absolute() else f"the path contains the file {ancestor}"
        raise UserError(
            problem, option=field, value=str(path), remedy="use a folder, or a path that does not exist yet"
        )
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot be written: no permission in {ancestor}",
            option=field,
            value=str(path),
            remedy="use another folder, or change the permissions",
        )


def check_file(path: Path | None) -> Path | None:
    """Return the path of an output file of a command, or raise a `UserError` before the work starts."""
    if path is not None:
        check_folder(path.parent, "file")
        require(not path.is_dir(), "is a folder", option="file", value=str(path), remedy="use the path of a file")
    return path


@contextlib.contextmanager
def raise_if_unwritable(path: Path, field: str) -> Iterator[None]:
    """Convert system errors of the block, such as a full or read-only disk, to a `UserError` that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE and _SHORT_OF_NUMPY not in str(error):
            raise
        problem = f"cannot be written: {error.strerror or error}"
        remedy = "free disk space or fix its permissions"
        raise UserError(problem, option=field, value=str(error.filename or path), remedy=remedy) from error


def fsync_path(path: Path) -> None:
    """Flush the bytes of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replaced_file(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[Path]:
    """Yield an empty temporary file next to `path`, which replaces `path` if the block ends without an error.

    Readers see the old content or the new content, and several processes may write the same path at once: the last
    rename wins. A killed process leaves its temporary file; see `remove_partials`.

    Args:
        path: The file to write, in a folder that exists.
        mode: Permissions of the new file, less those that the umask removes.
        durable: Flush the file before the rename and the folder after it, so that the new content survives a power
            failure.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}{PARTIAL}")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        yield partial
        if durable:
            fsync_path(partial)
        fail_point("file.before_rename")
        partial.replace(path)
    except OSError as error:
        if str(error.filename) == str(partial):  # an error message names the file that the user knows
            error.filename = str(path)
            error.filename2 = None
        raise
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        fsync_path(path.parent)


def write_atomic(path: Path, data: str | bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Replace the content of a file, text as UTF-8; the arguments are those of `replaced_file`."""
    with replaced_file(path, mode=mode, durable=durable) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


def remove_partials(folder: Path, name: str | None = None) -> None:
    """Remove the temporary files that killed writers left in a folder.

    Only for files with a single writer: the temporary file of another writer would be removed as well.

    Args:
        folder: The folder, which may not exist.
        name: Name of the file that they wrote; None for all files of the folder.
    """
    for path in folder.glob(f".{'*' if name is None else glob.escape(name)}.*-*{PARTIAL}"):
        if path.is_file():
            path.unlink(missing_ok=True)


def _path_exists(path: Path) -> bool:
    """Return whether the path exists, broken symbolic links included."""
    return os.path.lexists(path)


@contextlib.contextmanager
def replaced_folder(path: Path, *, marker: str, force: bool = False, field: str = "output") -> Iterator[Path]:
    """Yield an empty temporary folder next to `path`, which replaces `path` if the block ends without an error.

    The temporary folder of a killed writer is cleared. A second writer of the same path gets an error while the first
    one is running. The files are flushed to the disk only if the block does so.

    Args:
        path: The folder to write.
        marker: Name of a file; a folder that is not empty is replaced only if it contains this file.
        force: Replace a folder that is not empty.
        field: Name of the option that named `path`, for error messages.
    """
    path = path.absolute()
    check_replaceable(path, marker=marker, force=force)
    check_folder(path.parent, field)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(
        path.with_name(f".{path.name}.preparing"), ignore_errors=True
    )  # the temporary name that earlier versions used
    partial = path.with_name(f".{path.name}{PARTIAL}")
    descriptor = _lock(partial, path)
    try:
        _clear(partial)
        with raise_if_unwritable(path, field):
            yield partial
            fail_point("folder.before_rename")
            _replace(path, partial)
            fsync_path(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def check_replaceable(output: Path, *, marker: str, force: bool) -> None:
    """Raise if `output` is a non-empty folder, unless it holds the file `marker` and `force` is set."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not output.is_dir() or not (output / marker).exists():
        raise DataError(
            "exists and is not a prepared dataset", option="output", value=str(output), remedy="use another folder"
        )
    remedy = "use another folder, or add --force to replace it"
    require(force, "already contains a dataset", option="output", value=str(output), remedy=remedy, error=DataError)


def _lock(temporary: Path, output: Path) -> int:
    """Lock the temporary folder exclusively and return its descriptor; the kernel unlocks it if the process dies."""
    while True:
        temporary.mkdir(exist_ok=True)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            remedy = "wait until the other process has finished"
            raise DataError(
                "is being written by another process", option="output", value=str(output), remedy=remedy
            ) from None
        # Another writer may have renamed the folder to its final name between mkdir and flock; do not clear it then.
        if temporary.exists() and os.stat(temporary).st_ino == os.fstat(descriptor).st_ino:
            return descriptor
        os.close(descriptor)


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _replace(output: Path, temporary: Path) -> None:
    if output.exists() and any(output.iterdir()):
        old = output.parent / f".{output.name}.replaced"
        shutil.rmtree(old, ignore_errors=True)
        output.rename(old)
        temporary.rename(output)
        shutil.rmtree(old)
    else:
        temporary.rename(output)
