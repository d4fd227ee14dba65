"""Exports embedding tables: one row per id of the dataset, in the width of the model.

Computation that is the same for every request is done once at export: rows are multiplied by the projection of their
table, and the features of an item are folded into its row if it has list features. A server therefore only adds
vectors, whatever the tables were in training: narrow, wide, shared, hashed, dynamic or pooled.
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.data.dataset_schema import ITEM_PREFIX
from nestrec.embedding import TableConfig
from nestrec.serving.model.served_tables import DeviceTable, allocate_mapped
from nestrec.serving.model.serving_spec import serving_spec_of
from nestrec.training.training_session import Session

CHUNK_ROWS = 1 << 16


class TableExporter:
    """Reads the embedding tables of one run in the form that a server uses.

    Args:
        session: Session of the run.
        scratch: Folder on a disk with enough free space for the tables, which are memory-mapped.

    Raises:
        UserError: The model reads a table that its task does not declare for serving.
    """

    def __init__(self, session: Session, scratch: Path):
        self._session = session
        self._scratch = scratch
        self._tables: dict[str, DeviceTable] = {}
        self._table_of = {f: name for name, table in session.engine.tables.items() for f in table.feature_names}
        self._check_all_served()

    def _check_all_served(self) -> None:
        task = self._session.cfg.task
        card = self._session.dataset.card
        known = {column.name for column in serving_spec_of(task).columns(task, card)}
        of_items = self._session.engine.tables["items"].feature_names
        for feature in self._table_of:
            if feature not in known and feature not in of_items:
                raise _unserved_feature_error(feature)

    def table_of(self, feature: str) -> str:
        """Return the name of the table of a feature."""
        return self._table_of[feature]

    def num_rows(self, feature: str) -> int:
        """Return the number of ids in the table of a feature."""
        return self.num_ids(self.table_of(feature))

    def rows(self, name: str) -> DeviceTable:
        """Return all rows of a table as evaluation reads them: untrained keys have their initial vector."""
        if name not in self._tables:
            self._tables[name] = DeviceTable(
                self._read_in_chunks(self.num_ids(name), lambda keys: self._vectors(name, keys))
            )
        return self._tables[name]

    def vectors(self, name: str, keys: NDArray[np.int64]) -> torch.Tensor:
        """Return the (n, D) served vectors of some keys of a table; the table can be `items`. Collective."""
        content = self._item_content if name == "items" else None
        if content is None:
            return self._vectors(name, keys)
        return content(self._session.task, self._session.engine, keys)

    def serves_rows_unchanged(self, name: str) -> bool:
        """Return whether the served vector of an id is exactly its row of the table.

        If so, a delta needs only the rows that training has changed.
        """
        table: TableConfig = self._session.engine.tables[name]
        model: Any = self._session.task.model
        is_projected = hasattr(model, "to_width") and model.to_width.projects(name)
        return not (table.is_hashed or is_projected or (name == "items" and self._item_content is not None))

    @property
    def folds_items(self) -> bool:
        """Whether served item rows include the item features: a server reads single categories of items, not lists."""
        task = self._session.cfg.task
        card = self._session.dataset.card
        of_items = [c for c in serving_spec_of(task).columns(task, card) if c.name.startswith(ITEM_PREFIX)]
        is_folded = self._reads_index or serving_spec_of(task).stores_item_parts(task)
        return any(c.is_bag or c.width for c in of_items) or bool(of_items and is_folded)

    @property
    def item_vectors(self) -> int:
        """Number of vectors per served item: one for its id, and one per feature if these are stored separately."""
        task = self._session.cfg.task
        card = self._session.dataset.card
        serving = serving_spec_of(task)
        of_items = [c for c in serving.columns(task, card) if c.name.startswith(ITEM_PREFIX)]
        return 1 + len(of_items) if serving.stores_item_parts(task) else 1

    @property
    def _reads_index(self) -> bool:
        """Whether items are rows in an index, which holds all that they are."""
        return serving_spec_of(self._session.cfg.task).index is not None

    def items(self) -> DeviceTable:
        """Return the served rows of all items, with their features folded in if `folds_items`."""
        if self._item_content is None:
            return self.rows("items")
        num_items = self._session.dataset.num_items + 1
        return DeviceTable(self._read_in_chunks(num_items, lambda keys: self.vectors("items", keys)))

    @cached_property
    def _item_content(self) -> Callable[..., torch.Tensor] | None:
        """Function that computes the served row of an item with its features; None if rows are served unchanged."""
        return serving_spec_of(self._session.cfg.task).item_content if self.folds_items else None

    def num_ids(self, name: str) -> int:
        """Return the number of ids of a table."""
        known = (self._session.task.num_ids or {}).get(name) or self._session.engine.tables[name].num_rows
        if known is None:
            remedy = "set the number of rows of the table to export it"
            raise UserError("the table has no fixed number of rows", option="table", value=name, remedy=remedy)
        return known

    def _vectors(self, name: str, keys: NDArray[np.int64]) -> torch.Tensor:
        table = self._session.engine.tables[name]
        model = self._session.task.model
        feature = table.feature_names[0]
        rows = self._session.engine.lookup_readonly({feature: keys})[feature]
        return _project(model, table, rows)

    def _read_in_chunks(self, num_rows: int, vectors_of: Callable[[NDArray[np.int64]], torch.Tensor]) -> torch.Tensor:
        rows: torch.Tensor | None = None
        for start in range(0, num_rows, CHUNK_ROWS):
            keys = np.arange(start, min(start + CHUNK_ROWS, num_rows))
            chunk = vectors_of(keys)
            if rows is None:
                rows = allocate_mapped(self._scratch, num_rows, chunk.shape[1], chunk.dtype)
            rows[start : start + len(keys)] = chunk
        assert rows is not None
        return rows


def _unserved_feature_error(feature: str) -> UserError:
    problem = "the model reads this feature, but the task does not declare a column that a server could read"
    return UserError(problem, option="feature", value=feature, remedy="train without it to serve the model")


@torch.no_grad()
def _project(model: Any, table: TableConfig, rows: torch.Tensor) -> torch.Tensor:
    """Project rows to the width of the model; rows without a projection keep their stored data type."""
    if hasattr(model, "to_width") and model.to_width.projects(table.name):
        return model.to_width(table.name, rows)  # type: ignore[no-any-return]
    return rows.to(table.weight_dtype)
