"""Samples of labelled rows: dense numbers, categories, one label (Criteo)."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.data.batches import Assembler, KeysOfSamples, MicroBatch
from nestrec.data.dataset import Dataset, Rows


def assemble_rows(rows: Rows) -> MicroBatch:
    """Keys `category` (B, C); tensors dense (B, N) with NaN where missing, and label (B,)."""
    dense, categories = (_columns(rows, name) for name in ("dense", "categories"))
    tensors = {"dense": torch.from_numpy(dense), "label": torch.from_numpy(rows.scalars["label"].astype(np.int64))}
    return MicroBatch(rows.indices, {"category": categories}, tensors, max_length=1, num_tokens=rows.num_rows)


def _columns(rows: Rows, name: str) -> NDArray[Any]:
    """(B, N) values of a list column; (0, 0) without rows, which then have no width."""
    return rows.lists[name][0].reshape(rows.num_rows, -1 if rows.num_rows else 0)


class RowsAssembler(Assembler):
    """Training rows."""

    def __init__(self, dataset: Dataset, indices: NDArray[np.int64]):
        self._dataset, self._indices = dataset, indices
        self.weights = np.ones(len(indices))
        self.tokens = np.ones(len(indices), dtype=np.int64)
        self.shuffle_block = dataset.shuffle_block(len(indices))

    def read(self, samples: NDArray[np.int64]) -> Rows:
        return self._dataset.rows(self._indices[samples])

    def sample_keys(self, samples: NDArray[np.int64], rows: Rows, epoch: int) -> KeysOfSamples:
        values, offsets = rows.lists["categories"]
        return values.astype(np.int64), offsets

    def assemble(self, samples: NDArray[np.int64], rows: Rows, epoch: int) -> MicroBatch:
        return assemble_rows(rows)
