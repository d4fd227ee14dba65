"""Key index of a shard: which keys have a row, and in which slot of the store, for static and dynamic tables.

Dynamic tables decide about admission and eviction in `admit`, which is called once per training batch in batch order.
The decisions depend only on step numbers:

- A key gets a row in the step of its `admission_threshold`-th use. Before that it reads its initial vector.
- With a time to live, a row that was not used for more than `ttl_steps` steps is deleted: the next use of its key
  creates a new row.
- A shard stores at most its share of `max_rows`. If new rows would exceed this capacity, `lru` (or `lfu`) evicts the
  first rows by (last step, key) (or by (uses, last step, key)) until, counting the new rows, one sixteenth of the
  capacity is free. Keys of this batch and of the one before it are never evicted, so that a pipeline that fetches one
  batch ahead of the write-back makes the same decisions as a serial run. If the capacity is still too small, new keys
  are admitted in order of key while there is capacity, and the others continue to read their initial vectors.
- After resuming with more ranks, a shard may have more rows than its share of the capacity. The next training batch
  first evicts the surplus, least recently used first (`lfu`: least frequently used). Without eviction the rows stay,
  and the other shards get less capacity (`capacity_per_shard`).
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
    """Slots of the keys of a batch."""

    slots: NDArray[np.int64]
    """Slot of each key; -1 if it has no row, in which case it reads its initial vector and its gradient is dropped."""
    is_new: NDArray[np.bool_]
    """Whether the slot does not contain a row yet."""


@dataclass(slots=True)
class KeyIndexCounters:
    """Counters of a key index since its creation."""

    created: int = 0
    evicted: int = 0
    not_admitted: int = 0
    """Number of uses of keys that qualified for a row but were not admitted, because the shard was full."""
    peak_rows: int = 0


class KeyIndex(Protocol):
    """Interface of the key index of a shard, which maps keys to slots; the store contains the rows."""

    counters: KeyIndexCounters

    @property
    def num_slots(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """Return the slot of each key, -1 if it has no row. Read-only."""
        ...

    def admit(self, keys: Keys, step: int) -> AdmissionResult:
        """Return the slots of the unique keys of the training batch of `step`, and count one use of each."""
        ...

    def join(self, keys: Keys, step: int) -> AdmissionResult:
        """Return the slots of unique keys whose rows change in `step` because other replicas use them.

        Not counted as a use. Missing rows are created.
        """
        ...

    def restore(self, keys: Keys, uses: Keys | None, last_step: Keys | None) -> NDArray[np.int64]:
        """Insert the keys of a snapshot; return their slots."""
        ...

    def rows_since(self, step: int) -> tuple[Keys, NDArray[np.int64]]:
        """Return the sorted keys and the slots of the rows changed after `step`; all rows if it is negative."""
        ...

    def metadata(self, slots: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Return the columns that a snapshot contains in addition to the rows."""
        ...

    def snapshot_keys(self, since: int) -> SnapshotKeys:
        """Return a copy of the current keys, slots and metadata that later changes do not affect."""
        ...

    def grow(self, num_rows: int | None, shard: int, num_shards: int) -> None:
        """Add keys after the existing ones, which keep their slots. Does nothing if any int64 is a key."""
        ...

    def readable_keys(self) -> Keys:
        """Return the sorted keys that readers of the table see: all static keys, or dynamic keys with a row."""
        ...

    def filter_readable(self, keys: Keys) -> Keys:
        """Return those of the given keys of this shard that are in `readable_keys`."""
        ...

    def rebalance_capacity(self, rows_of_shards: Sequence[int], shard: int) -> None:
        """Set the capacity of this shard after loading rows that a different number of shards saved.

        Args:
            rows_of_shards: Current number of rows of each shard.
            shard: Index of this shard.
        """
        ...

    def evicted_since(self, step: int) -> Keys:
        """Return the sorted keys that were evicted after `step` and have no row now."""
        ...

    def deleted_since(self, step: int) -> Keys:
        """Return the sorted keys that had a row after `step` and now read their initial vector.

        These are evicted keys, and keys past their time to live that the sweep has not reached yet.
        """
        ...

    def delete_rows(self, keys: Keys) -> None:
        """Remove the rows of these keys if they exist; incremental snapshots list the evicted keys."""
        ...

    def drop_eviction_log(self, step: int) -> None:
        """Discard the log of evictions up to `step`, which no later call of `evicted_since` needs."""
        ...

    def admission_state(self) -> dict[str, NDArray[np.int64]]:
        """Return keys, uses and last steps of the keys that wait for admission, and `newest_step`; empty if static."""
        ...

    def load_admission(self, state: Mapping[str, NDArray[np.int64]]) -> None:
        """Add waiting keys from a result of `admission_state`."""
        ...


