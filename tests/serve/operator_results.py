"""Figures of long tests, kept where NESTREC_OPERATOR_RESULTS names a file: one row for each thing that is shown."""

import json
import os
import sys
from pathlib import Path

from nestrec.report.result_file import join_frames, make_frame


def record(shown, **figures):
    """Print a row, and put it into the file in place of an older one."""
    row = {"shown": shown, **figures}
    print("\n" + json.dumps(row))
    if not (name := os.environ.get("NESTREC_OPERATOR_RESULTS")):
        return
    path = Path(name)
    frames = []
    if path.exists():
        frame = json.loads(path.read_text())
        for number, run in enumerate(frame["runs"]):
            rows = [old for old in frame["rows"] if old["run"] == number and old["shown"] != shown]
            frames += [{**run, "rows": rows}] if rows else []
    command = f"NESTREC_OPERATOR_RESULTS=FILE pytest {' '.join(sys.argv[1:])}"
    frames.append(make_frame(bench="operator", command=command, rows=[row]))
    joined = join_frames(frames, bench="operator", command="see runs")
    path.write_text(json.dumps(joined, indent=2) + "\n")
