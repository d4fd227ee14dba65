"""Rows that cross in half precision: those of keys that a batch reads only through features marked so.

TurboGR's negatives: vectors that a token is only pushed away from are looked up and sent as 16 bits, every other row as
it is. A key that any other feature of the micro-batch (of the batch, with the window cache) reads too is sent once,
whole. Sources tell the owners with the keys, one byte each. On arrival the rows stand in one order and one type again,
so models notice nothing but the rounding; gradients stay whole both ways.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nestrec.embedding.flight.window_plan import WindowPlan
from nestrec.embedding.table import TableConfig
from nestrec.ops.rows.dedup_host import Segments

Flags = NDArray[np.uint8]
"""1 for a key whose row crosses in half precision."""


def flags_of_segment(tables: Sequence[TableConfig], asked: Segments, segment: int, num_whole: int) -> Flags:
    """Of the keys of a micro-batch and table, in their order. num_whole: how many of its positions, which come first,
    are those of features that are not marked."""
    low, high = asked.bounds[segment : segment + 2]
    if not tables[segment % len(tables)].half_features:
        return np.zeros(high - low, np.uint8)
    flags = np.ones(high - low, np.uint8)
    flags[asked.inverse_of(segment)[:num_whole]] = 0
    return flags


def flags_of_cache(tables: Sequence[TableConfig], plans: Sequence[WindowPlan], num_whole: NDArray[np.int64]) -> Flags:
    """The same with the window cache, in the order of the keys that micro-batches ask for."""
    of_tables = []
    for t, (table, plan) in enumerate(zip(tables, plans, strict=True)):
        of_cache = np.full(plan.num_rows, bool(table.half_features), np.uint8)
        for p, places in enumerate(plan.places):
            of_cache[places[plan.index[p][: num_whole[p, t]]]] = 0
        of_tables.append(np.split(of_cache, plan.starts[1:-1]))
    return np.concatenate([flags[p] for p in range(len(num_whole)) for flags in of_tables])
