"""Which keys of a shard have a row, and in which slot of the store: static and dynamic tables (admission by steps).

Dynamic tables decide in `admit`, called once for each training batch in batch order, from step numbers alone:

- A key gets a row in the step of its `admission_count`-th use. Before that it reads its initial vector.
- With a time to live, a row that was not used for more than `ttl_steps` steps is gone: its next use starts it anew.
- A shard holds at most `max_rows` rows. When new rows would pass the bound, `lru` (or `lfu`) evicts the rows that come
  first by (last step, key) (or by (uses, last step, key)) until, counting the new rows, a sixteenth of the bound is
  free. Keys of this batch and of the one before it are never evicted, so that a pipeline that fetches one batch ahead
  of the write-back takes the same decisions as a serial run. If the bound is still too small, new keys are admitted
  in order of key while there is room, and the others go on reading their initial vectors.
- A run that goes on with more ranks may find more rows in a shard than its part of the bound. The next training batch
  first ends those that are too many, used longest ago first (`lfu`: least often). Where nothing is ever evicted they
  stay, and the other shards leave them room (`room_of_shards`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.embedding.hashing import owner_of
from nestrec.embedding.key_hash_table import KeyHashTable
from nestrec.embedding.table_config import StoreConfig
from nestrec.embedding.table_snapshot import SnapshotKeys

Keys = NDArray[np.int64]
_KEY_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """Slots of a batch's keys."""

    slots: NDArray[np.int64]
    """-1: no row; the key reads its initial vector and its gradient is dropped."""
    is_new: NDArray[np.bool_]
    """The slot holds no row yet."""


@dataclass(slots=True)
class KeyIndexCounters:
    """What happened so far."""

    created: int = 0
    evicted: int = 0
    refused: int = 0
    """Uses of keys that had earned a row when there was no room."""
    peak_rows: int = 0


