"""An open-addressing hash table from int64 keys to slots, with the use count and the last step of each key.

Slots are consecutive integers from 0; freed slots are reused, last freed first. Loops are compiled with numba and
release the GIL. The table does not know what a slot contains.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.random import mix64_jit
from nestrec.base.thread_team import parallel_for

_MIN_BITS = 10


class KeyHashTable:
    """Hash table that assigns a slot to each key.

    Arrays indexed by slot: `key`; `uses`, the number of steps that used the key; `last_step`, the last of those steps;
    and `last_change`, the last step that changed the content of the slot, which is later than `last_step` if something
    other than a use changed it.
    """

    def __init__(self) -> None:
        self._entries = _empty_entries(_MIN_BITS)
        self._free = np.empty(0, np.int64)
        self.key = np.empty(0, np.int64)
        self.uses = np.empty(0, np.int64)
        self.last_step = np.empty(0, np.int64)
        self.last_change = np.empty(0, np.int64)
        self.is_live = np.empty(0, np.bool_)
        self.num_slots = 0
        """Number of slots allocated so far, including freed ones; the capacity that a store needs."""
        self.num_keys = 0

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each key; -1 for keys that are not in the table."""
        slots = np.empty(len(keys), np.int64)
        parallel_for(len(keys), len(keys), lambda a, b: _find(self._entries, keys[a:b], slots[a:b]))
        return slots

    def insert(
        self, keys: NDArray[np.int64], uses: NDArray[np.int64], last_step: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Insert unique keys that are not in the table yet; return their slots."""
        slots = self._take_slots(len(keys))
        self.key[slots] = keys
        self.is_live[slots] = True
        self.set_uses(slots, uses, last_step)
        self.num_keys += len(keys)
        bits = max(_MIN_BITS, int(2 * self.num_keys - 1).bit_length())
        if (1 << bits) > len(self._entries):
            self._entries = _empty_entries(bits)
            live = self.live_slots()
            _insert(self._entries, self.key[live], live)
        else:
            _insert(self._entries, keys, slots)
        return slots

    def use(self, slots: NDArray[np.int64], step: int) -> None:
        """Count a use in `step`; slots must be unique."""
        self.set_uses(slots, self.uses[slots] + 1, np.int64(step))

    def set_uses(
        self, slots: NDArray[np.int64], uses: NDArray[np.int64], last_step: NDArray[np.int64] | np.int64
    ) -> None:
        """Set the use count and the last step; the last change becomes the last step."""
        self.uses[slots] = uses
        self.last_step[slots] = self.last_change[slots] = last_step

    def remove(self, slots: NDArray[np.int64]) -> None:
        """Remove the keys of these slots and free the slots."""
        _remove(self._entries, self.key[slots])
        self.is_live[slots] = False
        self._free = np.concatenate([self._free, slots])
        self.num_keys -= len(slots)

    def live_slots(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.is_live[: self.num_slots])

    def _take_slots(self, count: int) -> NDArray[np.int64]:
        reused = min(count, len(self._free))
        split = len(self._free) - reused
        taken, self._free = self._free[split:][::-1], self._free[:split]
        fresh = np.arange(self.num_slots, self.num_slots + count - reused)
        self.num_slots += count - reused
        self._grow(self.num_slots)
        return np.concatenate([taken, fresh])

    def _grow(self, num_slots: int) -> None:
        if num_slots <= len(self.key):
            return
        extra = max(num_slots, len(self.key) * 3 // 2, 1024) - len(self.key)
        for name in ("key", "uses", "last_step", "last_change", "is_live"):
            grown = getattr(self, name)
            setattr(self, name, np.concatenate([grown, np.zeros(extra, grown.dtype)]))


def _empty_entries(bits: int) -> NDArray[np.int64]:
    return np.full((1 << bits, 2), -1, np.int64)


@njit(cache=True, nogil=True, inline="always")
def _home(key, size):  # type: ignore[no-untyped-def]
    # Upper bits: the lower ones determine the owner, so they are alike for all keys of a shard.
    return np.int64((mix64_jit(np.uint64(key)) >> np.uint64(32)) & np.uint64(size - 1))


@njit(cache=True, nogil=True)
def _find(entries, keys, slots):  # type: ignore[no-untyped-def]
    size = len(entries)
    for i in range(len(keys)):
        position = _home(keys[i], size)
        while entries[position, 1] >= 0 and entries[position, 0] != keys[i]:
            position = (position + 1) & (size - 1)
        slots[i] = entries[position, 1]


@njit(cache=True, nogil=True)
def _insert(entries, keys, slots):  # type: ignore[no-untyped-def]
    size = len(entries)
    for i in range(len(keys)):
        position = _home(keys[i], size)
        while entries[position, 1] >= 0:
            position = (position + 1) & (size - 1)
        entries[position, 0] = keys[i]
        entries[position, 1] = slots[i]


@njit(cache=True, nogil=True)
def _remove(entries, keys):  # type: ignore[no-untyped-def]
    """Remove keys by backward-shift deletion: without tombstones, probes stay short after many insertions."""
    size = len(entries)
    for i in range(len(keys)):
        hole = _home(keys[i], size)
        while entries[hole, 0] != keys[i] or entries[hole, 1] < 0:
            hole = (hole + 1) & (size - 1)
        entries[hole, 1] = -1
        position = (hole + 1) & (size - 1)
        while entries[position, 1] >= 0:
            home = _home(entries[position, 0], size)
            if ((position - home) & (size - 1)) >= ((position - hole) & (size - 1)):
                entries[hole, 0] = entries[position, 0]
                entries[hole, 1] = entries[position, 1]
                entries[position, 1] = -1
                hole = position
            position = (position + 1) & (size - 1)
