"""Stores and residency against a Python dict, through many random operations."""

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
class Oracle:
    """The rules of residency.py, said in dicts."""

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
        earned = sorted(k for k in missing if uses[k] >= store.admission_count)
        self.make_room(len(earned), step)
        room = len(earned) if store.max_rows is None else store.max_rows - len(self.rows)
        for key in earned[: max(0, room)]:
            self.rows[key] = Entry(self.begin(key), uses[key], step)
            self.waiting.pop(key, None)
        return np.stack([self.rows[k].row if k in self.rows else self.begin(k) for k in keys])

    def count_use(self, key: int, step: int) -> int:
        if self.table.store.admission_count == 1:
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

    def make_room(self, wanted: int, step: int) -> None:
        bound = self.table.store.max_rows
        kind = self.table.store.eviction
        if bound is None or kind not in ("lru", "lfu") or len(self.rows) + wanted <= bound:
            return
        old = [(e.uses if kind == "lfu" else 0, e.last, k) for k, e in self.rows.items() if e.last < step - 1]
        for *_, key in sorted(old)[: len(self.rows) + wanted - (bound - bound // 16)]:
            del self.rows[key]

    def write(self, keys: list[int], rows: np.ndarray) -> None:
        for key, row in zip(keys, rows, strict=True):
            if key in self.rows:
                self.rows[key].row = row.copy()

    def read(self, key: int) -> np.ndarray:
        return self.rows[key].row if key in self.rows and not self.expired(key, self.newest) else self.begin(key)


POLICIES = {
    "plain": StoreConfig(),
    "admission": StoreConfig(admission_count=3),
    "lru": StoreConfig(eviction="lru", max_rows=200),
    "lfu": StoreConfig(eviction="lfu", max_rows=200),
    "ttl": StoreConfig(eviction="ttl", ttl_steps=9),
    "admission and lru": StoreConfig(eviction="lru", max_rows=150, admission_count=2),
    "bound alone": StoreConfig(max_rows=100),
    "bound below a batch": StoreConfig(eviction="lru", max_rows=20),
}


def run(policy: StoreConfig, kind: str, folder: str, num_steps: int, batch: int) -> None:
    store = StoreConfig(
        kind=kind,
        folder=folder,
        cache_rows=64,
        admission_count=policy.admission_count,
        eviction=policy.eviction,
        max_rows=policy.max_rows,
        ttl_steps=policy.ttl_steps,
    )
    table = TableConfig(name="t", dim=3, store=store, optimizer=RowOptimizerConfig(kind="rowwise_adagrad"))
    shard = TableShard(table, 0, 1, CPU)
    oracle = Oracle(table, shard)
    draw = np.random.default_rng(5)
    for step in range(1, num_steps + 1):
        keys = np.unique(np.minimum(draw.zipf(1.4, batch), 10**6) * (1 - 2 * draw.integers(0, 2, batch)))
        keys = draw.permutation(keys)
        fetched = shard.fetch(keys, step)
        assert (fetched.rows.numpy() == oracle.fetch(keys.tolist(), step)).all()
        fetched.rows += step
        shard.write_back(fetched)
        oracle.write(keys.tolist(), fetched.rows.numpy())
        before = shard.residency.num_rows
        asked = draw.integers(-300, 300, 5)
        assert (shard.read(asked).numpy() == np.stack([oracle.read(k) for k in asked.tolist()])).all()
        assert shard.residency.num_rows == before
        if policy.max_rows is not None:
            assert before <= policy.max_rows
            assert isinstance(shard.residency, DynamicKeyIndex)
            assert shard.residency.candidates.num_keys <= policy.max_rows + batch
    everything = {k for k in oracle.rows if not oracle.expired(k, num_steps)}
    assert shard.keys().tolist() == sorted(everything)
    for chunk in shard.snapshot(chunk_rows=50):
        assert [oracle.rows[k].uses for k in chunk["keys"].tolist()] == chunk["uses"].tolist()
        rows = shard.layout.rows_of({n: v for n, v in chunk.items() if n in ("weight", "state_sum")}).numpy()
        assert (rows == np.stack([oracle.rows[k].row for k in chunk["keys"].tolist()])).all()
    if policy.eviction != "none" and policy.max_rows != 20:
        assert shard.residency.counters.evicted > 0
    shard.store.close()


@pytest.mark.parametrize("kind", ["device", "dram", "disk"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_shard_is_a_dict_through_thousands_of_operations(policy, kind, tmp_path):
    run(POLICIES[policy], kind, str(tmp_path), num_steps=60, batch=80)


@pytest.mark.parametrize("policy", ["lru", "lfu", "ttl"])
def test_a_shard_is_a_dict_through_100_000_operations_with_eviction(policy, tmp_path):
    run(POLICIES[policy], "dram", str(tmp_path), num_steps=1000, batch=100)


def test_incremental_snapshots_hold_what_changed_and_name_what_went(tmp_path):
    table = TableConfig(name="t", dim=2, store=StoreConfig(eviction="ttl", ttl_steps=3))
    shard = TableShard(table, 0, 1, CPU)
    for step in range(1, 7):
        shard.write_back(shard.fetch(np.array([step, 100]), step))
    [chunk] = shard.snapshot(since=4)
    assert chunk["keys"].tolist() == [5, 6, 100]
    residency = shard.residency
    assert isinstance(residency, DynamicKeyIndex)
    assert residency.evicted_since(0).tolist() == [1, 2]
    residency.drop_eviction_log(5)
    assert residency.evicted_since(0).tolist() == [2]


def test_a_snapshot_restores_uses_steps_and_waiting_keys(tmp_path):
    table = TableConfig(name="t", dim=2, store=StoreConfig(eviction="lfu", max_rows=40, admission_count=2))
    draw = np.random.default_rng(1)
    batches = [np.unique(draw.zipf(1.5, 20) % 1000) for _ in range(60)]

    def advance(shard: TableShard, steps: range) -> None:
        for step in steps:
            fetched = shard.fetch(batches[step], step)
            fetched.rows[:, 0] += step
            shard.write_back(fetched)

    whole, first, resumed = (TableShard(table, 0, 1, CPU) for _ in range(3))
    advance(whole, range(1, 60))
    advance(first, range(1, 30))
    resumed.load(first.snapshot())
    resumed.load_unsettled(first.unsettled())
    advance(resumed, range(30, 60))
    for a, b in zip(whole.snapshot(), resumed.snapshot(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert all(torch.equal(whole.unsettled()[n], resumed.unsettled()[n]) for n in whole.unsettled())
