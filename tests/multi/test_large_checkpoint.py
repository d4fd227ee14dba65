"""Tests of the script `large_checkpoint.py`: a complete run, a run over its time limit, and an interrupted run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROWS = ["--gib", "0.05", "--worlds", "2,3,1", "--alone_s", "1", "--aside_mib", "2"]


def start(tmp_path: Path, *more: str) -> subprocess.Popen[bytes]:
    folders = ["--folder", f"{tmp_path}/rows", "--memory_folder", f"{tmp_path}/memory", "--json", f"{tmp_path}/json"]
    driver = Path(__file__).with_name("large_checkpoint.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the driver imports tests/support
    return subprocess.Popen([sys.executable, str(driver), *ROWS, *folders, *more], env=environment)


def rows_of(tmp_path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((tmp_path / "json").read_text())["rows"]
    return rows


def test_large_checkpoint_reports_and_verifies_every_part(tmp_path):
    assert start(tmp_path, "--in_memory", "0.5", "--skews", "3,1").wait() == 0
    rows = rows_of(tmp_path)
    assert [(row["what"], row["ranks"]) for row in rows] == [
        ("fill", 2),
        ("save", 2),
        ("load", 3),
        ("save", 3),
        ("load", 1),
    ]
    assert rows[1]["digest"] == rows[2]["digest"] != rows[3]["digest"] == rows[4]["digest"]
    for row in rows[1::2]:
        assert row["steps"] > 0
        assert row["stall_share_spread"][0] <= row["stall_share"] <= row["stall_share_spread"][1]
    assert rows[-1]["left_s"] == 0
    assert not (tmp_path / "rows").exists()
    assert not (tmp_path / "memory").exists()


def test_large_checkpoint_interrupted_run_keeps_results(tmp_path):
    driver = start(tmp_path, "--alone_s", "60")
    while not (tmp_path / "json").exists():
        assert driver.poll() is None
        time.sleep(0.05)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait() == 0
    first, last = rows_of(tmp_path)
    assert first["what"] == "fill"
    assert (last["what"], last["ended_early"]) == ("save", "SIGTERM")
    assert not (tmp_path / "rows").exists()


def test_large_checkpoint_skips_parts_over_time_limit(tmp_path):
    assert start(tmp_path, "--gib", "500", "--limit_s", "60").wait() == 0
    (row,) = rows_of(tmp_path)
    assert (row["what"], row["parts"][0]) == ("left out", "fill by 2")
