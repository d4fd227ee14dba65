"""Copy-on-write snapshot of one rank's rows of a table, read in the order of the hashes of their keys.

In this order the rows of any shard, for any number of shards, are contiguous, so that a rank reads only the checkpoint
files that it needs. Rows are read while training continues (nestrec.embedding.stores.row_snapshot), and only one chunk
is in memory at a time. Rows that training copied to the ring are returned when half of the ring is in use, and at the
end. They are ordered among themselves, in chunks small enough that each covers a narrow range of hashes as well.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.random import mix64_jit
from nestrec.embedding.hashing import hash_of, range_of_shard
from nestrec.embedding.row_optimizer import RowLayout
from nestrec.embedding.stores.row_snapshot import PENDING, RowSnapshot, State
from nestrec.ops.embedding.host_loops import gather_rows_host

Keys = NDArray[np.int64]
CHUNK_BYTES = 32 << 20
"""Size of a chunk of rows, which is stored in a file of its own."""
_MAX_RING_CHUNKS = 32
_MIN_CHUNK_BYTES = 1 << 20
"""Minimum size of a chunk of ring rows, which are divided into at most `_MAX_RING_CHUNKS` chunks."""
_PIECE_ROWS = 1 << 21
"""Approximate maximum number of rows that are sorted at a time."""
_ROWS_PER_READ = 1 << 12
"""Rows that are read at a time; few enough to stay in the CPU cache until their columns are written."""
_NUM_RANGES = 1 << 12
"""Number of hash ranges in which rows are counted; consecutive ranges are merged into a sorted piece."""


@dataclass(frozen=True, slots=True)
class SnapshotKeys:
    """Keys of a snapshot, their slots and the metadata saved with their rows."""

    state: State
    """Per slot, `PENDING` if its row belongs to the snapshot; see `RowSnapshot`."""
    key_of_slot: Keys | None
    """Key of each slot; None if keys equal slots."""
    metadata: dict[str, NDArray[np.int64]]
    """Columns that are saved in addition to the row, by slot."""

    def pieces(self, first: int, end: int, max_rows: int) -> Iterator[Keys]:
        """Iterate over the unclaimed slots with a key hash in [first, end), in order, about `max_rows` at a time."""
        keys = self._keys_or_none()
        step = -(-(end - first) // _NUM_RANGES)
        counts = np.zeros(-(-(end - first) // step), np.int64)
        _count(self.state, keys, np.uint64(first), np.uint64(end), np.uint64(step), counts)
        piece = np.cumsum(counts) // max(1, max_rows)
        bounds = [*np.flatnonzero(np.diff(piece, prepend=-1)), len(counts)]
        for low, high in itertools.pairwise(bounds):
            sort_keys = np.empty(int(counts[low:high].sum()), np.uint64)
            until = min(end, first + int(high) * step)
            num = _find(self.state, keys, np.uint64(first + int(low) * step), np.uint64(until), sort_keys)
            yield self._sort_slots(sort_keys[:num])

    def in_order(self, slots: Keys) -> NDArray[np.int64]:
        """Return the indices that sort `slots` by hash, then by key."""
        keys = self.keys(slots)
        return np.asarray(np.lexsort((keys, hash_of(keys))))

    def keys(self, slots: Keys) -> Keys:
        """Return the keys of these slots."""
        return slots if self.key_of_slot is None else self.key_of_slot[slots]

    def _sort_slots(self, sort_keys: NDArray[np.uint64]) -> Keys:
        """Sort (hash, slot) pairs packed into one integer each, many times faster than pairs; return the slots."""
        sort_keys.sort()
        if self.key_of_slot is not None:
            _order_equal_hashes(sort_keys, self.key_of_slot)
        return (sort_keys & np.uint64(2**32 - 1)).view(np.int64)

    def _keys_or_none(self) -> Keys:
        return np.empty(0, np.int64) if self.key_of_slot is None else self.key_of_slot


class TableSnapshot:
    """Copy-on-write snapshot of a table on one rank; call `close` after reading it or to abandon it."""

    def __init__(
        self,
        keys: SnapshotKeys,
        layout: RowLayout,
        shard: tuple[int, int],
        rows: RowSnapshot,
        release: Callable[[], None],
    ) -> None:
        """Create a snapshot; `shard` is (index, number of shards)."""
        self._keys = keys
        self._layout = layout
        self._shard = shard
        self.rows = rows
        self.close = release
        self._num_left = int(np.count_nonzero(keys.state))
        self._read_buffer = np.empty((_ROWS_PER_READ, layout.num_words), np.int32)
        self._is_draining_ring = False

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield chunks of host columns, like `TableShard.snapshot`."""
        self.rows.start_reading()
        chunk_rows = max(1, CHUNK_BYTES // self._layout.row_bytes)
        for slots in self._keys.pieces(*range_of_shard(*self._shard), max(_PIECE_ROWS, chunk_rows)):
            for start in range(0, len(slots), chunk_rows):
                chunk = self._chunk(slots[start : start + chunk_rows], self.rows.take)
                if len(chunk["keys"]):
                    yield chunk
                yield from self.urgent_chunks()
        while self._num_left:  # claimed by a writer, but not in the ring yet
            self.rows.ring.wait_for_rows()
            yield from self._drain_ring()

    def urgent_chunks(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the rows of the ring if it is half full; read them at once so that training does not have to wait."""
        self.rows.start_reading()
        # The caller may be between two chunks of the ring, whose rows are released only after the last one.
        if self.rows.ring.is_half_full and not self._is_draining_ring:
            self.rows.raise_priority()
            yield from self._drain_ring()
            self.rows.restore_priority()

    def _drain_ring(self) -> Iterator[dict[str, torch.Tensor]]:
        self._is_draining_ring = True
        slots, indices = self.rows.copied_slots()
        order = self._keys.in_order(slots)
        num_chunks = max(1, min(_MAX_RING_CHUNKS, len(slots) * self._layout.row_bytes // _MIN_CHUNK_BYTES))
        for part in np.array_split(order, num_chunks):
            yield self._ring_chunk(slots[part], indices[part])
        self.rows.ring.release(len(slots))
        self._is_draining_ring = False

    def _ring_chunk(self, slots: Keys, indices: Keys) -> dict[str, torch.Tensor]:
        num_read = 0

        def read(part: Keys, out: NDArray[np.int32]) -> Keys:
            nonlocal num_read
            gather_rows_host(self.rows.ring.rows, indices[num_read : num_read + len(part)], out, num_threads=1)
            num_read += len(part)
            return part

        return self._chunk(slots, read)

    def _chunk(self, slots: Keys, read: Callable[[Keys, NDArray[np.int32]], Keys]) -> dict[str, torch.Tensor]:
        """Return the columns of those of these slots whose rows `read` returns."""
        columns = self._layout.empty_columns(len(slots))
        read_slots = np.empty(len(slots), np.int64)
        num_read_rows = 0
        for start in range(0, len(slots), _ROWS_PER_READ):
            part = slots[start : start + _ROWS_PER_READ]
            sort_keys = read(part, self._read_buffer[: len(part)])
            read_slots[num_read_rows : num_read_rows + len(sort_keys)] = sort_keys
            self._layout.to_columns(self._read_buffer[: len(sort_keys)], columns, num_read_rows)
            num_read_rows += len(sort_keys)
        read_slots, self._num_left = read_slots[:num_read_rows], self._num_left - num_read_rows
        chunk = {"keys": torch.from_numpy(np.ascontiguousarray(self._keys.keys(read_slots)))}
        chunk |= {name: values[:num_read_rows] for name, values in columns.items()}
        return chunk | {name: torch.from_numpy(values[read_slots]) for name, values in self._keys.metadata.items()}


@njit(cache=True, nogil=True, inline="always")
def _hash_at(keys, slot):  # type: ignore[no-untyped-def]
    return mix64_jit(np.uint64(keys[slot] if len(keys) else slot)) >> np.uint64(32)


@njit(cache=True, nogil=True)
def _count(state, keys, first, end, step, counts):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for slot in range(len(state)):
        if state[slot] == PENDING:
            value = _hash_at(keys, slot)
            if first <= value < end:
                counts[(value - first) // step] += 1


@njit(cache=True, nogil=True)
def _find(state, keys, first, end, sort_keys):  # type: ignore[no-untyped-def]
    num_matches = 0
    for slot in range(len(state)):
        if state[slot] == PENDING:
            value = _hash_at(keys, slot)
            if first <= value < end:
                sort_keys[num_matches] = value << np.uint64(32) | np.uint64(slot)
                num_matches += 1
    return num_matches


@njit(cache=True, nogil=True)
def _order_equal_hashes(sort_keys, keys):  # type: ignore[no-untyped-def]
    """Sort slots with equal hashes, which are few and adjacent, by key."""
    half, low = np.uint64(32), np.uint64(2**32 - 1)
    for i in range(1, len(sort_keys)):
        j = i
        while (
            j > 0
            and sort_keys[j] >> half == sort_keys[j - 1] >> half
            and keys[sort_keys[j] & low] < keys[sort_keys[j - 1] & low]
        ):
            sort_keys[j], sort_keys[j - 1] = sort_keys[j - 1], sort_keys[j]
            j -= 1
