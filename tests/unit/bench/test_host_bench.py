"""What the host of a rank does, by the number of ranks and of tables."""

import numpy as np
import pytest

from nestrec.base.config_overrides import with_overrides
from nestrec.base.errors import UserError
from nestrec_bench.step.host_bench import BENCH, OTHER, PARTS, HostBench


def rows_of(**options):
    return list(BENCH.measure(HostBench(samples=64, table_rows=4000, rounds=1, **options)))


@pytest.fixture(scope="module")
def rows():
    few = rows_of(ranks=(2, 48), models=("tables",), num_tables=3, micro_batches=2)
    many = rows_of(ranks=(2,), models=("retrieval", "tables"), num_tables=9, micro_batches=2)
    return few + many


def test_exchanges_of_a_step_do_not_depend_on_tables_or_ranks(rows):
    assert {row["tables"] for row in rows} == {1, 3, 9}
    # How many keys, the keys; vectors and gradients of each micro-batch.
    assert [row["exchanges"] for row in rows] == [2 + 2 * 2] * 4


def test_python_calls_of_a_step_do_not_depend_on_ranks(rows):
    few, many = rows[0]["python_calls"], rows[1]["python_calls"]
    assert 0.9 < many / few < 1.1


def test_parts_of_a_step_are_told(rows):
    for row in rows:
        assert set(row["parts"]) == {*PARTS, OTHER}
        assert all(value > 0 for value in row["parts"].values())
        assert row["host_mib"] > 0
        assert row["host_ms"] > 0.5 * np.sum(list(row["parts"].values()))


def test_the_window_cache_is_measured_too():
    [row] = rows_of(ranks=(4,), models=("tables",), num_tables=3, micro_batches=2, window_cache=True)
    assert row["exchanges"] == 6


def test_what_cannot_be_measured_is_refused_by_name():
    with pytest.raises(UserError, match=r"ranks=\(0,\): must be 1 or more"):
        with_overrides(HostBench(), {"ranks": "0"})
