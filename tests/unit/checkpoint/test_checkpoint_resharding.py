"""With another number of ranks, each rank reads its part of a checkpoint once and detects corruption."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from nestrec.artifacts.atomic_files import write_file
from nestrec.checkpoint import CheckpointGroup, CheckpointManager, LoadedCheckpoint, RankCheckpoint
from nestrec.embedding.table_config import TableConfig
from nestrec.embedding.table_shard import TableShard
from support.checkpoint_contents import make_rows
from support.rank_pool import run_ranks

TABLE = TableConfig(name="items", dim=6, num_rows=6000)


@pytest.fixture(autouse=True)
def _small_files(monkeypatch):
    monkeypatch.setattr("nestrec.embedding.table_snapshot.CHUNK_BYTES", 2048)


def shard_of(peers: CheckpointGroup) -> TableShard:
    return TableShard(TABLE, peers.rank, peers.world, torch.device("cpu"))


def save(folder: Path, world: int, step: int) -> None:
    def work(peers: CheckpointGroup) -> None:
        shard = shard_of(peers)
        fetched = shard.fetch_rows(shard.keys(), 1)
        fetched.rows += torch.from_numpy(fetched.keys.astype(np.int32))[:, None] % 7 + step
        shard.write_back(fetched)
        frozen = shard.snapshot_async()
        content = RankCheckpoint(state={"step": step}, tables={"items": frozen}, close=frozen.close)
        CheckpointManager(folder, peers=peers).save(step, content)

    assert run_ranks(world, work) == [None] * world


def rows_of(shard: TableShard) -> dict[int, bytes]:
    rows: dict[int, bytes] = {}
    for chunk in shard.snapshot():
        columns = [chunk[name].numpy() for name in sorted(chunk) if name != "keys"]
        for index, key in enumerate(chunk["keys"].tolist()):
            assert key not in rows
            rows[key] = b"".join(column[index].tobytes() for column in columns)
    return rows


def load(folder: Path, world: int, messages: list[str] | None = None) -> tuple[list[int], dict[int, bytes], int]:
    """Return the step that each rank restored, the row of each key, and the total number of bytes read."""

    def work(peers: CheckpointGroup) -> tuple[int, TableShard, int]:
        shard = shard_of(peers)

        def take(restored: LoadedCheckpoint) -> None:
            shard.clear()
            shard.load(restored.rows("items", shard=(peers.rank, peers.world)))

        report = [].append if messages is None else messages.append
        restored = CheckpointManager(folder, peers=peers, report=report).restore_latest(take)
        assert restored is not None
        return restored.step, shard, restored.bytes_read

    results = run_ranks(world, work)
    rows: dict[int, bytes] = {}
    for each in results:
        assert isinstance(each, tuple), each
        own = rows_of(each[1])
        assert not rows.keys() & own.keys()
        rows |= own
    return [each[0] for each in results], rows, sum(each[2] for each in results)  # type: ignore[index]


def test_checkpoint_loads_on_any_world_size_with_few_reads(tmp_path, monkeypatch):
    opened: list[str] = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *a, **k: (opened.append(path.name), real(path, *a, **k))[1])
    expected = None
    for saved, worlds in ((4, (4, 3, 1)), (3, (3, 8))):
        save(tmp_path / str(saved), saved, 1)
        files = list((tmp_path / str(saved) / "step-00000001").glob("rows-*"))
        table_bytes = sum(path.stat().st_size for path in files)
        for world in worlds:
            opened.clear()
            _, rows, num_bytes = load(tmp_path / str(saved), world)
            expected = expected or rows
            assert rows == expected
            assert len(rows) == 6000
            assert table_bytes <= num_bytes <= 1.1 * table_bytes
            num_rows_files = sum(name.startswith("rows-") for name in opened)
            assert num_rows_files <= len(files) + 2 * world, "no file is read only for verification"


@pytest.mark.parametrize("cores", [1, 4])
def test_checkpoint_background_save_is_consistent_snapshot(tmp_path, monkeypatch, cores):
    """Combines copied rows, files written ahead with direct I/O, and another number of ranks."""
    monkeypatch.setattr("nestrec.embedding.table_snapshot.CHUNK_BYTES", 16 << 10)
    monkeypatch.setattr("nestrec.artifacts.atomic_files.BLOCK_BYTES", 4 << 10)
    monkeypatch.setattr("nestrec.checkpoint.checkpoint_writer.cores_per_rank", lambda: cores)
    have_trained = threading.Barrier(3)
    num_copied_rows = list[int]()
    expected = dict[int, bytes]()
    may_write = threading.Event()

    def write_late(path: Path, content: Iterator[memoryview], *, direct_io: bool = False) -> tuple[int, str]:
        assert may_write.wait(60)
        return write_file(path, content, direct_io=direct_io)

    monkeypatch.setattr("nestrec.checkpoint.checkpoint_writer.write_file", write_late)

    def work(peers: CheckpointGroup) -> None:
        shard = shard_of(peers)
        draw = np.random.default_rng(peers.rank)
        keys = shard.keys()
        checkpoints = CheckpointManager(tmp_path, peers=peers)

        def train(step: int) -> None:
            fetched = shard.fetch_rows(np.unique(draw.choice(keys, 200)), step)
            fetched.rows += step
            shard.write_back(fetched)

        for step in range(1, 30):
            train(step)
        expected.update(rows_of(shard))
        frozen = shard.snapshot_async(max_bytes=64 << 10)
        content = RankCheckpoint(state={}, tables={"items": frozen}, close=frozen.close)
        checkpoints.save_async(30, content, is_copied=True)
        for step in range(30, 33):
            train(step)
        have_trained.wait(60)
        may_write.set()
        for step in range(33, 60):
            train(step)
        checkpoints.close()
        num_copied_rows.append(frozen.rows.ring.num_copied)

    assert run_ranks(3, work) == [None] * 3
    assert all(num > 100 for num in num_copied_rows)
    assert len(expected) > 3000
    steps, rows, _ = load(tmp_path, 2)
    assert steps == [30, 30]
    assert {key: rows[key] for key in expected} == expected


def test_checkpoint_memory_warning_is_printed_once(tmp_path, monkeypatch):
    monkeypatch.setattr("nestrec.checkpoint.checkpoint_manager.NOTED_BYTES", 1000)
    messages: list[str] = []

    def work(peers: CheckpointGroup) -> None:
        checkpoints = CheckpointManager(tmp_path, peers=peers, note=messages.append)
        checkpoints.save(1, RankCheckpoint(state={}, tables={"items": [make_rows(range(100 * peers.rank, 100), 1)]}))
        checkpoints.save(2, RankCheckpoint(state={}))
        CheckpointManager(tmp_path, peers=peers, note=messages.append).restore_latest(
            lambda restored: list(restored.rows("items"))
        )

    assert run_ranks(2, work) == [None, None]
    (written,) = messages
    assert re.fullmatch(r"checkpoint of step 1: 0.00 GB written by 2 ranks in \d+.\d s \(\d+.\d\d GB/s\)", written)


def test_checkpoint_corruption_on_one_rank_falls_back_on_all(tmp_path):
    for step in (1, 2):
        save(tmp_path, 3, step)
    file = max((tmp_path / "step-00000002").glob("rows-items-00002-*"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    messages: list[str] = []
    steps, rows, _ = load(tmp_path, 2, messages)
    assert steps == [1, 1]
    assert len(rows) == 6000
    (message,) = messages
    assert file.name in message


def test_checkpoint_without_hashes_loads(tmp_path, monkeypatch):
    monkeypatch.setattr("nestrec.checkpoint.checkpoint_writer._bounds", lambda keys: None)
    CheckpointManager(tmp_path).save(1, RankCheckpoint(state={}, tables={"items": [make_rows(range(20), 1)]}))
    manifest = (tmp_path / "step-00000001" / "manifest.json").read_text()
    assert "hashes" not in manifest
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    for shard in range(3):
        (chunk,) = restored.rows("items", shard=(shard, 3))
        assert len(chunk["keys"]) == 20
