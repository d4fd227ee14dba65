"""Checkpoints of sharded tables: resharding, incremental and background saves, corruption, retention."""

import dataclasses
import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nestrec.base.errors import CorruptFileError, NonFiniteError
from nestrec.checkpoint import (
    CheckpointGroup,
    CheckpointManager,
    CheckpointSaveError,
    Chunk,
    LoadedCheckpoint,
    RankCheckpoint,
    checkpoint_manager,
    verify,
)
from nestrec.checkpoint.checkpoint_content import parts_of
from nestrec.checkpoint.checkpoint_manifest import MANIFEST_NAME, read_manifest
from nestrec.embedding.hashing import hash_of, owner_of
from support.checkpoint_contents import make_content, make_rows, table_values, values_of
from support.rank_pool import run_ranks

KEYS = [*range(40), -1, -(2**63), 2**63 - 1]


def owner(key: int, world: int) -> int:
    return int(owner_of(np.array([key]), world)[0])


def shard_content(peers: CheckpointGroup, rows: list[Chunk], step: int) -> RankCheckpoint:
    return RankCheckpoint(tensors=make_content(step).tensors, state={"step": step}, tables={"items": rows})


def rows_of_rank(peers: CheckpointGroup, value: float) -> list[Chunk]:
    own = [key for key in KEYS if owner(key, peers.world) == peers.rank]
    return [make_rows(own[start : start + 4], value) for start in range(0, len(own), 4)]


def load_shard(folder: Path, peers: CheckpointGroup) -> list[Chunk]:
    restored = CheckpointManager(folder, peers=peers).restore_latest()
    assert restored is not None

    def owned(keys: torch.Tensor) -> torch.Tensor:
        return torch.tensor([owner(key, peers.world) == peers.rank for key in keys.tolist()], dtype=torch.bool)

    return list(restored.rows("items", shard=(peers.rank, peers.world), owned=owned))


def test_checkpoint_table_of_4_ranks_loads_on_any_number(tmp_path: Path) -> None:
    run_ranks(
        4,
        lambda peers: CheckpointManager(tmp_path, peers=peers).save(0, shard_content(peers, rows_of_rank(peers, 0), 0)),
    )
    expected = table_values([make_rows(KEYS, 0)])
    for step, world in enumerate((2, 1, 3, 60, 4), start=1):

        def move(peers: CheckpointGroup, step: int = step) -> dict[int, tuple[float, ...]]:
            rows = load_shard(tmp_path, peers)
            CheckpointManager(tmp_path, peers=peers).save(step, shard_content(peers, rows, step))
            return table_values(rows)

        shards = run_ranks(world, move)
        merged: dict[int, tuple[float, ...]] = {}
        for shard in shards:
            assert isinstance(shard, dict), shard
            assert not merged.keys() & shard.keys()
            merged |= shard
        assert merged == expected


def test_checkpoint_opens_only_own_shards(tmp_path: Path) -> None:
    run_ranks(
        3,
        lambda peers: CheckpointManager(tmp_path, peers=peers).save(0, shard_content(peers, rows_of_rank(peers, 0), 0)),
    )
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    for file in restored.path.glob("rows-items-00000-*"):
        file.unlink()
    keys = torch.cat([chunk["keys"] for chunk in restored.rows("items", shard=(1, 3))]).tolist()
    assert sorted(keys) == sorted(key for key in KEYS if owner(key, 3) == 1)
    assert list(restored.rows("items", shard=(1, 2))), "the removed files have no hash of the second half"
    with pytest.raises(CorruptFileError, match="rows-items-00000"):
        list(restored.rows("items", shard=(0, 2)))


