"""Records of tokens that stand before a history: what is known of its user, a token each.

A record of one has the value of its column in that column's fields and, in the last field, the number of the token from
1; those of events have 0 there. So batches hold both alike.

Legend: P tokens before a history, R records, F fields of a column, D model width.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.serving.model.inputs import History, numbers_of, values_of
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.spec import ColumnSpec

Ints = NDArray[np.int64]


def places_of(columns: Iterable[ColumnSpec], first: int) -> dict[str, slice]:
    """Where records hold each column, from a field on."""
    found = {}
    for column in columns:
        found[column.name] = slice(first, first + len(column.fields))
        first += len(column.fields)
    return found


class Before:
    """Of one model. places: where records hold each of its columns."""

    def __init__(self, servable: Servable, places: Mapping[str, slice]):
        self._columns = servable.prefix_columns
        self._places = [places[column.name] for column in self._columns]
        self._fields = [column.fields for column in self._columns]
        self.names = frozenset(column.name for column in self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def numbers(self, count: int) -> Sequence[Ints]:
        """The last field of so many events; none where nothing stands before them."""
        return [np.zeros(count, np.int64)] if self._columns else []

    def records(self, history: History, num_fields: int) -> Ints:
        """(P, fields) of a user."""
        found = np.zeros((len(self), num_fields if self._columns else 0), np.int64)
        for place, (fields, where) in enumerate(zip(self._fields, self._places, strict=True)):
            for field, name in enumerate(fields, start=where.start):
                of_events = history.features.get(name, found[:0, -1])  # all of them alike
                found[place, field] = history.asked.get(name, of_events[-1] if len(of_events) else 0)
            found[place, -1] = place + 1
        return found

    def vectors(self, servable: Servable, records: torch.Tensor) -> torch.Tensor:
        """(R, D) of records that are all of such tokens."""
        nothing = torch.zeros(len(records), servable.encoder_config.dim, dtype=servable.dtype, device=servable.device)
        return self.put(servable, records, nothing)

    def put(self, servable: Servable, records: torch.Tensor, content_RD: torch.Tensor) -> torch.Tensor:
        """(R, D or more) what records of events have, and of the others their own vectors."""
        for place, (column, where) in enumerate(zip(self._columns, self._places, strict=True)):
            is_own = (records[:, -1] == place + 1).to(content_RD.device)
            # What other records have in these fields need not be rows of its table.
            values_RF = torch.where((records[:, -1] == place + 1)[:, None], records[:, where], 0)
            own_RD = column_vectors(servable, column, values_RF).to(content_RD.dtype)
            wide = torch.nn.functional.pad(own_RD, (0, content_RD.shape[1] - own_RD.shape[1]))
            content_RD = torch.where(is_own[:, None], wide, content_RD)
        return content_RD


def column_vectors(servable: Servable, column: ColumnSpec, values_RF: torch.Tensor) -> torch.Tensor:
    """(R, D) what a column says, by what records have in its fields: ids, or bits of numbers."""
    if column.has_table and column.has_several:
        return _pooled(servable, column, values_RF)
    if column.has_table:
        return servable.tables[column.name].rows(values_RF[:, 0])
    numbers = values_of(values_RF) if column.kind == "vector" else numbers_of(values_RF[:, 0])
    numbers = numbers.to(device=servable.device, dtype=servable.dtype)
    return servable.model.to_width(column.name, numbers)  # type: ignore[no-any-return, operator]


def _pooled(servable: Servable, column: ColumnSpec, ids_RF: torch.Tensor) -> torch.Tensor:
    """Field by field: all rows of a text at once would be a batch of many times the width."""
    table, is_there_RF = servable.tables[column.name], ids_RF > 0
    if ids_RF.device.type == "cpu":  # a captured batch cannot know how long its lists are
        longest = int(is_there_RF.sum(1).max()) if len(ids_RF) else 0
        ids_RF, is_there_RF = ids_RF[:, :longest], is_there_RF[:, :longest]
    shape = len(ids_RF), servable.encoder_config.dim
    total_RD = torch.zeros(shape, dtype=servable.dtype, device=servable.device)
    for ids_R, is_there_R in zip(ids_RF.unbind(1), is_there_RF.unbind(1), strict=True):
        total_RD += table.rows(ids_R).to(total_RD) * is_there_R.to(total_RD)[:, None]
    if column.pooling == "sum":
        return total_RD
    return total_RD / is_there_RF.sum(1).clamp(min=1).to(total_RD)[:, None]
