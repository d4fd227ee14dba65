"""Tests of the benchmark of transports without a GPU: host transports, compared with Gloo."""

import pytest
import torch

from nestrec_bench.kernels.exchange_bench import ExchangeBenchConfig, measure_exchange

FIELDS = {"transport", "ranks", "bytes", "gb_per_s", "latency_us", "matmul_slowdown"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu measures on a GPU")
def test_exchange_bench_rows_and_received_data():
    rows = measure_exchange(ExchangeBenchConfig(ranks=(2,), bytes=(4096, 65536), rounds=2))
    expected = [(name, size) for name in ("host", "shared_memory") for size in (4096, 65536)]
    assert [(row["transport"], row["bytes"]) for row in rows] == expected
    assert all(set(row) >= FIELDS and row["equal_to_gloo"] and row["gb_per_s"] > 0 for row in rows)
