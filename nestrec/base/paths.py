"""Paths that a user names, checked before anything is written."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nestrec.base.errors import UserError

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
