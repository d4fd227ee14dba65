"""Gradients of rows that several ranks hold, summed over these holders: everybody to everybody, or scattered.

    direct       each holder sends its rows to all others, and all add them up in order of holder
    scattered    row number p belongs to holder p % R of R: it receives the others' gradients of the row, adds them up
                 in order of holder, and sends the sum to all others

Both add in one order, so the bits are the same. What each would send is known to every holder from the keys, and the
fewer bytes are taken: of n rows that all hold in common, R (R - 1) n cross directly, and 2 (R - 1) n scattered. With
two holders, or rows that only one of them has, direct is never more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nestrec.distributed.collectives import all_to_all_rows, gather_rows_from_all
from nestrec.distributed.topology import Communicator
from nestrec.embedding.routing.row_exchange import ConcatRows, ExchangeSide
from nestrec.embedding.table_config import RowShapes
from nestrec.ops.embedding.row_copy import Int64, RowList, add_spans, gather_spans, scatter_spans

_FEWEST_HOLDERS = 3


@dataclass(frozen=True, slots=True)
class DirectReduction:
    """The rows of each holder, which all others receive."""

    rows: tuple[RowList, ...]

    def num_own(self, holder: int) -> int:
        return len(self.rows[holder])


@dataclass(frozen=True, slots=True)
class ScatteredReduction:
    """Rows as one holder sends and receives them."""

    sent: RowList
    """Own rows in order of the holder that adds them up."""
    sent_sizes: list[int]
    """Elements for each holder."""
    added: tuple[RowList, ...]
    """For each holder its rows that this one adds up."""
    sums: tuple[RowList, ...]
    """For each holder the rows that it has added up."""

    def num_own(self, holder: int) -> int:
        return len(self.sent)


HolderRows = DirectReduction | ScatteredReduction
"""The rows of the holders of a shard whose gradient crosses to the others."""


@dataclass(frozen=True, slots=True)
class GradientBroadcast:
    """For each shard the rows of replicated tables whose sums it has, which all others receive (`everywhere`)."""

    rows: tuple[RowList, ...]

    def num_own(self, shard: int) -> int:
        return len(self.rows[shard])


Crossing = dict[torch.dtype, HolderRows] | dict[torch.dtype, GradientBroadcast]
"""By type of the gradients: between holders of a shard, or from the owners of rows that all ranks hold."""


def crossing_rows(sides: tuple[ExchangeSide, ...], shapes: RowShapes, device: torch.device, holder: int) -> Crossing:
    """The rows of each holder, by type of their gradients; holder: this one."""
    found: dict[torch.dtype, HolderRows] = {}
    for dtype in shapes.gradient_types if sides else ():
        chosen = shapes.has_type[dtype]
        mine = [side.only(chosen[side.tables]) for side in sides]
        distinct = _distinct(mine) if len(mine) >= _FEWEST_HOLDERS else []
        if distinct and _scattered_is_less(mine, distinct, shapes.dims):
            found[dtype] = _scattered(mine, distinct, shapes.dims, device, holder)
        else:
            found[dtype] = DirectReduction(tuple(side.rows(shapes.dims, device)[0] for side in mine))
    return found


def _distinct(sides: Sequence[ExchangeSide]) -> list[ExchangeSide]:
    """For each holder the distinct rows that it adds up."""
    numbers = np.unique(np.concatenate([(s.tables.astype(np.int64) << 32) | s.places for s in sides]))
    places = (numbers & 0xFFFFFFFF).astype(np.int32)
    everything = ExchangeSide((numbers >> 32).astype(np.int32), places, np.array([len(places)]))
    return [everything.only(places % len(sides) == r) for r in range(len(sides))]


def _scattered_is_less(sides: Sequence[ExchangeSide], distinct: Sequence[ExchangeSide], widths: Int64) -> bool:
    num_holders = len(sides)
    direct = (num_holders - 1) * sum(int(widths[side.tables].sum()) for side in sides)
    to_others = sum(int(widths[s.tables[s.places % num_holders != r]].sum()) for r, s in enumerate(sides))
    back = (num_holders - 1) * sum(int(widths[side.tables].sum()) for side in distinct)
    return to_others + back < direct


def _scattered(
    sides: Sequence[ExchangeSide], distinct: Sequence[ExchangeSide], widths: Int64, device: torch.device, holder: int
) -> ScatteredReduction:
    own = sides[holder]
    num_holders = len(sides)
    adds = own.places % num_holders
    order = np.argsort(adds, kind="stable")
    counts = np.bincount(adds, minlength=num_holders)
    sent, sizes = ExchangeSide(own.tables[order], own.places[order], counts).rows(widths, device)
    added = tuple(side.only(side.places % num_holders == holder).rows(widths, device)[0] for side in sides)
    sums = tuple(side.rows(widths, device)[0] for side in distinct)
    return ScatteredReduction(sent, sizes.tolist(), added, sums)


def sum_over_holders(holders: Communicator, rows: HolderRows, sums: ConcatRows, totals: ConcatRows) -> int:
    """Add the sums of every holder to the totals of all, in order of holder; bytes sent from here. Collective."""
    if isinstance(rows, ScatteredReduction):
        return _sum_scattered(holders, rows, sums, totals)
    mine = packed(sums, rows.rows[holders.rank])
    received = gather_rows_from_all(holders, mine, [of_holder.num_elements for of_holder in rows.rows])
    for of_holder, values in zip(rows.rows, received, strict=True):
        add_spans(values, of_holder, totals.elements, totals.spans)  # a holder has a row once
    return (holders.size - 1) * mine.numel() * mine.element_size()


def _sum_scattered(holders: Communicator, rows: ScatteredReduction, sums: ConcatRows, totals: ConcatRows) -> int:
    sizes = [of_holder.num_elements for of_holder in rows.added]
    received = all_to_all_rows(holders, packed(sums, rows.sent), rows.sent_sizes, sizes)
    for of_holder, values in zip(rows.added, received.split(sizes), strict=True):
        add_spans(values, of_holder, totals.elements, totals.spans)
    mine = packed(totals, rows.sums[holders.rank])
    everyone = gather_rows_from_all(holders, mine, [of_holder.num_elements for of_holder in rows.sums])
    for holder, (of_holder, values) in enumerate(zip(rows.sums, everyone, strict=True)):
        if holder != holders.rank:
            scatter_spans(values, of_holder, totals.elements, totals.spans)
    sent = sum(rows.sent_sizes) - rows.sent_sizes[holders.rank] + (holders.size - 1) * mine.numel()
    return sent * mine.element_size()


def packed(run: ConcatRows, rows: RowList) -> torch.Tensor:
    """Some rows of a run, one behind the other."""
    found = run.elements.new_empty(rows.num_elements)
    gather_spans(run.elements, run.spans, rows, found)
    return found
