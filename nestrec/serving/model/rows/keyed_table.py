"""A table of a model that is served whose rows are found by keys of any size, as dynamic tables have them in training.

A key without a row has the vector that it would begin with, as in evaluation.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.embedding.initial import initial_vectors
from nestrec.embedding.table import InitConfig, TableConfig
from nestrec.serving.model.tables import ServedTable


@config
class KeyedRows:
    """What is known of a table by key beside its rows."""

    table: str
    """its name in training"""
    dim: int
    """elements of a row"""
    seed: int
    """rows begin as functions of it and their keys"""
    init: InitConfig
    """how"""
    hash_key: int | None = None
    """texts of the column are hashed under it; none: requests tell keys"""

    def initial(self, keys: NDArray[np.int64]) -> torch.Tensor:
        """(keys, dim) float32"""
        return initial_vectors(keys, TableConfig(name=self.table, dim=self.dim, seed=self.seed, init=self.init))


class KeyedTable:
    """Ids are keys."""

    def __init__(self, rows: ServedTable, keys: NDArray[np.int64], begins: KeyedRows):
        """keys: of the rows, ascending"""
        self.by_row, self.keys, self.begins = rows, keys, begins
        self.num_rows = rows.num_rows

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        asked = ids.cpu().numpy()
        place = np.minimum(np.searchsorted(self.keys, asked), max(0, len(self.keys) - 1))
        is_there = self.keys[place] == asked if len(self.keys) else np.zeros(len(asked), np.bool_)
        found = self.by_row.rows(torch.from_numpy(place[is_there]))
        if is_there.all():
            return found
        out = torch.empty(len(asked), found.shape[1], dtype=found.dtype, device=found.device)
        out[torch.from_numpy(is_there).to(found.device)] = found
        out[torch.from_numpy(~is_there).to(found.device)] = self.begins.initial(asked[~is_there]).to(found)
        return out

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield from self.by_row.parts()

    def statistics(self) -> dict[str, int]:
        return self.by_row.statistics()

    @property
    def room(self) -> int:
        return self.by_row.room

    @property
    def row_device(self) -> torch.device:
        return self.by_row.row_device

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Keys stay those that they are."""
        self.by_row.put(torch.from_numpy(np.searchsorted(self.keys, ids.cpu().numpy())), rows)
