"""The memory of a table on disk is bounded as configured, measured as peak RSS of a new process."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, numpy as np, torch
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, StoreConfig, TableConfig

def resident_peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def train(num_rows, steps, kind):
    store = StoreConfig(kind=kind, folder=sys.argv[1], cache_rows=1024)
    engine = EmbeddingEngine([TableConfig(name="t", dim=1024, num_rows=num_rows, store=store)], Topology.single())
    draw = np.random.default_rng(0)
    for step in range(1, steps + 1):
        routed = engine.route({"t": draw.integers(0, num_rows, 300)})
        working = engine.fetch_rows(routed, step=step)
        vectors = engine.exchange_vectors(routed, working)["t"]
        engine.accumulate(routed, working, {"t": vectors * step})
        engine.update(working, learning_rate=0.1)
        engine.write_back(working)
    return engine

train(1500, 2, "disk").close()
before = resident_peak()
found = {}
for kind in ("disk", "dram"):  # in this order, because the peak never decreases
    engine = train(20_000, 100, kind)
    grown = resident_peak() - before
    found[kind] = {"grown": grown, "digest": engine.digest("t"), **engine.shards["t"].store.statistics()}
    engine.close()
print(json.dumps(found))
"""


def measure(folder) -> dict:
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    # Without a fixed threshold, malloc may retain freed batches, which changes the peak by megabytes between runs.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250, env=environment)
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_disk_store_memory_is_bounded_and_equals_dram(tmp_path):
    results = measure(tmp_path)
    disk, dram = results["disk"], results["dram"]
    table = 20_000 * 4112
    assert disk["disk_bytes"] == table
    assert dram["grown"] > 0.5 * table
    few_batches = 10 * 300 * 4112
    assert disk["grown"] < disk["host_bytes"] + few_batches < 0.35 * table
    assert disk["digest"] == dram["digest"]
