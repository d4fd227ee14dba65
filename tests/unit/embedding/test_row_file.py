import os

import numpy as np
import pytest
import torch

from nestrec.base.errors import UserError
from nestrec.embedding.stores.disk import DiskStore
from nestrec.embedding.stores.row_file import RowFile
from nestrec.embedding.stores.slab import Slab


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
    os.truncate(tmp_path / "rows", 0)
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
