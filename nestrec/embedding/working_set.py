"""The rows of one batch on their owner, in device buffers, with the sums of their gradients."""

from dataclasses import dataclass, field

import numpy as np
import torch

from nestrec.embedding.layout import RowLayout
from nestrec.embedding.optimizers import can_update_on_host, update_rows, update_rows_on_host
from nestrec.embedding.routing import RoutedTable
from nestrec.embedding.shard import FetchedRows
from nestrec.embedding.table import TableConfig
from nestrec.embedding.transfer import to_device, used_here
from nestrec.ops.gather_rows import take_rows
from nestrec.ops.sum_rows import add_by_index


@dataclass(slots=True)
class WorkingTable:
    """Rows of one table; row i belongs to `fetched.keys[i]`."""

    table: TableConfig
    layout: RowLayout
    fetched: FetchedRows
    gradient: torch.Tensor | None = None
    """(n, dim) sums in the state's type; none until the first gradients arrive."""

    def vectors(self, routed: RoutedTable) -> torch.Tensor:
        """Vectors of the keys asked from this shard, in order of source. May share memory with the working set."""
        weight = self.layout.view(self.fetched.rows, "weight")
        if routed.slots is None:
            return weight.contiguous()
        return take_rows(weight, routed.slots)

    def add(self, routed: RoutedTable, grad: torch.Tensor) -> None:
        """Add gradients of the keys asked from this shard, in order of source (rule 10)."""
        grad = grad.to(self.table.state_dtype)
        if routed.slots is None and self.gradient is None:
            self.gradient = grad
            return
        if self.gradient is None:
            self.gradient = grad.new_zeros(len(self.fetched.keys), self.table.dim)
        if grad.device.type == "cpu":
            add_by_index(self.gradient, _places(routed, grad.device), grad)
        else:
            # A source asks for a row once, so each of these adds at most one number to a place: no order to lose.
            for places, part in zip(
                _places(routed, grad.device).split(routed.receive_counts),
                grad.split(routed.receive_counts),
                strict=True,
            ):
                self.gradient.index_add_(0, places, part)

    def update(self, step: int, learning_rate: float) -> None:
        """One step of the row optimiser; rows that were not admitted stay as they begin."""
        if self.gradient is None or not len(self.fetched.keys):
            return
        rows, optimizer = self.fetched.rows, self.table.optimizer
        if can_update_on_host(rows, self.layout):
            self._update_on_host(step, learning_rate)
        else:
            refused = self.fetched.slots < 0
            places = np.where(refused, -1, np.arange(len(refused), dtype=np.int32)) if refused.any() else None
            update_rows(rows, self.gradient, self.layout, optimizer, step=step, learning_rate=learning_rate,
                        places=None if places is None else to_device(places, rows.device))  # fmt: skip
        used_here([self.gradient])
        self.gradient = None

    def _update_on_host(self, step: int, learning_rate: float) -> None:
        assert self.gradient is not None
        rows, refused = self.fetched.rows, torch.from_numpy(np.flatnonzero(self.fetched.slots < 0))
        before = rows.index_select(0, refused)
        update_rows_on_host(rows, self.gradient, self.layout, self.table.optimizer, step=step,
                            learning_rate=learning_rate, num_threads=self.table.store.num_threads)  # fmt: skip
        rows.index_copy_(0, refused, before)


def _places(routed: RoutedTable, device: torch.device) -> torch.Tensor:
    if routed.slots is not None:
        return routed.slots
    return torch.arange(sum(routed.receive_counts), dtype=torch.int32, device=device)


@dataclass(slots=True)
class WorkingSet:
    """The rows of the batch of one step, over all tables."""

    step: int
    """From 1; an update carries the step of the batch that made it (rule 13)."""
    tables: dict[str, WorkingTable] = field(default_factory=dict)
