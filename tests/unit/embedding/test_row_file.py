import os

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, StoreConfig, TableConfig
from nestrec.embedding.stores.disk_store import DiskStore, RowFile
from nestrec.embedding.stores.row_store import Slab


def test_row_file_full_disk_is_error(tmp_path):
    file = RowFile(tmp_path / "rows", 512)
    file.reserve(10)
    with pytest.raises(UserError, match=r"store\.folder=.*cannot allocate"):
        file.reserve(1 << 50)
    assert file.num_bytes == 5120
    file.close()
    assert not list(tmp_path.iterdir())


def test_row_file_truncation_is_error(tmp_path):
    store = DiskStore(tmp_path / "rows", 4, torch.device("cpu"), cache_rows=8)
    store.reserve(100)
    store.write(np.arange(100), np.ones((100, 4), np.int32))
    store.read(np.arange(8), np.empty((8, 4), np.int32))  # the file now contains all written rows
    os.ftruncate(store._file.descriptor, 0)
    with pytest.raises(UserError, match="reading or writing a row failed"):
        store.read(np.arange(50, 100), np.empty((50, 4), np.int32))
    store.close()


def test_row_file_slab_growth_keeps_rows():
    slab = Slab(3)
    for size in (1, 5, 6, 1000, 100_000):
        before = len(slab.rows)
        old = slab.rows.copy()
        slab.reserve(size)
        assert len(slab.rows) >= size
        assert (slab.rows[:before] == old).all()
        slab.rows[before:] = size
    slab.close()
    assert slab.num_bytes == 0


def engine_on_disk(folder) -> EmbeddingEngine:
    store = StoreConfig(kind="disk", folder=str(folder), cache_rows=8)
    return EmbeddingEngine([TableConfig(name="items", dim=2, num_rows=100, store=store)], Topology.single())


def train(engine: EmbeddingEngine, learning_rate: float) -> None:
    routed = engine.route({"items": np.arange(100)})
    working = engine.fetch_rows(routed, step=1)
    engine.accumulate(routed, working, {"items": torch.ones(100, 2)})
    engine.update(working, learning_rate=learning_rate)
    engine.write_back(working)


def test_row_file_equal_names_use_separate_files(tmp_path):
    alone = engine_on_disk(tmp_path / "alone")
    train(alone, 0.1)
    first = engine_on_disk(tmp_path / "both")
    train(first, 0.1)
    second = engine_on_disk(tmp_path / "both")
    train(second, 0.7)
    assert first.digest("items") == alone.digest("items") != second.digest("items")


def test_row_file_is_removed_with_process(tmp_path):
    engine = engine_on_disk(tmp_path)
    train(engine, 0.1)
    assert not list(tmp_path.iterdir()), "the kernel removes an unlinked file"
    descriptor = engine.shards["items"].store._file.descriptor
    assert os.fstat(descriptor).st_size > 0
    del engine
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_row_file_leftovers_are_removed_at_start(tmp_path):
    left = ["items.0.4711.rows", "items.3.4711.rows"]
    others = ["other.0.4711.rows", "items.0.rows", "items.of.mine.rows", "items.0.4711.rows.bak"]
    for name in [*left, *others]:
        (tmp_path / name).write_bytes(b"rows")
    engine_on_disk(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_row_file_names_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"store\.folder=.*the folder is not writable: Not a directory") as raised:
        engine_on_disk(tmp_path / "file" / "rows")
    assert raised.value.remedy
