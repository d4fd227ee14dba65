"""One rank's rows of a table as they are at a moment, handed out in the order of their keys' hashes.

In this order what any shard of any number of them owns lies together, so files of it are read by those who need them.
Rows are read while training goes on (nestrec.embedding.stores.frozen), and memory holds a piece of them at a time. Rows
that training has put aside are handed out when half of the room for them is taken, and at the end: in order among
themselves, and in chunks so small that each holds a narrow range of hashes as well.
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
from nestrec.embedding.stores.row_snapshot import WAITS, RowSnapshot, State
from nestrec.ops.embedding.host_loops import gather_rows_host

Keys = NDArray[np.int64]
CHUNK_BYTES = 32 << 20
"""Of the rows that are handed out at once, and lie in a file of their own."""
_ASIDE_CHUNKS = 32
_MIN_CHUNK_BYTES = 1 << 20
"""What was put aside is handed out in so many chunks, but not in smaller ones."""
_PIECE_ROWS = 1 << 21
"""At most about so many rows are put into order at a time."""
_ROWS_A_TURN = 1 << 12
"""Rows that are read at a time: they stay in the cache of the processor until their columns are written."""
_NUM_RANGES = 1 << 12
"""Ranges of hashes in which rows are counted, before some of them make a piece."""


@dataclass(frozen=True, slots=True)
class SnapshotKeys:
    """Which keys have rows, in which slots, and what else is told of them."""

    state: State
    """By slot: `WAITS` where its row is wanted; see `RowSnapshot`."""
    key_of_slot: Keys | None
    """None: a key is its slot."""
    metadata: dict[str, NDArray[np.int64]]
    """By slot, as it is saved beside a row."""

    def pieces(self, first: int, end: int, max_rows: int) -> Iterator[Keys]:
        """Slots of keys with a hash from `first` to `end` whose rows wait, in order; at most about so many at once."""
        keys = self._keys_or_none()
        step = -(-(end - first) // _NUM_RANGES)
        counts = np.zeros(-(-(end - first) // step), np.int64)
        _count(self.state, keys, np.uint64(first), np.uint64(end), np.uint64(step), counts)
        piece = np.cumsum(counts) // max(1, max_rows)
        bounds = [*np.flatnonzero(np.diff(piece, prepend=-1)), len(counts)]
        for low, high in itertools.pairwise(bounds):
            found = np.empty(int(counts[low:high].sum()), np.uint64)
            until = min(end, first + int(high) * step)
            num = _find(self.state, keys, np.uint64(first + int(low) * step), np.uint64(until), found)
            yield self._ordered(found[:num])

    def in_order(self, slots: Keys) -> NDArray[np.int64]:
        """Places in `slots` in order of hash, and of key where hashes are equal."""
        keys = self.keys(slots)
        return np.asarray(np.lexsort((keys, hash_of(keys))))

    def keys(self, slots: Keys) -> Keys:
        """Of these slots."""
        return slots if self.key_of_slot is None else self.key_of_slot[slots]

    def _ordered(self, found: NDArray[np.uint64]) -> Keys:
        """Slots out of (hash, slot) pairs, each in one number: these are sorted many times quicker than pairs."""
        found.sort()
        if self.key_of_slot is not None:
            _order_equal_hashes(found, self.key_of_slot)
        return (found & np.uint64(2**32 - 1)).view(np.int64)

    def _keys_or_none(self) -> Keys:
        return np.empty(0, np.int64) if self.key_of_slot is None else self.key_of_slot


class TableSnapshot:
    """The rows; `close` it when they are read, or not wanted any more."""

    def __init__(
        self,
        keys: SnapshotKeys,
        layout: RowLayout,
        shard: tuple[int, int],
        rows: RowSnapshot,
        thaw: Callable[[], None],
    ) -> None:
        """shard: (index, number)."""
        self._keys = keys
        self._layout = layout
        self._shard = shard
        self.rows = rows
        self.close = thaw
        self._num_left = int(np.count_nonzero(keys.state))
        self._turn = np.empty((_ROWS_A_TURN, layout.num_words), np.int32)
        self._hands_out_aside = False

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Chunks of host columns, as `TableShard.snapshot` gives them."""
        self.rows.begin()
        chunk_rows = max(1, CHUNK_BYTES // self._layout.row_bytes)
        for slots in self._keys.pieces(*range_of_shard(*self._shard), max(_PIECE_ROWS, chunk_rows)):
            for start in range(0, len(slots), chunk_rows):
                chunk = self._chunk(slots[start : start + chunk_rows], self.rows.take)
                if len(chunk["keys"]):
                    yield chunk
                yield from self.due()
        while self._num_left:  # claimed by who changes them now, and not put aside yet
            self.rows.aside.wait_for_more()
            yield from self._aside()

    def due(self) -> Iterator[dict[str, torch.Tensor]]:
        """Chunks that are to be read at once, so that training need not wait: what is aside, where that is much."""
        self.rows.begin()
        # Who asks may have got its last chunk from aside: until it asks for the next one, those rows still lie there.
        if self.rows.aside.is_crowded and not self._hands_out_aside:
            self.rows.hurry()
            yield from self._aside()
            self.rows.calm()

    def _aside(self) -> Iterator[dict[str, torch.Tensor]]:
        self._hands_out_aside = True
        slots, places = self.rows.held_aside()
        order = self._keys.in_order(slots)
        num_chunks = max(1, min(_ASIDE_CHUNKS, len(slots) * self._layout.row_bytes // _MIN_CHUNK_BYTES))
        for part in np.array_split(order, num_chunks):
            yield self._chunk_aside(slots[part], places[part])
        self.rows.aside.forget(len(slots))
        self._hands_out_aside = False

    def _chunk_aside(self, slots: Keys, places: Keys) -> dict[str, torch.Tensor]:
        num_read = 0

        def read(part: Keys, out: NDArray[np.int32]) -> Keys:
            nonlocal num_read
            gather_rows_host(self.rows.aside.rows, places[num_read : num_read + len(part)], out, num_threads=1)
            num_read += len(part)
            return part

        return self._chunk(slots, read)

    def _chunk(self, slots: Keys, read: Callable[[Keys, NDArray[np.int32]], Keys]) -> dict[str, torch.Tensor]:
        """Columns of those of these slots that `read` gives."""
        columns = self._layout.empty_columns(len(slots))
        kept = np.empty(len(slots), np.int64)
        num_kept = 0
        for start in range(0, len(slots), _ROWS_A_TURN):
            part = slots[start : start + _ROWS_A_TURN]
            found = read(part, self._turn[: len(part)])
            kept[num_kept : num_kept + len(found)] = found
            self._layout.to_columns(self._turn[: len(found)], columns, num_kept)
            num_kept += len(found)
        kept, self._num_left = kept[:num_kept], self._num_left - num_kept
        chunk = {"keys": torch.from_numpy(np.ascontiguousarray(self._keys.keys(kept)))}
        chunk |= {name: values[:num_kept] for name, values in columns.items()}
        return chunk | {name: torch.from_numpy(values[kept]) for name, values in self._keys.metadata.items()}


@njit(cache=True, nogil=True, inline="always")
def _hash_at(keys, slot):  # type: ignore[no-untyped-def]
    return mix64_jit(np.uint64(keys[slot] if len(keys) else slot)) >> np.uint64(32)


@njit(cache=True, nogil=True)
def _count(state, keys, first, end, step, counts):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    for slot in range(len(state)):
        if state[slot] == WAITS:
            value = _hash_at(keys, slot)
            if first <= value < end:
                counts[(value - first) // step] += 1


@njit(cache=True, nogil=True)
def _find(state, keys, first, end, found):  # type: ignore[no-untyped-def]
    num_found = 0
    for slot in range(len(state)):
        if state[slot] == WAITS:
            value = _hash_at(keys, slot)
            if first <= value < end:
                found[num_found] = value << np.uint64(32) | np.uint64(slot)
                num_found += 1
    return num_found


@njit(cache=True, nogil=True)
def _order_equal_hashes(found, keys):  # type: ignore[no-untyped-def]
    """Slots of one hash, which are few and lie together, into the order of their keys."""
    half, low = np.uint64(32), np.uint64(2**32 - 1)
    for i in range(1, len(found)):
        j = i
        while j > 0 and found[j] >> half == found[j - 1] >> half and keys[found[j] & low] < keys[found[j - 1] & low]:
            found[j], found[j - 1] = found[j - 1], found[j]
            j -= 1
