"""Records of tokens that stand before a history: what is known of its user, a token each.

A record of one has the value of its column in that column's field and, in the last field, the number of the token from
1; those of events have 0 there. So batches hold both alike.

Legend: P tokens before a history, R records, D model width.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.serving.model.inputs import History, numbers_of
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.spec import ColumnSpec

Ints = NDArray[np.int64]


class Before:
    """Of one model. field_of: where records have the value of each of its columns."""

    def __init__(self, servable: Servable, field_of: Mapping[str, int]):
        self._columns = servable.prefix_columns
        self._fields = [field_of[column.name] for column in self._columns]
        self.names = frozenset(column.name for column in self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def numbers(self, count: int) -> Sequence[Ints]:
        """The last field of so many events; none where nothing stands before them."""
        return [np.zeros(count, np.int64)] if self._columns else []

    def records(self, history: History, num_fields: int) -> Ints:
        """(P, fields) of a user."""
        found = np.zeros((len(self), num_fields if self._columns else 0), np.int64)
        for place, (column, field) in enumerate(zip(self._columns, self._fields, strict=True)):
            of_events = history.features.get(column.name, found[:0, -1])  # all of them alike
            found[place, field] = history.asked.get(column.name, of_events[-1] if len(of_events) else 0)
            found[place, -1] = place + 1
        return found

    def vectors(self, servable: Servable, records: torch.Tensor) -> torch.Tensor:
        """(R, D) of records that are all of such tokens."""
        nothing = torch.zeros(len(records), servable.encoder_config.dim, dtype=servable.dtype, device=servable.device)
        return self.put(servable, records, nothing)

    def put(self, servable: Servable, records: torch.Tensor, content_RD: torch.Tensor) -> torch.Tensor:
        """(R, D or more) what records of events have, and of the others their own vectors."""
        for place, (column, field) in enumerate(zip(self._columns, self._fields, strict=True)):
            is_own = (records[:, -1] == place + 1).to(content_RD.device)
            # What other records have in this field need not be a row of its table.
            ids = torch.where(records[:, -1] == place + 1, records[:, field], 0)
            own_RD = column_vectors(servable, column, ids).to(content_RD.dtype)
            wide = torch.nn.functional.pad(own_RD, (0, content_RD.shape[1] - own_RD.shape[1]))
            content_RD = torch.where(is_own[:, None], wide, content_RD)
        return content_RD


def column_vectors(servable: Servable, column: ColumnSpec, ids: torch.Tensor) -> torch.Tensor:
    """(R, D) what a column says, by its ids or the bits of its numbers."""
    if column.has_table:
        return servable.tables[column.name].rows(ids)
    numbers = numbers_of(ids).to(device=servable.device, dtype=servable.dtype)
    return servable.model.to_width(column.name, numbers)  # type: ignore[no-any-return, operator]
