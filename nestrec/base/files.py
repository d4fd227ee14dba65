"""Paths that a user names, checked before anything is written.

A folder that appears whole or not at all: written beside its place under another name, renamed at the end.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nestrec.base.errors import DataError, UserError
from nestrec.base.failpoints import fail_point

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG)
_SHORT_OF_NUMPY = " requested and "
"""Part of what it says, without a number, where it wrote less than it should."""


def given_path(value: Any, field: str) -> Path:
    """The path that a script names, as text or as one."""
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        remedy = 'give text or a Path, such as "data/mine"'
        if hasattr(value, "to_parquet") or hasattr(value, "write_parquet"):  # a data frame of pandas or polars
            remedy = 'write the table into a file first, such as "events.parquet", and give its path'
        raise UserError("is no path", field=field, value=value, remedy=remedy)
    return Path(value)


def check_folder(path: Path, field: str) -> None:
    """Raise unless `path` is a folder that can be written, or one that could be made."""
    present = next(place for place in (path.absolute(), *path.absolute().parents) if _is_there(place))
    if not present.is_dir():
        problem = "is a file" if present == path.absolute() else f"runs through the file {present}"
        raise UserError(problem, field=field, value=str(path), remedy="name a folder, or one that does not exist yet")
    if not os.access(present, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot be written: no permission in {present}",
            field=field,
            value=str(path),
            remedy="name another folder, or change its permissions",
        )


def check_file(path: Path | None) -> Path | None:
    """The path of a file that can be written, for an option of a command: asked before the work, not after it."""
    if path is not None:
        check_folder(path.parent, "file")
        if path.is_dir():
            raise UserError("is a folder", field="file", value=str(path), remedy="name a file")
    return path


@contextlib.contextmanager
def told_if_unwritable(path: Path, field: str) -> Iterator[None]:
    """A full disk, or one that may not be written, is an error that names the path and not one of the system."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE and _SHORT_OF_NUMPY not in str(error):
            raise
        problem, remedy = f"cannot be written: {error.strerror or error}", "free disk space or mend permissions"
        raise UserError(problem, field=field, value=str(error.filename or path), remedy=remedy) from error


def sync_folder(path: Path) -> None:
    """Flush the names in a folder, or the bytes of a file, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_there(path: Path) -> bool:
    """Also where a link leads nowhere; not where the path runs through a file."""
    return os.path.lexists(path)


@contextlib.contextmanager
def whole_folder(output: Path, *, marker: str, force: bool) -> Iterator[Path]:
    """Yield a temporary sibling of `output`; it takes the place of `output` if the block ends without an error.

    A leftover of a killed run is cleared. A second writer of the same output is refused while the first one lives.
    A non-empty folder is replaced only if it holds the file `marker` and `force` is set.
    """
    output = output.absolute()
    check_replaceable(output, marker=marker, force=force)
    check_folder(output.parent, "output")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.parent / f".{output.name}.preparing"
    descriptor = _lock(temporary, output)
    try:
        _clear(temporary)
        with told_if_unwritable(output, "output"):
            yield temporary
            fail_point("data.before_rename")
            _replace(output, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def check_replaceable(output: Path, *, marker: str, force: bool) -> None:
    """Raise if `output` is a non-empty folder, unless it holds the file `marker` and `force` is set."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not output.is_dir() or not (output / marker).exists():
        raise DataError(
            "exists and is not a prepared dataset", field="output", value=str(output), remedy="name another folder"
        )
    if not force:
        remedy = "name another folder, or give --force to replace it"
        raise DataError("already holds a dataset", field="output", value=str(output), remedy=remedy)


def _lock(temporary: Path, output: Path) -> int:
    """An exclusive lock on the temporary folder itself, which the kernel drops when the process dies."""
    while True:
        temporary.mkdir(exist_ok=True)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            remedy = "wait for the other `nestrec prepare` to end"
            raise DataError(
                "is being written by another process", field="output", value=str(output), remedy=remedy
            ) from None
        # The folder may have been renamed into place between mkdir and the lock: then this is no longer ours to clear.
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
