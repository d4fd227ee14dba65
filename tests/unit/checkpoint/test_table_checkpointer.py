"""Tables of one rank in checkpoints: what is saved of them and what is restored, without a run around it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nestrec.checkpoint import CheckpointManager, LoadedCheckpoint, RankCheckpoint
from nestrec.checkpoint.table_checkpointer import WAITING, TableCheckpointer
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, StoreConfig, TableConfig
from nestrec.embedding.table_snapshot import TableSnapshot

LRU = StoreConfig(kind="dram", eviction="lru", max_rows=2, admission_count=1)
TTL = StoreConfig(kind="dram", eviction="ttl", ttl_steps=4)
SLOW = StoreConfig(kind="dram", admission_count=3)


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
    engine.write_back(engine.fetch(routed, step=step))


def saved(folder: Path, checkpointer: TableCheckpointer, step: int) -> LoadedCheckpoint:
    content = RankCheckpoint(
        tables=checkpointer.rows(step, None, None) | checkpointer.read_ahead(), close=checkpointer.thaw
    )
    CheckpointManager(folder).save(step, content)
    restored = CheckpointManager(folder).restore_latest()
    assert restored is not None
    return restored


def test_removed_keys_are_those_of_tables_that_evict(engine: EmbeddingEngine) -> None:
    checkpointer = TableCheckpointer(engine)
    use(engine, 1, 1)
    use(engine, 2, 2)
    checkpointer.rows(2, None, None)
    checkpointer.thaw()
    for step, key in ((3, 3), (4, 1), (5, 1)):
        use(engine, step, key)
    checkpointer.rows(5, 2, None)
    checkpointer.thaw()
    gone = {name: keys.tolist() for name, keys in checkpointer.removed(5, 2).items()}
    # Of `lru`, key 1 left at step 3 and is back, and key 2 left at step 4. Of `slow`, key 1 waits no longer.
    assert gone == {"lru": [2], "slow" + WAITING: [1]}


def test_evictions_are_forgotten_when_no_save_needs_them(engine: EmbeddingEngine) -> None:
    checkpointer = TableCheckpointer(engine)
    for step in range(1, 6):
        use(engine, step, step)
    assert engine.evicted_since("lru", 0).tolist() == [1, 2, 3]
    checkpointer.hold_from(3)
    assert engine.evicted_since("lru", 0).tolist() == [2, 3]
    checkpointer.build_on(4)
    assert engine.evicted_since("lru", 0).tolist() == [2, 3], "the evictions of step 4 are still asked for"
    checkpointer.hold_from(None)
    assert engine.evicted_since("lru", 0).tolist() == [3]
    checkpointer.build_on(5)
    assert engine.evicted_since("lru", 0).tolist() == []


def test_tables_share_the_bytes_of_rows_that_are_put_aside(
    engine: EmbeddingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(engine, 1, 1, 2)
    asked = []
    freeze = engine.freeze

    def noted(table: str, *, since: int = -1, max_bytes: int | None = None) -> TableSnapshot:
        asked.append((table, since, max_bytes))
        return freeze(table, since=since, max_bytes=max_bytes)

    monkeypatch.setattr(engine, "freeze", noted)
    checkpointer = TableCheckpointer(engine)
    checkpointer.rows(2, 1, 1201)
    assert asked == [("fixed", 1, 400), ("lru", 1, 400), ("slow", 1, 400)]
    checkpointer.thaw()
    checkpointer.thaw()  # of a save that failed before it was read


def test_rows_that_were_read_ahead_come_back_for_their_step(engine: EmbeddingEngine, tmp_path: Path) -> None:
    use(engine, 1, 1, 2)
    ahead = {}
    for step, keys in ((2, [1, 3]), (3, [2, 5])):
        engine.read_ahead(engine.route({name: np.array(keys) for name in engine.tables}), step=step)
        ahead[f"fixed/read-ahead-{step}-0"] = keys
    checkpointer = TableCheckpointer(engine)
    read = {name: chunks for name, chunks in checkpointer.read_ahead().items() if name.startswith("fixed")}
    assert {name: chunk["keys"].tolist() for name, (chunk,) in read.items()} == ahead
    restored = saved(tmp_path, checkpointer, 1)
    other = EmbeddingEngine(list(engine.tables.values()), Topology.single())
    taken = TableCheckpointer(other)
    taken.take(restored)
    kept = other.reads_ahead._kept
    assert {step: kept[step]["fixed"][0].tolist() for step in kept} == {2: [1, 3], 3: [2, 5]}
    for step in kept:
        expected = engine.reads_ahead.pending()[step]["fixed"][1]
        assert torch.equal(kept[step]["fixed"][1], expected)


def test_time_to_live_counts_from_the_step_that_was_saved(tmp_path: Path) -> None:
    tables = [TableConfig(name="ttl", dim=2, store=TTL)]
    engine = EmbeddingEngine(tables, Topology.single())
    use(engine, 10, 1)
    use(engine, 13, 2)
    restored = saved(tmp_path, TableCheckpointer(engine), 13)
    other = EmbeddingEngine(tables, Topology.single())
    TableCheckpointer(other).take(restored)
    assert other.unsettled("ttl")["newest_step"].tolist() == [13]
    for each in (engine, other):
        use(each, 15, 2)
    assert other.gone_since("ttl", 13).tolist() == engine.gone_since("ttl", 13).tolist() == [1]


def test_time_to_live_counts_steps_without_any_use(tmp_path: Path) -> None:
    tables = [TableConfig(name="ttl", dim=2, store=TTL)]
    engine = EmbeddingEngine(tables, Topology.single())
    use(engine, 10, 1)
    restored = saved(tmp_path, TableCheckpointer(engine), 13)
    other = EmbeddingEngine(tables, Topology.single())
    TableCheckpointer(other).take(restored)
    assert other.unsettled("ttl")["newest_step"].tolist() == [13]
