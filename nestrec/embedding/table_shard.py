"""The shard of a table on one rank: the key index (which keys have rows), the store (the rows) and the row optimizer.

`table_digest` hashes the rows of a table over all ranks. It depends only on keys and bits, not on the number of ranks,
the stores or the order in which rows were created.
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
from nestrec.base.thread_team import parallel_for
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
    """Rows of a training batch, read from a shard."""

    keys: Keys
    slots: NDArray[np.int64]
    """Slot of each key in the store; -1 if it has no row, in which case its update is dropped."""
    rows: torch.Tensor
    """(n, num_words) int32 rows, weight and optimizer state, on the engine's device."""
    is_new: NDArray[np.bool_]
    """Whether each row was created by this batch."""


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
        is_not_admitted: NDArray[np.bool_],
        step: int,
        learning_rate: float,
    ) -> None:
        """Apply one optimizer step to (n, num_words) rows of these keys, in place.

        Args:
            gradient: (n, dim) sums in the type of the state.
            is_not_admitted: Flags of keys that were not admitted to the table; their rows are not changed.
        """
        draws = to_device(draws_of(self._table, keys, step), rows.device) if self._is_half else None
        now = RowStep(step, learning_rate, self._options, draws)
        is_any_not_admitted = bool(is_not_admitted.any())
        if self._optimizer.host_loop is not None and rows.device.type == "cpu":
            # The loop updates every row, so rows that must not change are saved and restored.
            unchanged = torch.from_numpy(np.flatnonzero(is_not_admitted)) if is_any_not_admitted else None
            original = None if unchanged is None else rows.index_select(0, unchanged)
            self.update_on_host(rows, gradient, now)
            if unchanged is not None and original is not None:
                rows.index_copy_(0, unchanged, original)
            return
        indices = None
        if is_any_not_admitted:
            own = np.arange(len(is_not_admitted), dtype=np.int32)
            indices = to_device(np.where(is_not_admitted, -1, own), rows.device)
        self.update_on_device(rows, gradient, now, indices)

    def update_on_host(self, rows: torch.Tensor, gradient: torch.Tensor, step: RowStep) -> None:
        """Update all rows by the host loop, which the row optimizer must have; bitwise identical to the kernel."""
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

        parallel_for(len(rows), len(rows), update, self._num_threads)

    def update_on_device(
        self, rows: torch.Tensor, gradient: torch.Tensor, step: RowStep, indices: torch.Tensor | None = None
    ) -> None:
        """Update rows by the kernel, or by the formula if the row optimizer has no kernel.

        Args:
            indices: Row of each gradient, negative for gradients to drop; row i for gradient i by default.
        """
        weight, *states = (self._layout.view(rows, column.name) for column in self._layout.columns)
        kernel = self._optimizer.kernel
        if kernel is None:
            update_by_formula(self._optimizer, weight, states, gradient, step, indices)
        elif self._is_half and not self._optimizer.kernel_rounds:
            _update_widened(kernel, weight, states, gradient, step, indices)
        else:
            kernel(weight, states, gradient, indices, step)


def _update_widened(  # noqa: PLR0917
    kernel: Kernel,
    weight: torch.Tensor,
    states: list[torch.Tensor],
    grad: torch.Tensor,
    step: RowStep,
    indices: torch.Tensor | None,
) -> None:
    """Run a kernel that cannot update 16-bit weights on float32 copies of them."""
    wide = weight.to(grad.dtype)
    draws = step.draws
    kernel(wide, states, grad, indices, step)
    if indices is not None and draws is not None:  # rows without an update need no rounding
        of_rows = draws.new_zeros(len(weight))
        moved = indices >= 0
        of_rows[indices[moved].long()] = draws[moved]
        draws = of_rows
    store_weight(weight, wide, draws)


