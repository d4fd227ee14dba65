"""Exchanges of embedding vectors and gradients between ranks (the output dist of TorchRec and its backward pass).

One all-to-all transfers the rows of all tables. The requesting rank and the owner list the rows in the same order: by
the rank on the other side, then by segment (micro-batch, table), then in the order of the requested keys. One message
therefore carries any number of tables of any width, without metadata. On a rank, the rows of all tables are stored in
one contiguous tensor, table after table.

Half precision. Keys that a batch reads only through features marked as half precision are sent in 16 bits (as TurboGR
does with negatives, from which a token is only pushed away); all other rows are sent unchanged. A key that any other
feature of the micro-batch (or of the batch, with the window cache) reads as well is sent once, in full precision. The
sources send one flag byte per key to the owners. Receivers convert the rows back to the order and dtype of the table,
so models see no difference except the rounding. Gradients are sent in full precision. Half-precision rows are narrower,
so they count as rows of an additional table with index T + t.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.cuda import record_stream_use, to_device
from nestrec.embedding.routing.window_cache_plan import WindowPlan
from nestrec.embedding.table_config import RowShapes, TableSpecs
from nestrec.ops.embedding.dedup_host import Segments
from nestrec.ops.embedding.row_copy import Int32, Int64, RowList, Spans, TargetGroups, scatter_spans

Flags = NDArray[np.uint8]
"""1 for a key whose row is sent in half precision."""


def segment_half_flags(specs: TableSpecs, requested: Segments, segment: int, num_full_precision: int) -> Flags:
    """Return the half-precision flags of the unique keys of a segment.

    Args:
        specs: Specs of the tables.
        requested: Requested keys of all segments.
        segment: Index of the segment.
        num_full_precision: Number of leading positions that belong to full-precision features.
    """
    low, high = requested.bounds[segment : segment + 2]
    if not specs.has_half_T[segment % specs.num_tables]:
        return np.zeros(high - low, np.uint8)
    flags = np.ones(high - low, np.uint8)
    flags[requested.inverse_of(segment)[:num_full_precision]] = 0
    return flags


def window_cache_half_flags(
    specs: TableSpecs, plans: Sequence[WindowPlan], num_full_precision: NDArray[np.int64]
) -> Flags:
    """Return the half-precision flags with the window cache, in the order of the requested keys."""
    of_tables = []
    for t, (has_half, plan) in enumerate(zip(specs.has_half_T, plans, strict=True)):
        of_cache = np.full(plan.num_rows, has_half, np.uint8)
        for p, indices in enumerate(plan.cache_indices):
            of_cache[indices[plan.inverse[p][: num_full_precision[p, t]]]] = 0
        of_tables.append(np.split(of_cache, plan.starts[1:-1]))
    return np.concatenate([flags[p] for p in range(len(num_full_precision)) for flags in of_tables])


_ALIGNMENT = 4
"""Alignment of the start of each table in elements; kernels read rows fastest if they start at 16 bytes."""


@dataclass(frozen=True, slots=True)
class ExchangeSide:
    """Rows on one side of an exchange, in the order in which they are sent."""

    tables: Int32
    indices: Int32
    """Index of each row among the rows of its table on this side."""
    counts: Int64
    """Number of rows of each rank on the other side."""
    half: Flags | None = None
    """Flags of the rows that are sent in half precision; None if there are none."""

    def select(self, chosen: NDArray[np.bool_]) -> "ExchangeSide":
        """Return the chosen rows, in the same order."""
        before = np.concatenate([[0], np.cumsum(chosen)])
        counts = np.diff(before[self._bounds])
        half = None if self.half is None else self.half[chosen]
        return ExchangeSide(self.tables[chosen], self.indices[chosen], counts, half)

    @property
    def _bounds(self) -> Int64:
        return np.concatenate([[0], np.cumsum(self.counts)])

    def row_list(self, widths: Int64, device: torch.device) -> tuple[RowList, Int64]:
        """Return the row list and the number of elements per rank; `widths` is the row width of each table."""
        tables = self.tables
        indices = self.indices
        if self.half is not None and self.half.any():
            tables, indices = tables.copy(), indices.copy()
            _renumber_half_rows(tables, indices, self.half, len(widths) // 2)
        result = RowList.of(tables, indices, widths, device)
        return result, np.diff(result.offsets[self._bounds])

    def half_indices(self, table: int, device: torch.device) -> torch.Tensor:
        """Return the indices of the rows of a table that are sent in half precision, in order."""
        assert self.half is not None
        chosen = (self.tables == table) & (self.half != 0)
        return to_device(self.indices[chosen].astype(np.int64), device)


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Plan of one exchange of rows between the requesting ranks and the owners."""

    own: ExchangeSide
    """Rows that this rank requests, and whose gradients it sends."""
    requested: ExchangeSide
    """Rows of this shard that other ranks request."""
    own_rows: RowList
    own_sizes: Int64
    """Number of own elements per rank."""
    requested_rows: RowList
    requested_sizes: Int64
    half_indices: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]
    """Table index to the indices of rows sent in half precision, own and requested."""
    groups: TargetGroups | None
    """Contributions grouped by target row, for sums of gradients on a device."""
    is_in_order: bool
    """Whether the own rows are stored contiguously in the order in which they are sent."""


