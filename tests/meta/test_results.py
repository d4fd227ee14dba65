"""Pages say what the result files say, and there is one current file for a bench and machine."""

import importlib.util
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def script(name: str) -> ModuleType:
    """A script of the documentation, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


result_tables, test_reports = script("result_tables"), script("test_reports")


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name)
def test_tables_of_pages_are_those_of_their_result_files(page: Path) -> None:
    text = page.read_text()
    assert result_tables.rewritten(text) == text, "run `make results`"


def test_a_changed_figure_is_noticed() -> None:
    page = (DOCS / "results" / "serving.md").read_text()
    start = page.index("<!-- table overload.json")
    changed = page[:start] + page[start:].replace("| 2x | ", "| 2x | 1", 1)
    assert changed != page
    assert result_tables.rewritten(changed) == page


FRAMES = {path.name: json.loads(path.read_text()) for path in sorted((DOCS / "results").glob("*.json"))}
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]

TOPICS = (
    {"quality.json", "negatives-quality.json", "nested-quality.json"},
    {"demo.json", "ranking.json"},
    {"front.json", "front-processes.json"},
    {"relay.json", "serving.json"},
    {"relay-cpu.json", "relay-emulated.json"},
    {"checkpoint.json", "checkpoint_busy.json"},
)
"""Files of one bench and machine that are different experiments: other runs, other data, other papers."""


def test_every_file_of_results_is_linked_from_a_page() -> None:
    named = set()
    for page in PAGES:
        text = page.read_text()
        links = re.findall(r"\]\(([^)#]+)", text)
        named |= {(page.parent / link).resolve() for link in links if "://" not in link}
        named |= {DOCS / "results" / source.partition("#")[0] for _, source, *_ in result_tables.BLOCK.findall(text)}
    named |= {DOCS / page for page in re.findall(r"results/\S+\.md", (DOCS.parent / "mkdocs.yml").read_text())}
    files = {path for path in (DOCS / "results").iterdir() if path.suffix in {".json", ".html", ".md"}}
    assert sorted(path.name for path in files - named) == []


def machines(frame: dict[str, Any]) -> set[str]:
    """Names of the machines that gave rows of a result file."""
    hardware = [run["hardware"] for run in frame.get("runs", [frame])]
    return {f"{one.get('gpus') or one.get('device') or one['cpu']}, {one['cores']} cores" for one in hardware}


def test_a_bench_has_one_file_a_machine() -> None:
    """What was measured again replaces what it repeats; `nestrec bench join` puts several commands into one file."""
    for (first, one), (second, other) in itertools.combinations(FRAMES.items(), 2):
        if one["bench"] == other["bench"] and machines(one) & machines(other):
            assert any({first, second} <= topic for topic in TOPICS), f"{first} and {second}: {one['bench']}"


def test_topics_are_of_one_bench_and_exist() -> None:
    for topic in TOPICS:
        assert len({FRAMES[name]["bench"] for name in topic}) == 1


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """The lines that a marker gives, of a small joined file."""
    hardware = {"cpu": "abacus", "cores": 2}
    rows = [
        {"impl": "a", "size": 1, "ms": 0.25, "spread": [0.2, 0.31], "parts": {"sum": {"ms": 1234.5}}, "run": 0},
        {"impl": "a", "size": 2, "ms": 0.00001, "run": 0},
        {"impl": "b", "size": 1, "ms": 12.3456, "is_new": True, "run": 1},
    ]
    runs = [
        {"command": "nestrec bench x --json x.json --n 1", "date": "2026-11-15T11:55:25+00:00", "hardware": hardware},
        {
            "command": "y",
            "date": "2026-11-16T01:02:03+00:00",
            "hardware": {**hardware, "gpus": ["H"]},
            "note": "one turn",
        },
    ]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "x.json").write_text(
        json.dumps({"rows": rows, "runs": runs, "pairs": rows[:1], "total": {"ms": 7}})
    )
    monkeypatch.setattr(result_tables, "DOCS", tmp_path)

    def write(marker: str) -> list[str]:
        lines = result_tables.rewritten(f"<!-- table {marker} -->\n<!-- /table -->").splitlines()
        return [line for line in lines[1:-1] if line and not line.startswith("| ---")]

    return write


@pytest.mark.parametrize(
    ("marker", "lines"),
    [
        ("x.json: impl, ms + spread as s where run=0", ["| impl | s |", "| a | 0.25 [0.2, 0.31] |", "| a | 1e-05 |"]),
        ("x.json: parts.sum.ms as s, ms ± size where size!=2 and is_new=None", ["| s | ms |", "| 1,234 | 0.25 ± 1 |"]),
        ("x.json: impl, ms by size", ["| impl | 1 | 2 |", "| a | 0.25 | 1e-05 |", "| b | 12.35 |  |"]),
        ("x.json: is_new where impl=b|c", ["| is_new |", "| yes |"]),
        ("x.json#pairs: impl", ["| impl |", "| a |"]),
        ("x.json#total: ms", ["| ms |", "| 7 |"]),
    ],
)  # fmt: skip
def test_cells_are_chosen_joined_and_spread(written: Callable[[str], list[str]], marker: str, lines: list[str]) -> None:
    assert written(marker)[:-1] == lines


def test_a_table_names_the_runs_of_its_rows_and_no_others(written: Callable[[str], list[str]]) -> None:
    first, second = (
        "`nestrec bench x --n 1`, 2026-11-15 11:55 UTC, abacus, 2 cores",
        "`y`, 2026-11-16 01:02 UTC, H, 2 cores, one turn",
    )
    assert written("x.json: ms where impl=a")[-1] == first
    assert written("x.json: ms")[-1] == f"{first}; {second}"


def test_tables_without_rows_or_with_two_for_a_cell_are_refused(written: Callable[[str], list[str]]) -> None:
    with pytest.raises(ValueError, match="no row"):
        written("x.json: ms where impl=z")
    with pytest.raises(ValueError, match="two rows"):
        written("x.json: size, impl by size where size=1")


def test_what_the_long_tests_gave_is_joined_with_what_is_known() -> None:
    """Files that ran again have new rows; the others keep the run that they are of."""
    xml = """<testsuites><testsuite>
        <testcase classname="tests.multi.test_a.TestX" name="a" time="1.5"/>
        <testcase classname="tests.multi.test_a" name="b" time="2"><failure/></testcase>
        <testcase classname="tests.unit.base.test_b" name="c" time="0.1"><skipped/></testcase>
    </testsuite></testsuites>"""
    rows = test_reports.rows_of(xml)
    ended = [[row[name] for name in ("file", "cases", "passed", "failed", "skipped", "seconds")] for row in rows]
    assert ended == [["tests/multi/test_a.py", 2, 1, 1, 0, 4], ["tests/unit/base/test_b.py", 1, 0, 0, 1, 0]]
    old = [{"file": "tests/multi/test_a.py", "what": "a grid", "run": 0}, {"file": "tests/multi/test_z.py", "run": 1}]
    known = {"rows": old, "runs": [{"date": "first"}, {"date": "second"}], "command": "before"}
    found = test_reports.joined(known, rows, {"command": "now", "date": "third"})
    assert [(row["file"], found["runs"][row["run"]]["date"]) for row in found["rows"]] == [
        ("tests/multi/test_a.py", "third"),
        ("tests/multi/test_z.py", "second"),
        ("tests/unit/base/test_b.py", "third"),
    ]
    assert len(found["runs"]) == 2
    assert found["rows"][0]["what"] == "a grid", "of what it is stays known"


def test_a_report_that_was_cut_short_tells_what_ran_and_files_that_could_not_be_read() -> None:
    xml = """<testsuite><testcase classname="tests.multi.test_a" name="test_x" time="1"/><testcase time="0.1"/>
        <testcase classname="" name="tests.serve.test_b" time="0"><error/></testcase>
        <testcase classname="" name="tests.serve.test_c" time="0"><skipped/></testcase></testsuite>"""
    rows = [(row["file"], row["passed"], row["failed"]) for row in test_reports.rows_of(xml, by_test=True)]
    assert rows == [("tests/multi/test_a.py::test_x", 1, 0), ("tests/serve/test_b.py", 0, 1)]


def test_some_tests_of_a_file_have_rows_of_their_own_until_the_whole_file_runs() -> None:
    xml = """<testsuite><testcase classname="tests.multi.test_a" name="test_x[1]" time="1"/>
        <testcase classname="tests.multi.test_a" name="test_x[2]" time="1"/></testsuite>"""
    rows = test_reports.rows_of(xml, xml.replace("test_x", "test_y"), by_test=True)
    assert [(row["file"], row["cases"]) for row in rows] == [
        ("tests/multi/test_a.py::test_x", 2),
        ("tests/multi/test_a.py::test_y", 2),
    ]
    known = {"rows": [{"file": "tests/multi/test_a.py", "cases": 9, "run": 0}], "runs": [{"date": "first"}]}
    some = test_reports.joined(known, rows, {"date": "second"})
    assert [row["cases"] for row in some["rows"]] == [9, 2, 2]
    whole = test_reports.joined(some, test_reports.rows_of(xml), {"date": "third"})
    assert [(row["file"], row["cases"]) for row in whole["rows"]] == [("tests/multi/test_a.py", 2)]
    assert whole["runs"] == [{"date": "third"}]


def test_a_report_gives_a_run_that_says_how_long_it_took_by_the_clock_and_of_which_commit_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side, tests take more seconds together than the clock goes on."""
    results = tmp_path / "results" / "gpu-tests.json"
    results.parent.mkdir()
    results.write_text(json.dumps({"rows": [], "runs": []}))
    report = tmp_path / "test-gpu.xml"
    cases = "".join(f'<testcase classname="tests.gpu.test_{name}_gpu" name="a" time="40"/>' for name in "ab")
    report.write_text(f'<testsuites><testsuite time="41.2">{cases}</testsuite></testsuites>')
    monkeypatch.setattr(test_reports, "DOCS", tmp_path)
    monkeypatch.setattr(test_reports, "commit", lambda: "abc123")
    test_reports.main(["gpu-tests.json", str(report)])
    found = json.loads(results.read_text())
    assert (found["command"], found["note"]) == ("make test-gpu", "41 s in all, commit abc123")
    assert [(row["file"], row["seconds"]) for row in found["rows"]] == [
        ("tests/gpu/test_a_gpu.py", 40),
        ("tests/gpu/test_b_gpu.py", 40),
    ]
    assert found["runs"][0]["hardware"]["cores"]
