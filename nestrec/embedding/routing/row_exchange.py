"""Exchanges of embedding vectors and gradients between ranks.

Rows that cross in half precision: those of keys that a batch reads only through features marked so.

TurboGR's negatives: vectors that a token is only pushed away from are looked up and sent as 16 bits, every other row as
it is. A key that any other feature of the micro-batch (of the batch, with the window cache) reads too is sent once,
whole. Sources tell the owners with the keys, one byte each. On arrival the rows stand in one order and one type again,
so models notice nothing but the rounding; gradients stay whole both ways.

Rows of all tables that cross in one exchange, as the rank that asks and the rank that owns see them.

Both sides name them in one order: by the rank on the other side, then by segment (micro-batch, table), then as the keys
were asked for. So one message carries them, of any number of tables of any width, and nobody sends along what is what.

Where they lie on a rank, rows of all tables lie in one run of memory, table behind table.

Rows that cross in half precision are narrower: they count as rows of a table of their own, number T + t.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.cuda import to_device, used_here
from nestrec.embedding.routing.window_cache_plan import WindowPlan
from nestrec.embedding.table_config import RowShapes, TableSpecs
from nestrec.ops.embedding.dedup_host import Segments
from nestrec.ops.embedding.row_copy import Int32, Int64, RowList, Spans, TargetGroups, scatter_spans

Flags = NDArray[np.uint8]
"""1 for a key whose row crosses in half precision."""


def flags_of_segment(specs: TableSpecs, asked: Segments, segment: int, num_whole: int) -> Flags:
    """Of the keys of a micro-batch and table, in their order. num_whole: how many of its positions, which come first,
    are those of features that are not marked."""
    low, high = asked.bounds[segment : segment + 2]
    if not specs.has_half_T[segment % specs.num_tables]:
        return np.zeros(high - low, np.uint8)
    flags = np.ones(high - low, np.uint8)
    flags[asked.inverse_of(segment)[:num_whole]] = 0
    return flags


def flags_of_cache(specs: TableSpecs, plans: Sequence[WindowPlan], num_whole: NDArray[np.int64]) -> Flags:
    """The same with the window cache, in the order of the keys that micro-batches ask for."""
    of_tables = []
    for t, (has_half, plan) in enumerate(zip(specs.has_half_T, plans, strict=True)):
        of_cache = np.full(plan.num_rows, has_half, np.uint8)
        for p, places in enumerate(plan.places):
            of_cache[places[plan.index[p][: num_whole[p, t]]]] = 0
        of_tables.append(np.split(of_cache, plan.starts[1:-1]))
    return np.concatenate([flags[p] for p in range(len(num_whole)) for flags in of_tables])


_ALIGNMENT = 4
"""Elements: kernels read a table's rows best where they begin at 16 bytes."""


