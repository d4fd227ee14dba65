"""The rows of a run's tables as an export holds them: for every id that the dataset knows, in the width of the model.

Products that are the same in every request are done here, once: a row goes through its table's matrix, and, where an
item has lists, its row is all that the model reads of it. So a server adds vectors, whatever the tables were in
training: narrow, wide, shared, hashed, dynamic or pooled.
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
from nestrec.serving.model.served_tables import DeviceTable, mapped
from nestrec.serving.model.serving_spec import serving_form_of
from nestrec.training.training_session import Session

CHUNK_ROWS = 1 << 16


class TableExporter:
    """Of one run. scratch: a folder on a disk with room for them."""

    def __init__(self, session: Session, scratch: Path):
        self._session = session
        self._scratch = scratch
        self._read: dict[str, DeviceTable] = {}
        self._table_of = {f: name for name, table in session.engine.tables.items() for f in table.feature_names}
        self._check_is_served()

    def _check_is_served(self) -> None:
        task = self._session.cfg.task
        card = self._session.dataset.card
        known = {column.name for column in serving_form_of(task).columns(task, card)}
        of_items = self._session.engine.tables["items"].feature_names
        for feature in self._table_of:
            if feature not in known and feature not in of_items:
                raise _not_served(feature)

    def table_of(self, feature: str) -> str:
        return self._table_of[feature]

    def num_rows(self, feature: str) -> int:
        """Ids that its table has rows of."""
        return self.num_ids(self.table_of(feature))

    def rows(self, name: str) -> DeviceTable:
        """Every row as evaluation reads it: keys that never trained have their initial vector."""
        if name not in self._read:
            self._read[name] = DeviceTable(self._filled(self.num_ids(name), lambda keys: self._vectors(name, keys)))
        return self._read[name]

    def vectors(self, name: str, keys: NDArray[np.int64]) -> torch.Tensor:
        """(n, D) some rows of a table as it is served, whose name may be `items`. Collective."""
        content = self._item_content if name == "items" else None
        if content is None:
            return self._vectors(name, keys)
        return content(self._session.task, self._session.engine, keys)

    def holds_rows_of(self, name: str) -> bool:
        """Whether what is served under a row's id is that row of the table and nothing else."""
        table: TableConfig = self._session.engine.tables[name]
        model: Any = self._session.task.model
        goes_through = hasattr(model, "to_width") and model.to_width.changes(name)
        return not (table.is_hashed or goes_through or (name == "items" and self._item_content is not None))

    @property
    def folds_items(self) -> bool:
        """Whether rows of items hold their features, too: a server knows single categories of items, and no lists."""
        task = self._session.cfg.task
        card = self._session.dataset.card
        of_items = [c for c in serving_form_of(task).columns(task, card) if c.name.startswith(ITEM_PREFIX)]
        is_folded = self._reads_index or serving_form_of(task).keeps_item_parts(task)
        return any(c.is_bag or c.width for c in of_items) or bool(of_items and is_folded)

    @property
    def item_vectors(self) -> int:
        """In what is served of an item: of its id, and of each of its features where those are kept apart."""
        task = self._session.cfg.task
        card = self._session.dataset.card
        form = serving_form_of(task)
        of_items = [c for c in form.columns(task, card) if c.name.startswith(ITEM_PREFIX)]
        return 1 + len(of_items) if form.keeps_item_parts(task) else 1

    @property
    def _reads_index(self) -> bool:
        """Whether items are found in an index, which holds all that they are."""
        return serving_form_of(self._session.cfg.task).index is not None

    def items(self) -> DeviceTable:
        """What the model reads of each item, or of its id alone."""
        if self._item_content is None:
            return self.rows("items")
        num_items = self._session.dataset.num_items + 1
        return DeviceTable(self._filled(num_items, lambda keys: self.vectors("items", keys)))

    @cached_property
    def _item_content(self) -> Callable[..., torch.Tensor] | None:
        """What is served of an item, where that is more than its own row."""
        return serving_form_of(self._session.cfg.task).item_content if self.folds_items else None

    def num_ids(self, name: str) -> int:
        """Ids that a table has rows of."""
        known = (self._session.task.num_ids or {}).get(name) or self._session.engine.tables[name].num_rows
        if known is None:
            remedy = "which ids there are is not known, so they cannot be written"
            raise UserError("has a row for any number", option="table", value=name, remedy=remedy)
        return known

    def _vectors(self, name: str, keys: NDArray[np.int64]) -> torch.Tensor:
        table = self._session.engine.tables[name]
        model = self._session.task.model
        feature = table.feature_names[0]
        found = self._session.engine.lookup_readonly({feature: keys})[feature]
        return _in_width(model, table, found)

    def _filled(self, num_rows: int, vectors_of: Callable[[NDArray[np.int64]], torch.Tensor]) -> torch.Tensor:
        rows: torch.Tensor | None = None
        for start in range(0, num_rows, CHUNK_ROWS):
            keys = np.arange(start, min(start + CHUNK_ROWS, num_rows))
            found = vectors_of(keys)
            if rows is None:
                rows = mapped(self._scratch, num_rows, found.shape[1], found.dtype)
            rows[start : start + len(keys)] = found
        assert rows is not None
        return rows


def _not_served(feature: str) -> UserError:
    problem = "is read by the model, and not by servers: its task tells no column of it"
    return UserError(problem, option="feature", value=feature, remedy="train without it to serve the model")


@torch.no_grad()
def _in_width(model: Any, table: TableConfig, found: torch.Tensor) -> torch.Tensor:
    """Rows that go through no matrix stay in the type that they are stored in."""
    if hasattr(model, "to_width") and model.to_width.changes(table.name):
        return model.to_width(table.name, found)  # type: ignore[no-any-return]
    return found.to(table.weight_dtype)