def vector_exchange(
    own: ExchangeSide, requested: ExchangeSide, shapes: RowShapes, device: torch.device, *, is_in_order: bool
) -> RowExchange:
    """Return the plan of sending vectors from the owners to the requesting ranks."""
    halves = [t for t, half in enumerate(shapes.half_dtypes) if half is not None]
    indices = tuple({t: side.half_indices(t, device) for t in halves} for side in (own, requested))
    in_order = is_in_order and not halves
    own_rows = own.row_list(shapes.words, device)
    requested_rows = requested.row_list(shapes.words, device)
    return RowExchange(own, requested, *own_rows, *requested_rows, (indices[0], indices[1]), None, in_order)


def gradient_exchanges(
    own: ExchangeSide,
    requested: ExchangeSide,
    shapes: RowShapes,
    num_owned: Int64,
    device: torch.device,
    *,
    is_in_order: bool,
    vectors: RowExchange | None = None,
) -> dict[torch.dtype, RowExchange]:
    """Return the plans of sending gradients from the requesting ranks to the owners, one per dtype.

    Args:
        own: Rows that this rank requests.
        requested: Rows of this shard that other ranks request.
        shapes: Shapes of the rows.
        num_owned: Number of rows of each table in the working set.
        device: Device of the rows.
        is_in_order: Whether the own rows are stored contiguously in the order in which they are sent.
        vectors: Plan for the vectors of the same rows, whose parts are reused.
    """
    if vectors is not None and len(shapes.gradient_types) == 1 and np.array_equal(shapes.words, shapes.dims):
        groups = _groups(vectors.requested_rows, requested, num_owned, device)
        return {shapes.gradient_dtypes[0]: replace(vectors, groups=groups, is_in_order=is_in_order)}
    exchanges = {}
    for dtype in shapes.gradient_types:
        own_side, requested_side = (ExchangeSide(s.tables, s.indices, s.counts) for s in (own, requested))
        if len(shapes.gradient_types) > 1:
            chosen = shapes.has_type[dtype]
            own_side, requested_side = (
                own_side.select(chosen[own_side.tables]),
                requested_side.select(chosen[requested_side.tables]),
            )
        requested_rows, requested_sizes = requested_side.row_list(shapes.dims, device)
        groups = _groups(requested_rows, requested_side, num_owned, device)
        own_rows = own_side.row_list(shapes.dims, device)
        exchanges[dtype] = RowExchange(
            own_side, requested_side, *own_rows, requested_rows, requested_sizes, ({}, {}), groups, is_in_order
        )
    return exchanges


def _groups(rows: RowList, requested: ExchangeSide, num_owned: Int64, device: torch.device) -> TargetGroups | None:
    """Group contributions by row; with a single source every row has one contribution."""
    return None if len(requested.counts) == 1 else TargetGroups.of(rows, num_owned, device)


@njit(cache=True, nogil=True)
def _renumber_half_rows(tables, indices, half, num_tables):  # type: ignore[no-untyped-def]
    """Assign half-precision rows to the additional tables, numbered consecutively."""
    seen = np.zeros(num_tables, np.int32)
    for i in range(len(tables)):
        if half[i]:
            table = tables[i]
            indices[i] = seen[table]
            seen[table] += 1
            tables[i] = num_tables + table


@njit(cache=True, nogil=True)
def by_micro_batch(micro_batches, counts, num_micro_batches):  # type: ignore[no-untyped-def]
    """Sort rows that are ordered by rank by (micro-batch, rank); `counts` is the number of rows per rank.

    Returns the order, the bounds of the micro-batches, and the (micro-batch, rank) numbers of rows.
    """
    of_ranks = np.zeros((num_micro_batches, len(counts)), np.int64)
    bounds = np.zeros(num_micro_batches + 1, np.int64)
    i = 0
    for rank in range(len(counts)):
        for _ in range(counts[rank]):
            of_ranks[micro_batches[i], rank] += 1
            bounds[micro_batches[i] + 1] += 1
            i += 1
    for p in range(num_micro_batches):
        bounds[p + 1] += bounds[p]
    order = np.empty(i, np.int64)
    at = bounds.copy()
    for k in range(i):
        p = micro_batches[k]
        order[at[p]] = k
        at[p] += 1
    return order, bounds, of_ranks


