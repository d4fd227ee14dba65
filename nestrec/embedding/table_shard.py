"""The rows of one table on one rank: which keys have rows (the key index), the rows (the store) and their optimizer.

`table_digest` hashes the rows of a table over all ranks. It depends on keys and bits alone, and not on the number of
ranks, on stores or on the order in which rows were created.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.cuda import to_device
from nestrec.base.errors import UserError
from nestrec.base.process import memory_bytes
from nestrec.base.random import mix64_jit
from nestrec.base.thread_team import for_parts
from nestrec.distributed.collectives import all_reduce_sum
from nestrec.distributed.topology import Communicator
from nestrec.embedding.hashing import owner_of
from nestrec.embedding.initial import initial_rows
from nestrec.embedding.key_index import AdmissionResult, DynamicKeyIndex, KeyIndex, StaticKeyIndex, index_bytes
from nestrec.embedding.optimizer_checks import draws_of
from nestrec.embedding.row_optimizer import Kernel, RowLayout, RowStep, update_by_formula, update_half_rows
from nestrec.embedding.stores.device_store import DeviceStore
from nestrec.embedding.stores.disk_store import DiskStore, remove_leftovers
from nestrec.embedding.stores.host_store import DramStore
from nestrec.embedding.stores.row_snapshot import SnapshotStore
from nestrec.embedding.stores.row_store import Store
from nestrec.embedding.table_config import TableConfig, layout_of
from nestrec.embedding.table_snapshot import TableSnapshot
from nestrec.ops.embedding.row_update import store_weight

Keys = NDArray[np.int64]
Chunk = dict[str, torch.Tensor]
_CHUNK_ROWS = 1 << 16


@dataclass(slots=True)
class FetchedRows:
    """Rows of a training batch, taken from a shard."""

    keys: Keys
    slots: NDArray[np.int64]
    """Slots of the store; -1: the key has no row, and what it learns is dropped."""
    rows: torch.Tensor
    """(n, num_words) int32, weight and state, on the engine's device."""
    is_new: NDArray[np.bool_]
    """The row began with this batch."""


