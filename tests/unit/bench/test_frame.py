"""Result files all have one frame."""

import json
from pathlib import Path

from nestrec.bench.frame import write_frame


def test_a_frame_names_command_date_and_hardware(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.json"
    write_frame(path, bench="x", command="nestrec bench x", rows=[{"a": 1}], emulated=True)
    frame = json.loads(path.read_text())
    assert list(frame) == ["bench", "command", "date", "hardware", "emulated", "rows"]
    assert frame["rows"] == [{"a": 1}]
    assert frame["emulated"] is True
    assert frame["hardware"]["cores"] >= 1
    assert frame["hardware"]["cpu"]
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]
