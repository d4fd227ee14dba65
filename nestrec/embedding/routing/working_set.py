"""Working set: the rows of one batch on their owner with their gradient sums, reusable buffers and a NaN/Inf check."""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.cuda import record_stream_use, to_device
from nestrec.embedding.routing.row_exchange import (
    ConcatRows,
    RowExchange,
    allocate_gradients,
    as_words,
    half_precision_spans,
    split_by_piece,
)
from nestrec.embedding.row_optimizer import RowLayout
from nestrec.embedding.table_config import RowShapes
from nestrec.embedding.table_shard import FetchedRows, TableOptimizer
from nestrec.ops.embedding.host_loops import are_finite
from nestrec.ops.embedding.row_copy import Int64, Spans, add_spans, gather_spans
from nestrec.ops.embedding.row_gather import take_rows

_SPARE = 1.25
_WATCHING_THREADS = 8


@dataclass(slots=True)
class WorkingTable:
    """Rows of one table in a working set; row i belongs to `fetched.keys[i]`."""

    optimizer: TableOptimizer
    layout: RowLayout
    fetched: FetchedRows
    gradient: torch.Tensor | None = None
    """(n, dim) gradient sums in the dtype of the optimizer state; None until the first gradients are received."""
    total: torch.Tensor | None = None
    """(n, dim) gradient sums over the replicas; None if gradients are not reduced over replicas."""
    num_updated: int | None = None
    """Number of leading rows that are updated; None updates all."""
    averaged: torch.Tensor | None = None
    """Indices of the rows that are averaged over the replicas after the update; None if there are none."""
    gradient_scale: int = 1
    """Factor by which gradients are multiplied before the update."""

    def update_selected(self, selection: "RowSelection", step: int, learning_rate: float) -> torch.Tensor | None:
        """Apply one row optimizer step to the selected rows and keep the gradients of the others.

        Returns:
            The updated rows, or None if there were no gradients or rows.
        """
        gradient = self.gradient if self.total is None else self.total
        indices = selection.indices
        if gradient is None or not len(indices):
            return None
        rows = self.fetched.rows.index_select(0, indices)
        selected_gradient = gradient.index_select(0, indices)
        self._update(rows, selected_gradient * self.gradient_scale, selection.on_host, step, learning_rate)
        self.fetched.rows.index_copy_(0, indices, rows)
        return rows

    def update(self, step: int, learning_rate: float) -> torch.Tensor | None:
        """Apply one row optimizer step to all rows; rows that were not admitted keep their initial values.

        Returns:
            The updated rows, or None if there were no gradients or rows.
        """
        gradient = self.gradient if self.total is None else self.total
        end = len(self.fetched.keys) if self.num_updated is None else self.num_updated
        self.gradient = self.total = None
        if gradient is None or not end:
            return None
        if self.gradient_scale != 1:
            gradient = gradient * self.gradient_scale
        rows = self.fetched.rows
        if end < len(self.fetched.keys):
            rows, gradient = rows[:end], gradient[:end]
        self._update(rows, gradient, slice(end), step, learning_rate)
        return rows

    def _update(
        self,
        rows: torch.Tensor,
        gradient: torch.Tensor,
        selection: NDArray[Any] | slice,
        step: int,
        learning_rate: float,
    ) -> None:
        """Update rows; `selection` selects their keys among the fetched ones."""
        is_not_admitted = self.fetched.slots[selection] < 0
        self.optimizer.update(rows, gradient, self.fetched.keys[selection], is_not_admitted, step, learning_rate)
        record_stream_use([gradient])


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Selected rows of a table; host and device have the indices, so that reading them needs no synchronization."""

    on_host: NDArray[np.int64]
    indices: torch.Tensor

    @staticmethod
    def of(indices: NDArray[np.int64], device: torch.device) -> "RowSelection":
        return RowSelection(indices, to_device(indices, device))


@dataclass(slots=True)
class WorkingSet:
    """Rows of all tables of the batch of one step, in one tensor, table after table."""

    step: int
    """Step of the batch, from 1; an update uses the step number and learning rate of its own batch."""
    shapes: RowShapes
    words: torch.Tensor
    """Contents of all rows as int32 words."""
    spans: Spans
    """Location of the vectors of each table in `words`."""
    num_rows: Int64
    """Number of rows of each table."""
    tables: dict[str, WorkingTable] = field(default_factory=dict)
    _sums: dict[torch.dtype, ConcatRows] = field(default_factory=dict)
    _totals: dict[torch.dtype, ConcatRows] = field(default_factory=dict)

    @staticmethod
    def of(
        step: int, num_rows: Int64, shapes: RowShapes, device: torch.device, buffers: "RowBuffers | None" = None
    ) -> "WorkingSet":
        """Allocate a working set of `num_rows` rows of each table, from `buffers` if given."""
        sizes = num_rows * shapes.strides[: shapes.num_tables]
        ends = np.cumsum(sizes)
        num_spans = len(shapes.words)
        starts = np.concatenate([ends - sizes, np.full(num_spans - len(ends), -1, np.int64)])
        size = int(ends[-1])
        words = (
            torch.empty(size, dtype=torch.int32, device=device) if buffers is None else buffers.take(step, size, device)
        )
        return WorkingSet(step, shapes, words, Spans.of(starts, shapes.strides, shapes.words, device), num_rows)

    def rows_of(self, table: int, num_rows: int) -> torch.Tensor:
        """Return the (num_rows, num_words) memory of the rows of a table."""
        start, words = int(self.spans.starts[table]), int(self.spans.strides[table])
        return self.words[start : start + num_rows * words].view(num_rows, words)

    def vector_writer(self, row_exchange: RowExchange) -> Callable[[torch.Tensor], None]:
        """Return a function that writes the vectors of an exchange to a buffer, in the order in which they are sent."""
        write = partial(gather_spans, self.words, self.spans, row_exchange.requested_rows)
        if not row_exchange.half_indices[1]:
            return write

        def write_both(out: torch.Tensor) -> None:
            write(out)
            spans = half_precision_spans(row_exchange.half_indices[1], self.shapes, out.device)
            gather_spans(self._halves(row_exchange), spans, row_exchange.requested_rows, out)

        return write_both

    def _halves(self, row_exchange: RowExchange) -> torch.Tensor:
        """Return the rows that are sent in half precision, rounded, table after table."""
        tables = list(self.tables.values())
        parts = []
        for t, indices in row_exchange.half_indices[1].items():
            vectors = tables[t].layout.view(tables[t].fetched.rows, "weight")
            parts.append(as_words(take_rows(vectors, indices).to(self.shapes.half_dtypes[t])).reshape(-1))
        return torch.cat(parts)

    def add(
        self, row_exchange: RowExchange, pieces: Sequence[torch.Tensor], dtype: torch.dtype, *, is_all: bool
    ) -> None:
        """Add received gradients to the sums, in order of source rank.

        Args:
            row_exchange: Plan of the exchange.
            pieces: Received gradients, one piece per rank or all in one.
            dtype: Dtype of the gradients.
            is_all: Whether these are the gradients of all rows, in order, and no others follow.
        """
        if is_all and not any(table.gradient is not None for _, table in self._of_type(dtype)):
            is_of_dtype = np.where(self.shapes.has_type[dtype], self.num_rows, 0)
            spans, _ = Spans.packed(is_of_dtype, self.shapes.dims, self.words.device)
            self._take_sums(dtype, ConcatRows(pieces[0], spans, self.num_rows))
            return
        sums = self.sums(dtype)
        for piece, rows in split_by_piece(pieces, row_exchange.requested_rows, row_exchange.requested.counts):
            add_spans(piece, rows, sums.elements, sums.spans, row_exchange.groups if len(pieces) == 1 else None)

    def sums(self, dtype: torch.dtype) -> ConcatRows:
        """Return the gradient sums of a dtype; zeros if none were received since the last update."""
        if dtype not in self._sums or any(table.gradient is None for _, table in self._of_type(dtype)):
            self._take_sums(dtype, allocate_gradients(dtype, self.num_rows, self.shapes, self.words.device))
        return self._sums[dtype]

    def _take_sums(self, dtype: torch.dtype, sums_of_rows: ConcatRows) -> None:
        self._sums[dtype] = sums_of_rows
        for t, table in self._of_type(dtype):
            table.gradient = sums_of_rows.of_table(t)

    def totals(self, dtype: torch.dtype) -> ConcatRows:
        """Return the gradient sums over the replicas."""
        is_of_dtype = self._of_type(dtype)
        if dtype not in self._totals or any(table.total is None for _, table in is_of_dtype):
            sums_of_rows = self._totals[dtype] = allocate_gradients(
                dtype, self.num_rows, self.shapes, self.words.device
            )
            for t, table in is_of_dtype:
                table.total = sums_of_rows.of_table(t)
        return self._totals[dtype]

    def _of_type(self, dtype: torch.dtype) -> list[tuple[int, WorkingTable]]:
        return list(itertools.compress(enumerate(self.tables.values()), self.shapes.has_type[dtype].tolist()))


class RowBuffers:
    """Reusable buffers for working sets, one per batch in flight; only a larger batch enlarges a buffer.

    The caller must ensure that a buffer is no longer in use when it is reused: with two buffers, that the write-back of
    batch t-1 precedes the fetch of batch t+1. The order of write-back and fetch requires this anyway.
    """

    def __init__(self, turns: int = 2) -> None:
        self._turns = turns
        self._buffers: dict[int, torch.Tensor] = {}

    def take(self, step: int, num_words: int, device: torch.device) -> torch.Tensor:
        """Return (num_words,) memory for the rows of the batch of a step."""
        buffer = self._buffers.get(step % self._turns)
        if buffer is None or len(buffer) < num_words:
            buffer = torch.empty(int(num_words * _SPARE), dtype=torch.int32, device=device)
            self._buffers[step % self._turns] = buffer
        return buffer[:num_words]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())


class FiniteRowCheck:
    """Asynchronous check that updated rows contain neither NaN nor infinity.

    On a device, the sums of updated rows times zero are accumulated: the result is zero, or NaN forever after a row
    contained an infinity or a NaN. (Rows whose sum overflows are reported as well; they cannot be trained either.) On
    the host, the bits of the rows are checked. There is one value per table and thread, so that lanes that update rows
    at the same time do not wait for each other.
    """

    def __init__(self, num_tables: int, device: torch.device) -> None:
        # Allocated up front: memory allocated on another stream could be read here before it is initialized.
        self._seen = torch.zeros(_WATCHING_THREADS, num_tables, dtype=torch.float64, device=device)
        self._row_of_thread: dict[int, int] = {}

    def check_rows(self, table: int, layout: RowLayout, rows: torch.Tensor) -> None:
        """Check (n, num_words) updated rows of a table, given by its index, without synchronizing the host."""
        is_of_dtype = self._row_of_thread.setdefault(
            threading.get_ident(), len(self._row_of_thread) % _WATCHING_THREADS
        )
        if layout.float32_words is not None and rows.device.type == "cpu":
            if not are_finite(rows.numpy(), layout.float32_words):
                self._seen[is_of_dtype, table] = torch.nan
            return
        for column in layout.columns:
            # Half precision is summed in float32, because its own range overflows soon; float32 in float32, which is
            # six times as fast on a CPU as float64.
            kind = torch.float32 if column.dtype.itemsize < 4 else column.dtype
            self._seen[is_of_dtype, table].add_(layout.view(rows, column.name).sum(dtype=kind) * 0)

    def non_finite_markers(self) -> torch.Tensor:
        """Return (num_tables,) float64 on the device: 0, or NaN if rows of the table are not finite.

        Updates that are still running may not be included.
        """
        return self._seen.sum(0)

    def clear(self, table: int) -> None:
        """Reset the result of a table whose rows are replaced."""
        self._seen[:, table] = 0