class TableShard:
    """The rows of one table on one rank."""

    def __init__(self, table: TableConfig, shard: int, num_shards: int, device: torch.device) -> None:
        self.table = table
        self.layout = layout_of(table)
        self.optimizer = TableOptimizer(table, self.layout)
        self._share = shard, num_shards
        """(index, number of shards) of the rows that this rank reads and saves; also defined for a replicated table."""
        self._shard, self._num_shards = (0, 1) if table.is_replicated else self._share
        self._device = device
        self._reset()

    def _reset(self) -> None:
        """Create an empty key index and store."""
        table = self.table
        self.key_index: KeyIndex
        if table.num_rows is None:
            self.key_index = DynamicKeyIndex(table.store, self._num_shards)
        else:
            self._check_fits(table.num_rows)
            self.key_index = StaticKeyIndex(table.num_rows, self._shard, self._num_shards)
        self.store = make_store(table, self.layout, self._device, self._shard)

    def _check_fits(self, num_rows: int) -> None:
        """Check that this machine has enough memory for the table even if only few of its rows are used."""
        index = index_bytes(num_rows, self._num_shards)
        of_rows = 0
        if self.table.store.kind != "disk" and self._device.type == "cpu":
            of_rows = self.layout.row_bytes * (num_rows // self._num_shards)
        try:
            np.empty(of_rows, np.uint8)  # reserves and releases address space: the store needs as much
            if index <= (memory_bytes() or index):
                return
        except MemoryError:
            pass
        raise UserError(
            f"requires {(index + of_rows) / 2**30:,.0f} GiB per rank, more than this machine has",
            option=f"tables.{self.table.name}.num_rows",
            value=num_rows,
            remedy="reduce the number of rows; for ids from a large range, use a dynamic table (rows=None) or a hashed "
            "table (hashed=True)",
        )

    def grow(self, table: TableConfig) -> None:
        """Enlarge the table; existing rows keep their values."""
        self.table = table
        self.optimizer = TableOptimizer(table, self.layout)
        self.key_index.grow(table.num_rows, self._shard, self._num_shards)

    def fetch_rows(
        self, keys: Keys, step: int, into: torch.Tensor | None = None, *, num_used: int | None = None
    ) -> FetchedRows:
        """Read the rows of the training batch of `step`, and create new rows for admitted keys.

        Args:
            keys: Unique keys of the batch that this shard owns.
            step: Step of the batch, from 1.
            into: (n, num_words) device buffer for the rows; None allocates memory.
            num_used: Number of leading keys that the batch uses, the others are only averaged; None means all.
        """
        admitted = self._admit(keys, step, len(keys) if num_used is None else num_used)
        self.store.reserve(self.key_index.num_slots)
        is_any_new = bool(admitted.is_new.any())
        old = np.where(admitted.is_new, -1, admitted.slots) if is_any_new else admitted.slots
        rows = self._read_slots(keys, old, into)
        if is_any_new:
            self.store.scatter(np.where(admitted.is_new, admitted.slots, -1), rows)
        return FetchedRows(keys, admitted.slots, rows, admitted.is_new)

    def _admit(self, keys: Keys, step: int, num_used: int) -> AdmissionResult:
        used = self.key_index.admit(keys[:num_used], step)
        if num_used == len(keys):
            return used
        joined = self.key_index.join(keys[num_used:], step)
        return AdmissionResult(np.concatenate([used.slots, joined.slots]), np.concatenate([used.is_new, joined.is_new]))

    def write_back(self, fetched: FetchedRows, slots: NDArray[np.int64] | None = None) -> None:
        """Write rows to the store; `slots` overrides those of `fetched`, with -1 for rows to skip."""
        self.store.scatter(fetched.slots if slots is None else slots, fetched.rows)

    def read(self, keys: Keys, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return (n, num_words) rows of any owned keys; missing rows have their initial values. Read-only.

        Args:
            keys: Keys that this shard owns.
            into: (n, num_words) device buffer for the rows; None allocates memory.
        """
        return self._read_slots(keys, self.key_index.find(keys), into)

    def keys(self) -> Keys:
        """Return the sorted keys that readers of the table see: all static keys, or dynamic keys with a row."""
        keys = self.key_index.readable_keys()
        return keys[self._is_in_share(keys)] if self.table.is_replicated else keys

    def snapshot(self, since: int = -1, chunk_rows: int = _CHUNK_ROWS) -> Iterator[Chunk]:
        """Yield the rows changed after step `since` (all rows by default), sorted by key, as host columns."""
        keys, slots = self.key_index.rows_since(since)
        if self.table.is_replicated:
            owned_indices = self._is_in_share(keys)
            keys, slots = keys[owned_indices], slots[owned_indices]
        for start in range(0, len(keys), chunk_rows):
            part = keys[start : start + chunk_rows]
            indices = slots[start : start + chunk_rows]
            columns = {"keys": torch.from_numpy(np.ascontiguousarray(part))}
            columns |= self.layout.columns_of(self._read_slots(part, indices).cpu())
            columns |= {name: torch.from_numpy(values) for name, values in self.key_index.metadata(indices).items()}
            yield columns

    def snapshot_async(self, since: int = -1, max_bytes: int | None = None) -> TableSnapshot:
        """Take a copy-on-write snapshot that is read while training continues, in the order of the hashes of the keys.

        Args:
            since: Include only rows changed after this step; all rows by default.
            max_bytes: Maximum size of the copy-on-write ring for rows that change before they are read. The snapshot
                returns the rows of the ring early, before it is full; if it becomes full, writers wait. None if no row
                changes before the snapshot is closed.
        """
        assert isinstance(self.store, SnapshotStore)
        keys = self.key_index.snapshot_keys(since)
        if self.table.is_replicated:
            slots = np.flatnonzero(keys.state)
            keys.state[slots[~self._is_in_share(keys.keys(slots))]] = 0
        rows = self.store.snapshot(keys.state, self.layout.num_words, max_bytes or 0)
        return TableSnapshot(keys, self.layout, self._share, rows, self.store.release_snapshot)

    def _is_in_share(self, keys: Keys) -> NDArray[np.bool_]:
        """Return whether this rank reads and saves the rows of these keys."""
        shard, num_shards = self._share
        is_mine: NDArray[np.bool_] = owner_of(keys, num_shards) == shard
        return is_mine

    def load(self, chunks: Iterable[Mapping[str, torch.Tensor]]) -> int:
        """Load the rows that this shard owns from chunks of any snapshot; return their number."""
        num_taken = 0
        for chunk in chunks:
            keys = chunk["keys"].numpy()
            owned_indices = np.flatnonzero(owner_of(keys, self._num_shards) == self._shard)
            pick = torch.from_numpy(owned_indices)
            is_all = len(owned_indices) == len(keys)
            own = dict(chunk) if is_all else {name: values.index_select(0, pick) for name, values in chunk.items()}
            uses, last_step = (own[n].numpy() if n in own else None for n in ("uses", "last_step"))
            slots = self.key_index.restore(keys[owned_indices], uses, last_step)
            self.store.reserve(self.key_index.num_slots)
            rows = self._rows_of(keys[owned_indices], own)
            self.store.scatter(slots, rows.to(self._device))
            num_taken += len(owned_indices)
        return num_taken

    def clear(self) -> None:
        """Delete all rows and keys."""
        self.store.close()
        self._reset()

    def pending_key_state(self) -> Chunk:
        """Return the state of keys that wait for admission, for a snapshot: uses and last step."""
        return {name: torch.from_numpy(values) for name, values in self.key_index.admission_state().items()}

    def load_pending_key_state(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Load this shard's keys from the `pending_key_state` of any shard."""
        if not saved:
            return
        state = {name: values.numpy() for name, values in saved.items()}
        owned_indices = owner_of(state["keys"], self._num_shards) == self._shard
        own = {name: state[name][owned_indices] for name in ("keys", "uses", "last_step")}
        self.key_index.load_admission({**own, "newest_step": state["newest_step"]})

    def _rows_of(self, keys: Keys, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Build rows from columns; missing state columns (when importing weights only) get their initial values."""
        complete = dict(columns)
        missing = [c for c in self.layout.columns if c.name not in complete]
        for column in missing:
            complete[column.name] = torch.full((len(keys), column.width), column.initial, dtype=column.dtype)
        return self.layout.rows_of(complete)

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
    """Return the SHA-256 of the number of rows and of four 64-bit sums of row hashes over all shards. Collective.

    All keys of a static table are included; rows that were never used have their initial values.
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
    """Create an empty store for one shard of a table."""
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
