"""Quality benchmark: from run folders to a result file and a page."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestrec.base.errors import UserError
from nestrec.cli.app import app
from nestrec_bench.quality.quality_bench import parse_pair, quality_frame, trained_on
from support.example_run import make_versions, write_ranks


def write_runs(folder: Path) -> Path:
    for recipe, ranks in (("hstu", [1, 1, 2, 0]), ("sasrec", [3, 0, 0, 0])):
        for seed in (1, 2):
            write_ranks(folder / f"{recipe}-{seed}", recipe, seed, ranks)
    return folder


def test_quality_bench_writes_result_file_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = write_runs(tmp_path / "runs")
    result = tmp_path / "out" / "quality.json"
    page = tmp_path / "quality.md"
    arguments = ["bench", "quality", str(runs), "--pair", "hstu:sasrec", "--json", str(result), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["nestrec", *arguments])
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    frame = json.loads(result.read_text())
    assert frame["command"] == "nestrec " + " ".join(arguments)
    assert [(row["recipe"], row["seeds"]) for row in frame["rows"]] == [("hstu", [1, 2]), ("sasrec", [1, 2])]
    assert frame["comparisons"][0]["recall@10_difference"] == pytest.approx(0.5)
    assert f"| hstu | sasrec | {frame['rows'][0]['dataset']} |" in page.read_text()


def test_quality_bench_names_machine_of_runs(tmp_path: Path) -> None:
    runs = write_runs(tmp_path)
    versions = {**make_versions(), "device": "NVIDIA H200", "cpu_count": 16}
    for run in runs.iterdir():
        (run / "versions.json").write_text(json.dumps(versions))
    hardware = quality_frame([runs], [], command="c")["hardware"]
    assert (hardware["device"], hardware["cores"]) == ("NVIDIA H200", 16)
    (runs / "hstu-1" / "versions.json").write_text(json.dumps({**versions, "device": "cpu"}))
    assert trained_on(sorted(runs.iterdir()))["device"] == ["cpu", "NVIDIA H200"]


def test_quality_bench_rejects_invalid_runs_and_pairs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the folder does not contain a run"):
        quality_frame([tmp_path], [], command="c")
    with pytest.raises(UserError, match="expected two recipes"):
        parse_pair("hstu")
