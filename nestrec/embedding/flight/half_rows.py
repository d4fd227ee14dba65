"""Rows that cross in half precision: those of keys that a batch reads only through features marked so.

TurboGR's negatives: vectors that a token is only pushed away from are looked up and sent as 16 bits, every other row as
it is. A key that any other feature of the micro-batch (of the batch, with the window cache) reads too is sent once,
whole. Sources tell the owners with the keys, one byte each. On arrival the rows stand in one order and one type again,
so models notice nothing but the rounding; gradients stay whole both ways.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.transfer import to_device
from nestrec.embedding.flight.window_plan import WindowPlan
from nestrec.embedding.table import TableConfig
from nestrec.ops.rows.dedup_host import Deduplicated

Flags = NDArray[np.uint8]
"""1 for a key whose row crosses in half precision."""


@dataclass(frozen=True, slots=True)
class CrossingRows:
    """Rows on one side of an exchange that cross in one type."""

    places: torch.Tensor
    """Where they are on this side, in the order in which they cross."""
    counts: tuple[int, ...]
    """Of each rank on the other side."""


@dataclass(frozen=True, slots=True)
class HalfRows:
    """How the rows of one exchange are told apart: (whole, half), on the owner and on the source."""

    of_owner: tuple[CrossingRows, CrossingRows]
    """Places in the working set."""
    of_source: tuple[CrossingRows, CrossingRows]
    """Places among the keys that this rank asks for."""
    flags: tuple[Flags, Flags]
    """Of what this rank asks for and of what it is asked for, so that an exchange can be cut in two."""


def flags_of_micro_batches(
    table: TableConfig, num_whole: Sequence[int], micro_batches: Sequence[Deduplicated], plan: WindowPlan | None
) -> list[Flags]:
    """For each micro-batch, in the order of the keys that it asks for.

    num_whole: how many of a micro-batch's keys, which come first, are those of features that are not marked. plan: of
    the window cache.
    """
    if not table.half_features:
        return [np.zeros(len(micro_batch.keys), np.uint8) for micro_batch in micro_batches]
    if plan is None:
        flags = [np.ones(len(micro_batch.keys), np.uint8) for micro_batch in micro_batches]
        for micro_batch, count, found in zip(micro_batches, num_whole, flags, strict=True):
            found[micro_batch.inverse[:count]] = 0
        return flags
    of_cache = np.ones(plan.num_rows, np.uint8)
    for micro_batch, count, places in zip(micro_batches, num_whole, plan.places, strict=True):
        of_cache[places[micro_batch.inverse[:count]]] = 0
    return np.split(of_cache, np.cumsum([len(micro_batch.keys) for micro_batch in micro_batches])[:-1])


def half_rows(
    asking: tuple[Flags, Sequence[int]],
    asked: tuple[Flags, Sequence[int]],
    working_places: NDArray[np.int32] | None,
    device: torch.device,
) -> HalfRows:
    """asking, asked: flags and counts by rank, of what this rank asks for and of what it is asked for."""
    return HalfRows(
        _crossings(*asked, working_places, device), _crossings(*asking, None, device), (asking[0], asked[0])
    )


def _crossings(
    flags: Flags, counts: Sequence[int], working_places: NDArray[np.int32] | None, device: torch.device
) -> tuple[CrossingRows, CrossingRows]:
    rank = np.repeat(np.arange(len(counts)), counts)

    def crossing(wanted: NDArray[np.bool_]) -> CrossingRows:
        places: NDArray[Any] = np.flatnonzero(wanted)
        of_ranks = np.bincount(rank[wanted], minlength=len(counts))
        return CrossingRows(
            to_device(places if working_places is None else working_places[places], device), tuple(of_ranks.tolist())
        )

    return crossing(flags == 0), crossing(flags != 0)
