import os

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, StoreConfig, TableConfig
from nestrec.embedding.stores.disk_store import DiskStore, RowFile
from nestrec.embedding.stores.row_store import Slab


def test_a_full_disk_is_an_error_when_the_file_grows(tmp_path):
    file = RowFile(tmp_path / "rows", 512)
    file.reserve(10)
    with pytest.raises(UserError, match=r"store\.folder .*cannot hold"):
        file.reserve(1 << 50)
    assert file.num_bytes == 5120
    file.close()
    assert not list(tmp_path.iterdir())


def test_a_file_that_lost_its_rows_is_an_error(tmp_path):
    store = DiskStore(tmp_path / "rows", 4, torch.device("cpu"), cache_rows=8)
    store.reserve(100)
    store.write(np.arange(100), np.ones((100, 4), np.int32))
    store.read(np.arange(8), np.empty((8, 4), np.int32))  # all that was written is in the file now
    os.ftruncate(store._file.descriptor, 0)
    with pytest.raises(UserError, match="could not be read or written"):
        store.read(np.arange(50, 100), np.empty((50, 4), np.int32))
    store.close()


def test_a_slab_keeps_its_rows_as_it_grows():
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
    working = engine.fetch(routed, step=1)
    engine.accumulate(routed, working, {"items": torch.ones(100, 2)})
    engine.update(working, learning_rate=learning_rate)
    engine.write_back(working)


def test_two_tables_of_one_name_in_one_folder_do_not_write_into_each_other(tmp_path):
    alone = engine_on_disk(tmp_path / "alone")
    train(alone, 0.1)
    first = engine_on_disk(tmp_path / "both")
    train(first, 0.1)
    second = engine_on_disk(tmp_path / "both")
    train(second, 0.7)
    assert first.digest("items") == alone.digest("items") != second.digest("items")


def test_rows_on_disk_go_with_the_process_even_where_it_is_killed(tmp_path):
    engine = engine_on_disk(tmp_path)
    train(engine, 0.1)
    assert not list(tmp_path.iterdir()), "a file without a name is the kernel's to remove"
    descriptor = engine.shards["items"].store._file.descriptor
    assert os.fstat(descriptor).st_size > 0
    del engine
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_files_that_were_left_behind_are_removed_at_the_start_and_no_others(tmp_path):
    left = ["items.0.4711.rows", "items.3.4711.rows"]
    others = ["other.0.4711.rows", "items.0.rows", "items.of.mine.rows", "items.0.4711.rows.bak"]
    for name in [*left, *others]:
        (tmp_path / name).write_bytes(b"rows")
    engine_on_disk(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_a_folder_that_cannot_hold_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"store\.folder .*cannot be written to: Not a directory") as refused:
        engine_on_disk(tmp_path / "file" / "rows")
    assert refused.value.remedy
