"""The demo: trained on two ranks, compared, exported and served, by the commands that anyone would use."""

import subprocess
import sys
from pathlib import Path

import pytest

from nestrec.report.evaluations import ratio_to_best
from nestrec.report.run_folder import headline_evaluation, load_run

SMALL = {
    "training.max_steps": "12",
    "batch.batch_samples": "8",
    "task.history.max_length": "16",
    "task.num_negatives": "8",
    "task.encoder.max_length": "16",
    "task.encoder.dim": "16",
    "task.encoder.head_dim": "8",
}


def demo(folder: Path, options: dict[str, str], timeout_s: float) -> Path:
    """Its run, with what every demo shows: equal bits, an answer, the two timelines above each other."""
    command = [sys.executable, "-m", "nestrec", "demo", *(f"--{name}={value}" for name, value in options.items())]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "tables of `nested` equal those of `serial`, bit by bit" in ended.stdout
    assert "POST /v1/recommend" in ended.stdout
    page = (folder / "runs/demo/report.html").read_text()
    assert page.index("<h3>serial</h3>") < page.index("<h3>nested</h3>")
    return folder / "runs/demo"


@pytest.mark.timeout(300)
def test_the_demo_trains_compares_serves_and_writes_its_report(tmp_path: Path) -> None:
    demo(tmp_path, SMALL, 280)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_at_full_size_the_model_is_half_again_as_good_as_the_best_baseline(tmp_path: Path) -> None:
    """Logs with several interests, which the last item and popularity cannot follow."""
    record = headline_evaluation(load_run(demo(tmp_path, {}, 1100)))
    assert record is not None
    assert record["part"] == "test"
    assert ratio_to_best(record["metrics"], "model", "ndcg@10") >= 1.5
