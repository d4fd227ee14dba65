"""Writes the results of slow tests and GPU tests to a file of results/, from the JUnit reports of pytest.

    python docs/test_reports.py slow-tests.json test-slow.xml ... ["command that wrote them"] [--by-test]

`make test-slow` and `make test-gpu` call it. A row is a test file, or with --by-test a test, if only some tests of a
file ran. New results replace older ones of the same files and tests; other rows stay. Each row refers to its run:
command, date, hardware, duration and commit.
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
    """Return one row per test file, or per test, of JUnit reports: number of cases, outcomes and seconds."""
    counts: dict[str, Counter[str]] = {}
    seconds: dict[str, float] = {}
    for case in (case for xml in reports for case in ElementTree.fromstring(xml).iter("testcase")):
        tags = {child.tag for child in case}
        classname = case.get("classname")
        words = (classname or case.attrib.get("name", "")).split(".")
        module = next((n for n, word in enumerate(words, 1) if word.startswith("test_")), 0)
        if module == 0 or not (classname or tags & {"failure", "error"}):
            continue  # an interrupted test, or a file without tests for this machine
        file = "/".join(words[:module]) + ".py"
        if by_test and classname:
            file += "::" + case.attrib["name"].partition("[")[0]
        outcome = "failed" if tags & {"failure", "error"} else "passed"
        if "skipped" in tags:
            outcome = "skipped"
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
    """Return the known results, in which the rows of a new run replace older ones of the same files."""
    replaced = {row["file"] for row in rows}
    subjects = {row["file"]: {"what": row["what"]} for row in known["rows"] if "what" in row}
    older = [row for row in known["rows"] if not {row["file"], row["file"].partition("::")[0]} & replaced]
    used = sorted({row["run"] for row in older})
    older = [{**row, "run": used.index(row["run"])} for row in older]
    new = [{"file": row["file"], **subjects.get(row["file"], {}), **row, "run": len(used)} for row in rows]
    merged = sorted(older + new, key=lambda row: row["file"])
    return {**known, **run, "rows": merged, "runs": [*(known["runs"][number] for number in used), run]}


def wall_of(*reports: str) -> int:
    """Return the total wall-clock time of all reports in seconds; tests of one report may have run in parallel."""
    suites = (suite for xml in reports for suite in ElementTree.fromstring(xml).iter("testsuite"))
    return round(sum(float(suite.attrib.get("time", 0.0)) for suite in suites))


def commit() -> str:
    """Return the commit of the working tree, marked if it has changes; empty outside of a repository."""
    command = ["git", "-C", str(DOCS), "describe", "--always", "--dirty=, changed"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main(words: list[str]) -> None:
    name, *others = (word for word in words if word != "--by-test")
    reports = [Path(word).read_text() for word in others if word.endswith(".xml")]
    command = next((word for word in others if not word.endswith(".xml")), COMMANDS[name])
    frame = make_frame(bench=name.removesuffix(".json").replace("-", " "), command=command, rows=[])
    note = ", ".join(part for part in (f"{wall_of(*reports)} s in all", f"commit {commit()}") if part != "commit ")
    run = {name: frame[name] for name in ("command", "date", "hardware")} | {"note": note}
    rows = rows_of(*reports, by_test="--by-test" in words)
    results = DOCS / "results" / name
    results.write_text(json.dumps(joined(json.loads(results.read_text()), rows, run), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
