"""The rows of one batch on their owner: the sums of their gradients, the buffers they lie in, a watch over them."""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.cuda import to_device, used_here
from nestrec.embedding.routing.row_exchange import ConcatRows, RowExchange, as_words, by_piece, gradient_run, half_spans
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
    """Rows of one table; row i belongs to `fetched.keys[i]`."""

    optimizer: TableOptimizer
    layout: RowLayout
    fetched: FetchedRows
    gradient: torch.Tensor | None = None
    """(n, dim) sums in the state's type; none until the first gradients arrive."""
    total: torch.Tensor | None = None
    """(n, dim) sums over the holders of these rows, where gradients cross between them."""
    num_touched: int | None = None
    """Only the first so many rows are updated; none: all."""
    averaged: torch.Tensor | None = None
    """Places of the rows that are averaged over holders after the update; none: no row is."""
    gradient_scale: int = 1
    """What gradients are multiplied with before the update."""

    def update_some(self, chosen: "RowSelection", step: int, learning_rate: float) -> torch.Tensor | None:
        """One step of the row optimiser on the chosen rows; the gradients of the others wait.

        Those rows, or none where there was nothing to do.
        """
        gradient = self.gradient if self.total is None else self.total
        places = chosen.places
        if gradient is None or not len(places):
            return None
        rows = self.fetched.rows.index_select(0, places)
        learnt = gradient.index_select(0, places)
        self._update(rows, learnt * self.gradient_scale, chosen.on_host, step, learning_rate)
        self.fetched.rows.index_copy_(0, places, rows)
        return rows

    def update(self, step: int, learning_rate: float) -> torch.Tensor | None:
        """One step of the row optimiser; rows that were not admitted stay as they begin.

        The rows, or none where there was nothing to do.
        """
        gradient = self.gradient if self.total is None else self.total
        end = len(self.fetched.keys) if self.num_touched is None else self.num_touched
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
        self, rows: torch.Tensor, gradient: torch.Tensor, chosen: NDArray[Any] | slice, step: int, learning_rate: float
    ) -> None:
        """chosen: which of the fetched rows these are."""
        is_refused = self.fetched.slots[chosen] < 0
        self.optimizer.update(rows, gradient, self.fetched.keys[chosen], is_refused, step, learning_rate)
        used_here([gradient])


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Some rows of a table. The host is told beside the device: nobody waits to ask."""

    on_host: NDArray[np.int64]
    places: torch.Tensor

    @staticmethod
    def of(places: NDArray[np.int64], device: torch.device) -> "RowSelection":
        return RowSelection(places, to_device(places, device))


@dataclass(slots=True)
class WorkingSet:
    """The rows of the batch of one step, over all tables: one run of memory, table behind table."""

    step: int
    """From 1; an update carries the step of the batch that made it (rates travel with the batch)."""
    shapes: RowShapes
    words: torch.Tensor
    """int32 words of all rows."""
    spans: Spans
    """Where the vectors of each table lie in them."""
    num_rows: Int64
    """Of each table."""
    tables: dict[str, WorkingTable] = field(default_factory=dict)
    _sums: dict[torch.dtype, ConcatRows] = field(default_factory=dict)
    _totals: dict[torch.dtype, ConcatRows] = field(default_factory=dict)

    @staticmethod
    def of(
        step: int, num_rows: Int64, shapes: RowShapes, device: torch.device, buffers: "RowBuffers | None" = None
    ) -> "WorkingSet":
        """Memory for so many rows of each table. buffers: where it is taken from; none: fresh."""
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
        """(num_rows, num_words) memory of a table's rows."""
        start, words = int(self.spans.starts[table]), int(self.spans.strides[table])
        return self.words[start : start + num_rows * words].view(num_rows, words)

    def vector_writer(self, leg: RowExchange) -> Callable[[torch.Tensor], None]:
        """Writes the vectors that a leg takes to others, in the order in which they cross."""
        write = partial(gather_spans, self.words, self.spans, leg.asked_rows)
        if not leg.half_places[1]:
            return write

        def write_both(out: torch.Tensor) -> None:
            write(out)
            spans = half_spans(leg.half_places[1], self.shapes, out.device)
            gather_spans(self._halves(leg), spans, leg.asked_rows, out)

        return write_both

    def _halves(self, leg: RowExchange) -> torch.Tensor:
        """Rows that cross in half precision, rounded, table behind table."""
        tables = list(self.tables.values())
        parts = []
        for t, places in leg.half_places[1].items():
            vectors = tables[t].layout.view(tables[t].fetched.rows, "weight")
            parts.append(as_words(take_rows(vectors, places).to(self.shapes.halves[t])).reshape(-1))
        return torch.cat(parts)

    def add(self, leg: RowExchange, pieces: Sequence[torch.Tensor], dtype: torch.dtype, *, is_all: bool) -> None:
        """Add gradients that have come to the sums, source by source (order of sums).

        is_all: they are those of all rows, in order, and no others will come.
        """
        if is_all and not any(table.gradient is not None for _, table in self._of_type(dtype)):
            mine = np.where(self.shapes.has_type[dtype], self.num_rows, 0)
            spans, _ = Spans.packed(mine, self.shapes.dims, self.words.device)
            self._take_sums(dtype, ConcatRows(pieces[0], spans, self.num_rows))
            return
        sums = self.sums(dtype)
        for piece, rows in by_piece(pieces, leg.asked_rows, leg.asked.counts):
            add_spans(piece, rows, sums.elements, sums.spans, leg.groups if len(pieces) == 1 else None)

    def sums(self, dtype: torch.dtype) -> ConcatRows:
        """Sums of gradients of a type; zeros where none has come since the last update."""
        if dtype not in self._sums or any(table.gradient is None for _, table in self._of_type(dtype)):
            self._take_sums(dtype, gradient_run(dtype, self.num_rows, self.shapes, self.words.device))
        return self._sums[dtype]

    def _take_sums(self, dtype: torch.dtype, run: ConcatRows) -> None:
        self._sums[dtype] = run
        for t, table in self._of_type(dtype):
            table.gradient = run.of_table(t)

    def totals(self, dtype: torch.dtype) -> ConcatRows:
        """Sums over the holders of these rows."""
        mine = self._of_type(dtype)
        if dtype not in self._totals or any(table.total is None for _, table in mine):
            run = self._totals[dtype] = gradient_run(dtype, self.num_rows, self.shapes, self.words.device)
            for t, table in mine:
                table.total = run.of_table(t)
        return self._totals[dtype]

    def _of_type(self, dtype: torch.dtype) -> list[tuple[int, WorkingTable]]:
        return list(itertools.compress(enumerate(self.tables.values()), self.shapes.has_type[dtype].tolist()))


