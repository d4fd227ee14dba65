"""Rows that cross between hosts once for all ranks of a host: each rank asks for them on behalf of its host.

    rank            keys            vectors and gradients
    that asks       asks rank s % L of its own host, of L, for the rows of shard s
    between         asks shard s once for what several ranks ask of it
                                    hands vectors to those who asked; adds their gradients up, in order of rank
    owner           sees one source a host, in order of host

Vectors and gradients so take two exchanges each, the first or the second inside the host. Sums are in order of rank on
a host, then in order of host: the same in every schedule, so that each equals `serial` to the bit. Without hosts they
are in order of rank, which agrees to rounding (order of sums).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.embedding.routing.deduplicated_keys import (
    ERROR_WORDS,
    DeduplicatedKeys,
    KeyCounts,
    KeyRows,
    asked_rows,
    field_of,
    num_rows_of,
    own_rows,
    planned,
    segments_of,
)
from nestrec.embedding.routing.row_exchange import (
    ConcatRows,
    ExchangeSide,
    RowExchange,
    by_piece,
    by_value,
    gradient_legs,
    gradient_run,
    vector_leg,
    vector_run,
)
from nestrec.embedding.table_config import RowShapes, TableConfig
from nestrec.ops.embedding.dedup_host import dedup_segments
from nestrec.ops.embedding.row_copy import Int32, Int64, add_spans


@dataclass(frozen=True, slots=True)
class IntraHostKeys:
    """Keys of a batch inside a host."""

    source: DeduplicatedKeys
    """What this rank asks of its kind on other hosts, on behalf of this one."""
    own: KeyRows
    """Every key that this rank asks for, as it asks."""
    asked: KeyRows
    """Every key that ranks of this host ask through this one, as they came; places among the rows of `source`."""


@dataclass(frozen=True, slots=True)
class IntraHostExchange:
    """What crosses inside a host with a micro-batch."""

    vectors: RowExchange
    gradients: dict[torch.dtype, RowExchange]


@dataclass(slots=True)
class _Between:
    """Rows that lie on the rank between, made when they are needed."""

    vectors: ConcatRows | None = None
    sums: dict[torch.dtype, ConcatRows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HierarchicalExchange:
    """A batch between the ranks of a host and other hosts: what crosses inside, and what lies on the rank between."""

    keys: IntraHostKeys
    micro_batches: tuple[IntraHostExchange, ...]
    gradient_sides: list[tuple[ExchangeSide, ExchangeSide]]
    """For each micro-batch the gradients that leave after it, own and asked, of all types."""
    num_rows: NDArray[np.int64]
    """(micro-batch, table) rows between; with the window cache the same in all, which use one place for a row."""
    _between: _Between = field(default_factory=_Between)

    @property
    def is_kept(self) -> bool:
        """Rows stay from micro-batch to micro-batch."""
        return self.keys.source.windows is not None

    def portion(self, micro_batches: tuple[IntraHostExchange, ...]) -> "HierarchicalExchange":
        """Some of what crosses; the rows between are the same."""
        return replace(self, micro_batches=micro_batches)

    def vectors(self, micro_batch: int, shapes: RowShapes, device: torch.device) -> ConcatRows:
        """Where the vectors of a micro-batch lie."""
        run = self._between.vectors if self.is_kept else None
        if run is None:
            run = self._between.vectors = vector_run(self.num_rows[micro_batch], shapes, device)
        return run

    def add(
        self, micro_batch: int, dtype: torch.dtype, pieces: Sequence[torch.Tensor], shapes: RowShapes
    ) -> ConcatRows:
        """Sums of gradients, with those that have come from the ranks of this host, in their order."""
        leg = self.micro_batches[micro_batch].gradients[dtype]
        sums = self._between.sums.get(dtype) if self.is_kept else None
        if sums is None:
            sums = gradient_run(dtype, self.num_rows[micro_batch], shapes, pieces[0].device)
            self._between.sums[dtype] = sums
        for piece, rows in by_piece(pieces, leg.asked_rows, leg.asked.counts):
            add_spans(piece, rows, sums.elements, sums.spans, leg.groups if len(pieces) == 1 else None)
        return sums


def check_rows_are_whole(tables: Sequence[TableConfig]) -> None:
    """A row that one rank takes in half precision and another whole would be rounded for both, or for none."""
    for table in tables:
        if table.half_features:
            raise UserError(
                f"features of table {table.name!r} take their rows in half precision",
                option="ranks.hierarchy",
                value=True,
                remedy="leave out one of the two (task.negatives.lookup)",
            )


def on_behalf(
    source: DeduplicatedKeys, records: NDArray[Any], counted: KeyCounts, num_shards: int, ranks_of_host: int
) -> IntraHostKeys:
    """What a rank asks other hosts for, of what ranks of its own have told it. Local.

    source: of this rank. records, counted: of the exchange inside the host.
    """
    num_tables = source.num_tables
    num_micro_batches = source.num_micro_batches
    last = field_of(records, "last")
    segments = segments_of(records)
    keys = np.ascontiguousarray(records["key"])
    if last is not None:  # a key of several ranks is used from the first use by any of them to the last
        keys, segments = np.tile(keys, 2), np.concatenate([segments, _used_last(last, segments, num_tables)])
    order, counts = by_value(segments.astype(np.int32), num_tables * num_micro_batches)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    places = np.empty(len(keys), np.int32)
    if last is None:
        distinct = dedup_segments(keys[order], bounds, num_shards)
        plans = None
        places[order] = distinct.inverse
    else:
        distinct, plans = planned(keys[order], bounds, num_tables, num_shards)
        kept = [plans[s % num_tables].places[s // num_tables][distinct.inverse_of(s)] for s in range(len(bounds) - 1)]
        places[order] = np.concatenate(kept)
    owners = distinct.owners(num_shards) // np.int32(ranks_of_host)
    none: list[dict[str, tuple[int, ...]]] = [{} for _ in range(num_micro_batches)]
    between = DeduplicatedKeys(none, num_tables, distinct, owners, {}, plans, None, [0] * ERROR_WORDS)
    asked = asked_rows(records, places[: len(records)], counted.comes, num_tables)
    return IntraHostKeys(between, own_rows(source, counted), asked)


def _used_last(last: NDArray[np.int16], segments: Int32, num_tables: int) -> Int32:
    """The segment that uses each key last."""
    return last.astype(np.int32) * num_tables + segments % num_tables


def relay(keys: IntraHostKeys, shapes: RowShapes, device: torch.device) -> HierarchicalExchange:
    """What crosses inside the host with each micro-batch. Local."""
    num_micro_batches = keys.source.num_micro_batches
    windows = keys.source.windows
    num_rows = num_rows_of(keys.source)
    if windows is not None:
        num_rows = np.tile(np.array([plan.num_rows for plan in windows], np.int64), (num_micro_batches, 1))
    coming = _sides(keys, by_last=False)
    going = coming if windows is None else _sides(keys, by_last=True)
    legs = tuple(within_legs(coming[p], going[p], num_rows[p], shapes, device) for p in range(num_micro_batches))
    return HierarchicalExchange(keys, legs, going, num_rows)


def _sides(keys: IntraHostKeys, *, by_last: bool) -> list[tuple[ExchangeSide, ExchangeSide]]:
    both = (rows.sides(keys.source.num_micro_batches, by_last=by_last) for rows in (keys.own, keys.asked))
    return list(zip(*both, strict=True))


def within_legs(
    coming: tuple[ExchangeSide, ExchangeSide],
    going: tuple[ExchangeSide, ExchangeSide],
    num_rows: Int64,
    shapes: RowShapes,
    device: torch.device,
) -> IntraHostExchange:
    """Own and asked rows whose vectors come and whose gradients go. num_rows: of each table between."""
    vectors = vector_leg(*coming, shapes, device, is_in_order=False)
    return IntraHostExchange(vectors, gradient_legs(*going, shapes, num_rows, device, is_in_order=False))


def flags_within(relayed: HierarchicalExchange, between: KeyRows, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of each key asked through this rank, what is known of its row. flags: of the rows as this rank asks for them."""
    asked = relayed.keys.asked
    num_tables = relayed.num_rows.shape[1]
    first = np.concatenate([[0], np.cumsum(relayed.num_rows.reshape(-1))])

    def number(rows: KeyRows) -> Int64:
        part = 0 if relayed.is_kept else rows.micro_batches.astype(np.int64)
        found: Int64 = first[part * num_tables + rows.tables] + rows.places
        return found

    known = np.zeros(first[-1], np.bool_)
    known[number(between)] = flags
    return known[number(asked)]