class TableOptimizer:
    """The row optimizer of a table, looked up once, and the layout of the rows that it updates."""

    def __init__(self, table: TableConfig, layout: RowLayout) -> None:
        self._table = table
        self._layout = layout
        self._weight = layout.columns[0]
        self._is_half = table.is_half
        self._num_threads = table.store.num_threads
        self._options = table.optimizer
        self._optimizer = table.optimizer.spec

    def update(  # noqa: PLR0917
        self,
        rows: torch.Tensor,
        gradient: torch.Tensor,
        keys: Keys,
        is_refused: NDArray[np.bool_],
        step: int,
        learning_rate: float,
    ) -> None:
        """Make one step on (n, num_words) rows of these keys, in place.

        Args:
            gradient: (n, dim) sums in the type of the state.
            is_refused: Which keys were not admitted to the table; their rows stay as they are.
        """
        draws = to_device(draws_of(self._table, keys, step), rows.device) if self._is_half else None
        now = RowStep(step, learning_rate, self._options, draws)
        is_any_refused = bool(is_refused.any())
        if self._optimizer.host_loop is not None and rows.device.type == "cpu":
            # The loop updates every row that it is given, so those that must stay are copied and put back.
            kept = torch.from_numpy(np.flatnonzero(is_refused)) if is_any_refused else None
            before = None if kept is None else rows.index_select(0, kept)
            self.update_on_host(rows, gradient, now)
            if kept is not None and before is not None:
                rows.index_copy_(0, kept, before)
            return
        places = None
        if is_any_refused:
            places = to_device(np.where(is_refused, -1, np.arange(len(is_refused), dtype=np.int32)), rows.device)
        self.update_on_device(rows, gradient, now, places)

    def update_on_host(self, rows: torch.Tensor, gradient: torch.Tensor, step: RowStep) -> None:
        """Update all rows by the host loop, which a row optimizer may lack. The bits are those of the kernel."""
        loop = self._optimizer.host_loop
        assert loop is not None
        dtype = self._weight.dtype
        gradient = gradient.contiguous()
        if self._is_half:

            def update(first: int, end: int) -> None:
                draws = None if step.draws is None else step.draws[first:end]
                part = gradient[first:end]
                update_half_rows(rows[first:end], part, self._layout, draws, lambda a, b, c: loop(a, b, c, step))
        else:
            values = rows.view(dtype).numpy()
            gradients = gradient.numpy()
            state_starts = [column.offset_bytes // dtype.itemsize for column in self._layout.columns[1:]]

            def update(first: int, end: int) -> None:
                loop(values[first:end], gradients[first:end], state_starts, step)

        for_parts(len(rows), len(rows), update, self._num_threads)

    def update_on_device(
        self, rows: torch.Tensor, gradient: torch.Tensor, step: RowStep, places: torch.Tensor | None = None
    ) -> None:
        """Update rows by the kernel, or by the formula if the row optimizer has no kernel.

        Args:
            places: Row of each gradient, negative for gradients to be dropped; row i for gradient i by default.
        """
        weight, *states = (self._layout.view(rows, column.name) for column in self._layout.columns)
        kernel = self._optimizer.kernel
        if kernel is None:
            update_by_formula(self._optimizer, weight, states, gradient, step, places)
        elif self._is_half and not self._optimizer.kernel_rounds:
            _update_widened(kernel, weight, states, gradient, step, places)
        else:
            kernel(weight, states, gradient, places, step)


def _update_widened(  # noqa: PLR0917
    kernel: Kernel,
    weight: torch.Tensor,
    states: list[torch.Tensor],
    grad: torch.Tensor,
    step: RowStep,
    places: torch.Tensor | None,
) -> None:
    """Run a kernel that cannot update 16-bit weights on float32 copies of them."""
    wide = weight.to(grad.dtype)
    draws = step.draws
    kernel(wide, states, grad, places, step)
    if places is not None and draws is not None:  # rows that did not move have nothing to be rounded
        of_rows = draws.new_zeros(len(weight))
        moved = places >= 0
        of_rows[places[moved].long()] = draws[moved]
        draws = of_rows
    store_weight(weight, wide, draws)


class TableShard:
    """One table's rows on one rank."""

    def __init__(self, table: TableConfig, shard: int, num_shards: int, device: torch.device) -> None:
        self.table = table
        self.layout = layout_of(table)
        self.optimizer = TableOptimizer(table, self.layout)
        self._share = shard, num_shards
        """What it answers for where tables are read or saved: of a replicated one, as if that were sharded."""
        self._shard, self._num_shards, self._device = *((0, 1) if table.is_replicated else self._share), device
        self._begin()

    def _begin(self) -> None:
        """No key has been used: a residency and a store without rows."""
        table = self.table
        self.residency: KeyIndex
        if table.num_rows is None:
            self.residency = DynamicKeyIndex(table.store, self._num_shards)
        else:
            self._check_fits(table.num_rows)
            self.residency = StaticKeyIndex(table.num_rows, self._shard, self._num_shards)
        self.store = make_store(table, self.layout, self._device, self._shard)

    def _check_fits(self, num_rows: int) -> None:
        """Raise a UserError where this machine cannot hold what a table needs, however few of its rows are used."""
        index = index_bytes(num_rows, self._num_shards)
        of_rows = 0
        if self.table.store.kind != "disk" and self._device.type == "cpu":
            of_rows = self.layout.row_bytes * (num_rows // self._num_shards)
        try:
            np.empty(of_rows, np.uint8)  # asked for and given back untouched: the store will ask for as much
            if index <= (memory_bytes() or index):
                return
        except MemoryError:
            pass
        raise UserError(
            f"needs {(index + of_rows) / 2**30:,.0f} GiB on each rank, more than this machine has",
            option=f"tables.{self.table.name}.rows",
            value=num_rows,
            remedy="give fewer rows; of ids from a large range, let rows appear as they are used (rows=None), or share "
            "rows (hashed=True)",
        )

    def grow(self, table: TableConfig) -> None:
        """The same table with more rows."""
        self.table = table
        self.optimizer = TableOptimizer(table, self.layout)
        self.residency.grow(table.num_rows, self._shard, self._num_shards)

    def fetch(
        self, keys: Keys, step: int, into: torch.Tensor | None = None, *, num_used: int | None = None
    ) -> FetchedRows:
        """Rows of distinct keys for the training batch of `step`; new rows are created where the table admits them.

        into: (n, num_words) buffer of the device to read into; none takes fresh memory. num_used: only the first so
        many are used by the batch, the others are there to be averaged; none: all.
        """
        admitted = self._admit(keys, step, len(keys) if num_used is None else num_used)
        self.store.reserve(self.residency.num_slots)
        is_any_new = bool(admitted.is_new.any())
        old = np.where(admitted.is_new, -1, admitted.slots) if is_any_new else admitted.slots
        rows = self._read_slots(keys, old, into)
        if is_any_new:
            self.store.scatter(np.where(admitted.is_new, admitted.slots, -1), rows)
        return FetchedRows(keys, admitted.slots, rows, admitted.is_new)

    def _admit(self, keys: Keys, step: int, num_used: int) -> AdmissionResult:
        used = self.residency.admit(keys[:num_used], step)
        if num_used == len(keys):
            return used
        joined = self.residency.join(keys[num_used:], step)
        return AdmissionResult(np.concatenate([used.slots, joined.slots]), np.concatenate([used.is_new, joined.is_new]))

    def write_back(self, fetched: FetchedRows, slots: NDArray[np.int64] | None = None) -> None:
        """Rows to the store. slots: those of `fetched`, with -1 for rows that need not be written."""
        self.store.scatter(fetched.slots if slots is None else slots, fetched.rows)

    def read(self, keys: Keys, into: torch.Tensor | None = None) -> torch.Tensor:
        """(n, num_words) rows of any owned keys, as they begin where they do not exist. Changes nothing.

        into: as for `fetch`.
        """
        return self._read_slots(keys, self.residency.find(keys), into)

    def keys(self) -> Keys:
        """Sorted keys that count when the table is read: all of a static table, those with rows of a dynamic one."""
        keys = self.residency.readable_keys()
        return keys[self._is_shared(keys)] if self.table.is_replicated else keys

    def snapshot(self, since: int = -1, chunk_rows: int = _CHUNK_ROWS) -> Iterator[Chunk]:
        """Rows changed after step `since` (all rows by default), sorted by key, as host columns."""
        keys, slots = self.residency.rows_since(since)
        if self.table.is_replicated:
            mine = self._is_shared(keys)
            keys, slots = keys[mine], slots[mine]
        for start in range(0, len(keys), chunk_rows):
            part = keys[start : start + chunk_rows]
            places = slots[start : start + chunk_rows]
            columns = {"keys": torch.from_numpy(np.ascontiguousarray(part))}
            columns |= self.layout.columns_of(self._read_slots(part, places).cpu())
            columns |= {name: torch.from_numpy(values) for name, values in self.residency.metadata(places).items()}
            yield columns

    def freeze(self, since: int = -1, max_bytes: int | None = None) -> TableSnapshot:
        """The same rows as they are now, to be read while training goes on, in the order of their keys' hashes.

        max_bytes: of rows that are put aside because they change before they are read. None: nothing changes until it
        is closed. What is aside is handed out before that is full, ahead of its turn; where it is full all the same,
        what would change further rows waits.
        """
        assert isinstance(self.store, SnapshotStore)
        keys = self.residency.frozen(since)
        if self.table.is_replicated:
            slots = np.flatnonzero(keys.state)
            keys.state[slots[~self._is_shared(keys.keys(slots))]] = 0
        rows = self.store.freeze(keys.state, self.layout.num_words, max_bytes or 0)
        return TableSnapshot(keys, self.layout, self._share, rows, self.store.thaw)

    def _is_shared(self, keys: Keys) -> NDArray[np.bool_]:
        """Whether this rank answers for them."""
        shard, num_shards = self._share
        is_mine: NDArray[np.bool_] = owner_of(keys, num_shards) == shard
        return is_mine

    def load(self, chunks: Iterable[Mapping[str, torch.Tensor]]) -> int:
        """Take the rows that this shard owns out of any snapshot; how many it took."""
        taken = 0
        for chunk in chunks:
            keys = chunk["keys"].numpy()
            mine = np.flatnonzero(owner_of(keys, self._num_shards) == self._shard)
            pick = torch.from_numpy(mine)
            is_all = len(mine) == len(keys)
            own = dict(chunk) if is_all else {name: values.index_select(0, pick) for name, values in chunk.items()}
            uses, last_step = (own[n].numpy() if n in own else None for n in ("uses", "last_step"))
            slots = self.residency.restore(keys[mine], uses, last_step)
            self.store.reserve(self.residency.num_slots)
            rows = self._rows_of(keys[mine], own)
            self.store.scatter(slots, rows.to(self._device))
            taken += len(mine)
        return taken

    def clear(self) -> None:
        """Forget every row and every key."""
        self.store.close()
        self._begin()

    def unsettled(self) -> Chunk:
        """What a snapshot must hold of keys without rows: uses and last step of those that wait for admission."""
        return {name: torch.from_numpy(values) for name, values in self.residency.admission_state().items()}

    def load_unsettled(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take what belongs to this shard out of another's `unsettled`."""
        if not saved:
            return
        state = {name: values.numpy() for name, values in saved.items()}
        mine = owner_of(state["keys"], self._num_shards) == self._shard
        own = {name: state[name][mine] for name in ("keys", "uses", "last_step")}
        self.residency.load_admission({**own, "newest_step": state["newest_step"]})

    def _rows_of(self, keys: Keys, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Rows of given columns; state that is not given (an import of bare weights) begins as in a new row."""
        given = dict(columns)
        missing = [c for c in self.layout.columns if c.name not in given]
        for column in missing:
            given[column.name] = torch.full((len(keys), column.width), column.initial, dtype=column.dtype)
        return self.layout.rows_of(given)

    def _read_slots(self, keys: Keys, slots: NDArray[np.int64], into: torch.Tensor | None = None) -> torch.Tensor:
        rows = into
        if rows is None:
            rows = torch.empty(len(keys), self.layout.num_words, dtype=torch.int32, device=self._device)
        self.store.gather(slots, rows)
        absent = np.flatnonzero(slots < 0)
        if len(absent):
            fresh = initial_rows(keys[absent], self.table, self.layout, self._device)
            rows.index_copy_(0, to_device(absent, self._device), fresh)
        return rows


_LANES = 4


def table_digest(shard: TableShard, shards: Communicator) -> str:
    """sha256 over the number of rows and four 64-bit sums of row hashes, each over all shards. Collective.

    A static table counts all its keys: rows that were never used count with their initial values.
    """
    keys = shard.keys()
    sums = np.zeros(_LANES + 1, np.uint64)
    for start in range(0, len(keys), _CHUNK_ROWS):
        part = keys[start : start + _CHUNK_ROWS]
        words = shard.read(part).cpu().numpy().view(np.uint64)
        _add_hashes(part, words, sums)
    total = torch.from_numpy(sums.view(np.int64))
    all_reduce_sum(shards, total)
    return hashlib.sha256(total.numpy().tobytes()).hexdigest()


@njit(cache=True, nogil=True)
def _add_hashes(keys, words, sums):  # type: ignore[no-untyped-def]
    for i in range(len(keys)):
        hashed = mix64_jit(np.uint64(keys[i]))
        for j in range(words.shape[1]):
            hashed = mix64_jit(hashed ^ words[i, j])
        sums[0] += np.uint64(1)
        for lane in range(1, len(sums)):
            hashed = mix64_jit(hashed)
            sums[lane] += hashed


def make_store(table: TableConfig, layout: RowLayout, device: torch.device, shard: int) -> Store:
    """An empty store for one shard of a table."""
    config = table.store
    if config.kind == "dram":
        return DramStore(layout.num_words, device, config.num_threads)
    if config.kind == "disk":
        folder = Path(config.folder)
        name = quote(table.name, safe="")
        remove_leftovers(folder, name)
        path = folder / f"{name}.{shard}"
        return DiskStore(path, layout.num_words, device, config.cache_rows, config.num_threads)
    return DeviceStore(layout.num_words, device, config.num_threads)
