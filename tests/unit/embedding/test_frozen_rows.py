"""Rows of a table as they were at a moment, while training writes on: equal to a copy of that moment."""

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
"""launched: rows of a GPU, the work of whose streams is done when it is launched."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr("nestrec.embedding.table_snapshot.CHUNK_BYTES", 4096)
    monkeypatch.setattr("nestrec.embedding.table_snapshot._MIN_CHUNK_BYTES", 1024)
    monkeypatch.setattr("nestrec.embedding.table_snapshot._PIECE_ROWS", 300)
    monkeypatch.setattr("nestrec.embedding.table_snapshot._ROWS_A_TURN", 16)


def make_shard(tmp_path, kind: str, num_rows: int | None) -> TableShard:
    store = StoreConfig(
        kind="device" if kind == "launched" else kind, folder=str(tmp_path) if kind == "disk" else "", cache_rows=64
    )
    optimizer = RowOptimizerConfig(kind="rowwise_adagrad")
    table = TableConfig(name="t", dim=4, num_rows=num_rows, store=store, optimizer=optimizer)
    shard = TableShard(table, 1, 2, torch.device("cpu"))
    if kind == "launched":

        def freeze(state, num_words, max_bytes):
            aside = CopyOnWriteRing(num_words, max_bytes, host_memory)
            return DeviceRows(shard.store.gather, torch.device("cpu"), state, aside)

        shard.store._freeze = freeze
    return shard


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


OWNED = np.flatnonzero(hash_of(np.arange(4000)) >= 2**31)


def on_thread(work, *args) -> threading.Thread:
    thread = threading.Thread(target=work, args=args)
    thread.start()
    return thread


@pytest.mark.parametrize("num_rows", [4000, None])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_moment_however_they_change_while_they_are_read(tmp_path, kind, num_rows):
    draw = np.random.default_rng(1)
    shard = make_shard(tmp_path, kind, num_rows)
    train(shard, OWNED[:1500], 1)
    expected = columns_of(shard.snapshot())
    frozen = shard.freeze(max_bytes=2000 * shard.layout.row_bytes)
    chunks = []
    train(shard, draw.choice(OWNED, 60, replace=False), 2)
    for step, chunk in enumerate(frozen, start=3):
        chunks.append(chunk)
        train(shard, draw.choice(OWNED, 60, replace=False), step)
    frozen.close()
    assert frozen.rows.aside.num_put > 0, "some rows changed before they were read"
    assert_same(columns_of(chunks), expected)
    assert len(chunks) > 5
    hashes = [hash_of(chunk["keys"].numpy()).astype(np.int64) for chunk in chunks]
    assert all((np.diff(of_chunk) >= 0).all() for of_chunk in hashes), "in order of hash"
    by_turn = [of_chunk for of_chunk in hashes if len(of_chunk) > 40]
    assert len(by_turn) > 5
    assert (np.diff(np.concatenate(by_turn)) >= 0).all(), "those that nobody changed, also from chunk to chunk"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [4000, None])
@pytest.mark.parametrize("seed", range(3))
def test_a_copy_of_the_moment_whoever_is_slow_and_however_little_room_there_is(tmp_path, kind, num_rows, seed):
    """Two threads as they come, or one of them held up now and then, at random."""
    draw = np.random.default_rng(seed)
    shard = make_shard(tmp_path, kind, num_rows)
    train(shard, OWNED, 1)
    for step in range(2, 5):
        expected = columns_of(shard.snapshot())
        frozen = shard.freeze(max_bytes=int(draw.integers(0, 600)) * shard.layout.row_bytes)
        parts = np.array_split(draw.permutation(OWNED), int(draw.integers(1, 60)))
        held = threading.Semaphore(int(draw.integers(0, len(parts))))  # so many steps before rows are read

        def write(parts=parts, step=step, held=held) -> None:
            for part in parts:
                held.acquire()
                train(shard, part, step)

        writer = on_thread(write)
        chunks = []
        num_free = int(draw.integers(0, 9))
        for chunk in frozen:
            chunks.append(chunk)
            held.release(num_free) if num_free else None
        frozen.close()
        held.release(len(parts))
        writer.join()
        assert_same(columns_of(chunks), expected)
    found = columns_of(shard.snapshot())
    assert int(found["keys"].shape[0]) == len(OWNED)


@pytest.mark.parametrize("kind", ["launched", "disk"])
def test_rows_that_could_not_be_put_aside_are_read_all_the_same(tmp_path, monkeypatch, kind):
    """A device without memory ends the training; the save beside it would wait for these rows for ever."""
    shard = make_shard(tmp_path, kind, 4000)
    train(shard, OWNED, 1)
    expected = columns_of(shard.snapshot())
    fetched = shard.fetch(OWNED[:60], 2)
    frozen = shard.freeze(max_bytes=100 * shard.layout.row_bytes)

    def fail(slots, out) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(frozen.rows, "_gather" if kind == "launched" else "_read", fail)
        with pytest.raises(torch.OutOfMemoryError):
            shard.write_back(fetched)
    assert_same(columns_of(frozen), expected)
    frozen.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_room_is_handed_out_before_its_turn_and_training_goes_on(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("nestrec.embedding.table_snapshot.CHUNK_BYTES", 1024)
    shard = make_shard(tmp_path, kind, 4000)
    train(shard, OWNED, 1)
    expected = columns_of(shard.snapshot())
    frozen = shard.freeze(max_bytes=100 * shard.layout.row_bytes)
    chunks = []
    writer = on_thread(lambda: [train(shard, part, 2) for part in np.array_split(OWNED, 100)])
    for chunk in frozen:
        chunks.append(chunk)
        while writer.is_alive() and not frozen.rows.aside.is_crowded:
            time.sleep(0)  # training is far quicker than the disk
    writer.join()
    frozen.close()
    assert frozen.rows.aside.num_put > 500
    assert len(frozen.rows.aside.rows) == 100, "never more memory than it was given"
    assert_same(columns_of(chunks), expected)


@pytest.mark.parametrize("num_rows", [20, 4000])
def test_rows_that_training_was_first_at_are_handed_out_once_by_who_looks_at_all_tables(tmp_path, num_rows):
    """All of them lie aside when the reader comes: of a small table that is all the room there is."""
    shard = make_shard(tmp_path, "dram", num_rows)
    owned = np.flatnonzero(hash_of(np.arange(num_rows)) >= 2**31)
    train(shard, owned, 1)
    expected = columns_of(shard.snapshot())
    frozen = shard.freeze(max_bytes=1 << 20)
    train(shard, owned, 2)
    chunks = itertools.islice(chunks_of({"t": frozen}), 300)  # where it does not end, neither may this
    assert_same(columns_of(chunk for _, chunk in chunks), expected)
    frozen.close()


def test_training_does_not_wait_for_a_table_whose_turn_has_not_come(tmp_path):
    first, second = make_shard(tmp_path, "dram", 4000), make_shard(tmp_path, "dram", 4000)
    train(first, OWNED, 1)
    train(second, OWNED, 1)
    expected = columns_of(second.snapshot())
    tables = {"first": first.freeze(), "second": second.freeze(max_bytes=200 * second.layout.row_bytes)}
    writer = on_thread(lambda: [train(second, part, 2) for part in np.array_split(OWNED, 100)])
    aside = tables["second"].rows.aside
    order = []
    chunks = []
    for table, chunk in chunks_of(tables):
        order.append(table)
        chunks += [chunk] if table == "second" else []
        while writer.is_alive() and table == "first" and not aside.is_crowded:
            time.sleep(0)
    writer.join()
    assert_same(columns_of(chunks), expected)
    last = max(place for place, table in enumerate(order) if table == "first")
    assert order[:last].count("second") > 1, "written between the chunks of the first"


@pytest.mark.parametrize("kind", ["device", "dram"])
def test_who_writes_to_host_memory_never_waits_for_who_reads(tmp_path, kind):
    shard = make_shard(tmp_path, kind, 4000)
    train(shard, OWNED, 1)
    frozen = shard.freeze(max_bytes=4000 * shard.layout.row_bytes)
    with frozen.rows._moves.of_reader():  # a reader that has lost its core
        writer = on_thread(train, shard, OWNED, 2)
        writer.join(60)
        assert not writer.is_alive()
    frozen.close()


@pytest.mark.parametrize("kind", KINDS)
def test_training_waits_where_there_is_no_room_aside_and_goes_on_when_nobody_reads_any_more(tmp_path, kind):
    shard = make_shard(tmp_path, kind, 4000)
    train(shard, OWNED, 1)
    given_up = shard.freeze(max_bytes=10 * shard.layout.row_bytes)
    writer = on_thread(train, shard, OWNED, 3)
    while given_up.rows.aside.num_put < 10:
        assert writer.is_alive()
    given_up.close()
    writer.join()
    assert given_up.rows.aside.num_put == 10


def test_memory_is_bounded_however_large_the_table_is(monkeypatch):
    """A byte a row, what is aside, chunks, and a piece in order: no more, and no copy of the rows."""
    monkeypatch.setattr("nestrec.embedding.table_snapshot.CHUNK_BYTES", CHUNK_BYTES := 1 << 15)
    monkeypatch.setattr("nestrec.embedding.table_snapshot._PIECE_ROWS", 1 << 12)
    monkeypatch.setattr("nestrec.embedding.table_snapshot._ROWS_A_TURN", 1 << 10)
    table = TableConfig(name="t", dim=4, num_rows=100_000, store=StoreConfig(kind="dram"))
    shard = TableShard(table, 0, 1, torch.device("cpu"))
    keys = np.arange(100_000)
    train(shard, keys, 1)
    compiled = shard.freeze(max_bytes=CHUNK_BYTES)  # host loops, before memory is counted
    train(shard, keys[:10], 1)
    assert sum(len(chunk["keys"]) for chunk in compiled) == 100_000
    compiled.close()
    tracemalloc.start()
    frozen = shard.freeze(max_bytes=CHUNK_BYTES)
    num_read = 0
    for step, chunk in enumerate(frozen):
        num_read += len(chunk["keys"])
        train(shard, keys[15 * step : 15 * (step + 1)], 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    frozen.close()
    assert num_read == 100_000
    assert frozen.rows.aside.num_put > 512, "more than once what makes it crowded"
    assert frozen.rows.aside.rows.nbytes <= CHUNK_BYTES
    assert peak < 100_000 + 16 * CHUNK_BYTES, peak


@pytest.mark.skipif(sys.platform != "linux", reason="faults of a thread are not told")
def test_who_reads_has_the_memory_for_rows_aside_made_so_that_training_need_not():
    def faults_of_writing(aside: CopyOnWriteRing) -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        aside.rows[1:] = 1
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    table = TableConfig(name="t", dim=252, num_rows=32 << 10, store=StoreConfig(kind="dram"))
    shard = TableShard(table, 0, 1, torch.device("cpu"))
    train(shard, np.arange(32 << 10), 1)
    late = shard.freeze(max_bytes=32 << 20)
    faults_late = faults_of_writing(late.rows.aside)
    late.close()
    early = shard.freeze(max_bytes=32 << 20)
    early.rows.aside.rows[0] = 7
    reader = on_thread(early.rows.begin)
    reader.join()
    assert (early.rows.aside.rows[0] == 7).all(), "what was put there before stays"
    assert faults_of_writing(early.rows.aside) * 4 < faults_late
    early.close()


def test_no_more_memory_is_kept_for_rows_aside_than_there_are_rows_to_read(tmp_path):
    shard = make_shard(tmp_path, "dram", 4000)
    train(shard, OWNED, 1)
    train(shard, OWNED[:20], 2)
    frozen = shard.freeze(since=1, max_bytes=1 << 20)
    assert frozen.rows.aside.rows.nbytes == 20 * shard.layout.row_bytes
    frozen.close()


def test_keys_of_equal_hashes_come_in_the_order_of_keys():
    keys = np.random.default_rng(3).permutation(np.arange(200_000))
    frozen = SnapshotKeys(np.ones(len(keys), np.uint8), keys, {})
    found = [np.stack([hash_of(keys[slots]).astype(np.int64), keys[slots]]) for slots in frozen.pieces(0, 2**32, 7000)]
    assert len(found) > 20
    hashes, ordered = np.concatenate(found, 1)
    assert (np.diff(hashes) == 0).any()
    assert np.array_equal(ordered, keys[np.lexsort((keys, hash_of(keys)))])


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_a_nice_reader_hurries_while_there_is_little_room(tmp_path):
    shard = make_shard(tmp_path, "dram", 4000)
    seen = []
    train(shard, OWNED, 1)
    frozen = shard.freeze(max_bytes=100 * shard.layout.row_bytes)

    def read() -> None:
        if not set_niceness(threading.get_native_id(), 1) or not set_niceness(threading.get_native_id(), 0):
            seen.append("may not")
            return
        set_niceness(threading.get_native_id(), 3)
        for number, _ in enumerate(frozen):
            seen.append(niceness(threading.get_native_id()))
            if number == 2:
                train(shard, OWNED[:80], 2)  # few of them were read by now

    reader = on_thread(read)
    reader.join()
    frozen.close()
    if seen != ["may not"]:
        assert seen[:3] == [3, 3, 3]
        assert 0 in seen[3:], "half of the room is taken"
        assert seen[-1] == 3, "and it is as nice as it was afterwards"


def test_only_rows_changed_since_a_step_are_frozen(tmp_path):
    shard = make_shard(tmp_path, "device", 4000)
    owned = np.flatnonzero(hash_of(np.arange(4000)) >= 2**31)
    train(shard, owned, 1)
    train(shard, owned[10:20], 2)
    frozen = shard.freeze(since=1)
    assert_same(columns_of(frozen), columns_of(shard.snapshot(since=1)))
    frozen.close()
