"""Rows of a table whose engine has a GPU, as they were at a moment: equal to a copy of that moment."""

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
def test_frozen_rows_are_those_of_the_moment(kind, may_change):
    table = TableConfig(name="t", dim=8, num_rows=5000, store=StoreConfig(kind=kind))
    shard = TableShard(table, 0, 1, torch.device("cuda"))

    def train(keys: np.ndarray, step: int) -> None:
        fetched = shard.fetch(keys, step)
        fetched.rows += step
        shard.write_back(fetched)

    train(np.arange(3000), 1)
    expected = columns_of(shard.snapshot())
    frozen = shard.freeze(max_bytes=1 << 20 if may_change else None)
    if may_change:
        train(np.arange(1000, 4000), 2)
    found = columns_of(frozen)
    frozen.close()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("num_rows", [20_000, None])
def test_rows_of_a_gpu_are_read_in_pieces_while_a_training_thread_changes_and_adds_them(monkeypatch, num_rows):
    """No copy of the table: pinned memory of so many rows, and the table moves where it grows."""
    monkeypatch.setattr("nestrec.embedding.table_snapshot.CHUNK_BYTES", 1 << 15)
    monkeypatch.setattr("nestrec.embedding.table_snapshot._ROWS_A_TURN", 256)
    table = TableConfig(name="t", dim=8, num_rows=num_rows, store=StoreConfig(kind="device"))
    shard = TableShard(table, 0, 1, torch.device("cuda"))
    draw = np.random.default_rng(2)

    def train(keys: np.ndarray, step: int) -> None:
        fetched = shard.fetch(keys, step)
        fetched.rows += step
        shard.write_back(fetched)

    train(np.arange(15_000), 1)
    for step in range(2, 12):
        expected = columns_of(shard.snapshot())
        frozen = shard.freeze(max_bytes=500 * shard.layout.row_bytes)
        parts = np.array_split(draw.permutation(20_000), 40)
        writer = threading.Thread(target=lambda parts=parts, step=step: [train(part, step) for part in parts])
        writer.start()
        found = columns_of(frozen)
        writer.join()
        frozen.close()
        assert frozen.rows.aside.num_put > 0
        assert len(frozen.rows.aside.rows) == 500
        for name, values in expected.items():
            assert torch.equal(found[name], values), name