@pytest.mark.parametrize("failing", [0, 2])
def test_checkpoint_full_disk_on_one_rank_fails_on_all(tmp_path: Path, failing: int) -> None:
    def work(peers: CheckpointGroup) -> None:
        checkpoints = CheckpointManager(tmp_path, peers=peers)
        checkpoints.save(1, shard_content(peers, rows_of_rank(peers, 1), 1))

        def rows():  # type: ignore[no-untyped-def]
            yield from rows_of_rank(peers, 2)
            if peers.rank == failing:
                raise OSError(28, "No space left on device")

        checkpoints.save(2, shard_content(peers, rows(), 2))

    errors = run_ranks(3, work)
    assert all(isinstance(error, CheckpointSaveError) and f"rank {failing}" in str(error) for error in errors)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert verify(tmp_path / "step-00000001") == []


def test_checkpoint_corrupt_on_one_rank_is_skipped_by_all(tmp_path: Path) -> None:
    def save(peers: CheckpointGroup) -> None:
        checkpoints = CheckpointManager(tmp_path, peers=peers)
        for step in (1, 2):
            checkpoints.save(step, shard_content(peers, rows_of_rank(peers, step), step))

    run_ranks(2, save)
    file = next((tmp_path / "step-00000002").glob("rows-items-00001-*"))
    file.write_bytes(file.read_bytes()[:-1])
    messages: list[str] = []

    def load(peers: CheckpointGroup) -> int:
        restored = CheckpointManager(tmp_path, peers=peers, report=messages.append).restore_latest()
        assert restored is not None
        return restored.step

    assert run_ranks(2, load) == [1, 1]
    assert len(messages) == 1


class Model:
    """Dictionary with random updates that records the changes since the last save."""

    def __init__(self) -> None:
        self.rows: dict[int, float] = {}
        self.touched: set[int] = set()
        self.removed: set[int] = set()

    def train(self, random_: random.Random) -> None:
        for key in random_.sample(range(30), 4):
            self.rows[key] = random_.random()
            self.touched.add(key)
        for key in random_.sample(sorted(self.rows), 1):
            del self.rows[key]
            self.removed.add(key)
            self.touched.discard(key)

    def content(self, base: int | None) -> RankCheckpoint:
        keys = self.rows.keys() if base is None else self.touched
        chunks = [_chunk({key: self.rows[key]}) for key in sorted(keys)]
        removed = {} if base is None else {"items": torch.tensor(sorted(self.removed), dtype=torch.int64)}
        self.touched, self.removed = set(), set()
        return RankCheckpoint(tables={"items": chunks}, removed=removed, base=base)


def _chunk(rows: dict[int, float]) -> Chunk:
    return {"keys": torch.tensor(list(rows)), "weight": torch.tensor(list(rows.values()), dtype=torch.float64)}


def _rows(restored: LoadedCheckpoint | None) -> dict[int, float]:
    assert restored is not None
    pairs = [
        pair for c in restored.rows("items") for pair in zip(c["keys"].tolist(), c["weight"].tolist(), strict=True)
    ]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("seed", range(5))
