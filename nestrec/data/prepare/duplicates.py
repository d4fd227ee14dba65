"""Counting of exact duplicates over a whole input in bounded memory: signatures go to files by their top bits."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestrec.data.prepare.spill import RecordFile

NUM_BUCKETS = 64


class DuplicateCounter:
    """Counts rows whose signature came before."""

    def __init__(self, folder: Path):
        self._files = [RecordFile(folder / f"signatures-{b:02d}.bin", np.dtype(np.uint64)) for b in range(NUM_BUCKETS)]

    def add(self, signatures: NDArray[np.uint64]) -> None:
        buckets = (signatures >> np.uint64(58)).astype(np.uint8)
        for bucket in np.unique(buckets):
            self._files[bucket].append(signatures[buckets == bucket])

    def finish(self) -> int:
        """The number of duplicates; the files are removed."""
        total = 0
        for file in self._files:
            total += file.num_records - np.unique(file.load()).size
            file.delete()
        return total
