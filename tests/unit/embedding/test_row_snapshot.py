"""A snapshot of a table equals a copy from the same time, although training continues to write rows."""

import itertools
import resource
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest
import torch

from nestrec.base.thread_team import niceness, set_niceness
from nestrec.checkpoint.checkpoint_content import chunks_of
from nestrec.embedding.hashing import hash_of
from nestrec.embedding.row_optimizer import RowOptimizerConfig
from nestrec.embedding.stores.row_snapshot import CopyOnWriteRing, DeviceRows, host_memory
from nestrec.embedding.table_config import StoreConfig, TableConfig
from nestrec.embedding.table_shard import TableShard
from nestrec.embedding.table_snapshot import SnapshotKeys

KINDS = ["device", "launched", "dram", "disk"]
"""Kinds of stores; `launched` uses the GPU code on the CPU, where work on streams is done when it is launched."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr("nestrec.embedding.table_snapshot.CHUNK_BYTES", 4096)
    monkeypatch.setattr("nestrec.embedding.table_snapshot._MIN_CHUNK_BYTES", 1024)
    monkeypatch.setattr("nestrec.embedding.table_snapshot._PIECE_ROWS", 300)
    monkeypatch.setattr("nestrec.embedding.table_snapshot._ROWS_PER_READ", 16)


def make_shard(tmp_path, kind: str, num_rows: int | None) -> TableShard:
    store = StoreConfig(
        kind="device" if kind == "launched" else kind, folder=str(tmp_path) if kind == "disk" else "", cache_rows=64
    )
    optimizer = RowOptimizerConfig(kind="rowwise_adagrad")
    table = TableConfig(name="t", dim=4, num_rows=num_rows, store=store, optimizer=optimizer)
    shard = TableShard(table, 1, 2, torch.device("cpu"))
    if kind == "launched":

        def make_snapshot(state, num_words, max_bytes):
            ring = CopyOnWriteRing(num_words, max_bytes, host_memory)
            return DeviceRows(shard.store.gather, torch.device("cpu"), state, ring)

        shard.store._make_snapshot = make_snapshot
    return shard


def train(shard: TableShard, keys: np.ndarray, step: int) -> None:
    fetched = shard.fetch_rows(keys, step)
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


OWNED = np.flatnonzero(hash_of(np.arange(4000)) >= 2**31)


def on_thread(work, *args) -> threading.Thread:
    thread = threading.Thread(target=work, args=args)
    thread.start()
    return thread


@pytest.mark.parametrize("num_rows", [4000, None])
@pytest.mark.parametrize("kind", KINDS)
def test_snapshot_is_consistent_under_concurrent_updates(tmp_path, kind, num_rows):
    draw = np.random.default_rng(1)
    shard = make_shard(tmp_path, kind, num_rows)
    train(shard, OWNED[:1500], 1)
    expected = columns_of(shard.snapshot())
    snapshot = shard.snapshot_async(max_bytes=2000 * shard.layout.row_bytes)
    chunks = []
    train(shard, draw.choice(OWNED, 60, replace=False), 2)
    for step, chunk in enumerate(snapshot, start=3):
        chunks.append(chunk)
        train(shard, draw.choice(OWNED, 60, replace=False), step)
    snapshot.close()
    assert snapshot.rows.ring.num_copied > 0, "some rows changed before they were read"
    assert_same(columns_of(chunks), expected)
    assert len(chunks) > 5
    hashes = [hash_of(chunk["keys"].numpy()).astype(np.int64) for chunk in chunks]
    assert all((np.diff(part) >= 0).all() for part in hashes), "each chunk is ordered by hash"
    ordered_chunks = [part for part in hashes if len(part) > 40]
    assert len(ordered_chunks) > 5
    assert (np.diff(np.concatenate(ordered_chunks)) >= 0).all(), "chunks of unchanged rows are ordered by hash, too"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [4000, None])
@pytest.mark.parametrize("seed", range(3))
def test_snapshot_is_consistent_with_small_copy_on_write_ring(tmp_path, kind, num_rows, seed):
    """Runs two threads that are not synchronized, or one of which is delayed at random times."""
    draw = np.random.default_rng(seed)
    shard = make_shard(tmp_path, kind, num_rows)
    train(shard, OWNED, 1)
    for step in range(2, 5):
        expected = columns_of(shard.snapshot())
        snapshot = shard.snapshot_async(max_bytes=int(draw.integers(0, 600)) * shard.layout.row_bytes)
        parts = np.array_split(draw.permutation(OWNED), int(draw.integers(1, 60)))
        permits = threading.Semaphore(int(draw.integers(0, len(parts))))  # number of steps before rows are read

        def write(parts=parts, step=step, permits=permits) -> None:
            for part in parts:
                permits.acquire()
                train(shard, part, step)

        writer = on_thread(write)
        chunks = []
        num_free = int(draw.integers(0, 9))
        for chunk in snapshot:
            chunks.append(chunk)
            permits.release(num_free) if num_free else None
        snapshot.close()
        permits.release(len(parts))
        writer.join()
        assert_same(columns_of(chunks), expected)
    found = columns_of(shard.snapshot())
    assert int(found["keys"].shape[0]) == len(OWNED)


@pytest.mark.parametrize("kind", ["launched", "disk"])
def test_snapshot_rows_are_read_if_copy_fails(tmp_path, monkeypatch, kind):
    """If the device runs out of memory, training ends; a concurrent save must not wait for these rows forever."""
    shard = make_shard(tmp_path, kind, 4000)
    train(shard, OWNED, 1)
    expected = columns_of(shard.snapshot())
    fetched = shard.fetch_rows(OWNED[:60], 2)
    snapshot = shard.snapshot_async(max_bytes=100 * shard.layout.row_bytes)

    def fail(slots, out) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(snapshot.rows, "_gather" if kind == "launched" else "_read", fail)
        with pytest.raises(torch.OutOfMemoryError):
            shard.write_back(fetched)
    assert_same(columns_of(snapshot), expected)
    snapshot.close()


@pytest.mark.parametrize("kind", KINDS)
def test_snapshot_full_ring_is_read_early(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("nestrec.embedding.table_snapshot.CHUNK_BYTES", 1024)
    shard = make_shard(tmp_path, kind, 4000)
    train(shard, OWNED, 1)
    expected = columns_of(shard.snapshot())
    snapshot = shard.snapshot_async(max_bytes=100 * shard.layout.row_bytes)
    chunks = []
    writer = on_thread(lambda: [train(shard, part, 2) for part in np.array_split(OWNED, 100)])
    for chunk in snapshot:
        chunks.append(chunk)
        while writer.is_alive() and not snapshot.rows.ring.is_half_full:
            time.sleep(0)  # training is much faster than the disk
    writer.join()
    snapshot.close()
    assert snapshot.rows.ring.num_copied > 500
    assert len(snapshot.rows.ring.rows) == 100, "the ring does not exceed its memory limit"
    assert_same(columns_of(chunks), expected)


@pytest.mark.parametrize("num_rows", [20, 4000])
def test_snapshot_copied_rows_are_returned_once(tmp_path, num_rows):
    """All rows are already copied when the reader starts; the ring of a small table is then full."""
    shard = make_shard(tmp_path, "dram", num_rows)
    owned = np.flatnonzero(hash_of(np.arange(num_rows)) >= 2**31)
    train(shard, owned, 1)
    expected = columns_of(shard.snapshot())
    snapshot = shard.snapshot_async(max_bytes=1 << 20)
    train(shard, owned, 2)
    chunks = itertools.islice(chunks_of({"t": snapshot}), 300)  # a limit, in case the iteration does not end
    assert_same(columns_of(chunk for _, chunk in chunks), expected)
    snapshot.close()


def test_snapshot_does_not_block_training_on_later_tables(tmp_path):
    first, second = make_shard(tmp_path, "dram", 4000), make_shard(tmp_path, "dram", 4000)
    train(first, OWNED, 1)
    train(second, OWNED, 1)
    expected = columns_of(second.snapshot())
    tables = {"first": first.snapshot_async(), "second": second.snapshot_async(max_bytes=200 * second.layout.row_bytes)}
    writer = on_thread(lambda: [train(second, part, 2) for part in np.array_split(OWNED, 100)])
    ring = tables["second"].rows.ring
    order = []
    chunks = []
    for table, chunk in chunks_of(tables):
        order.append(table)
        chunks += [chunk] if table == "second" else []
        while writer.is_alive() and table == "first" and not ring.is_half_full:
            time.sleep(0)
    writer.join()
    assert_same(columns_of(chunks), expected)
    last = max(index for index, table in enumerate(order) if table == "first")
    assert order[:last].count("second") > 1, "chunks of the second table are written between those of the first"


@pytest.mark.parametrize("kind", ["device", "dram"])
def test_snapshot_writer_never_waits_for_reader(tmp_path, kind):
    shard = make_shard(tmp_path, kind, 4000)
    train(shard, OWNED, 1)
    snapshot = shard.snapshot_async(max_bytes=4000 * shard.layout.row_bytes)
    with snapshot.rows._moves.for_reader():  # a reader that is not scheduled
        writer = on_thread(train, shard, OWNED, 2)
        writer.join(60)
        assert not writer.is_alive()
    snapshot.close()


@pytest.mark.parametrize("kind", KINDS)
def test_snapshot_full_ring_blocks_until_released(tmp_path, kind):
    shard = make_shard(tmp_path, kind, 4000)
    train(shard, OWNED, 1)
    abandoned = shard.snapshot_async(max_bytes=10 * shard.layout.row_bytes)
    writer = on_thread(train, shard, OWNED, 3)
    while abandoned.rows.ring.num_copied < 10:
        assert writer.is_alive()
    abandoned.close()
    writer.join()
    assert abandoned.rows.ring.num_copied == 10


def test_snapshot_memory_is_bounded(monkeypatch):
    """Memory is needed for one byte per row, the ring, chunks, and one sorted piece, but not for a copy of the rows."""
    monkeypatch.setattr("nestrec.embedding.table_snapshot.CHUNK_BYTES", CHUNK_BYTES := 1 << 15)
    monkeypatch.setattr("nestrec.embedding.table_snapshot._PIECE_ROWS", 1 << 12)
    monkeypatch.setattr("nestrec.embedding.table_snapshot._ROWS_PER_READ", 1 << 10)
    table = TableConfig(name="t", dim=4, num_rows=100_000, store=StoreConfig(kind="dram"))
    shard = TableShard(table, 0, 1, torch.device("cpu"))
    keys = np.arange(100_000)
    train(shard, keys, 1)
    compiled = shard.snapshot_async(max_bytes=CHUNK_BYTES)  # compile the host loops before memory is counted
    train(shard, keys[:10], 1)
    assert sum(len(chunk["keys"]) for chunk in compiled) == 100_000
    compiled.close()
    tracemalloc.start()
    snapshot = shard.snapshot_async(max_bytes=CHUNK_BYTES)
    num_read = 0
    for step, chunk in enumerate(snapshot):
        num_read += len(chunk["keys"])
        train(shard, keys[15 * step : 15 * (step + 1)], 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    snapshot.close()
    assert num_read == 100_000
    assert snapshot.rows.ring.num_copied > 512, "more rows were copied than fit into the ring at once"
    assert snapshot.rows.ring.rows.nbytes <= CHUNK_BYTES
    assert peak < 100_000 + 16 * CHUNK_BYTES, peak


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no page fault counter per thread")
def test_snapshot_reader_prefaults_ring_memory():
    def page_faults_of_writing(ring: CopyOnWriteRing) -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        ring.rows[1:] = 1
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    table = TableConfig(name="t", dim=252, num_rows=32 << 10, store=StoreConfig(kind="dram"))
    shard = TableShard(table, 0, 1, torch.device("cpu"))
    train(shard, np.arange(32 << 10), 1)
    late = shard.snapshot_async(max_bytes=32 << 20)
    faults_late = page_faults_of_writing(late.rows.ring)
    late.close()
    early = shard.snapshot_async(max_bytes=32 << 20)
    early.rows.ring.rows[0] = 7
    reader = on_thread(early.rows.start_reading)
    reader.join()
    assert (early.rows.ring.rows[0] == 7).all(), "rows that were copied before are unchanged"
    assert page_faults_of_writing(early.rows.ring) * 4 < faults_late
    early.close()


def test_snapshot_ring_is_not_larger_than_table(tmp_path):
    shard = make_shard(tmp_path, "dram", 4000)
    train(shard, OWNED, 1)
    train(shard, OWNED[:20], 2)
    snapshot = shard.snapshot_async(since=1, max_bytes=1 << 20)
    assert snapshot.rows.ring.rows.nbytes == 20 * shard.layout.row_bytes
    snapshot.close()


def test_snapshot_orders_equal_hashes_by_key():
    keys = np.random.default_rng(3).permutation(np.arange(200_000))
    snapshot = SnapshotKeys(np.ones(len(keys), np.uint8), keys, {})
    pieces = [
        np.stack([hash_of(keys[slots]).astype(np.int64), keys[slots]]) for slots in snapshot.pieces(0, 2**32, 7000)
    ]
    assert len(pieces) > 20
    hashes, ordered = np.concatenate(pieces, 1)
    assert (np.diff(hashes) == 0).any()
    assert np.array_equal(ordered, keys[np.lexsort((keys, hash_of(keys)))])


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no niceness per thread")
def test_snapshot_reader_raises_priority_if_ring_fills(tmp_path):
    shard = make_shard(tmp_path, "dram", 4000)
    recorded = []
    train(shard, OWNED, 1)
    snapshot = shard.snapshot_async(max_bytes=100 * shard.layout.row_bytes)

    def read() -> None:
        if not set_niceness(threading.get_native_id(), 1) or not set_niceness(threading.get_native_id(), 0):
            recorded.append("not permitted")
            return
        set_niceness(threading.get_native_id(), 3)
        for number, _ in enumerate(snapshot):
            recorded.append(niceness(threading.get_native_id()))
            if number == 2:
                train(shard, OWNED[:80], 2)  # few of these rows were read before

    reader = on_thread(read)
    reader.join()
    snapshot.close()
    if recorded != ["not permitted"]:
        assert recorded[:3] == [3, 3, 3]
        assert 0 in recorded[3:], "more than half of the ring is in use"
        assert recorded[-1] == 3, "the niceness is restored afterwards"


def test_snapshot_since_step_has_changed_rows_only(tmp_path):
    shard = make_shard(tmp_path, "device", 4000)
    owned = np.flatnonzero(hash_of(np.arange(4000)) >= 2**31)
    train(shard, owned, 1)
    train(shard, owned[10:20], 2)
    snapshot = shard.snapshot_async(since=1)
    assert_same(columns_of(snapshot), columns_of(shard.snapshot(since=1)))
    snapshot.close()
