"""Content of the tables of one rank in checkpoints, tested without a training run."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nestrec.checkpoint import CheckpointManager, LoadedCheckpoint, RankCheckpoint
from nestrec.checkpoint.table_checkpointer import WAITING, TableCheckpointer
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, StoreConfig, TableConfig
from nestrec.embedding.table_snapshot import TableSnapshot

LRU = StoreConfig(kind="dram", eviction_policy="lru", max_rows=2, admission_threshold=1)
TTL = StoreConfig(kind="dram", eviction_policy="ttl", ttl_steps=4)
SLOW = StoreConfig(kind="dram", admission_threshold=3)


@pytest.fixture
def engine() -> EmbeddingEngine:
    tables = [
        TableConfig(name="fixed", dim=2, num_rows=9),
        TableConfig(name="lru", dim=2, store=LRU),
        TableConfig(name="slow", dim=2, store=SLOW),
    ]
    return EmbeddingEngine(tables, Topology.single())


def use(engine: EmbeddingEngine, step: int, *keys: int) -> None:
    routed = engine.route({name: np.array(keys) for name in engine.tables})
    engine.write_back(engine.fetch_rows(routed, step=step))


def saved(folder: Path, checkpointer: TableCheckpointer, step: int) -> LoadedCheckpoint:
    content = RankCheckpoint(
        tables=checkpointer.rows(step, None, None) | checkpointer.prefetched_rows(),
        close=checkpointer.release_snapshots,
    )
    CheckpointManager(folder).save(step, content)
    restored = CheckpointManager(folder).restore_latest()
    assert restored is not None
    return restored


def test_table_checkpoint_removed_keys_are_evicted_keys(engine: EmbeddingEngine) -> None:
    checkpointer = TableCheckpointer(engine)
    use(engine, 1, 1)
    use(engine, 2, 2)
    checkpointer.rows(2, None, None)
    checkpointer.release_snapshots()
    for step, key in ((3, 3), (4, 1), (5, 1)):
        use(engine, step, key)
    checkpointer.rows(5, 2, None)
    checkpointer.release_snapshots()
    removed = {name: keys.tolist() for name, keys in checkpointer.removed(5, 2).items()}
    # Table `lru` evicted key 1 at step 3 and key 2 at step 4, and added key 1 again. Key 1 of `slow` was admitted.
    assert removed == {"lru": [2], "slow" + WAITING: [1]}


def test_table_checkpoint_drops_unneeded_evictions(engine: EmbeddingEngine) -> None:
    checkpointer = TableCheckpointer(engine)
    for step in range(1, 6):
        use(engine, step, step)
    assert engine.evicted_since("lru", 0).tolist() == [1, 2, 3]
    checkpointer.retain_evictions_from(3)
    assert engine.evicted_since("lru", 0).tolist() == [2, 3]
    checkpointer.set_base(4)
    assert engine.evicted_since("lru", 0).tolist() == [2, 3], "the evictions of step 4 are still needed"
    checkpointer.retain_evictions_from(None)
    assert engine.evicted_since("lru", 0).tolist() == [3]
    checkpointer.set_base(5)
    assert engine.evicted_since("lru", 0).tolist() == []


def test_table_checkpoint_divides_copy_on_write_bytes(engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    use(engine, 1, 1, 2)
    calls = []
    snapshot_async = engine.snapshot_async

    def recorded(table: str, *, since: int = -1, max_bytes: int | None = None) -> TableSnapshot:
        calls.append((table, since, max_bytes))
        return snapshot_async(table, since=since, max_bytes=max_bytes)

    monkeypatch.setattr(engine, "snapshot_async", recorded)
    checkpointer = TableCheckpointer(engine)
    checkpointer.rows(2, 1, 1201)
    assert calls == [("fixed", 1, 400), ("lru", 1, 400), ("slow", 1, 400)]
    checkpointer.release_snapshots()
    checkpointer.release_snapshots()  # as after a save that failed before its content was read


def test_table_checkpoint_restores_prefetched_rows(engine: EmbeddingEngine, tmp_path: Path) -> None:
    use(engine, 1, 1, 2)
    ahead = {}
    for step, keys in ((2, [1, 3]), (3, [2, 5])):
        engine.prefetch_rows(engine.route({name: np.array(keys) for name in engine.tables}), step=step)
        ahead[f"fixed/read-ahead-{step}-0"] = keys
    checkpointer = TableCheckpointer(engine)
    read = {name: chunks for name, chunks in checkpointer.prefetched_rows().items() if name.startswith("fixed")}
    assert {name: chunk["keys"].tolist() for name, (chunk,) in read.items()} == ahead
    restored = saved(tmp_path, checkpointer, 1)
    other = EmbeddingEngine(list(engine.tables.values()), Topology.single())
    taken = TableCheckpointer(other)
    taken.load_rows(restored)
    prefetched = other.prefetched_rows._restored
    assert {step: prefetched[step]["fixed"][0].tolist() for step in prefetched} == {2: [1, 3], 3: [2, 5]}
    for step in prefetched:
        expected = engine.prefetched_rows.pending()[step]["fixed"][1]
        assert torch.equal(prefetched[step]["fixed"][1], expected)


def test_table_checkpoint_ttl_counts_from_saved_step(tmp_path: Path) -> None:
    tables = [TableConfig(name="ttl", dim=2, store=TTL)]
    engine = EmbeddingEngine(tables, Topology.single())
    use(engine, 10, 1)
    use(engine, 13, 2)
    restored = saved(tmp_path, TableCheckpointer(engine), 13)
    other = EmbeddingEngine(tables, Topology.single())
    TableCheckpointer(other).load_rows(restored)
    assert other.pending_key_state("ttl")["newest_step"].tolist() == [13]
    for each in (engine, other):
        use(each, 15, 2)
    assert other.deleted_since("ttl", 13).tolist() == engine.deleted_since("ttl", 13).tolist() == [1]


def test_table_checkpoint_ttl_counts_steps_without_use(tmp_path: Path) -> None:
    tables = [TableConfig(name="ttl", dim=2, store=TTL)]
    engine = EmbeddingEngine(tables, Topology.single())
    use(engine, 10, 1)
    restored = saved(tmp_path, TableCheckpointer(engine), 13)
    other = EmbeddingEngine(tables, Topology.single())
    TableCheckpointer(other).load_rows(restored)
    assert other.pending_key_state("ttl")["newest_step"].tolist() == [13]
