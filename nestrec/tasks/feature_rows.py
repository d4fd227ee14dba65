"""The vectors of a feature at each place of a micro-batch: looked up, or pooled where a place has several ids."""

from collections.abc import Mapping

import torch

from nestrec.base.errors import UserError
from nestrec.data.batches import OFFSETS, MicroBatch
from nestrec.models.features import ToWidth
from nestrec.ops.rows.gather import gather_rows
from nestrec.ops.rows.pool import pool_bags
from nestrec.ops.rows.stored import TableRows
from nestrec.tasks.table_options import ChosenTables


class FeatureRows:
    """What a task asks for the vectors of its features."""

    def __init__(self, chosen: ChosenTables, to_width: ToWidth):
        self._table_of = {feature: table.name for feature, table in chosen.table_of.items()}
        self._pooling, self._to_width = chosen.pooling, to_width
        for feature, how in chosen.pooling.items():
            if how == "weighted":
                raise UserError(
                    "lists of a dataset hold ids without weights",
                    field=f"tables.{self._table_of[feature]}.pooling",
                    value=how,
                    remedy="take mean or sum; batches of a script's own can be weighted (docs/own-model.md)",
                )

    def of(
        self, feature: str, batch: MicroBatch, rows: Mapping[str, TableRows], index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """(*places, model width), in training. rows: distinct ones of each table; index: places of keys in them."""
        if feature not in self._table_of:
            return self._of_numbers(feature, batch)
        table = self._table_of[feature]
        if feature in self._pooling:
            found = self._pooled(feature, batch, rows[table], index[feature])
        else:
            found = gather_rows(rows[table], index[feature])
        return self._to_width(table, found)  # type: ignore[no-any-return]

    def of_looked_up(self, feature: str, batch: MicroBatch, vectors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The same of the vectors of all keys, as `EmbeddingEngine.lookup_readonly` gives them."""
        if feature not in self._table_of:
            return self._of_numbers(feature, batch)
        found = vectors[feature]
        if feature in self._pooling:
            found = self._pooled(feature, batch, found, torch.arange(len(found), device=found.device))
        return self._to_width(self._table_of[feature], found)  # type: ignore[no-any-return]

    def _of_numbers(self, feature: str, batch: MicroBatch) -> torch.Tensor:
        return self._to_width(feature, batch.tensors[feature].to(self._to_width.dtype))  # type: ignore[no-any-return]

    def _pooled(self, feature: str, batch: MicroBatch, rows: TableRows, index_P: torch.Tensor) -> torch.Tensor:
        return pool_bags(rows, index_P, batch.tensors[feature + OFFSETS], self._pooling[feature])
