"""Table shards equal a reference implementation with dictionaries after many random operations."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from nestrec.embedding import RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.embedding.initial import initial_rows
from nestrec.embedding.key_index import DynamicKeyIndex
from nestrec.embedding.table_shard import TableShard

CPU = torch.device("cpu")


@dataclass
class Entry:
    row: np.ndarray
    uses: int
    last: int


@dataclass
class ReferenceShard:
    """Reference implementation of a table shard and its key index with dictionaries."""

    table: TableConfig
    shard: TableShard
    rows: dict[int, Entry] = field(default_factory=dict)
    waiting: dict[int, Entry] = field(default_factory=dict)
    newest: int = 0

    def begin(self, key: int) -> np.ndarray:
        return initial_rows(np.array([key]), self.table, self.shard.layout, CPU).numpy()[0]

    def expired(self, key: int, step: int) -> bool:
        ttl = self.table.store.ttl_steps
        return ttl is not None and step - self.rows[key].last > ttl

    def fetch(self, keys: list[int], step: int) -> np.ndarray:
        self.newest = step
        store = self.table.store
        for key in [k for k in self.rows if self.expired(k, step)]:
            del self.rows[key]
        missing = [k for k in keys if k not in self.rows]
        for key in set(keys) - set(missing):
            self.rows[key].uses += 1
            self.rows[key].last = step
        uses = {k: self.count_use(k, step) for k in missing}
        self.bound_waiting(step)
        admitted = sorted(k for k in missing if uses[k] >= store.admission_threshold)
        self.make_room(len(admitted), step)
        room = len(admitted) if store.max_rows is None else store.max_rows - len(self.rows)
        for key in admitted[: max(0, room)]:
            self.rows[key] = Entry(self.begin(key), uses[key], step)
            self.waiting.pop(key, None)
        return np.stack([self.rows[k].row if k in self.rows else self.begin(k) for k in keys])

    def count_use(self, key: int, step: int) -> int:
        if self.table.store.admission_threshold == 1:
            return 1
        entry = self.waiting.setdefault(key, Entry(np.empty(0), 0, step))
        entry.uses, entry.last = entry.uses + 1, step
        return entry.uses

    def bound_waiting(self, step: int) -> None:
        bound = self.table.store.max_rows
        if bound is not None and len(self.waiting) > bound:
            old = sorted((e.last, k) for k, e in self.waiting.items() if e.last < step)
            for _, key in old[: len(self.waiting) - (bound - bound // 16)]:
                del self.waiting[key]

    def make_room(self, num_new: int, step: int) -> None:
        bound = self.table.store.max_rows
        kind = self.table.store.eviction_policy
        if bound is None or kind not in ("lru", "lfu") or len(self.rows) + num_new <= bound:
            return
        old = [(e.uses if kind == "lfu" else 0, e.last, k) for k, e in self.rows.items() if e.last < step - 1]
        for *_, key in sorted(old)[: len(self.rows) + num_new - (bound - bound // 16)]:
            del self.rows[key]

    def write(self, keys: list[int], rows: np.ndarray) -> None:
        for key, row in zip(keys, rows, strict=True):
            if key in self.rows:
                self.rows[key].row = row.copy()

    def read(self, key: int) -> np.ndarray:
        return self.rows[key].row if key in self.rows and not self.expired(key, self.newest) else self.begin(key)


POLICIES = {
    "plain": StoreConfig(),
    "admission": StoreConfig(admission_threshold=3),
    "lru": StoreConfig(eviction_policy="lru", max_rows=200),
    "lfu": StoreConfig(eviction_policy="lfu", max_rows=200),
    "ttl": StoreConfig(eviction_policy="ttl", ttl_steps=9),
    "admission and lru": StoreConfig(eviction_policy="lru", max_rows=150, admission_threshold=2),
    "bound only": StoreConfig(max_rows=100),
    "bound below a batch": StoreConfig(eviction_policy="lru", max_rows=20),
}


def run(policy: StoreConfig, kind: str, folder: str, num_steps: int, batch: int) -> None:
    store = StoreConfig(
        kind=kind,
        folder=folder,
        cache_rows=64,
        admission_threshold=policy.admission_threshold,
        eviction_policy=policy.eviction_policy,
        max_rows=policy.max_rows,
        ttl_steps=policy.ttl_steps,
    )
    table = TableConfig(name="t", dim=3, store=store, optimizer=RowOptimizerConfig(kind="rowwise_adagrad"))
    shard = TableShard(table, 0, 1, CPU)
    reference = ReferenceShard(table, shard)
    draw = np.random.default_rng(5)
    for step in range(1, num_steps + 1):
        keys = np.unique(np.minimum(draw.zipf(1.4, batch), 10**6) * (1 - 2 * draw.integers(0, 2, batch)))
        keys = draw.permutation(keys)
        fetched = shard.fetch_rows(keys, step)
        assert (fetched.rows.numpy() == reference.fetch(keys.tolist(), step)).all()
        fetched.rows += step
        shard.write_back(fetched)
        reference.write(keys.tolist(), fetched.rows.numpy())
        before = shard.key_index.num_rows
        queried = draw.integers(-300, 300, 5)
        assert (shard.read(queried).numpy() == np.stack([reference.read(k) for k in queried.tolist()])).all()
        assert shard.key_index.num_rows == before
        if policy.max_rows is not None:
            assert before <= policy.max_rows
            assert isinstance(shard.key_index, DynamicKeyIndex)
            assert shard.key_index.candidates.num_keys <= policy.max_rows + batch
    expected_keys = {k for k in reference.rows if not reference.expired(k, num_steps)}
    assert shard.keys().tolist() == sorted(expected_keys)
    for chunk in shard.snapshot(chunk_rows=50):
        assert [reference.rows[k].uses for k in chunk["keys"].tolist()] == chunk["uses"].tolist()
        rows = shard.layout.rows_of({n: v for n, v in chunk.items() if n in ("weight", "state_sum")}).numpy()
        assert (rows == np.stack([reference.rows[k].row for k in chunk["keys"].tolist()])).all()
    if policy.eviction_policy != "none" and policy.max_rows != 20:
        assert shard.key_index.counters.evicted > 0
    shard.store.close()


@pytest.mark.parametrize("kind", ["device", "dram", "disk"])
@pytest.mark.parametrize("policy", POLICIES)
def test_table_shard_equals_dict(policy, kind, tmp_path):
    run(POLICIES[policy], kind, str(tmp_path), num_steps=60, batch=80)


@pytest.mark.parametrize("policy", ["lru", "lfu", "ttl"])
def test_table_shard_equals_dict_with_eviction(policy, tmp_path):
    run(POLICIES[policy], "dram", str(tmp_path), num_steps=1000, batch=100)


def test_incremental_snapshot_contains_changes_and_deletions(tmp_path):
    table = TableConfig(name="t", dim=2, store=StoreConfig(eviction_policy="ttl", ttl_steps=3))
    shard = TableShard(table, 0, 1, CPU)
    for step in range(1, 7):
        shard.write_back(shard.fetch_rows(np.array([step, 100]), step))
    [chunk] = shard.snapshot(since=4)
    assert chunk["keys"].tolist() == [5, 6, 100]
    key_index = shard.key_index
    assert isinstance(key_index, DynamicKeyIndex)
    assert key_index.evicted_since(0).tolist() == [1, 2]
    key_index.drop_eviction_log(5)
    assert key_index.evicted_since(0).tolist() == [2]


def test_snapshot_restores_admission_state(tmp_path):
    table = TableConfig(name="t", dim=2, store=StoreConfig(eviction_policy="lfu", max_rows=40, admission_threshold=2))
    draw = np.random.default_rng(1)
    batches = [np.unique(draw.zipf(1.5, 20) % 1000) for _ in range(60)]

    def advance(shard: TableShard, steps: range) -> None:
        for step in steps:
            fetched = shard.fetch_rows(batches[step], step)
            fetched.rows[:, 0] += step
            shard.write_back(fetched)

    uninterrupted, first, resumed = (TableShard(table, 0, 1, CPU) for _ in range(3))
    advance(uninterrupted, range(1, 60))
    advance(first, range(1, 30))
    resumed.load(first.snapshot())
    resumed.load_pending_key_state(first.pending_key_state())
    advance(resumed, range(30, 60))
    for a, b in zip(uninterrupted.snapshot(), resumed.snapshot(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert all(
        torch.equal(uninterrupted.pending_key_state()[n], resumed.pending_key_state()[n])
        for n in uninterrupted.pending_key_state()
    )