@njit(cache=True, nogil=True)
def by_value(values, num_values):  # type: ignore[no-untyped-def]
    """Sort small integers with a stable counting sort; return the order and the count of each value."""
    counts = np.zeros(num_values, np.int64)
    for i in range(len(values)):
        counts[values[i]] += 1
    at = np.zeros(num_values, np.int64)
    for v in range(1, num_values):
        at[v] = at[v - 1] + counts[v - 1]
    order = np.empty(len(values), np.int64)
    for i in range(len(values)):
        order[at[values[i]]] = i
        at[values[i]] += 1
    return order, counts


@dataclass(frozen=True, slots=True)
class ConcatRows:
    """Rows of several tables in one tensor, table after table."""

    elements: torch.Tensor
    """Contents of the rows: int32 words of vectors, or elements of gradients."""
    spans: Spans
    """Location of the rows of each table; missing tables are skipped."""
    num_rows: Int64
    """Number of rows of each table."""

    def of_table(self, table: int) -> torch.Tensor:
        """Return the (n, width) rows of a table."""
        start, width, rows = int(self.spans.starts[table]), int(self.spans.widths[table]), int(self.num_rows[table])
        return self.elements[start : start + rows * width].view(rows, width)


def allocate_vectors(
    num_rows: Int64, shapes: RowShapes, device: torch.device, elements: torch.Tensor | None = None
) -> ConcatRows:
    """Allocate memory for `num_rows` vectors of each table, or wrap `elements` that already have this layout."""
    spans, size = _layout_spans(num_rows, shapes.words[: shapes.num_tables], device, len(shapes.words))
    return ConcatRows(
        torch.empty(size, dtype=torch.int32, device=device) if elements is None else elements, spans, num_rows
    )