def test_incremental_checkpoint_restores_complete_table(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    model = Model()
    checkpoints = CheckpointManager(tmp_path, keep=2, max_deltas=3)
    history: dict[int, dict[int, float]] = {}
    for step in range(12):
        model.train(random_)
        checkpoints.save(step, model.content(checkpoints.next_base_step()))
        history[step] = dict(model.rows)
        for retained in checkpoints.steps()[-2:]:
            assert verify(tmp_path / f"step-{retained:08d}") == []
            assert _rows(CheckpointManager(tmp_path).restore(retained)) == history[retained]
        if random_.random() < 0.3:  # a restart: the next save builds on the restored checkpoint
            checkpoints = CheckpointManager(tmp_path, keep=2, max_deltas=3)
            assert _rows(checkpoints.restore_latest()) == history[step]
    assert len(checkpoints.steps()) <= 2 + 3


def test_incremental_checkpoint_chain_is_bounded(tmp_path: Path) -> None:
    """Every third checkpoint is full, although each save passes changed rows only."""
    checkpoints = CheckpointManager(tmp_path, keep=100, max_deltas=2)
    for step in range(7):
        base = checkpoints.next_base_step()
        assert base == (step - 1 if step else None)
        checkpoints.save(step, RankCheckpoint(tables={"items": [_chunk({step: 1.0})]}, base=base))
        assert _rows(CheckpointManager(tmp_path).restore_latest()) == dict.fromkeys(range(step + 1), 1.0)
    is_full = [CheckpointManager(tmp_path).restore(step).manifest.base is None for step in range(7)]
    assert is_full == [True, False, False, True, False, False, True]


def test_incremental_checkpoint_corrupt_chain_is_not_merged(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, max_deltas=1)
    for step in range(2):
        base = checkpoints.next_base_step()
        checkpoints.save(step, RankCheckpoint(tables={"items": [_chunk({step: 1.0})]}, base=base))
    file = tmp_path / "step-00000000" / "rows-items-00000-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointSaveError, match="the base checkpoint is corrupt"):
        checkpoints.save(2, RankCheckpoint(tables={"items": [_chunk({2: 1.0})]}, base=1))
    assert checkpoints.next_base_step() is None


def test_incremental_checkpoint_other_world_size_is_full(tmp_path: Path) -> None:
    def train(peers: CheckpointGroup, steps: range) -> list[int | None]:
        checkpoints = CheckpointManager(tmp_path, peers=peers, max_deltas=1)
        checkpoints.restore_latest()
        bases = []
        for step in steps:
            bases.append(checkpoints.next_base_step())
            rows = rows_of_rank(peers, step)
            checkpoints.save(
                step, RankCheckpoint(tables={"items": rows if bases[-1] is None else rows[:1]}, base=bases[-1])
            )
        return bases

    assert run_ranks(2, lambda peers: train(peers, range(2))) == [[None, 0]] * 2
    assert run_ranks(3, lambda peers: train(peers, range(2, 5))) == [[1, None, 3]] * 3
    assert len(values_of(CheckpointManager(tmp_path).restore(4), "items")) == len(KEYS)


def test_incremental_checkpoint_of_corrupt_base_is_corrupt(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, max_deltas=1, report=lambda message: None)
    for step in range(4):  # steps 0 and 2 are full, 1 builds on 0, and 3 builds on 2
        checkpoints.save(
            step, RankCheckpoint(tables={"items": [_chunk({1: float(step)})]}, base=checkpoints.next_base_step())
        )
    (tmp_path / "step-00000002" / "rows-items-00000-00000.safetensors").write_bytes(b"")
    assert verify(tmp_path / "step-00000003") != []
    assert _rows(checkpoints.restore_latest()) == {1: 1.0}


def test_incremental_checkpoint_after_failed_save_is_full(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, max_deltas=5)
    checkpoints.save(0, RankCheckpoint(tables={"items": [_chunk({1: 1.0})]}))
    assert checkpoints.next_base_step() == 0
    with pytest.raises(CheckpointSaveError):
        checkpoints.save(1, RankCheckpoint(tables={"items": [{"keys": torch.zeros(2)}]}, base=0))
    assert checkpoints.next_base_step() is None


def test_background_checkpoint_ignores_later_training(tmp_path: Path) -> None:
    content = make_content(1)
    expected = make_content(1)
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save_async(1, content)
    for tensor in content.tensors.values():
        tensor.zero_()
    for chunk in content.tables["items"]:
        chunk["weight"].zero_()
    checkpoints.close()
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    assert torch.equal(restored.tensors["model/weight"], expected.tensors["model/weight"])
    assert values_of(restored, "items") == table_values(expected.tables["items"])


def test_background_checkpoint_error_is_raised_once(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    bad = dataclasses.replace(make_content(1), state={"not json": object()})
    checkpoints.save_async(1, bad)
    with pytest.raises(CheckpointSaveError, match="not JSON serializable"):
        checkpoints.save(2, make_content(2))
    checkpoints.save_async(3, make_content(3))
    checkpoints.close()
    assert checkpoints.steps() == [3]


def test_incremental_checkpoint_in_background_restores_rows(tmp_path: Path) -> None:
    random_ = random.Random(1)
    model = Model()
    checkpoints = CheckpointManager(tmp_path, max_deltas=2)
    bases = []
    for step in range(5):
        model.train(random_)
        bases.append(checkpoints.next_base_step())
        checkpoints.save_async(step, model.content(bases[-1]))
    checkpoints.close()
    assert bases == [None, 0, 1, 2, 3]
    assert _rows(CheckpointManager(tmp_path).restore_latest()) == model.rows


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_checkpoint_rejects_nonfinite_rows_on_all_ranks(tmp_path: Path, value: float) -> None:
    CheckpointManager(tmp_path).save(1, RankCheckpoint(tables={"items": [make_rows([0, 1], 0.5)]}))

    def save(peers: CheckpointGroup) -> None:
        rows = make_rows([2 * peers.rank, 2 * peers.rank + 1], value if peers.rank == 1 else 0.5)
        CheckpointManager(tmp_path, peers=peers).save(2, RankCheckpoint(tables={"items": [rows]}))

    for error in run_ranks(3, save):
        assert isinstance(error, NonFiniteError)
        assert "rank 1: NonFiniteError: 2 rows of table 'items' are not finite (weight)" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_checkpoint_saves_rows_whose_sum_overflows(tmp_path: Path) -> None:
    tensors = {"a": torch.full((3,), 3e38), "b": torch.full((9,), 6e4, dtype=torch.float16)}
    CheckpointManager(tmp_path).save(1, RankCheckpoint(tensors=tensors))
    assert verify(tmp_path / "step-00000001") == []
    with pytest.raises(NonFiniteError, match=r"the dense weights .* are not finite \(c\)"):
        CheckpointManager(tmp_path).save(2, RankCheckpoint(tensors={**tensors, "c": torch.tensor([1.0, float("nan")])}))


def test_checkpoint_retention_keeps_bases_of_unreadable(tmp_path: Path) -> None:
    """A read may fail temporarily, and the unreadable checkpoint may build on an older one."""
    checkpoints = CheckpointManager(tmp_path, keep=2, max_deltas=1)
    for step in (1, 2):
        base = checkpoints.next_base_step()
        checkpoints.save(step, RankCheckpoint(tables={"items": [make_rows([step], 1.0)]}, base=base))
    manifest = tmp_path / "step-00000002" / "manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    manifest.symlink_to(manifest.name)  # reading it fails with ELOOP
    later = CheckpointManager(tmp_path, keep=2)
    later.save(3, RankCheckpoint(tables={"items": [make_rows([3], 1.0)]}))
    assert later.steps() == [1, 2, 3]
    manifest.unlink()
    manifest.write_bytes(content)
    assert set(values_of(later.restore(2), "items")) == {1, 2}
    later.save(4, RankCheckpoint(tables={"items": [make_rows([4], 1.0)]}))
    assert later.steps() == [3, 4]


def test_checkpoint_reads_rows_at_hash_range_edges(tmp_path: Path) -> None:
    """With 2**32 shards a shard owns one hash, so the lowest and highest hash of a file are edges of shards."""
    CheckpointManager(tmp_path).save(0, RankCheckpoint(tables={"items": [make_rows(KEYS, 0)]}))
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    key_by_hash = dict(zip(hash_of(np.array(KEYS)).tolist(), KEYS, strict=True))
    assert len(key_by_hash) == len(KEYS)
    for shard in (min(key_by_hash), max(key_by_hash)):
        found = restored.rows("items", shard=(shard, 2**32), owned=lambda keys, key=key_by_hash[shard]: keys == key)
        assert [chunk["keys"].tolist() for chunk in found] == [[key_by_hash[shard]]]
    assert list(restored.rows("items", shard=(min(key_by_hash) - 1, 2**32))) == []
    assert list(restored.rows("items", shard=(max(key_by_hash) + 1, 2**32))) == []


def test_checkpoint_manifest_lists_files_of_all_ranks(tmp_path: Path) -> None:
    def save(peers: CheckpointGroup) -> None:
        checkpoints = CheckpointManager(tmp_path, peers=peers, max_deltas=2)
        checkpoints.save(1, shard_content(peers, rows_of_rank(peers, 0), 1))
        removed = torch.tensor([key for key in KEYS[:9] if owner(key, 2) == peers.rank])
        content = shard_content(peers, [], 2)
        checkpoints.save(2, dataclasses.replace(content, removed={"items": removed}, base=checkpoints.next_base_step()))

    assert run_ranks(2, save) == [None, None]
    for step, kind in ((1, "rows"), (2, "removed")):
        folder = tmp_path / f"step-{step:08d}"
        manifest = read_manifest(folder)
        assert (manifest.step, manifest.num_ranks, manifest.tables) == (step, 2, ("items",))
        assert {entry.name for entry in manifest.files} | {MANIFEST_NAME} == {path.name for path in folder.iterdir()}
        assert [entry.name for entry in manifest.files] == sorted(entry.name for entry in manifest.files)
        numbers: dict[int, list[str]] = {0: [], 1: []}
        for entry in manifest.files:
            assert entry.bytes == (folder / entry.name).stat().st_size
            if entry.kind in ("state", "tensors"):
                assert entry.name.startswith(entry.kind)
                assert (entry.table, entry.hashes) == (None, None)
                continue
            keys = load_file(folder / entry.name)["keys"].numpy()
            assert (entry.kind, entry.table, entry.num_shards) == (kind, "items", 2)
            assert entry.hashes == (hash_of(keys).min(), hash_of(keys).max())
            assert set(owner_of(keys, 2).tolist()) == {entry.shard}
            numbers[entry.shard].append(entry.name)
        expected = {"rows": -(-len(KEYS) // 8), "removed": 1}[kind]
        assert all(abs(len(names) - expected) <= 2 for names in numbers.values())
        for rank, names in numbers.items():
            ends = [f"-{number:05d}" for number in range(len(names))] if kind == "rows" else [""]
            assert names == [f"{kind}-items-{rank:05d}{end}.safetensors" for end in ends]
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    assert set(values_of(restored, "items")) == set(KEYS[9:])


def test_incremental_checkpoint_chain_is_bounded_across_restarts(tmp_path: Path) -> None:
    """After a restart, the chain continues from the restored step, with full checkpoints at the same steps."""
    for step in range(8):
        checkpoints = CheckpointManager(tmp_path, keep=100, max_deltas=2)
        checkpoints.restore_latest()
        checkpoints.save(
            step, RankCheckpoint(tables={"items": [_chunk({step: 1.0})]}, base=checkpoints.next_base_step())
        )
    is_full = [CheckpointManager(tmp_path).restore(step).manifest.base is None for step in range(8)]
    assert is_full == [True, False, False, True, False, False, True, False]


def test_checkpoint_dense_tensors_are_split_by_size() -> None:
    tensors = {str(i): torch.zeros(size, dtype=torch.float64) for i, size in enumerate([4, 4, 5, 20, 1, 7, 0, 1])}
    parts = [list(part) for part in parts_of(tensors, 64)]
    assert parts == [["0", "1"], ["2"], ["3"], ["4", "5", "6"], ["7"]]
    assert list(parts_of({}, 64)) == []


def test_background_checkpoint_copies_removed_keys(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, max_deltas=2)
    checkpoints.save(1, RankCheckpoint(tables={"items": [make_rows(range(4), 1)]}))
    removed = torch.tensor([1, 2])
    content = RankCheckpoint(tables={"items": []}, removed={"items": removed}, base=checkpoints.next_base_step())
    safe = content.copy()
    removed.fill_(3)
    checkpoints.save_async(2, safe, is_copied=True)
    checkpoints.close()
    restored = CheckpointManager(tmp_path).restore_latest()
    assert restored is not None
    assert set(values_of(restored, "items")) == {0, 3}


def corrupt_rows(folder: Path, step: int) -> None:
    """Change one byte of a rows file without changing its size."""
    file = folder / f"step-{step:08d}" / "rows-items-00000-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")


def test_checkpoint_rows_are_verified_if_not_read(tmp_path: Path) -> None:
    messages: list[str] = []
    checkpoints = CheckpointManager(tmp_path, report=messages.append)
    for step in (1, 2):
        checkpoints.save(step, RankCheckpoint(tables={"items": [_chunk({1: float(step)})]}))
    corrupt_rows(tmp_path, 2)
    with pytest.raises(CorruptFileError, match="rows-items"):
        checkpoints.restore(2)
    assert _rows(checkpoints.restore_latest()) == {1: 1.0}
    assert ["step 2 is corrupt" in message for message in messages] == [True]


def test_checkpoint_restored_rows_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CheckpointManager(tmp_path).save(1, RankCheckpoint(tables={"items": [_chunk({1: 1.0}), _chunk({2: 1.0})]}))
    verified: list[str] = []
    problems_of = checkpoint_manager.file_problems

    def recorded(files: list[Any], **options: bool) -> list[str]:
        verified.extend(
            entry.name for _, entry in files if entry.kind == "rows" and not options.get("skip_row_content")
        )
        return problems_of(files, **options)

    monkeypatch.setattr(checkpoint_manager, "file_problems", recorded)
    found: list[int] = []
    restored = CheckpointManager(tmp_path).restore_latest(
        lambda restored: found.extend(key for chunk in restored.rows("items") for key in chunk["keys"].tolist())
    )
    assert restored is not None
    assert (sorted(found), verified) == ([1, 2], [])
    assert restored.bytes_read == sum(entry.bytes for entry in restored.manifest.files if entry.kind == "rows")


def test_checkpoint_is_full_by_default(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, RankCheckpoint(tables={"items": [_chunk({1: 1.0})]}))
    assert checkpoints.next_base_step() is None


def test_background_checkpoint_releases_content_after_failure(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save_async(1, dataclasses.replace(make_content(1), state={"not json": object()}))
    closed: list[int] = []
    with pytest.raises(CheckpointSaveError, match="not JSON serializable"):
        checkpoints.save_async(2, dataclasses.replace(make_content(2), close=lambda: closed.append(2)))
    assert closed == [2]


def test_checkpoint_corrupt_state_is_none(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, make_content(1))
    assert checkpoints.state(1) == make_content(1).state
    file = tmp_path / "step-00000001" / "state.json"
    file.write_bytes(file.read_bytes().replace(b'"epoch": 1', b'"epoch": 2'))
    assert checkpoints.state(1) is None


def test_checkpoint_write_throughput_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    checkpoints = CheckpointManager(tmp_path, note=messages.append)
    monkeypatch.setattr(checkpoint_manager, "time", SimpleNamespace(perf_counter=lambda: 104.0))
    checkpoints._report_throughput(7, "written", 2_000_000_000, 100.0)
    checkpoints._report_throughput(8, "written", checkpoint_manager.NOTED_BYTES - 1, 100.0)
    assert messages == ["checkpoint of step 7: 2.00 GB written by 1 ranks in 4.0 s (0.50 GB/s)"]


def test_incremental_checkpoint_merge_has_each_row_once(tmp_path: Path) -> None:
    def train(peers: CheckpointGroup) -> None:
        checkpoints = CheckpointManager(tmp_path, peers=peers, max_deltas=1)
        for step in range(3):
            base = checkpoints.next_base_step()
            rows = rows_of_rank(peers, step)
            checkpoints.save(step, RankCheckpoint(tables={"items": rows[: None if base is None else 1]}, base=base))

    run_ranks(2, train)
    restored = CheckpointManager(tmp_path).restore(2)
    assert restored.manifest.base is None
    assert set(values_of(restored, "items")) == set(KEYS)
    rows = [entry for entry in restored.manifest.files if entry.kind == "rows"]
    keys = [load_file(tmp_path / "step-00000002" / entry.name)["keys"].tolist() for entry in rows]
    assert sorted(itertools.chain(*keys)) == sorted(KEYS), "no file contains rows of the other rank"
