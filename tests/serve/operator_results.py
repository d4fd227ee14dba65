"""Results of long tests: one row per property that a test shows, written to the file NESTREC_OPERATOR_RESULTS."""

import json
import os
import sys
from pathlib import Path

from nestrec.report.result_file import join_frames, make_frame


def record(shown, **figures):
    """Print a row, and write it to the file, where it replaces an older row of the same property.

    Args:
        shown: Property that the test shows, such as a fault that loses no request.
        figures: Columns of the row.
    """
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
