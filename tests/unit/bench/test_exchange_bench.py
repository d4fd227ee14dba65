"""The bench of transports where there is no GPU: the host's, checked against Gloo."""

import pytest
import torch

from nestrec_bench.kernels.exchange_bench import ExchangeBench, measure_exchange

FIELDS = {"transport", "ranks", "bytes", "gb_per_s", "latency_us", "matmul_slowdown"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu measures on a GPU")
def test_rows_hold_the_fields_of_the_design_and_what_arrives_is_right():
    rows = measure_exchange(ExchangeBench(ranks=(2,), bytes=(4096, 65536), rounds=2))
    expected = [(name, size) for name in ("host", "shared_memory") for size in (4096, 65536)]
    assert [(row["transport"], row["bytes"]) for row in rows] == expected
    assert all(set(row) >= FIELDS and row["equal_to_gloo"] and row["gb_per_s"] > 0 for row in rows)
