"""A row is one run of bytes: weight, then optimiser state, padded to 16 bytes.

Because they lie together, weight and state cannot be moved apart: every gather, scatter, cache and buffer copy moves
whole rows, as int32 words whose meaning only this file and the row optimisers know.
"""

from dataclasses import dataclass

import torch

from nestrec.embedding.table import TableConfig

ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Column:
    """A named part of each row."""

    name: str
    dtype: torch.dtype
    width: int
    offset_bytes: int
    initial: float = 0.0


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the columns of a table lie inside its rows."""

    columns: tuple[Column, ...]
    num_words: int
    """int32 words of a row."""

    @property
    def row_bytes(self) -> int:
        return 4 * self.num_words

    @property
    def weight(self) -> Column:
        return self.columns[0]

    def column(self, name: str) -> Column:
        return next(c for c in self.columns if c.name == name)

    def view(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """(n, width) view of a column of (n, num_words) int32 rows; rows of a slab are strided."""
        column = self.column(name)
        start = column.offset_bytes // column.dtype.itemsize
        return rows.view(column.dtype)[:, start : start + column.width]

    def columns_of(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Contiguous copies of every column."""
        return {c.name: self.view(rows, c.name).contiguous() for c in self.columns}

    def rows_of(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        """(n, num_words) rows made of given columns; the inverse of `columns_of`."""
        rows = torch.zeros(len(columns["weight"]), self.num_words, dtype=torch.int32)
        for column in self.columns:
            self.view(rows, column.name).copy_(columns[column.name].view(-1, column.width))
        return rows


def layout_of(table: TableConfig) -> RowLayout:
    """The layout of a table's rows."""
    columns, offset = [Column("weight", table.weight_dtype, table.dim, 0)], table.dim * table.weight_dtype.itemsize
    for state in table.optimizer.spec.state:
        offset = _round_up(offset, table.state_dtype.itemsize)
        width = 1 if state.is_row_wise else table.dim
        columns.append(Column(state.name, table.state_dtype, width, offset, state.initial(table.optimizer)))
        offset += width * table.state_dtype.itemsize
    return RowLayout(tuple(columns), _round_up(offset, ALIGNMENT_BYTES) // 4)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
