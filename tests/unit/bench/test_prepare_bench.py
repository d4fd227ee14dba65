"""Preparation of large logs in bounded memory."""

import json
from pathlib import Path

import pytest

from nestrec_bench.quality.prepare_bench import measure_prepare


def test_prepare_bench_measures_new_process(tmp_path: Path) -> None:
    rows = measure_prepare([50_000], output=tmp_path / "prepare.json", command="nestrec bench prepare", num_items=1000)
    assert rows == json.loads((tmp_path / "prepare.json").read_text())["rows"]
    assert rows[0]["events"] > 30_000
    assert rows[0]["peak_memory_mib"] >= rows[0]["memory_after_import_mib"] > 50


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prepare_bench_memory_is_flat() -> None:
    small, large = measure_prepare([10_000_000, 40_000_000])
    print(small, large)
    assert small["events"] > 9_500_000
    assert small["peak_memory_mib"] < 1536
    assert large["peak_memory_mib"] < 1.4 * small["peak_memory_mib"]