class KeyIndex(Protocol):
    """The key side of a shard; the store is the row side."""

    counters: KeyIndexCounters

    @property
    def num_slots(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """Slot of each key, -1 without a row. Changes nothing."""
        ...

    def admit(self, keys: Keys, step: int) -> AdmissionResult:
        """Slots of distinct keys used by the training batch of `step`."""
        ...

    def join(self, keys: Keys, step: int) -> AdmissionResult:
        """Slots of distinct keys whose rows are changed in `step` by others' uses. Not a use: nothing is counted."""
        ...

    def restore(self, keys: Keys, uses: Keys | None, last_step: Keys | None) -> NDArray[np.int64]:
        """Slots for the rows of a snapshot."""
        ...

    def rows_since(self, step: int) -> tuple[Keys, NDArray[np.int64]]:
        """Keys (sorted) and slots of the rows changed after `step`; all rows for a negative step."""
        ...

    def metadata(self, slots: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """What a snapshot must hold beside the rows."""
        ...

    def frozen(self, since: int) -> SnapshotKeys:
        """What `rows_since` and `metadata` say now, whatever comes later."""
        ...

    def grow(self, num_rows: int | None, shard: int, num_shards: int) -> None:
        """Adds keys after the present ones, which keep their slots. Does nothing if any int64 is a key."""
        ...

    def readable_keys(self) -> Keys:
        """Returns the sorted keys that count when the table is read: all static keys, dynamic keys with a row."""
        ...

    def only_readable(self, keys: Keys) -> Keys:
        """Returns those of the given keys of this shard that `readable_keys` contains."""
        ...

    def divide_room(self, rows_of_shards: Sequence[int], shard: int) -> None:
        """Sets the bound of this shard after rows were loaded that another number of shards had saved.

        Args:
            rows_of_shards: Number of rows that each shard has now.
            shard: Index of this shard.
        """
        ...

    def evicted_since(self, step: int) -> Keys:
        """Returns the sorted keys that lost their row after `step` and have none now."""
        ...

    def gone_since(self, step: int) -> Keys:
        """Returns the sorted keys that had a row after `step` and now read their initial vector.

        These are the evicted keys, and those that are past their time to live and not swept yet.
        """
        ...

    def forget(self, keys: Keys) -> None:
        """Removes the rows of these keys if they exist; an incremental snapshot names rows that were evicted."""
        ...

    def drop_eviction_log(self, step: int) -> None:
        """Forgets evictions up to `step`, which no later call of `evicted_since` needs."""
        ...

    def admission_state(self) -> dict[str, NDArray[np.int64]]:
        """Returns keys, uses and last steps of the keys that wait for a row, and `newest_step`; empty if static."""
        ...

    def load_admission(self, state: Mapping[str, NDArray[np.int64]]) -> None:
        """Adds waiting keys from a state of `admission_state`."""
        ...


def index_bytes(num_rows: int, num_shards: int) -> int:
    """Memory in which `StaticKeyIndex` keeps which rows a shard has, before there is any."""
    of_all = 0 if num_shards == 1 else 4 * num_rows
    return of_all + (9 if num_shards == 1 else 17) * (num_rows // num_shards)


class StaticKeyIndex:
    """Keys 0 to num_rows - 1 that this shard owns; a row comes into being on first use, its slot is known before."""

    def __init__(self, num_rows: int, shard: int, num_shards: int) -> None:
        self.counters = KeyIndexCounters()
        self._num_keys = num_rows
        self._slot_of_key, self._owned = _owned_keys(num_rows, shard, num_shards)
        count = num_rows if self._owned is None else len(self._owned)
        self._exists = np.zeros(count, np.bool_)
        self._last_step = np.full(count, -1, np.int64)

    def grow(self, num_rows: int | None, shard: int, num_shards: int) -> None:
        assert num_rows is not None
        self._num_keys = num_rows
        self._slot_of_key, self._owned = _owned_keys(num_rows, shard, num_shards)
        more = (num_rows if self._owned is None else len(self._owned)) - len(self._exists)
        self._exists = np.concatenate([self._exists, np.zeros(more, np.bool_)])
        self._last_step = np.concatenate([self._last_step, np.full(more, -1, np.int64)])

    @property
    def num_slots(self) -> int:
        return len(self._exists)

    @property
    def num_rows(self) -> int:
        return self.counters.created

    def owned(self) -> Keys:
        """Every key of this shard, with or without a row, sorted."""
        return np.arange(self._num_keys) if self._owned is None else self._owned

    def find(self, keys: Keys) -> NDArray[np.int64]:
        slots = self._slots(keys)
        return np.where(self._exists[slots], slots, -1)

    def admit(self, keys: Keys, step: int) -> AdmissionResult:
        slots = self._slots(keys)
        is_new = np.empty(len(keys), np.bool_)
        self.counters.created += _use(slots, step, self._exists, self._last_step, is_new)
        self.counters.peak_rows = self.counters.created
        return AdmissionResult(slots, is_new)

    join = admit

    def restore(self, keys: Keys, uses: Keys | None, last_step: Keys | None) -> NDArray[np.int64]:
        slots = self._slots(keys)
        self._mark(slots, int((~self._exists[slots]).sum()))
        return slots

    def rows_since(self, step: int) -> tuple[Keys, NDArray[np.int64]]:
        slots = np.flatnonzero(self._exists & (self._last_step > step) if step >= 0 else self._exists)
        return (slots if self._owned is None else self._owned[slots]), slots

    def metadata(self, slots: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        return {}

    def frozen(self, since: int) -> SnapshotKeys:
        is_wanted = self._exists.copy() if since < 0 else self._exists & (self._last_step > since)
        return SnapshotKeys(is_wanted.view(np.uint8), self._owned, {})

    def readable_keys(self) -> Keys:
        return self.owned()

    def only_readable(self, keys: Keys) -> Keys:
        return keys

    def divide_room(self, rows_of_shards: Sequence[int], shard: int) -> None:
        """Does nothing: every key has its slot."""

    def evicted_since(self, step: int) -> Keys:
        return np.empty(0, np.int64)

    def gone_since(self, step: int) -> Keys:
        return np.empty(0, np.int64)

    def forget(self, keys: Keys) -> None:
        """Does nothing: rows are never evicted."""

    def drop_eviction_log(self, step: int) -> None:
        """Does nothing: rows are never evicted."""

    def admission_state(self) -> dict[str, NDArray[np.int64]]:
        return {}

    def load_admission(self, state: Mapping[str, NDArray[np.int64]]) -> None:
        """Does nothing: every key is admitted."""

    def _slots(self, keys: Keys) -> NDArray[np.int64]:
        return keys if self._slot_of_key is None else self._slot_of_key[keys].astype(np.int64)

    def _mark(self, slots: NDArray[np.int64], created: int) -> None:
        self._exists[slots] = True
        self.counters.created += created
        self.counters.peak_rows = self.counters.created


class DynamicKeyIndex:
    """Any int64 is a key; rows come and go by the rules at the top of this file."""

    def __init__(self, store: StoreConfig, num_shards: int) -> None:
        self.counters = KeyIndexCounters()
        self._store = store
        self._bound = None if store.max_rows is None else max(1, store.max_rows // num_shards)
        self._rows = KeyHashTable()
        self._candidates = KeyHashTable()
        self.newest_step = 0
        """Step of the last training batch: what a time to live counts from."""
        self._evicted: list[tuple[int, Keys]] = []

    @property
    def num_slots(self) -> int:
        return self._rows.num_slots

    @property
    def num_rows(self) -> int:
        return self._rows.num_keys

    @property
    def candidates(self) -> KeyHashTable:
        """Keys that have been used but have no row."""
        return self._candidates

    def find(self, keys: Keys) -> NDArray[np.int64]:
        slots = self._rows.find(keys)
        ttl = self._store.ttl_steps
        if ttl is not None:
            found = np.flatnonzero(slots >= 0)
            slots[found[self.newest_step - self._rows.last_step[slots[found]] > ttl]] = -1
        return slots

    def divide_room(self, rows_of_shards: Sequence[int], shard: int) -> None:
        if self._store.max_rows is not None and self._store.eviction == "none":
            self._bound = room_of_shards(rows_of_shards, self._store.max_rows)[shard]

    def admit(self, keys: Keys, step: int) -> AdmissionResult:
        self.newest_step = step
        self._end_surplus(step)
        slots = self._rows.find(keys)
        if self._store.ttl_steps is not None:
            self._end_expired(slots[slots >= 0], step, self._store.ttl_steps)
            slots = self._rows.find(keys)
        found = slots >= 0
        self._rows.use(slots[found], step)
        missing = np.flatnonzero(~found)
        if len(missing):
            slots[missing] = self._admit_missing(keys[missing], step)
        is_new = ~found & (slots >= 0)
        self.counters.created += int(is_new.sum())
        self.counters.peak_rows = max(self.counters.peak_rows, self.num_rows)
        return AdmissionResult(slots, is_new)

    def join(self, keys: Keys, step: int) -> AdmissionResult:
        slots = self._rows.find(keys)
        is_new = slots < 0
        never = np.zeros(int(is_new.sum()), np.int64)
        slots[is_new] = self._rows.insert(keys[is_new], never, never)
        self._rows.last_change[slots] = step
        self.counters.created += len(never)
        self.counters.peak_rows = max(self.counters.peak_rows, self.num_rows)
        return AdmissionResult(slots, is_new)

    def restore(self, keys: Keys, uses: Keys | None, last_step: Keys | None) -> NDArray[np.int64]:
        uses = np.ones(len(keys), np.int64) if uses is None else uses
        last_step = np.zeros(len(keys), np.int64) if last_step is None else last_step
        slots = self._rows.find(keys)
        absent = slots < 0
        slots[absent] = self._rows.insert(keys[absent], uses[absent], last_step[absent])
        self._rows.set_uses(slots, uses, last_step)
        self.newest_step = max(self.newest_step, int(last_step.max(initial=0)))
        self.counters.peak_rows = max(self.counters.peak_rows, self.num_rows)
        return slots

    def grow(self, num_rows: int | None, shard: int, num_shards: int) -> None:
        """Does nothing: any int64 is a key."""

    def readable_keys(self) -> Keys:
        return self.rows_since(-1)[0]

    def only_readable(self, keys: Keys) -> Keys:
        return keys[self.find(keys) >= 0]

    def admission_state(self) -> dict[str, NDArray[np.int64]]:
        waiting = self._candidates
        slots = waiting.live_slots()
        slots = slots[np.argsort(waiting.key[slots])]
        return {
            "keys": waiting.key[slots],
            "uses": waiting.uses[slots],
            "last_step": waiting.last_step[slots],
            "newest_step": np.array([self.newest_step]),
        }

    def load_admission(self, state: Mapping[str, NDArray[np.int64]]) -> None:
        self._candidates.insert(state["keys"], state["uses"], state["last_step"])
        self.newest_step = max(self.newest_step, state["newest_step"].item())

    def forget(self, keys: Keys) -> None:
        slots = self._rows.find(keys)
        self._rows.remove(slots[slots >= 0])

    def evicted_since(self, step: int) -> Keys:
        gone = [keys for at, keys in self._evicted if at > step]
        keys = np.unique(np.concatenate(gone)) if gone else np.empty(0, np.int64)
        return keys[self._rows.find(keys) < 0]

    def gone_since(self, step: int) -> Keys:
        gone = [self.evicted_since(step)]
        ttl = self._store.ttl_steps
        if ttl is not None:
            live = self._rows.live_slots()
            last_step = self._rows.last_step[live]
            gone.append(self._rows.key[live[(self.newest_step - last_step > ttl) & (step - last_step <= ttl)]])
        return np.unique(np.concatenate(gone))

    def drop_eviction_log(self, step: int) -> None:
        self._evicted = [(at, keys) for at, keys in self._evicted if at > step]

    def rows_since(self, step: int) -> tuple[Keys, NDArray[np.int64]]:
        slots = self._rows.live_slots()
        if self._store.ttl_steps is not None:
            slots = slots[self.newest_step - self._rows.last_step[slots] <= self._store.ttl_steps]
        if step >= 0:
            slots = slots[self._rows.last_change[slots] > step]
        slots = slots[np.argsort(self._rows.key[slots], kind="stable")]
        return self._rows.key[slots], slots

    def metadata(self, slots: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        return {"uses": self._rows.uses[slots], "last_step": self._rows.last_step[slots]}

    def frozen(self, since: int) -> SnapshotKeys:
        num_slots = self._rows.num_slots
        is_wanted = np.zeros(self._rows.num_slots, np.uint8)
        is_wanted[self.rows_since(since)[1]] = 1
        everything = np.arange(num_slots)
        return SnapshotKeys(is_wanted, self._rows.key[:num_slots].copy(), self.metadata(everything))

    def _end_expired(self, slots: NDArray[np.int64], step: int, ttl: int) -> None:
        """End the lives that are over: among the batch's own keys now, among all keys in a sweep now and then."""
        if step % max(1, ttl // 4) == 0:
            slots = self._rows.live_slots()
        self._evict(slots[step - self._rows.last_step[slots] > ttl], step)

    def _end_surplus(self, step: int) -> None:
        """Rows past the bound, which only loading brings; no batch is in flight then, so any of them may go."""
        if self._bound is None or self._rows.num_keys <= self._bound or self._store.eviction == "none":
            return
        self._evict(_first_by(self._rows, self._ranks(), step, self._rows.num_keys - self._bound), step)

    def _admit_missing(self, keys: Keys, step: int) -> NDArray[np.int64]:
        slots = np.full(len(keys), -1, np.int64)
        uses = self._count_candidates(keys, step)
        earned = np.flatnonzero(uses >= self._store.admission_count)
        room = self._make_room(len(earned), step)
        if room < len(earned):
            self.counters.refused += len(earned) - room
            earned = np.sort(earned[np.argsort(keys[earned], kind="stable")[:room]])
        if len(earned):
            slots[earned] = self._rows.insert(keys[earned], uses[earned], np.full(len(earned), step))
            candidate_slots = self._candidates.find(keys[earned])
            self._candidates.remove(candidate_slots[candidate_slots >= 0])
        return slots

    def _count_candidates(self, keys: Keys, step: int) -> NDArray[np.int64]:
        """Uses of each key without a row, this one included."""
        if self._store.admission_count <= 1:
            return np.ones(len(keys), np.int64)
        slots = self._candidates.find(keys)
        absent = slots < 0
        self._candidates.use(slots[~absent], step)
        slots[absent] = self._candidates.insert(
            keys[absent], np.ones(int(absent.sum()), np.int64), np.full(int(absent.sum()), step)
        )
        uses = self._candidates.uses[slots].copy()
        self._bound_candidates(step)
        return uses

    def _bound_candidates(self, step: int) -> None:
        """Candidates are bounded like rows: the longest unused are forgotten first, those of this batch never."""
        if self._bound is None or self._candidates.num_keys <= self._bound:
            return
        surplus = self._candidates.num_keys - (self._bound - self._bound // 16)
        self._candidates.remove(_first_by(self._candidates, [self._candidates.last_step], step, surplus))

    def _make_room(self, wanted: int, step: int) -> int:
        """Evict where the bound asks for it; how many new rows fit."""
        if self._bound is None:
            return wanted
        if self._store.ttl_steps is not None and self._rows.num_keys + wanted > self._bound:
            # Rows past their time take no room, swept or not: a run resumed without them must decide the same.
            live = self._rows.live_slots()
            self._evict(live[step - self._rows.last_step[live] > self._store.ttl_steps], step)
        if self._rows.num_keys + wanted > self._bound and self._store.eviction in ("lru", "lfu"):
            surplus = self._rows.num_keys + wanted - (self._bound - self._bound // 16)
            self._evict(_first_by(self._rows, self._ranks(), step - 1, surplus), step)
        return max(0, min(wanted, self._bound - self._rows.num_keys))

    def _ranks(self) -> list[NDArray[np.int64]]:
        """What decides who goes first, and where that is equal, what decides then."""
        last_step = self._rows.last_step
        return [self._rows.uses, last_step] if self._store.eviction == "lfu" else [last_step]

    def _evict(self, slots: NDArray[np.int64], step: int) -> None:
        if len(slots):
            self._evicted.append((step, self._rows.key[slots]))
            self.counters.evicted += len(slots)
            self._rows.remove(slots)


def room_of_shards(rows: Sequence[int], max_rows: int) -> list[int]:
    """How many rows each shard may hold: those it has, or a part that is equal for all who have fewer.

    A shard that is full stays so, and the others fill up to what they are given: asked again later, the answer is the
    same, so a run that is resumed goes on with the same bounds.
    """
    equal = 0
    left = max_rows
    for place, own in enumerate(sorted(rows, reverse=True)):
        equal = left // (len(rows) - place)
        if own <= equal:
            break
        left -= own
    return [max(1, own, equal) for own in rows]


def _first_by(
    table: KeyHashTable, ranks: list[NDArray[np.int64]], protected_from_step: int, count: int
) -> NDArray[np.int64]:
    """Slots of the `count` keys that come first by (ranks, key) among those last used before a step."""
    slots = table.live_slots()
    slots = slots[table.last_step[slots] < protected_from_step]
    if count >= len(slots):
        return slots
    taken = []
    for rank in [*ranks, table.key]:  # no two keys are equal, so in the end exactly `count` have been taken
        values = rank[slots]
        threshold = np.partition(values, count)[count]
        taken.append(slots[values < threshold])
        count, slots = count - len(taken[-1]), slots[values == threshold]
    return np.concatenate(taken)


@njit(cache=True, nogil=True)
def _use(slots, step, exists, last_step, is_new):  # type: ignore[no-untyped-def]
    """Mark the rows of a batch as existing, used in a step; how many begin with it."""
    created = 0
    for i in range(len(slots)):
        slot = slots[i]
        is_new[i] = not exists[slot]
        created += is_new[i]
        exists[slot] = True
        last_step[slot] = step
    return created


def _owned_keys(num_rows: int, shard: int, num_shards: int) -> tuple[NDArray[np.int32] | None, Keys | None]:
    if num_shards == 1:
        return None, None
    parts = []
    for start in range(0, num_rows, _KEY_CHUNK):
        keys = np.arange(start, min(start + _KEY_CHUNK, num_rows))
        parts.append(keys[owner_of(keys, num_shards) == shard])
    owned = np.concatenate(parts)
    slot_of_key = np.full(num_rows, -1, np.int32)
    slot_of_key[owned] = np.arange(len(owned), dtype=np.int32)
    return slot_of_key, owned
