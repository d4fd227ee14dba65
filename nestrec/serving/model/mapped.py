"""Memory that the system may write out to a disk: a table may be larger than the host's."""

import mmap
import tempfile
from pathlib import Path

import torch


def mapped(scratch: Path, num_rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """(num_rows, dim) zeros in a file without a name in the folder `scratch`."""
    num_bytes = num_rows * dim * dtype.itemsize
    with tempfile.TemporaryFile(dir=scratch) as file:
        file.truncate(num_bytes)
        memory = mmap.mmap(file.fileno(), num_bytes)
    return torch.frombuffer(memory, dtype=dtype).view(num_rows, dim)
