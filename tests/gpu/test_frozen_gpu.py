"""Asynchronous snapshots of tables on a GPU equal a synchronous copy taken at the same step."""

import threading

import numpy as np
import pytest
import torch

from nestrec.embedding.table_config import StoreConfig, TableConfig
from nestrec.embedding.table_shard import TableShard

pytestmark = pytest.mark.gpu


def columns_of(chunks) -> dict[str, torch.Tensor]:
    parts = list(chunks)
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    order = joined["keys"].argsort()
    return {name: values[order] for name, values in joined.items()}


@pytest.mark.parametrize("may_change", [True, False])
@pytest.mark.parametrize("kind", ["device", "dram"])
def test_snapshot_of_gpu_rows_equals_rows_at_its_start(kind, may_change):
    table = TableConfig(name="t", dim=8, num_rows=5000, store=StoreConfig(kind=kind))
    shard = TableShard(table, 0, 1, torch.device("cuda"))

    def train(keys: np.ndarray, step: int) -> None:
        fetched = shard.fetch_rows(keys, step)
        fetched.rows += step
        shard.write_back(fetched)

    train(np.arange(3000), 1)
    expected = columns_of(shard.snapshot())
    snapshot = shard.snapshot_async(max_bytes=1 << 20 if may_change else None)
    if may_change:
        train(np.arange(1000, 4000), 2)
    found = columns_of(snapshot)
    snapshot.close()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("num_rows", [20_000, None])
def test_snapshot_of_gpu_rows_is_consistent_during_training(monkeypatch, num_rows):
    """The table is not copied: pinned memory is limited to 500 rows, and a growing table is reallocated."""
    monkeypatch.setattr("nestrec.embedding.table_snapshot.CHUNK_BYTES", 1 << 15)
    monkeypatch.setattr("nestrec.embedding.table_snapshot._ROWS_PER_READ", 256)
    table = TableConfig(name="t", dim=8, num_rows=num_rows, store=StoreConfig(kind="device"))
    shard = TableShard(table, 0, 1, torch.device("cuda"))
    draw = np.random.default_rng(2)

    def train(keys: np.ndarray, step: int) -> None:
        fetched = shard.fetch_rows(keys, step)
        fetched.rows += step
        shard.write_back(fetched)

    train(np.arange(15_000), 1)
    for step in range(2, 12):
        expected = columns_of(shard.snapshot())
        snapshot = shard.snapshot_async(max_bytes=500 * shard.layout.row_bytes)
        parts = np.array_split(draw.permutation(20_000), 40)
        writer = threading.Thread(target=lambda parts=parts, step=step: [train(part, step) for part in parts])
        writer.start()
        found = columns_of(snapshot)
        writer.join()
        snapshot.close()
        assert snapshot.rows.ring.num_copied > 0
        assert len(snapshot.rows.ring.rows) == 500
        for name, values in expected.items():
            assert torch.equal(found[name], values), name
