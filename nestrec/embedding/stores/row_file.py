"""A file of rows that grows, and reads and writes of single rows from inside host loops."""

import os
from pathlib import Path

from numba import types

from nestrec.base.errors import UserError

_GROWTH = 1.5

# The C library's own calls, so that loops without the GIL can use them; addresses are passed as integers.
pread = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))
pwrite = types.ExternalFunction("pwrite", types.intp(types.int32, types.uintp, types.uintp, types.int64))


class RowFile:
    """Rows of `row_bytes` one after another. The file is scratch: it is removed when closed."""

    def __init__(self, path: Path, row_bytes: int) -> None:
        self._path, self._row_bytes = path, row_bytes
        self.num_rows = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

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
            raise UserError(problem, field="store.folder", value=str(self._path.parent), remedy=remedy) from error
        self.num_rows = capacity

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._path.unlink(missing_ok=True)