def index_bytes(num_rows: int, num_shards: int) -> int:
    """Return the memory in bytes that a `StaticKeyIndex` allocates, before any row exists."""
    slot_map_bytes = 0 if num_shards == 1 else 4 * num_rows
    return slot_map_bytes + (9 if num_shards == 1 else 17) * (num_rows // num_shards)


class StaticKeyIndex:
    """Key index of a static table: the keys from 0 to num_rows - 1 that this shard owns.

    The slot of every key is fixed; its row is created on first use.
    """

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
        """Return every key of this shard, sorted, with or without a row."""
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

    def snapshot_keys(self, since: int) -> SnapshotKeys:
        is_pending = self._exists.copy() if since < 0 else self._exists & (self._last_step > since)
        return SnapshotKeys(is_pending.view(np.uint8), self._owned, {})

    def readable_keys(self) -> Keys:
        return self.owned()

    def filter_readable(self, keys: Keys) -> Keys:
        return keys

    def rebalance_capacity(self, rows_of_shards: Sequence[int], shard: int) -> None:
        """Do nothing: every key has its slot."""

    def evicted_since(self, step: int) -> Keys:
        return np.empty(0, np.int64)

    def deleted_since(self, step: int) -> Keys:
        return np.empty(0, np.int64)

    def delete_rows(self, keys: Keys) -> None:
        """Do nothing: rows are never evicted."""

    def drop_eviction_log(self, step: int) -> None:
        """Do nothing: rows are never evicted."""

    def admission_state(self) -> dict[str, NDArray[np.int64]]:
        return {}

    def load_admission(self, state: Mapping[str, NDArray[np.int64]]) -> None:
        """Do nothing: every key is admitted."""

    def _slots(self, keys: Keys) -> NDArray[np.int64]:
        return keys if self._slot_of_key is None else self._slot_of_key[keys].astype(np.int64)

    def _mark(self, slots: NDArray[np.int64], created: int) -> None:
        self._exists[slots] = True
        self.counters.created += created
        self.counters.peak_rows = self.counters.created


class DynamicKeyIndex:
    """Key index of a dynamic embedding table: any int64 is a key; rows are admitted and evicted.

    The module docstring describes the rules.
    """

    def __init__(self, store: StoreConfig, num_shards: int) -> None:
        self.counters = KeyIndexCounters()
        self._store = store
        self._bound = None if store.max_rows is None else max(1, store.max_rows // num_shards)
        self._rows = KeyHashTable()
        self._candidates = KeyHashTable()
        self.newest_step = 0
        """Step of the last training batch, relative to which time to live is measured."""
        self._evicted: list[tuple[int, Keys]] = []

    @property
    def num_slots(self) -> int:
        return self._rows.num_slots

    @property
    def num_rows(self) -> int:
        return self._rows.num_keys

    @property
    def candidates(self) -> KeyHashTable:
        """Table of keys that have been used but have no row yet."""
        return self._candidates

    def find(self, keys: Keys) -> NDArray[np.int64]:
        slots = self._rows.find(keys)
        ttl = self._store.ttl_steps
        if ttl is not None:
            has_row = np.flatnonzero(slots >= 0)
            slots[has_row[self.newest_step - self._rows.last_step[slots[has_row]] > ttl]] = -1
        return slots

    def rebalance_capacity(self, rows_of_shards: Sequence[int], shard: int) -> None:
        if self._store.max_rows is not None and self._store.eviction_policy == "none":
            self._bound = capacity_per_shard(rows_of_shards, self._store.max_rows)[shard]

    def admit(self, keys: Keys, step: int) -> AdmissionResult:
        self.newest_step = step
        self._end_surplus(step)
        slots = self._rows.find(keys)
        if self._store.ttl_steps is not None:
            self._end_expired(slots[slots >= 0], step, self._store.ttl_steps)
            slots = self._rows.find(keys)
        has_row = slots >= 0
        self._rows.use(slots[has_row], step)
        missing = np.flatnonzero(~has_row)
        if len(missing):
            slots[missing] = self._admit_missing(keys[missing], step)
        is_new = ~has_row & (slots >= 0)
        self.counters.created += int(is_new.sum())
        self.counters.peak_rows = max(self.counters.peak_rows, self.num_rows)
        return AdmissionResult(slots, is_new)

    def join(self, keys: Keys, step: int) -> AdmissionResult:
        slots = self._rows.find(keys)
        is_new = slots < 0
        zeros = np.zeros(int(is_new.sum()), np.int64)
        slots[is_new] = self._rows.insert(keys[is_new], zeros, zeros)
        self._rows.last_change[slots] = step
        self.counters.created += len(zeros)
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
        """Do nothing: any int64 is a key."""

    def readable_keys(self) -> Keys:
        return self.rows_since(-1)[0]

    def filter_readable(self, keys: Keys) -> Keys:
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

    def delete_rows(self, keys: Keys) -> None:
        slots = self._rows.find(keys)
        self._rows.remove(slots[slots >= 0])

    def evicted_since(self, step: int) -> Keys:
        deleted = [keys for at, keys in self._evicted if at > step]
        keys = np.unique(np.concatenate(deleted)) if deleted else np.empty(0, np.int64)
        return keys[self._rows.find(keys) < 0]

    def deleted_since(self, step: int) -> Keys:
        deleted = [self.evicted_since(step)]
        ttl = self._store.ttl_steps
        if ttl is not None:
            live = self._rows.live_slots()
            last_step = self._rows.last_step[live]
            deleted.append(self._rows.key[live[(self.newest_step - last_step > ttl) & (step - last_step <= ttl)]])
        return np.unique(np.concatenate(deleted))

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

    def snapshot_keys(self, since: int) -> SnapshotKeys:
        num_slots = self._rows.num_slots
        is_pending = np.zeros(self._rows.num_slots, np.uint8)
        is_pending[self.rows_since(since)[1]] = 1
        all_slots = np.arange(num_slots)
        return SnapshotKeys(is_pending, self._rows.key[:num_slots].copy(), self.metadata(all_slots))

    def _end_expired(self, slots: NDArray[np.int64], step: int, ttl: int) -> None:
        """Delete expired rows: those of the batch in every step, all others in a periodic sweep."""
        if step % max(1, ttl // 4) == 0:
            slots = self._rows.live_slots()
        self._evict(slots[step - self._rows.last_step[slots] > ttl], step)

    def _end_surplus(self, step: int) -> None:
        """Evict rows beyond the capacity.

        Only loading creates such a surplus. No batch is in flight then, so any row can be evicted.
        """
        if self._bound is None or self._rows.num_keys <= self._bound or self._store.eviction_policy == "none":
            return
        self._evict(_first_by(self._rows, self._ranks(), step, self._rows.num_keys - self._bound), step)

    def _admit_missing(self, keys: Keys, step: int) -> NDArray[np.int64]:
        slots = np.full(len(keys), -1, np.int64)
        uses = self._count_candidates(keys, step)
        admitted = np.flatnonzero(uses >= self._store.admission_threshold)
        capacity = self._make_room(len(admitted), step)
        if capacity < len(admitted):
            self.counters.not_admitted += len(admitted) - capacity
            admitted = np.sort(admitted[np.argsort(keys[admitted], kind="stable")[:capacity]])
        if len(admitted):
            slots[admitted] = self._rows.insert(keys[admitted], uses[admitted], np.full(len(admitted), step))
            candidate_slots = self._candidates.find(keys[admitted])
            self._candidates.remove(candidate_slots[candidate_slots >= 0])
        return slots

    def _count_candidates(self, keys: Keys, step: int) -> NDArray[np.int64]:
        """Count a use of each key without a row; return its uses including this one."""
        if self._store.admission_threshold <= 1:
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
        """Limit the number of candidates to the capacity for rows.

        The least recently used candidates are removed first, those of this batch never.
        """
        if self._bound is None or self._candidates.num_keys <= self._bound:
            return
        surplus = self._candidates.num_keys - (self._bound - self._bound // 16)
        self._candidates.remove(_first_by(self._candidates, [self._candidates.last_step], step, surplus))

    def _make_room(self, num_requested: int, step: int) -> int:
        """Evict rows if the capacity requires it; return how many new rows fit."""
        if self._bound is None:
            return num_requested
        if self._store.ttl_steps is not None and self._rows.num_keys + num_requested > self._bound:
            # Expired rows take no capacity, swept or not: a run resumed without them must make the same decisions.
            live = self._rows.live_slots()
            self._evict(live[step - self._rows.last_step[live] > self._store.ttl_steps], step)
        if self._rows.num_keys + num_requested > self._bound and self._store.eviction_policy in ("lru", "lfu"):
            surplus = self._rows.num_keys + num_requested - (self._bound - self._bound // 16)
            self._evict(_first_by(self._rows, self._ranks(), step - 1, surplus), step)
        return max(0, min(num_requested, self._bound - self._rows.num_keys))

    def _ranks(self) -> list[NDArray[np.int64]]:
        """Return the sort keys of the eviction order, most significant first."""
        last_step = self._rows.last_step
        return [self._rows.uses, last_step] if self._store.eviction_policy == "lfu" else [last_step]

    def _evict(self, slots: NDArray[np.int64], step: int) -> None:
        if len(slots):
            self._evicted.append((step, self._rows.key[slots]))
            self.counters.evicted += len(slots)
            self._rows.remove(slots)


def capacity_per_shard(rows: Sequence[int], max_rows: int) -> list[int]:
    """Return the capacity of each shard: the rows it has, or a share that is equal for all shards with fewer rows.

    A full shard stays full, and the others grow up to their share. Later calls therefore return the same capacities,
    and a resumed run continues with them.
    """
    equal = 0
    left = max_rows
    for rank, own in enumerate(sorted(rows, reverse=True)):
        equal = left // (len(rows) - rank)
        if own <= equal:
            break
        left -= own
    return [max(1, own, equal) for own in rows]


def _first_by(
    table: KeyHashTable, ranks: list[NDArray[np.int64]], protected_from_step: int, count: int
) -> NDArray[np.int64]:
    """Return the slots of the first `count` keys by (ranks, key) among those last used before a step."""
    slots = table.live_slots()
    slots = slots[table.last_step[slots] < protected_from_step]
    if count >= len(slots):
        return slots
    taken = []
    for rank in [*ranks, table.key]:  # keys are unique, so in the end exactly `count` are taken
        values = rank[slots]
        threshold = np.partition(values, count)[count]
        taken.append(slots[values < threshold])
        count, slots = count - len(taken[-1]), slots[values == threshold]
    return np.concatenate(taken)


@njit(cache=True, nogil=True)
def _use(slots, step, exists, last_step, is_new):  # type: ignore[no-untyped-def]
    """Mark the rows of a batch as existing and used in a step; return how many of them are new."""
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
