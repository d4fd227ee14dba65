"""Rows of a table as they were at a moment, while training writes on: equal to a copy of that moment."""

import threading

import numpy as np
import pytest
import torch

from nestrec.embedding.hashing import hash_of
from nestrec.embedding.row_optimizer import RowOptimizerConfig
from nestrec.embedding.shard import TableShard
from nestrec.embedding.table import StoreConfig, TableConfig

KINDS = ["device", "dram", "disk"]


def make_shard(tmp_path, kind: str, num_rows: int | None) -> TableShard:
    store = StoreConfig(kind=kind, folder=str(tmp_path) if kind == "disk" else "", cache_rows=64)
    optimizer = RowOptimizerConfig(kind="rowwise_adagrad")
    table = TableConfig(name="t", dim=4, num_rows=num_rows, store=store, optimizer=optimizer)
    return TableShard(table, 1, 2, torch.device("cpu"))


def train(shard: TableShard, keys: np.ndarray, step: int) -> None:
    fetched = shard.fetch(keys, step)
    fetched.rows += step
    shard.write_back(fetched)


def columns_of(chunks) -> dict[str, torch.Tensor]:
    parts = list(chunks)
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    order = joined["keys"].argsort()
    return {name: values[order] for name, values in joined.items()}


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name].view(torch.uint8), values.view(torch.uint8)), name


@pytest.mark.parametrize("num_rows", [4000, None])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_moment_however_they_change_while_they_are_read(tmp_path, monkeypatch, kind, num_rows):
    monkeypatch.setattr("nestrec.embedding.frozen_table.CHUNK_BYTES", 4096)
    monkeypatch.setattr("nestrec.embedding.frozen_table._PIECE_ROWS", 300)
    monkeypatch.setattr("nestrec.embedding.stores.frozen._ROWS_A_TURN", 16)
    draw, shard = np.random.default_rng(1), make_shard(tmp_path, kind, num_rows)
    owned = np.flatnonzero(hash_of(np.arange(4000)) >= 2**31)
    train(shard, owned[:1500], 1)
    expected = columns_of(shard.snapshot())
    frozen, chunks = shard.freeze(max_bytes=2000 * shard.layout.row_bytes), []
    train(shard, draw.choice(owned, 60, replace=False), 2)
    for step, chunk in enumerate(frozen, start=3):
        chunks.append(chunk)
        train(shard, draw.choice(owned, 60, replace=False), step)
    frozen.close()
    assert frozen.rows.num_aside > 0, "some rows changed before they were read"
    assert_same(columns_of(chunks), expected)
    hashes = hash_of(torch.cat([chunk["keys"] for chunk in chunks]).numpy())
    assert len(chunks) > 5
    assert (np.diff(hashes.astype(np.int64)) >= 0).all(), "in order of hash"


def test_training_waits_where_there_is_no_room_aside_and_goes_on_when_reading_ends(tmp_path):
    shard = make_shard(tmp_path, "dram", 4000)
    owned = np.flatnonzero(hash_of(np.arange(4000)) >= 2**31)
    train(shard, owned, 1)
    expected = columns_of(shard.snapshot())
    frozen = shard.freeze(max_bytes=10 * shard.layout.row_bytes)
    writer = threading.Thread(target=train, args=(shard, owned, 2))
    writer.start()
    while frozen.rows.num_aside < 10:
        assert writer.is_alive()
    chunks = list(frozen)
    writer.join()
    assert_same(columns_of(chunks), expected)
    frozen.close()
    given_up = shard.freeze(max_bytes=10 * shard.layout.row_bytes)
    writer = threading.Thread(target=train, args=(shard, owned, 3))
    writer.start()
    given_up.close()
    writer.join()
    assert given_up.rows.num_aside <= 10


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_room_in_memory_goes_into_a_file_and_nobody_waits(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("nestrec.embedding.frozen_table.CHUNK_BYTES", 4096)
    shard = make_shard(tmp_path, kind, 4000)
    owned = np.flatnonzero(hash_of(np.arange(4000)) >= 2**31)
    train(shard, owned, 1)
    expected = columns_of(shard.snapshot())
    frozen, chunks = shard.freeze(max_bytes=10 * shard.layout.row_bytes, spill=tmp_path / "spill"), []
    assert list((tmp_path / "spill").iterdir()) == [], "a kill leaves nothing behind"
    train(shard, owned[::2], 2)
    for step, chunk in enumerate(frozen, start=3):
        chunks.append(chunk)
        train(shard, owned[step::7], step)
    frozen.close()
    assert frozen.rows.num_aside > 1000
    assert_same(columns_of(chunks), expected)


def test_a_full_disk_makes_training_wait_as_without_a_file(tmp_path, monkeypatch):
    shard = make_shard(tmp_path, "dram", 4000)
    owned = np.flatnonzero(hash_of(np.arange(4000)) >= 2**31)
    train(shard, owned, 1)
    expected = columns_of(shard.snapshot())
    frozen = shard.freeze(max_bytes=10 * shard.layout.row_bytes, spill=tmp_path)
    frozen.rows._file.close()
    monkeypatch.setattr(frozen.rows, "_file", open("/dev/full", "wb", buffering=0))  # noqa: SIM115
    writer = threading.Thread(target=train, args=(shard, owned, 2))
    writer.start()
    chunks = list(frozen)
    writer.join()
    frozen.close()
    assert_same(columns_of(chunks), expected)


def test_who_reads_and_who_waits_for_room_never_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("nestrec.embedding.stores.frozen._ROWS_A_TURN", 2)
    shard = make_shard(tmp_path, "dram", 4000)
    owned = np.flatnonzero(hash_of(np.arange(4000)) >= 2**31)
    train(shard, owned, 1)
    for step in range(2, 7):
        expected = columns_of(shard.snapshot())
        frozen = shard.freeze(max_bytes=10 * shard.layout.row_bytes)
        parts = np.array_split(np.random.default_rng(step).permutation(owned), 100)
        writer = threading.Thread(target=lambda parts=parts, step=step: [train(shard, part, step) for part in parts])
        writer.start()
        chunks = list(frozen)
        writer.join()
        frozen.close()
        assert_same(columns_of(chunks), expected)


def test_only_rows_changed_since_a_step_are_frozen(tmp_path):
    shard = make_shard(tmp_path, "device", 4000)
    owned = np.flatnonzero(hash_of(np.arange(4000)) >= 2**31)
    train(shard, owned, 1)
    train(shard, owned[10:20], 2)
    frozen = shard.freeze(since=1)
    assert_same(columns_of(frozen), columns_of(shard.snapshot(since=1)))
    frozen.close()
