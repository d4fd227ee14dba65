import json

import numpy as np

from nestrec_bench.kernels.stores_bench import StoresBenchConfig, measure_stores, zipf_slots


def test_stores_bench_has_row_per_store_and_operation(tmp_path):
    bench = StoresBenchConfig(num_rows=2000, disk_rows=500, dim=8, num_keys=300, rounds=1)
    rows = measure_stores(bench, output=tmp_path / "stores.json", command="nestrec bench stores")
    assert [(r["op"], r["store"]) for r in rows] == [
        ("copy", "torch"),
        ("gather", "index_select"),
        ("find", "key table"),
        ("gather", "dram"),
        ("scatter", "dram"),
        ("gather", "disk"),
        ("scatter", "disk"),
    ]
    assert all(r["gb_per_s"] >= 0 for r in rows)
    assert json.loads((tmp_path / "stores.json").read_text())["rows"] == rows


def test_stores_bench_slots_have_zipf_distribution():
    slots = zipf_slots(1000, 200_000, 0.75)
    counts = np.sort(np.bincount(slots, minlength=1000))[::-1]
    assert counts[0] / counts[15] == np.clip(counts[0] / counts[15], 6.5, 9.5)  # 16 ** 0.75 is 8
