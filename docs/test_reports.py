"""Writes what long tests and those on a GPU gave into a file of results/, from the reports that pytest leaves.

    python docs/test_reports.py slow-tests.json test-slow.xml ... ["command that wrote them"] [--by-test]

`make test-slow` and `make test-gpu` call it. A row is a test file, or, where only some tests of files ran, with
--by-test a test. What ran again replaces what was known of it, a file that of its tests too; the others keep their
rows, with the run that they are of: how long all of it took by the clock, and of which commit it was.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from nestrec.report.result_file import make_frame

DOCS = Path(__file__).resolve().parent
COMMANDS = {"slow-tests.json": "make test-slow", "gpu-tests.json": "make test-gpu"}
Row = dict[str, Any]


def rows_of(*reports: str, by_test: bool = False) -> list[Row]:
    """A row for each file of JUnit reports, or for each test: cases, how they ended, seconds."""
    counts: dict[str, Counter[str]] = {}
    seconds: dict[str, float] = {}
    for case in (case for xml in reports for case in ElementTree.fromstring(xml).iter("testcase")):
        ended = {child.tag for child in case}
        inside = case.get("classname")
        words = (inside or case.get("name", "")).split(".")
        module = next((n for n, word in enumerate(words, 1) if word.startswith("test_")), 0)
        if module == 0 or not (inside or ended & {"failure", "error"}):
            continue  # a test that was cut short, a file that has nothing for this machine
        file = "/".join(words[:module]) + ".py"
        if by_test and inside:
            file += "::" + case.attrib["name"].partition("[")[0]
        outcome = "skipped" if "skipped" in ended else "failed" if ended & {"failure", "error"} else "passed"
        counts.setdefault(file, Counter())[outcome] += 1
        seconds[file] = seconds.get(file, 0.0) + float(case.attrib.get("time", 0.0))
    return [
        {
            "file": file,
            "cases": sum(found.values()),
            "passed": found["passed"],
            "failed": found["failed"],
            "skipped": found["skipped"],
            "seconds": round(seconds[file]),
        }
        for file, found in sorted(counts.items())
    ]


def joined(known: dict[str, Any], rows: list[Row], run: dict[str, Any]) -> dict[str, Any]:
    """What is known, with the rows of a new run in the place of older ones of the same files."""
    again = {row["file"] for row in rows}
    said = {row["file"]: {"what": row["what"]} for row in known["rows"] if "what" in row}
    kept = [row for row in known["rows"] if not {row["file"], row["file"].partition("::")[0]} & again]
    used = sorted({row["run"] for row in kept})
    kept = [{**row, "run": used.index(row["run"])} for row in kept]
    new = [{"file": row["file"], **said.get(row["file"], {}), **row, "run": len(used)} for row in rows]
    found = sorted(kept + new, key=lambda row: row["file"])
    return {**known, **run, "rows": found, "runs": [*(known["runs"][number] for number in used), run]}


def wall_of(*reports: str) -> int:
    """Seconds by the clock, all reports together: tests of one report may have run side by side."""
    suites = (suite for xml in reports for suite in ElementTree.fromstring(xml).iter("testsuite"))
    return round(sum(float(suite.attrib.get("time", 0.0)) for suite in suites))


def commit() -> str:
    """Of the tree that the tests ran on, with a word where it was changed; nothing where there is no repository."""
    asked = ["git", "-C", str(DOCS), "describe", "--always", "--dirty=, changed"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def main(words: list[str]) -> None:
    name, *given = (word for word in words if word != "--by-test")
    reports = [Path(word).read_text() for word in given if word.endswith(".xml")]
    command = next((word for word in given if not word.endswith(".xml")), COMMANDS[name])
    frame = make_frame(bench=name.removesuffix(".json").replace("-", " "), command=command, rows=[])
    note = ", ".join(part for part in (f"{wall_of(*reports)} s in all", f"commit {commit()}") if part != "commit ")
    run = {name: frame[name] for name in ("command", "date", "hardware")} | {"note": note}
    rows = rows_of(*reports, by_test="--by-test" in words)
    results = DOCS / "results" / name
    results.write_text(json.dumps(joined(json.loads(results.read_text()), rows, run), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
