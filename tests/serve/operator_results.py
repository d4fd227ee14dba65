"""Figures of long tests, kept where NESTREC_OPERATOR_RESULTS names a file: one row for each thing that is shown."""

import json
import os
import sys
from pathlib import Path

from nestrec.bench.harness.frame import join_frames, make_frame


def record(shown, **figures):
    """Print a row, and put it into the file in place of an older one."""
    row = {"shown": shown, **figures}
    print("\n" + json.dumps(row))
    if not (name := os.environ.get("NESTREC_OPERATOR_RESULTS")):
        return
    path, frames = Path(name), []
    if path.exists():
        frame = json.loads(path.read_text())
        frames = [{**frame, "rows": [old for old in frame["rows"] if old["shown"] != shown]}]
    command = " ".join(["pytest", *(word for word in sys.argv[1:] if not word.startswith("no:") and word != "-p")])
    frames.append(make_frame(bench="operator", command=command, rows=[row]))
    joined = join_frames(
        frames, bench="operator", command="NESTREC_OPERATOR_RESULTS=docs/results/operator.json make test-slow"
    )
    path.write_text(json.dumps(joined, indent=2) + "\n")
