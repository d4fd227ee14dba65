"""The rows of one batch on their owner: the sums of their gradients, the buffers they lie in, a watch over them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.transfer import to_device, used_here
from nestrec.distributed.transports import Parcel
from nestrec.embedding.flight.routing import RoutedTable
from nestrec.embedding.rounding import draws_of
from nestrec.embedding.row_optimizer import RowStep, runs_host_loop, update_rows, update_rows_on_host
from nestrec.embedding.shard import FetchedRows
from nestrec.embedding.table import RowLayout, TableConfig
from nestrec.ops.rows.gather import take_rows
from nestrec.ops.rows.sum import add_distinct

_SPARE = 1.25
_WATCHING_THREADS = 8


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
        rows = weight.contiguous() if routed.working_places is None else weight
        return Parcel(rows, routed.receive_counts, routed.send_counts, routed.working_places)

    def vectors_at(self, places: torch.Tensor) -> torch.Tensor:
        """Vectors of the rows at these places."""
        return take_rows(self.layout.view(self.fetched.rows, "weight"), places)

    def add(self, routed: RoutedTable, received: Sequence[torch.Tensor]) -> None:
        """Add gradients of the keys asked from this shard, source by source (order of sums)."""
        if routed.working_places is None and self.gradient is None:
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
        self._update(rows, chosen * self.gradient_scale, places.cpu().numpy(), step, learning_rate)
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
        self._update(rows, gradient[:end], slice(end), step, learning_rate)
        return rows

    def _update(
        self, rows: torch.Tensor, gradient: torch.Tensor, chosen: NDArray[Any] | slice, step: int, learning_rate: float
    ) -> None:
        """chosen: which of the fetched rows these are."""
        refused, draws = self.fetched.slots[chosen] < 0, None
        if self.table.is_half:
            draws = to_device(draws_of(self.table, self.fetched.keys[chosen], step), rows.device)
        now = RowStep(step, learning_rate, self.table.optimizer, draws)
        if runs_host_loop(rows, self.table.optimizer.spec):
            kept = torch.from_numpy(np.flatnonzero(refused))
            before = rows.index_select(0, kept)
            update_rows_on_host(rows, gradient, self.layout, now, num_threads=self.table.store.num_threads)
            rows.index_copy_(0, kept, before)
        else:
            places = np.where(refused, -1, np.arange(len(refused), dtype=np.int32)) if refused.any() else None
            update_rows(rows, gradient, self.layout, now, None if places is None else to_device(places, rows.device))
        used_here([gradient])


def _places(routed: RoutedTable, device: torch.device) -> torch.Tensor:
    if routed.working_places is not None:
        return routed.working_places
    return torch.arange(sum(routed.receive_counts), dtype=torch.int32, device=device)


@dataclass(slots=True)
class WorkingSet:
    """The rows of the batch of one step, over all tables."""

    step: int
    """From 1; an update carries the step of the batch that made it (rates travel with the batch)."""
    tables: dict[str, WorkingTable] = field(default_factory=dict)


class RowBuffers:
    """For each table as many buffers as there are batches in flight; a buffer is enlarged only by a larger batch.

    The caller sees to it that a buffer is no longer in use when its turn comes again: with two of them, that the
    write-back of batch t-1 comes before the fetch of batch t+1, which write-back before gather asks for anyway.
    """

    def __init__(self, turns: int = 2) -> None:
        self._turns = turns
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def take(self, table: str, step: int, num_rows: int, layout: RowLayout, device: torch.device) -> torch.Tensor:
        """(num_rows, num_words) memory for the rows of a table in the batch of a step."""
        place = table, step % self._turns
        buffer = self._buffers.get(place)
        if buffer is None or len(buffer) < num_rows:
            size = int(num_rows * _SPARE)
            buffer = torch.empty(size, layout.num_words, dtype=torch.int32, device=device)
            self._buffers[place] = buffer
        return buffer[:num_rows]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())


class RowWatch:
    """Are the rows still finite? Asked of every updated row on the device, answered whenever somebody reads the device.

    Sums of updated rows times zero add up to zero, or to NaN for ever once a row held an infinity or a NaN. (Rows whose
    sum overflows count as well: nothing can be learned from them either.) One number a table and thread, so that lanes
    which update rows at the same time do not wait for each other.
    """

    def __init__(self, num_tables: int, device: torch.device) -> None:
        # Made at once: what another stream allocates could be read here before it is filled.
        self._seen = torch.zeros(_WATCHING_THREADS, num_tables, dtype=torch.float64, device=device)
        self._row_of_thread: dict[int, int] = {}

    def look(self, table: int, layout: RowLayout, rows: torch.Tensor) -> None:
        """(n, num_words) rows of a table, by number, as an update has left them. The host does not wait."""
        mine = self._row_of_thread.setdefault(threading.get_ident(), len(self._row_of_thread) % _WATCHING_THREADS)
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