@dataclass(frozen=True, slots=True)
class ExchangeSide:
    """Rows on one side of an exchange, in the order in which they cross."""

    tables: Int32
    places: Int32
    """Among the rows of their table on this side."""
    counts: Int64
    """Rows of each rank on the other side."""
    half: Flags | None = None
    """Which cross in half precision."""

    def only(self, chosen: NDArray[np.bool_]) -> "ExchangeSide":
        """Some of the rows, in the same order."""
        before = np.concatenate([[0], np.cumsum(chosen)])
        counts = np.diff(before[self._bounds])
        half = None if self.half is None else self.half[chosen]
        return ExchangeSide(self.tables[chosen], self.places[chosen], counts, half)

    @property
    def _bounds(self) -> Int64:
        return np.concatenate([[0], np.cumsum(self.counts)])

    def rows(self, widths: Int64, device: torch.device) -> tuple[RowList, Int64]:
        """The list of them, and the elements of each rank; widths: elements of a row of each table."""
        tables = self.tables
        places = self.places
        if self.half is not None and self.half.any():
            tables, places = tables.copy(), places.copy()
            _number_halves(tables, places, self.half, len(widths) // 2)
        found = RowList.of(tables, places, widths, device)
        return found, np.diff(found.offsets[self._bounds])

    def half_places(self, table: int, device: torch.device) -> torch.Tensor:
        """Places of the rows of a table that cross in half precision, in order."""
        assert self.half is not None
        chosen = (self.tables == table) & (self.half != 0)
        return to_device(self.places[chosen].astype(np.int64), device)


@dataclass(frozen=True, slots=True)
class RowExchange:
    """One exchange in one direction, or in both."""

    own: ExchangeSide
    """Rows that this rank asks for, and whose gradients it sends."""
    asked: ExchangeSide
    """Rows of this shard that others ask for."""
    own_rows: RowList
    own_sizes: Int64
    """Elements of each rank."""
    asked_rows: RowList
    asked_sizes: Int64
    half_places: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]
    """Table to the places of rows that cross in half precision, own and asked."""
    groups: TargetGroups | None
    """Of gradients on a device: contributions to one row."""
    is_in_order: bool
    """The own rows lie packed just as they cross."""


def vector_leg(
    own: ExchangeSide, asked: ExchangeSide, shapes: RowShapes, device: torch.device, *, is_in_order: bool
) -> RowExchange:
    """Vectors, from the owners to those who ask."""
    halves = [t for t, half in enumerate(shapes.halves) if half is not None]
    places = tuple({t: side.half_places(t, device) for t in halves} for side in (own, asked))
    in_order = is_in_order and not halves
    own_rows = own.rows(shapes.words, device)
    asked_rows = asked.rows(shapes.words, device)
    return RowExchange(own, asked, *own_rows, *asked_rows, (places[0], places[1]), None, in_order)


def gradient_legs(
    own: ExchangeSide,
    asked: ExchangeSide,
    shapes: RowShapes,
    num_owned: Int64,
    device: torch.device,
    *,
    is_in_order: bool,
    vectors: RowExchange | None = None,
) -> dict[torch.dtype, RowExchange]:
    """Gradients, from those who asked to the owners; one leg for each of their types. num_owned: rows of each table.

    vectors: a leg of the same rows, of which what is the same for gradients is taken.
    """
    if vectors is not None and len(shapes.gradient_types) == 1 and np.array_equal(shapes.words, shapes.dims):
        groups = _groups(vectors.asked_rows, asked, num_owned, device)
        return {shapes.states[0]: replace(vectors, groups=groups, is_in_order=is_in_order)}
    legs = {}
    for dtype in shapes.gradient_types:
        mine, theirs = (ExchangeSide(s.tables, s.places, s.counts) for s in (own, asked))
        if len(shapes.gradient_types) > 1:
            chosen = shapes.has_type[dtype]
            mine, theirs = mine.only(chosen[mine.tables]), theirs.only(chosen[theirs.tables])
        asked_rows, asked_sizes = theirs.rows(shapes.dims, device)
        groups = _groups(asked_rows, theirs, num_owned, device)
        own_rows = mine.rows(shapes.dims, device)
        legs[dtype] = RowExchange(mine, theirs, *own_rows, asked_rows, asked_sizes, ({}, {}), groups, is_in_order)
    return legs


def _groups(rows: RowList, asked: ExchangeSide, num_owned: Int64, device: torch.device) -> TargetGroups | None:
    """One source asks for a row once: then there is nothing to group."""
    return None if len(asked.counts) == 1 else TargetGroups.of(rows, num_owned, device)


@njit(cache=True, nogil=True)
def _number_halves(tables, places, half, num_tables):  # type: ignore[no-untyped-def]
    """Rows in half precision to tables of their own, in which they are numbered as they come."""
    seen = np.zeros(num_tables, np.int32)
    for i in range(len(tables)):
        if half[i]:
            table = tables[i]
            places[i] = seen[table]
            seen[table] += 1
            tables[i] = num_tables + table


