"""Tables with a row cache: rows are bitwise identical and memory is bounded, for any requests."""

import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nestrec.base.errors import CorruptFileError, UserError
from nestrec.serving.model.served_tables import CachedTable, DeviceTable, TablesConfig, open_table

NUM_ROWS, DIM = 300, 6
CPU = torch.device("cpu")


@pytest.fixture
def weight(request):
    dtype = getattr(request, "param", torch.float32)
    return torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture
def file(weight, tmp_path):
    save_file({"ids": torch.arange(5), "weight": weight}, tmp_path / "table.safetensors")
    return tmp_path / "table.safetensors"


def open_cached_table(file, store, cache_rows):
    return open_table(file, "weight", CPU, TablesConfig(store=store, cache_rows=cache_rows))


@pytest.mark.parametrize("store", ["dram", "disk"])
@pytest.mark.parametrize("cache_rows", [0, 1, 7, 64, NUM_ROWS - 1])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], indirect=True)
def test_row_cache_is_bitwise_identical_and_bounded(weight, file, store, cache_rows):
    table = open_cached_table(file, store, cache_rows)
    rng = np.random.default_rng(2)
    for _ in range(60):
        ids = rng.zipf(1.3, int(rng.integers(0, 120))) % NUM_ROWS
        found = table.rows(torch.from_numpy(ids))
        assert torch.equal(found, weight[torch.from_numpy(ids)])
        found.fill_(0.0)  # rows are copies, so this does not change the table
        counts = table.statistics()
        assert counts["device_rows"] <= cache_rows
        assert len(table._cache) == cache_rows
    assert 0 < counts["misses"] <= counts["lookups"]
    assert (counts["misses"] < counts["lookups"]) == (cache_rows > 0)
    assert torch.equal(torch.cat([part for _, part in table.parts()]), weight)


def test_row_cache_serves_more_rows_than_it_holds(weight, file):
    table = open_cached_table(file, "disk", 4)
    ids = torch.arange(NUM_ROWS).flip(0)
    assert torch.equal(table.rows(ids), weight[ids])
    assert table.statistics() == {"rows": NUM_ROWS, "device_rows": 4, "lookups": NUM_ROWS, "misses": NUM_ROWS}


def test_row_cache_retains_frequently_used_rows(file):
    table = open_cached_table(file, "dram", 8)
    table.rows(torch.tensor([7, 9]))
    for other in range(100, 200):
        table.rows(torch.tensor([7, 9, other]))
    assert table.statistics()["misses"] == 2 + 100


def test_row_cache_is_thread_safe(weight, file):
    table = open_cached_table(file, "disk", 16)
    wrong = []

    def request_rows(seed):
        rng = np.random.default_rng(seed)
        for _ in range(200):
            ids = torch.from_numpy(rng.integers(0, 60, 24))
            if not torch.equal(table.rows(ids), weight[ids]):
                wrong.append(ids)

    threads = [threading.Thread(target=request_rows, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert table.statistics()["device_rows"] <= 16


def test_row_cache_table_that_fits_is_on_device(weight, file):
    assert isinstance(open_cached_table(file, "disk", NUM_ROWS), DeviceTable)
    assert isinstance(open_cached_table(file, "disk", NUM_ROWS - 1), CachedTable)
    table = open_cached_table(file, "device", 0)
    assert torch.equal(table.rows(torch.tensor([0, 5, 0])), weight[[0, 5, 0]])
    assert table.statistics()["device_rows"] == NUM_ROWS


def test_row_cache_truncated_file_is_error(file):
    table = open_cached_table(file, "disk", 4)
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 100 * DIM * 4)
    with pytest.raises(CorruptFileError):
        table.rows(torch.tensor([NUM_ROWS - 1]))
    with pytest.raises(CorruptFileError):
        list(table.parts())


def test_row_cache_rejects_negative_size(file):
    with pytest.raises(UserError, match="cache_rows"):
        open_cached_table(file, "dram", -1)
