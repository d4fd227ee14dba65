"""One rank's rows of a table as they are at a moment, handed out in the order of their keys' hashes.

In this order what any shard of any number of them owns lies together, so files of it are read by those who need them.
Rows are read while training goes on (nestrec.embedding.stores.frozen), and memory holds a piece of them at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.embedding.hashing import hash_of, range_of_shard
from nestrec.embedding.stores.frozen import FrozenRows
from nestrec.embedding.table import RowLayout

Keys = NDArray[np.int64]
CHUNK_BYTES = 32 << 20
"""Of the rows that are handed out at once, and lie in a file of their own."""
_PIECE_ROWS = 1 << 20
"""About so many rows are put into order at a time."""
_SCANNED = 1 << 22


@dataclass(frozen=True, slots=True)
class FrozenKeys:
    """Which keys have rows, in which slots, and what else is told of them."""

    is_wanted: NDArray[np.bool_]
    """By slot."""
    key_of_slot: Keys | None
    """None: a key is its slot."""
    metadata: dict[str, NDArray[np.int64]]
    """By slot, as it is saved beside a row."""

    def between(self, first: int, end: int) -> Keys:
        """Slots of keys with a hash from `first` to `end`, in order of hash, and of key where hashes are equal."""
        found, hashes = [], []
        for start in range(0, len(self.is_wanted), _SCANNED):
            slots = start + np.flatnonzero(self.is_wanted[start : start + _SCANNED])
            of_slot = hash_of(self.keys(slots))
            is_between = (of_slot >= first) & (of_slot < end)
            found.append(slots[is_between])
            hashes.append(of_slot[is_between])
        slots = np.concatenate([np.empty(0, np.int64), *found])
        order = np.lexsort((self.keys(slots), np.concatenate([np.empty(0, np.uint32), *hashes])))
        return np.asarray(slots[order])

    def keys(self, slots: Keys) -> Keys:
        """Of these slots."""
        return slots if self.key_of_slot is None else self.key_of_slot[slots]


class FrozenTable:
    """The rows; `close` it when they are read, or not wanted any more."""

    def __init__(
        self,
        keys: FrozenKeys,
        layout: RowLayout,
        shard: tuple[int, int],
        rows: FrozenRows,
        thaw: Callable[[], None],
    ) -> None:
        """shard: (index, number)."""
        self._keys, self._layout, self._shard, self.rows, self.close = keys, layout, shard, rows, thaw

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Chunks of host columns, as `TableShard.snapshot` gives them."""
        first, end = range_of_shard(*self._shard)
        num_pieces = 1 + int(self._keys.is_wanted.sum()) // _PIECE_ROWS
        chunk_rows = max(1, CHUNK_BYTES // self._layout.row_bytes)
        left = np.empty(0, np.int64)
        for piece in range(1, num_pieces + 1):
            low, high = (first + (end - first) * p // num_pieces for p in (piece - 1, piece))
            left = np.concatenate([left, self._keys.between(low, high)])
            while len(left) >= chunk_rows or (len(left) and piece == num_pieces):
                slots, left = left[:chunk_rows], left[chunk_rows:]
                yield self._chunk(slots)

    def _chunk(self, slots: Keys) -> dict[str, torch.Tensor]:
        rows = torch.empty(len(slots), self._layout.num_words, dtype=torch.int32)
        self.rows.take(slots, rows.numpy())
        columns = {"keys": torch.from_numpy(np.ascontiguousarray(self._keys.keys(slots)))}
        columns |= self._layout.columns_of(rows)
        return columns | {name: torch.from_numpy(values[slots]) for name, values in self._keys.metadata.items()}