@njit(cache=True, nogil=True)
def by_micro_batch(micro_batches, counts, num_micro_batches):  # type: ignore[no-untyped-def]
    """Rows in order of rank to rows in order of (micro-batch, rank): order, where micro-batches begin, and (micro-
    batch, rank) numbers. counts: rows of each rank."""
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
    """Stable order of small numbers, and how many there are of each."""
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
    """Rows of some tables, one table behind the other."""

    elements: torch.Tensor
    """int32 words of vectors, or elements of gradients."""
    spans: Spans
    """Where the rows of each table lie; tables that are not here are passed over."""
    num_rows: Int64
    """Of each table."""

    def of_table(self, table: int) -> torch.Tensor:
        """(n, width) rows of a table."""
        start, width, rows = int(self.spans.starts[table]), int(self.spans.widths[table]), int(self.num_rows[table])
        return self.elements[start : start + rows * width].view(rows, width)


def vector_run(
    num_rows: Int64, shapes: RowShapes, device: torch.device, elements: torch.Tensor | None = None
) -> ConcatRows:
    """Memory for so many vectors of each table. elements: vectors that lie so already."""
    spans, size = _laid_out(num_rows, shapes.words[: shapes.num_tables], device, len(shapes.words))
    return ConcatRows(
        torch.empty(size, dtype=torch.int32, device=device) if elements is None else elements, spans, num_rows
    )


