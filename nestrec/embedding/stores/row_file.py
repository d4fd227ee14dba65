"""A file of rows that grows, and reads and writes of single rows from inside host loops."""

import contextlib
import os
import re
import secrets
import weakref
from pathlib import Path

from numba import types

from nestrec.base.errors import UserError

_GROWTH = 1.5

# The C library's own calls, so that loops without the GIL can use them; addresses are passed as integers.
pread = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))
pwrite = types.ExternalFunction("pwrite", types.intp(types.int32, types.uintp, types.uintp, types.int64))


class RowFile:
    """Rows of `row_bytes` one after another, in the folder of `path`.

    The file is scratch and belongs to this object: its name is unique and is gone as soon as it is open, so that nobody
    else can write into it, and the kernel removes it with the process, however that ends.
    """

    def __init__(self, path: Path, row_bytes: int) -> None:
        self._folder, self._row_bytes = path.parent, row_bytes
        self.num_rows = 0
        self.descriptor = _open_nameless(path)
        self._closes = weakref.finalize(self, os.close, self.descriptor)
        self._closes.atexit = False  # a lane may still be writing rows, and the number could be another file's by then

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self._row_bytes

    def reserve(self, num_rows: int) -> None:
        """Have room for `num_rows`. Blocks are allocated at once: a full disk must be an error here, not later."""
        if num_rows <= self.num_rows:
            return
        capacity = num_rows if self.num_rows == 0 else max(num_rows, int(self.num_rows * _GROWTH))
        try:
            os.posix_fallocate(self.descriptor, 0, capacity * self._row_bytes)
        except OSError as error:
            problem = f"cannot hold {capacity * self._row_bytes:,} bytes of rows: {error.strerror}"
            remedy = "free space, name another folder, or bound the table (max_rows)"
            raise UserError(problem, field="store.folder", value=str(self._folder), remedy=remedy) from error
        self.num_rows = capacity

    def close(self) -> None:
        self._closes()
        self.descriptor = -1


def remove_leftovers(folder: Path, table: str) -> None:
    """Remove row files of any shard of a table that have a name: nobody will read them.

    They come from a process that was killed between making and unnaming its file, or from a version that left them.
    """
    name = re.compile(re.escape(table) + r"\.\d+\.[0-9a-f]+\.rows")
    with contextlib.suppress(OSError):  # no such folder yet, or a file that another rank was quicker to remove
        for path in [path for path in folder.iterdir() if name.fullmatch(path.name)]:
            path.unlink(missing_ok=True)


def _open_nameless(path: Path) -> int:
    named = path.with_name(f"{path.name}.{secrets.token_hex(8)}.rows")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(named, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        named.unlink(missing_ok=True)
    except OSError as error:
        problem = f"cannot be written to: {error.strerror}"
        remedy = "name a folder that this process may write to"
        raise UserError(problem, field="store.folder", value=str(path.parent), remedy=remedy) from error
    return descriptor
