"""An open-addressing hash table from int64 keys to slots, with the uses and the last step of each key.

Slots are small integers handed out from 0; freed slots are handed out again, last freed first. Loops are numba and
release the GIL. Nothing here knows what a slot holds.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.base.random import mix64_jit
from nestrec.base.thread_team import for_parts

_MIN_BITS = 10


class KeyHashTable:
    """Keys with a slot each.

    Arrays indexed by slot: `key`, `uses` (steps in which it was used), `last_step` (of those), and `last_change`, which
    is later where something else than a use has changed what the slot holds.
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
        """Slots handed out so far, freed ones included: what a store must have room for."""
        self.num_keys = 0

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slot of each key, -1 where the key is not in the table."""
        slots = np.empty(len(keys), np.int64)
        for_parts(len(keys), len(keys), lambda a, b: _find(self._entries, keys[a:b], slots[a:b]))
        return slots

    def insert(
        self, keys: NDArray[np.int64], uses: NDArray[np.int64], last_step: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Slots for distinct keys that are not in the table yet."""
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
        """Count a use in `step`; the slots are distinct."""
        self.set_uses(slots, self.uses[slots] + 1, np.int64(step))

    def set_uses(
        self, slots: NDArray[np.int64], uses: NDArray[np.int64], last_step: NDArray[np.int64] | np.int64
    ) -> None:
        """How often and when last, as if the last use were the last change."""
        self.uses[slots] = uses
        self.last_step[slots] = self.last_change[slots] = last_step

    def remove(self, slots: NDArray[np.int64]) -> None:
        """Forget the keys of these slots."""
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
    # Upper bits: the lower ones decide the owner, so they are alike for all keys of a shard.
    return np.int64((mix64_jit(np.uint64(key)) >> np.uint64(32)) & np.uint64(size - 1))


@njit(cache=True, nogil=True)
def _find(entries, keys, slots):  # type: ignore[no-untyped-def]
    size = len(entries)
    for i in range(len(keys)):
        place = _home(keys[i], size)
        while entries[place, 1] >= 0 and entries[place, 0] != keys[i]:
            place = (place + 1) & (size - 1)
        slots[i] = entries[place, 1]


@njit(cache=True, nogil=True)
def _insert(entries, keys, slots):  # type: ignore[no-untyped-def]
    size = len(entries)
    for i in range(len(keys)):
        place = _home(keys[i], size)
        while entries[place, 1] >= 0:
            place = (place + 1) & (size - 1)
        entries[place, 0] = keys[i]
        entries[place, 1] = slots[i]


@njit(cache=True, nogil=True)
def _remove(entries, keys):  # type: ignore[no-untyped-def]
    """Backward-shift deletion: no tombstones, so probes stay short however many keys come and go."""
    size = len(entries)
    for i in range(len(keys)):
        hole = _home(keys[i], size)
        while entries[hole, 0] != keys[i] or entries[hole, 1] < 0:
            hole = (hole + 1) & (size - 1)
        entries[hole, 1] = -1
        place = (hole + 1) & (size - 1)
        while entries[place, 1] >= 0:
            home = _home(entries[place, 0], size)
            if ((place - home) & (size - 1)) >= ((place - hole) & (size - 1)):
                entries[hole, 0] = entries[place, 0]
                entries[hole, 1] = entries[place, 1]
                entries[place, 1] = -1
                hole = place
            place = (place + 1) & (size - 1)
