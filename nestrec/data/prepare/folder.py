"""A folder that appears whole or not at all: written beside its place under another name, renamed at the end."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from nestrec.base.errors import DataError
from nestrec.base.failpoints import fail_point
from nestrec.base.paths import check_folder, told_if_unwritable
from nestrec.data.card import CARD_FILE


@contextlib.contextmanager
def whole_folder(output: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary sibling of `output`; it takes the place of `output` if the block ends without an error.

    A leftover of a killed run is cleared. A second writer of the same output is refused while the first one lives.
    """
    output = output.absolute()
    check_replaceable(output, force=force)
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


def check_replaceable(output: Path, *, force: bool) -> None:
    """Refuse to touch a non-empty folder, unless it is a dataset and `force` is given."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not output.is_dir() or not (output / CARD_FILE).exists():
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
