"""The demo: trained on two ranks, compared, exported and served, by the commands that anyone would use."""

import subprocess
import sys
from pathlib import Path

import pytest

SMALL = {
    "training.max_steps": "12",
    "batch.batch_samples": "8",
    "task.history.max_length": "16",
    "task.num_negatives": "8",
    "task.encoder.max_length": "16",
    "task.encoder.dim": "16",
    "task.encoder.head_dim": "8",
}


@pytest.mark.timeout(300)
def test_the_demo_trains_compares_serves_and_writes_its_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nestrec", "demo", *(f"--{name}={value}" for name, value in SMALL.items())]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "tables of `nested` equal those of `serial`, bit by bit" in ended.stdout
    assert "POST /v1/recommend" in ended.stdout
    page = (tmp_path / "runs/demo/report.html").read_text()
    assert page.index("<h3>serial</h3>") < page.index("<h3>nested</h3>")