def vectors_of(run: ConcatRows, shapes: RowShapes, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Table to its (n, dim) vectors, where they lie."""
    typed = {dtype: run.elements.view(dtype) for dtype in set(shapes.weights)}
    begin = {dtype: elements.storage_offset() for dtype, elements in typed.items()}
    lists = run.num_rows.tolist(), run.spans.starts.tolist(), run.spans.widths.tolist(), shapes.dims.tolist()
    found = {}
    # One view for each table: with many tables and micro-batches, a slice of a slice would be half of a step's time.
    for name, dtype, rows, start, width, dim in zip(names, shapes.weights, *lists, strict=False):
        a_word = 4 / dtype.itemsize
        found[name] = typed[dtype].as_strided((rows, dim), (int(width * a_word), 1), begin[dtype] + int(start * a_word))
    return found


def gradient_run(dtype: torch.dtype, num_rows: Int64, shapes: RowShapes, device: torch.device) -> ConcatRows:
    """Zeros for the gradients of this type."""
    spans, size = _laid_out(np.where(shapes.has_type[dtype], num_rows, 0), shapes.dims, device)
    return ConcatRows(torch.zeros(size, dtype=dtype, device=device), spans, num_rows)


def joined_gradients(
    gradients: Mapping[str, torch.Tensor] | Mapping[torch.dtype, ConcatRows],
    num_rows: Int64,
    shapes: RowShapes,
    device: torch.device,
) -> dict[torch.dtype, ConcatRows]:
    """Gradients of all tables, for each of their types, one table behind the other; without a copy where there is one
    table. num_rows: of each table. Runs stay as they are."""
    given, runs = [value for value in gradients.values() if isinstance(value, torch.Tensor)], {}
    if not given:
        return {
            dtype: run
            for dtype, run in gradients.items()
            if isinstance(run, ConcatRows) and isinstance(dtype, torch.dtype)
        }
    for dtype in shapes.gradient_types:
        mine = shapes.has_type[dtype]
        is_all = len(shapes.gradient_types) == 1
        parts = [_plain(value, dtype) for value in (given if is_all else itertools.compress(given, mine.tolist()))]
        flat = parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        spans, _ = Spans.packed(num_rows if is_all else np.where(mine, num_rows, 0), shapes.dims, device)
        runs[dtype] = ConcatRows(flat, spans, num_rows)
    return runs


def _plain(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if gradient.requires_grad:
        gradient = gradient.detach()
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


def _laid_out(num_rows: Int64, widths: Int64, device: torch.device, num_spans: int | None = None) -> tuple[Spans, int]:
    """Tables one behind the other, each aligned. num_spans: those beyond the tables have no rows here."""
    sizes = -(-num_rows * widths // _ALIGNMENT) * _ALIGNMENT
    ends = np.cumsum(sizes)
    starts = ends - sizes
    strides = widths
    missing = (num_spans or len(widths)) - len(widths)
    if missing:
        none = np.full(missing, -1, np.int64)
        starts, strides, widths = np.concatenate([starts, none]), np.tile(strides, 2), np.tile(widths, 2)
    return Spans.of(starts, strides, widths, device), int(ends[-1])


def arrived_vectors(
    leg: RowExchange, pieces: Sequence[torch.Tensor], num_rows: Int64, shapes: RowShapes, into: ConcatRows | None = None
) -> ConcatRows:
    """Vectors that have come, each at its place; where they lie so already, as they came. num_rows: of each table.

    into: where they are put; none: in memory of their own.
    """
    device = pieces[0].device
    if into is None and leg.is_in_order and len(pieces) == 1 and not (num_rows * shapes.words % _ALIGNMENT)[:-1].any():
        return vector_run(num_rows, shapes, torch.device("cpu"), pieces[0])  # no kernel asks where rows lie
    run = vector_run(num_rows, shapes, device) if into is None else into
    used_here([run.elements])
    for piece, rows in by_piece(pieces, leg.own_rows, leg.own.counts):
        scatter_spans(piece, rows, run.elements, run.spans)
    if leg.half_places[0]:
        _place_halves(leg, pieces, run, shapes)
    return run


def by_piece(pieces: Sequence[torch.Tensor], rows: RowList, counts: Int64) -> list[tuple[torch.Tensor, RowList]]:
    """What has come, with its rows; counts: rows of each rank."""
    if len(pieces) == 1:
        return [(pieces[0], rows)]
    bounds = itertools.pairwise([0, *np.cumsum(counts).tolist()])
    return [(piece, rows.part(*bound)) for piece, bound in zip(pieces, bounds, strict=True) if len(piece)]


def _place_halves(leg: RowExchange, pieces: Sequence[torch.Tensor], run: ConcatRows, shapes: RowShapes) -> None:
    """Rows that came in half precision, to their places in the type of their table."""
    places = leg.half_places[0]
    spans = half_spans(leg.half_places[0], shapes, run.elements.device)
    sizes = [len(rows) * int(shapes.words[shapes.num_tables + t]) for t, rows in places.items()]
    arrived = run.elements.new_empty(sum(sizes))
    for piece, rows in by_piece(pieces, leg.own_rows, leg.own.counts):
        scatter_spans(piece, rows, arrived, spans)
    for (t, where), words in zip(places.items(), arrived.split(sizes), strict=True):
        half = shapes.halves[t]
        dtype = shapes.weights[t]
        dim = int(shapes.dims[t])
        assert half is not None
        width = int(shapes.words[shapes.num_tables + t])
        values = words.view(len(where), width).view(half)[:, :dim].to(dtype)
        run.of_table(t).view(dtype)[:, :dim].index_copy_(0, where, values)


def half_spans(places: dict[int, torch.Tensor], shapes: RowShapes, device: torch.device) -> Spans:
    """Where rows that cross in half precision lie on their own, table behind table."""
    starts = np.full(len(shapes.words), -1, np.int64)
    at = 0
    for t, rows in places.items():
        starts[shapes.num_tables + t] = at
        at += len(rows) * int(shapes.words[shapes.num_tables + t])
    return Spans.of(starts, shapes.words, shapes.words, device)


def as_words(values: torch.Tensor) -> torch.Tensor:
    """(n, dim) of 16 bits as (n, words)."""
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    return values.contiguous().view(torch.int32)
