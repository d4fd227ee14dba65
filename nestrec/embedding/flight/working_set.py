"""The rows of one batch on their owner, in device buffers, with the sums of their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.distributed.parcel import Parcel
from nestrec.embedding.flight.routing import RoutedTable
from nestrec.embedding.layout import RowLayout
from nestrec.embedding.optimizers.updating import runs_host_loop, update_rows, update_rows_on_host
from nestrec.embedding.row_optimizer import RowStep
from nestrec.embedding.shard import FetchedRows
from nestrec.embedding.table import TableConfig
from nestrec.embedding.transfer import to_device, used_here
from nestrec.ops.rows.gather import take_rows
from nestrec.ops.rows.sum import add_distinct


@dataclass(slots=True)
class WorkingTable:
    """Rows of one table; row i belongs to `fetched.keys[i]`."""

    table: TableConfig
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

    def parcel(self, routed: RoutedTable) -> Parcel:
        """Vectors of the keys asked from this shard, in order of source. May share memory with the working set."""
        weight = self.layout.view(self.fetched.rows, "weight")
        rows = weight.contiguous() if routed.slots is None else weight
        return Parcel(rows, routed.receive_counts, routed.send_counts, routed.slots)

    def vectors_at(self, places: torch.Tensor) -> torch.Tensor:
        """Vectors of the rows at these places."""
        return take_rows(self.layout.view(self.fetched.rows, "weight"), places)

    def add(self, routed: RoutedTable, received: Sequence[torch.Tensor]) -> None:
        """Add gradients of the keys asked from this shard, source by source (order of sums)."""
        if routed.slots is None and self.gradient is None:
            (self.gradient,) = received
            return
        if self.gradient is None:
            self.gradient = received[0].new_zeros(len(self.fetched.keys), self.table.dim)
        places = _places(routed, self.fetched.rows.device).split(routed.receive_counts)
        for where, grad in zip(places, received, strict=True):
            add_distinct(self.gradient, where, grad)  # a source asks for a row once

    def add_of_holders(self, places: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Add complete sums of the holders, in order of holder."""
        if self.total is None:
            self.total = gradients[0].new_zeros(len(self.fetched.keys), self.table.dim)
        for where, grad in zip(places, gradients, strict=True):
            add_distinct(self.total, where, grad)  # a holder has a row once

    def update_some(self, places: torch.Tensor, step: int, learning_rate: float) -> torch.Tensor | None:
        """One step of the row optimiser on the rows at these places; the gradients of the others wait.

        Those rows, or none where there was nothing to do.
        """
        gradient = self.gradient if self.total is None else self.total
        if gradient is None or not len(places):
            return None
        rows, chosen = self.fetched.rows.index_select(0, places), gradient.index_select(0, places)
        slots = self.fetched.slots[places.cpu().numpy()]
        self._update(rows, chosen * self.gradient_scale, slots, step, learning_rate)
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
        rows = self.fetched.rows[:end]
        self._update(rows, gradient[:end], self.fetched.slots[:end], step, learning_rate)
        return rows

    def _update(
        self, rows: torch.Tensor, gradient: torch.Tensor, slots: NDArray[np.int64], step: int, learning_rate: float
    ) -> None:
        refused, now = slots < 0, RowStep(step, learning_rate, self.table.optimizer)
        if runs_host_loop(rows, self.layout, self.table.optimizer.spec):
            kept = torch.from_numpy(np.flatnonzero(refused))
            before = rows.index_select(0, kept)
            update_rows_on_host(rows, gradient, self.layout, now, num_threads=self.table.store.num_threads)
            rows.index_copy_(0, kept, before)
        else:
            places = np.where(refused, -1, np.arange(len(refused), dtype=np.int32)) if refused.any() else None
            update_rows(rows, gradient, self.layout, now, None if places is None else to_device(places, rows.device))
        used_here([gradient])


def _places(routed: RoutedTable, device: torch.device) -> torch.Tensor:
    if routed.slots is not None:
        return routed.slots
    return torch.arange(sum(routed.receive_counts), dtype=torch.int32, device=device)


@dataclass(slots=True)
class WorkingSet:
    """The rows of the batch of one step, over all tables."""

    step: int
    """From 1; an update carries the step of the batch that made it (rates travel with the batch)."""
    tables: dict[str, WorkingTable] = field(default_factory=dict)
