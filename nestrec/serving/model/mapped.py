"""Memory that the system may write out to a disk: a table may be larger than the host's."""

import mmap
import os
import tempfile
from pathlib import Path

import torch

from nestrec.base.errors import UserError


def mapped(scratch: Path, num_rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """(num_rows, dim) zeros in a file without a name in the folder `scratch`.

    Blocks are allocated at once: on a full disk the first touch of a row without one would end the process (SIGBUS).
    """
    num_bytes = num_rows * dim * dtype.itemsize
    try:
        with tempfile.TemporaryFile(dir=scratch) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        problem = f"cannot hold {num_bytes:,} bytes of rows for a while: {error.strerror}"
        remedy = "free space, or name a folder on another disk (TMPDIR where a run is loaded)"
        raise UserError(problem, field="folder", value=str(scratch), remedy=remedy) from error
    return torch.frombuffer(memory, dtype=dtype).view(num_rows, dim)