def vectors_of(rows_of_tables: ConcatRows, shapes: RowShapes, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return (n, dim) views of the vectors of each table, by table name."""
    typed = {dtype: rows_of_tables.elements.view(dtype) for dtype in set(shapes.weight_dtypes)}
    begin = {dtype: elements.storage_offset() for dtype, elements in typed.items()}
    lists = (
        rows_of_tables.num_rows.tolist(),
        rows_of_tables.spans.starts.tolist(),
        rows_of_tables.spans.widths.tolist(),
        shapes.dims.tolist(),
    )
    result = {}
    # One view per table: with many tables and micro-batches, slices of slices would take half of the time of a step.
    for name, dtype, rows, start, width, dim in zip(names, shapes.weight_dtypes, *lists, strict=False):
        a_word = 4 / dtype.itemsize
        result[name] = typed[dtype].as_strided(
            (rows, dim), (int(width * a_word), 1), begin[dtype] + int(start * a_word)
        )
    return result


def allocate_gradients(dtype: torch.dtype, num_rows: Int64, shapes: RowShapes, device: torch.device) -> ConcatRows:
    """Allocate zeros for the gradients of this dtype."""
    spans, size = _layout_spans(np.where(shapes.has_type[dtype], num_rows, 0), shapes.dims, device)
    return ConcatRows(torch.zeros(size, dtype=dtype, device=device), spans, num_rows)


def concat_gradients(
    gradients: Mapping[str, torch.Tensor] | Mapping[torch.dtype, ConcatRows],
    num_rows: Int64,
    shapes: RowShapes,
    device: torch.device,
) -> dict[torch.dtype, ConcatRows]:
    """Concatenate the gradients of all tables, per dtype; does not copy a single table.

    Args:
        gradients: Table name to gradients, or dtype to already concatenated rows, which are returned unchanged.
        num_rows: Number of rows of each table.
        shapes: Shapes of the rows.
        device: Device of the row offsets.
    """
    tensors, runs = [value for value in gradients.values() if isinstance(value, torch.Tensor)], {}
    if not tensors:
        return {
            dtype: rows_of_tables
            for dtype, rows_of_tables in gradients.items()
            if isinstance(rows_of_tables, ConcatRows) and isinstance(dtype, torch.dtype)
        }
    for dtype in shapes.gradient_types:
        own_side = shapes.has_type[dtype]
        is_all = len(shapes.gradient_types) == 1
        parts = [
            _as_dtype(value, dtype) for value in (tensors if is_all else itertools.compress(tensors, own_side.tolist()))
        ]
        flat = parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        spans, _ = Spans.packed(num_rows if is_all else np.where(own_side, num_rows, 0), shapes.dims, device)
        runs[dtype] = ConcatRows(flat, spans, num_rows)
    return runs


def _as_dtype(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if gradient.requires_grad:
        gradient = gradient.detach()
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


def _layout_spans(
    num_rows: Int64, widths: Int64, device: torch.device, num_spans: int | None = None
) -> tuple[Spans, int]:
    """Lay out tables one after another with aligned starts; spans beyond the tables, up to `num_spans`, are empty."""
    sizes = -(-num_rows * widths // _ALIGNMENT) * _ALIGNMENT
    ends = np.cumsum(sizes)
    starts = ends - sizes
    strides = widths
    missing = (num_spans or len(widths)) - len(widths)
    if missing:
        none = np.full(missing, -1, np.int64)
        starts, strides, widths = np.concatenate([starts, none]), np.tile(strides, 2), np.tile(widths, 2)
    return Spans.of(starts, strides, widths, device), int(ends[-1])


def scatter_received_vectors(
    row_exchange: RowExchange,
    pieces: Sequence[torch.Tensor],
    num_rows: Int64,
    shapes: RowShapes,
    into: ConcatRows | None = None,
) -> ConcatRows:
    """Scatter received vectors to their rows; returns them without a copy if they are already in order.

    Args:
        row_exchange: Plan of the exchange.
        pieces: Received words, one piece per rank or all in one.
        num_rows: Number of rows of each table.
        shapes: Shapes of the rows.
        into: Memory for the rows; None allocates it.
    """
    device = pieces[0].device
    if (
        into is None
        and row_exchange.is_in_order
        and len(pieces) == 1
        and not (num_rows * shapes.words % _ALIGNMENT)[:-1].any()
    ):
        return allocate_vectors(num_rows, shapes, torch.device("cpu"), pieces[0])  # no kernel reads offsets
    rows_of_tables = allocate_vectors(num_rows, shapes, device) if into is None else into
    record_stream_use([rows_of_tables.elements])
    for piece, rows in split_by_piece(pieces, row_exchange.own_rows, row_exchange.own.counts):
        scatter_spans(piece, rows, rows_of_tables.elements, rows_of_tables.spans)
    if row_exchange.half_indices[0]:
        _scatter_half_rows(row_exchange, pieces, rows_of_tables, shapes)
    return rows_of_tables


def split_by_piece(pieces: Sequence[torch.Tensor], rows: RowList, counts: Int64) -> list[tuple[torch.Tensor, RowList]]:
    """Pair each received piece with its rows; `counts` is the number of rows of each rank."""
    if len(pieces) == 1:
        return [(pieces[0], rows)]
    bounds = itertools.pairwise([0, *np.cumsum(counts).tolist()])
    return [(piece, rows.slice_rows(*bound)) for piece, bound in zip(pieces, bounds, strict=True) if len(piece)]


def _scatter_half_rows(
    row_exchange: RowExchange, pieces: Sequence[torch.Tensor], rows_of_tables: ConcatRows, shapes: RowShapes
) -> None:
    """Convert received half-precision rows to the dtype of their table and copy them to their rows."""
    indices = row_exchange.half_indices[0]
    spans = half_precision_spans(row_exchange.half_indices[0], shapes, rows_of_tables.elements.device)
    sizes = [len(rows) * int(shapes.words[shapes.num_tables + t]) for t, rows in indices.items()]
    arrived = rows_of_tables.elements.new_empty(sum(sizes))
    for piece, rows in split_by_piece(pieces, row_exchange.own_rows, row_exchange.own.counts):
        scatter_spans(piece, rows, arrived, spans)
    for (t, where), words in zip(indices.items(), arrived.split(sizes), strict=True):
        half = shapes.half_dtypes[t]
        dtype = shapes.weight_dtypes[t]
        dim = int(shapes.dims[t])
        assert half is not None
        width = int(shapes.words[shapes.num_tables + t])
        values = words.view(len(where), width).view(half)[:, :dim].to(dtype)
        rows_of_tables.of_table(t).view(dtype)[:, :dim].index_copy_(0, where, values)


def half_precision_spans(indices: dict[int, torch.Tensor], shapes: RowShapes, device: torch.device) -> Spans:
    """Return the spans of half-precision rows stored separately, table after table."""
    starts = np.full(len(shapes.words), -1, np.int64)
    at = 0
    for t, rows in indices.items():
        starts[shapes.num_tables + t] = at
        at += len(rows) * int(shapes.words[shapes.num_tables + t])
    return Spans.of(starts, shapes.words, shapes.words, device)


def as_words(values: torch.Tensor) -> torch.Tensor:
    """Return (n, dim) 16-bit values as (n, words) int32 words."""
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    return values.contiguous().view(torch.int32)