class RowBuffers:
    """As many buffers as there are batches in flight; a buffer is enlarged only by a larger batch.

    The caller sees to it that a buffer is no longer in use when its turn comes again: with two of them, that the
    write-back of batch t-1 comes before the fetch of batch t+1, which write-back before gather asks for anyway.
    """

    def __init__(self, turns: int = 2) -> None:
        self._turns = turns
        self._buffers: dict[int, torch.Tensor] = {}

    def take(self, step: int, num_words: int, device: torch.device) -> torch.Tensor:
        """(num_words,) memory for the rows of the batch of a step."""
        buffer = self._buffers.get(step % self._turns)
        if buffer is None or len(buffer) < num_words:
            buffer = torch.empty(int(num_words * _SPARE), dtype=torch.int32, device=device)
            self._buffers[step % self._turns] = buffer
        return buffer[:num_words]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())


class FiniteRowCheck:
    """Are the rows still finite? Asked of every updated row on the device, answered whenever somebody reads the device.

    On a device sums of updated rows times zero add up to zero, or to NaN for ever once a row held an infinity or a NaN.
    (Rows whose sum overflows count as well: nothing can be learned from them either.) The host looks at their bits. One
    number a table and thread, so that lanes which update rows at the same time do not wait for each other.
    """

    def __init__(self, num_tables: int, device: torch.device) -> None:
        # Made at once: what another stream allocates could be read here before it is filled.
        self._seen = torch.zeros(_WATCHING_THREADS, num_tables, dtype=torch.float64, device=device)
        self._row_of_thread: dict[int, int] = {}

    def look(self, table: int, layout: RowLayout, rows: torch.Tensor) -> None:
        """(n, num_words) rows of a table, by number, as an update has left them. The host does not wait."""
        mine = self._row_of_thread.setdefault(threading.get_ident(), len(self._row_of_thread) % _WATCHING_THREADS)
        if layout.whole_words is not None and rows.device.type == "cpu":
            if not are_finite(rows.numpy(), layout.whole_words):
                self._seen[mine, table] = torch.nan
            return
        for column in layout.columns:
            # Half precision is summed in float32, since its own range is soon passed; float32 in itself, which on a CPU
            # is six times as quick as in float64.
            kind = torch.float32 if column.dtype.itemsize < 4 else column.dtype
            self._seen[mine, table].add_(layout.view(rows, column.name).sum(dtype=kind) * 0)

    def seen(self) -> torch.Tensor:
        """(num_tables,) float64 on the device: 0, or NaN where rows are not finite. What lanes do now may lack."""
        return self._seen.sum(0)

    def forget(self, table: int) -> None:
        """The table is filled anew."""
        self._seen[:, table] = 0
