import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from nestrec.balance import POLICIES
from nestrec.base.errors import UserError
from nestrec.data.synthetic.synthetic_logs import generate, preset
from nestrec_bench.balance import balance_bench
from nestrec_bench.balance.balance_job import MeasuredBalanceConfig, measure
from nestrec_bench.pages import balance_tables

FIELDS = {"policy", "lengths", "ranks", "batch", "imbalance", "straggler", "max_token_gap", "partition_ms", "measured"}


def test_balance_bench_has_row_per_policy_cost_and_noise() -> None:
    rows = balance_bench.run("turbogr-kuai", 4, 8, rounds=2)
    found = {(row["policy"], row["cost"], row["noise"]) for row in rows}
    assert len(found) == len(rows) == len(POLICIES) * len(balance_bench.COSTS) * 3
    assert all(set(row) >= FIELDS and not row["measured"] for row in rows)


def test_balance_bench_is_deterministic() -> None:
    first, second = (balance_bench.run("freescale", 4, 16, rounds=2, seed=3) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        timings = {"partition_ms": 0, "partition_cpu_ms": 0}
        assert {**a, **timings} == {**b, **timings}


def test_balance_bench_baseline_is_imbalanced() -> None:
    rows = balance_bench.run("turbogr-kuai", 16, 8, rounds=30)
    assert balance_tables.void_lines(rows) == []
    even = [{**row, "imbalance": 0.34} for row in rows if row["policy"] == "fixed" and row["noise"] == "none"]
    assert len(balance_tables.void_lines(even)) == len(balance_bench.COSTS)


def test_balance_bench_reads_lengths_of_text_array_dataset(tmp_path: Path) -> None:
    values = np.arange(1, 41)
    np.savetxt(tmp_path / "lengths.txt", values, fmt="%d")
    np.save(tmp_path / "lengths.npy", values)
    shape = preset("tiny", num_users=50)
    generate(shape, tmp_path / "dataset")
    for name in ("lengths.txt", "lengths.npy"):
        batches = balance_bench.global_batches(str(tmp_path / name), 20, seed=0, rounds=4)
        assert np.sort(batches[:2].reshape(-1)).tolist() == values.tolist()
        assert np.sort(batches[2:].reshape(-1)).tolist() == values.tolist()
    assert balance_bench.read_lengths(tmp_path / "dataset").size == 50


def test_balance_bench_rejects_invalid_options(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'freescale'"):
        balance_bench.run("freescal", 2, 2)
    with pytest.raises(UserError, match="ranks=0"):
        balance_bench.run("freescale", 0, 2)
    (tmp_path / "negative.txt").write_text("5\n-1\n")
    with pytest.raises(UserError, match="none negative"):
        balance_bench.run(str(tmp_path / "negative.txt"), 2, 2)


def test_balance_bench_table_marks_published_figures() -> None:
    rows = balance_bench.run("turbogr-kuai", 16, 8, rounds=2) + balance_bench.published("turbogr-kuai", 16)
    assert all(set(row) >= FIELDS for row in rows)
    text = io.StringIO()
    balance_tables.show_balance(rows, Console(file=text, width=140))
    for expected in ("TurboGR Table 3", "47.01%", "10,726", "refined", "predicted", "published rows"):
        assert expected in text.getvalue()


def test_balance_bench_counts_unique_keys() -> None:
    rows = balance_bench.run_one("tiny", 3, 8, rounds=2, measured_rounds=0)
    found = {row["policy"]: row for row in rows if "unique_keys_ranks" in row}
    assert set(found) == set(POLICIES)
    assert found["fixed"]["over_fixed_ranks"] == 0.0
    for row in found.values():
        assert row["unique_keys_batch"] <= row["unique_keys_ranks"] <= row["unique_keys_micro_batches"]


def test_balance_bench_measures_policies_on_real_ranks() -> None:
    bench = MeasuredBalanceConfig(lengths="tiny", ranks=2, batch=4, rounds=2, fit_rounds=3, dim=8)
    rows = measure(bench)
    assert [row["policy"] for row in rows] == ["fixed", "zigzag", "refined"]
    for row in rows:
        assert set(row) >= FIELDS | {"step_ms", "speedup", "speedup_cpu", "cpu_imbalance", "cores", "exchange_ms"}
        assert row["measured"]
        assert 0 <= row["imbalance"] < 1
        assert row["data_lanes"] == ["trade_0"]
    assert rows[0]["speedup"] == 1.0
    assert rows[0]["moved_bytes"] == 0
    text = io.StringIO()
    balance_tables.show_balance(rows, Console(file=text, width=200))
    assert "measured" in text.getvalue()


def test_balance_bench_names_failing_rank() -> None:
    with pytest.raises(UserError, match="rank 0 failed"):
        measure(MeasuredBalanceConfig(lengths="tiny", ranks=1, batch=4, rounds=1, policies=("no such policy",)))
