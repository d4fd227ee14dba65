"""Host benchmark: host work of a rank by the number of ranks and tables."""

import numpy as np
import pytest

from nestrec.base.config_overrides import apply_overrides
from nestrec.base.errors import UserError
from nestrec_bench.step.host_bench import BENCH, OTHER, PARTS, HostBenchConfig


def measure(**options):
    return list(BENCH.measure(HostBenchConfig(samples=64, table_rows=4000, rounds=1, **options)))


@pytest.fixture(scope="module")
def rows():
    few = measure(ranks=(2, 48), models=("tables",), num_tables=3, micro_batches=2)
    many = measure(ranks=(2,), models=("retrieval", "tables"), num_tables=9, micro_batches=2)
    return few + many


def test_host_bench_exchange_count_is_constant(rows):
    assert {row["tables"] for row in rows} == {1, 3, 9}
    # Number of keys, keys, and vectors and gradients of each micro-batch.
    assert [row["exchanges"] for row in rows] == [2 + 2 * 2] * 4


def test_host_bench_python_calls_do_not_depend_on_ranks(rows):
    few, many = rows[0]["python_calls"], rows[1]["python_calls"]
    assert 0.9 < many / few < 1.1


def test_host_bench_reports_parts_of_step(rows):
    for row in rows:
        assert set(row["parts"]) == {*PARTS, OTHER}
        assert all(value > 0 for value in row["parts"].values())
        assert row["host_mib"] > 0
        assert row["host_ms"] > 0.5 * np.sum(list(row["parts"].values()))


def test_host_bench_measures_window_cache():
    [row] = measure(ranks=(4,), models=("tables",), num_tables=3, micro_batches=2, window_cache=True)
    assert row["exchanges"] == 6


def test_host_bench_rejects_invalid_options():
    with pytest.raises(UserError, match=r"ranks=\(0,\): must be 1 or more"):
        apply_overrides(HostBenchConfig(), {"ranks": "0"})
