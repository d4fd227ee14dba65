"""Rows that batches have read before their step: kept over a stop, so that a run goes on with what it had read.

Schedules that use rows late (`stale`, `semi_async`) read those of the next batches before this one's update. A run that
stops here and reads them anew later would use other values than one that went on.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.embedding.flight.working_set import WorkingSet

Vectors = tuple[NDArray[np.int64], torch.Tensor]
"""(n,) keys and their (n, dim) vectors."""


class ReadsAhead:
    """By step of the batch that will use them. Used by the lane that reads rows, or while no lane is busy."""

    def __init__(self) -> None:
        self._in_flight: dict[int, WorkingSet] = {}
        self._kept: dict[int, dict[str, Vectors]] = {}

    def began(self, working: WorkingSet) -> None:
        """Rows were just read; where they had been read before a stop, they are as they were then."""
        for name, (keys, vectors) in self._kept.pop(working.step, {}).items():
            table = working.tables[name]
            order = np.argsort(keys)
            places = np.searchsorted(keys, table.fetched.keys, sorter=order).clip(max=len(keys) - 1)
            found = np.flatnonzero(keys[order[places]] == table.fetched.keys) if len(keys) else places[:0]
            weight = table.layout.view(table.fetched.rows, "weight")
            weight[torch.from_numpy(found)] = vectors[torch.from_numpy(order[places[found]])].to(weight.device)
        self._in_flight[working.step] = working

    def ended(self, step: int) -> None:
        """The batch of this step needs them no more."""
        self._in_flight.pop(step, None)

    def forget(self) -> None:
        """Every batch from now on reads anew."""
        self._in_flight.clear()
        self._kept.clear()

    def pending(self) -> dict[int, dict[str, Vectors]]:
        """Step to table to what was read for it, in host memory."""
        return {
            step: {
                name: (table.fetched.keys, table.layout.view(table.fetched.rows, "weight").cpu().contiguous())
                for name, table in working.tables.items()
            }
            for step, working in self._in_flight.items()
        }

    def keep(self, step: int, read: Mapping[str, Vectors]) -> None:
        """What `pending` gave before a stop, for the next read of that step; keys may lack, or be others' too."""
        self._kept[step] = dict(read)
