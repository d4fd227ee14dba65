"""Tests of the common format of result files."""

import json
from pathlib import Path

from nestrec.report.result_file import join_frames, make_frame, write_frame


def test_result_frame_names_command_date_and_hardware(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.json"
    write_frame(path, bench="x", command="nestrec bench x", rows=[{"a": 1}], emulated=True)
    frame = json.loads(path.read_text())
    assert list(frame) == ["bench", "command", "date", "hardware", "emulated", "rows"]
    assert frame["rows"] == [{"a": 1}]
    assert frame["emulated"] is True
    assert frame["hardware"]["cores"] >= 1
    assert frame["hardware"]["cpu"]
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_result_join_adds_run_index_to_rows() -> None:
    frames = [make_frame(bench="x", command=f"nestrec bench x {i}", rows=[{"a": i}], emulated=i == 1) for i in range(2)]
    joined = join_frames(frames, bench="both", command="nestrec bench join")
    assert joined["rows"] == [{"a": 0, "run": 0}, {"a": 1, "run": 1}]
    assert [run["command"] for run in joined["runs"]] == ["nestrec bench x 0", "nestrec bench x 1"]
    assert joined["emulated"] is True
    assert "rows" not in joined["runs"][0]


def test_result_join_of_joined_file_retains_runs() -> None:
    frames = [make_frame(bench="x", command=f"nestrec bench x {i}", rows=[{"a": i}]) for i in range(3)]
    joined = join_frames(frames[:2], bench="x", command="nestrec bench join")
    again = join_frames([frames[2], joined], bench="x", command="nestrec bench join")
    assert again["rows"] == [{"a": 2, "run": 0}, {"a": 0, "run": 1}, {"a": 1, "run": 2}]
    assert [run["command"][-1] for run in again["runs"]] == ["2", "0", "1"]


def test_result_join_includes_additional_row_lists() -> None:
    frames = [{**make_frame(bench="x", command="x", rows=[{"a": i}]), "pairs": [{"b": i}]} for i in range(2)]
    joined = join_frames(frames, bench="x", command="nestrec bench join")
    assert joined["pairs"] == [{"b": 0, "run": 0}, {"b": 1, "run": 1}]
    assert all("pairs" not in run for run in joined["runs"])
