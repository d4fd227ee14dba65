"""Samples of labelled rows: dense numbers, categories, one label (Criteo)."""

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.data.batches import Assembler, MicroBatch
from nestrec.data.dataset import Dataset


def assemble_rows(dataset: Dataset, indices: NDArray[np.int64]) -> MicroBatch:
    """Keys `category` (B, C); tensors dense (B, N) with NaN where missing, and label (B,)."""
    rows = dataset.rows(indices)
    dense = rows.lists["dense"][0].reshape(len(indices), -1)
    categories = rows.lists["categories"][0].reshape(len(indices), -1)
    tensors = {"dense": torch.from_numpy(dense), "label": torch.from_numpy(rows.scalars["label"].astype(np.int64))}
    return MicroBatch(indices, {"category": categories}, tensors, max_length=1, num_tokens=len(indices))


class RowsAssembler(Assembler):
    """Training rows."""

    def __init__(self, dataset: Dataset, indices: NDArray[np.int64]):
        self._dataset, self._indices = dataset, indices
        self.weights = np.ones(len(indices))
        self.tokens = np.ones(len(indices), dtype=np.int64)

    def assemble(self, samples: NDArray[np.int64], epoch: int) -> MicroBatch:
        return assemble_rows(self._dataset, self._indices[samples])
