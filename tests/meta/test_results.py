"""Tables and charts match result files, result files are one per benchmark and machine, and scripts write them."""

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


def load_script(name: str) -> ModuleType:
    """Import a script of the documentation folder, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


result_tables = load_script("result_tables")
charts = load_script("charts")
test_reports = load_script("test_reports")


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name)
def test_page_tables_match_result_files(page: Path) -> None:
    text = page.read_text()
    assert result_tables.rewritten(text) == text, "run `make results`"


def test_result_tables_detect_changed_figure() -> None:
    page = (DOCS / "results" / "serving.md").read_text()
    start = page.index("<!-- table overload.json")
    changed = page[:start] + page[start:].replace("| 2x | ", "| 2x | 1", 1)
    assert changed != page
    assert result_tables.rewritten(changed) == page


def chart_paths(name: str) -> list[Path]:
    return [charts.FOLDER / f"{name}-{theme}.svg" for theme in ("light", "dark")]


@pytest.mark.parametrize("name", charts.CHARTS)
def test_chart_matches_result_files(name: str) -> None:
    chart = charts.CHARTS[name]()
    found = [charts.DIGEST.search(path.read_text()) for path in chart_paths(name)]
    assert [match and match[1] for match in found] == [chart.digest] * 2, "run `make results`"


def test_charts_are_on_pages() -> None:
    """Every chart is drawn by a function and shown by a page, in both variants."""
    files = {path.name for path in charts.FOLDER.iterdir()}
    assert files == {path.name for name in charts.CHARTS for path in chart_paths(name)}
    text = "".join(page.read_text() for page in PAGES)
    assert sorted(name for name in files if f"pictures/charts/{name}" not in text) == []


def test_chart_digest_depends_on_figures() -> None:
    chart = charts.CHARTS["peers-throughput"]()
    series = chart.panels[0].series[0]
    before = chart.digest
    series.values[0] += 1.0
    assert chart.digest != before


def test_chart_drawing_is_deterministic() -> None:
    pytest.importorskip("matplotlib")
    first, second = (charts.draw(charts.CHARTS["kv-cache-p99"](), "kv-cache-p99", "light") for _ in range(2))
    assert first == second


MAX_COLUMNS = 8


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_wide_tables_are_collapsed(page: Path) -> None:
    """Tables with more than eight columns are inside of collapsed blocks, which are indented."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line.replace(r"\|", "") for line in text.splitlines() if line.startswith("|")]
    assert [line for line in lines if line.strip().count("|") - 1 > MAX_COLUMNS] == []


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
"""Files of the same benchmark and machine with different experiments: other runs, other data, other papers."""


def test_result_files_are_linked_from_pages() -> None:
    named = set()
    for page in PAGES:
        text = page.read_text()
        links = re.findall(r"\]\(([^)#]+)", text)
        named |= {(page.parent / link).resolve() for link in links if "://" not in link}
        named |= {DOCS / "results" / source.partition("#")[0] for _, _, source, *_ in result_tables.BLOCK.findall(text)}
    named |= {DOCS / page for page in re.findall(r"results/\S+\.md", (DOCS.parent / "mkdocs.yml").read_text())}
    files = {path for path in (DOCS / "results").iterdir() if path.suffix in {".json", ".html", ".md"}}
    assert sorted(path.name for path in files - named) == []


def machines(frame: dict[str, Any]) -> set[str]:
    """Return the names of the machines that measured rows of a result file."""
    hardware = [run["hardware"] for run in frame.get("runs", [frame])]
    return {f"{one.get('gpus') or one.get('device') or one['cpu']}, {one['cores']} cores" for one in hardware}


def test_result_files_are_one_per_benchmark_and_machine() -> None:
    """New measurements replace earlier ones; `nestrec bench join` joins several commands in one file."""
    for (first, one), (second, other) in itertools.combinations(FRAMES.items(), 2):
        if one["bench"] == other["bench"] and machines(one) & machines(other):
            assert any({first, second} <= topic for topic in TOPICS), f"{first} and {second}: {one['bench']}"


def test_result_file_topics_have_one_benchmark_each() -> None:
    for topic in TOPICS:
        assert len({FRAMES[name]["bench"] for name in topic}) == 1


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return a function from a table marker to the lines of the table, for a small joined result file."""
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

    def write(marker: str, indent: str = "") -> list[str]:
        page = f"{indent}<!-- table {marker} -->\n{indent}<!-- /table -->"
        lines = result_tables.rewritten(page).splitlines()
        return [line for line in lines[1:-1] if line and not line.strip().startswith("| ---")]

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
def test_result_tables_select_join_and_pivot(
    written: Callable[[str], list[str]], marker: str, lines: list[str]
) -> None:
    assert [line for line in written(marker) if line.startswith("|")] == lines


def test_result_tables_name_the_runs_of_their_rows(written: Callable[[str], list[str]]) -> None:
    first, second = (
        "`nestrec bench x --n 1`, 2026-11-15 11:55 UTC, abacus, 2 cores",
        "`y`, 2026-11-16 01:02 UTC, H, 2 cores, one turn",
    )
    assert written("x.json: ms where impl=a")[-1] == first
    title = '??? note "Measured on abacus, 2 cores; H, 2 cores, 2026-11-15 to 2026-11-16"'
    assert written("x.json: ms")[-3:] == [title, f"    - {first}", f"    - {second}"]


def test_result_tables_indent_equally(written: Callable[..., list[str]]) -> None:
    """A table inside of a collapsed block is indented like its markers, and updated again without changes."""
    plain, indented = written("x.json: impl, ms"), written("x.json: impl, ms", indent="    ")
    assert indented == [f"    {line}" for line in plain]
    page = "    <!-- table x.json: impl, ms -->\n    <!-- /table -->\n"
    text = result_tables.rewritten(page)
    assert result_tables.rewritten(text) == text
    assert "-->\n\n    | impl |" in text, "Markdown needs a blank line before a table in a collapsed block"


def test_result_tables_reject_missing_and_duplicate_rows(written: Callable[[str], list[str]]) -> None:
    with pytest.raises(ValueError, match="no row"):
        written("x.json: ms where impl=z")
    with pytest.raises(ValueError, match="two rows"):
        written("x.json: size, impl by size where size=1")


def test_slow_test_report_merges_with_earlier_results() -> None:
    """Files that ran again have new rows; the rows of other files refer to their earlier run."""
    xml = """<testsuites><testsuite>
        <testcase classname="tests.multi.test_a.TestX" name="a" time="1.5"/>
        <testcase classname="tests.multi.test_a" name="b" time="2"><failure/></testcase>
        <testcase classname="tests.unit.base.test_b" name="c" time="0.1"><skipped/></testcase>
    </testsuite></testsuites>"""
    rows = test_reports.rows_of(xml)
    values = [[row[name] for name in ("file", "cases", "passed", "failed", "skipped", "seconds")] for row in rows]
    assert values == [["tests/multi/test_a.py", 2, 1, 1, 0, 4], ["tests/unit/base/test_b.py", 1, 0, 0, 1, 0]]
    old = [{"file": "tests/multi/test_a.py", "what": "a grid", "run": 0}, {"file": "tests/multi/test_z.py", "run": 1}]
    known = {"rows": old, "runs": [{"date": "first"}, {"date": "second"}], "command": "before"}
    found = test_reports.joined(known, rows, {"command": "now", "date": "third"})
    assert [(row["file"], found["runs"][row["run"]]["date"]) for row in found["rows"]] == [
        ("tests/multi/test_a.py", "third"),
        ("tests/multi/test_z.py", "second"),
        ("tests/unit/base/test_b.py", "third"),
    ]
    assert len(found["runs"]) == 2
    assert found["rows"][0]["what"] == "a grid", "the subject of a file is preserved"


def test_slow_test_report_accepts_interrupted_run() -> None:
    xml = """<testsuite><testcase classname="tests.multi.test_a" name="test_x" time="1"/><testcase time="0.1"/>
        <testcase classname="" name="tests.serve.test_b" time="0"><error/></testcase>
        <testcase classname="" name="tests.serve.test_c" time="0"><skipped/></testcase></testsuite>"""
    rows = [(row["file"], row["passed"], row["failed"]) for row in test_reports.rows_of(xml, by_test=True)]
    assert rows == [("tests/multi/test_a.py::test_x", 1, 0), ("tests/serve/test_b.py", 0, 1)]


def test_slow_test_report_by_test_until_file_runs() -> None:
    xml = """<testsuite><testcase classname="tests.multi.test_a" name="test_x[1]" time="1"/>
        <testcase classname="tests.multi.test_a" name="test_x[2]" time="1"/></testsuite>"""
    rows = test_reports.rows_of(xml, xml.replace("test_x", "test_y"), by_test=True)
    assert [(row["file"], row["cases"]) for row in rows] == [
        ("tests/multi/test_a.py::test_x", 2),
        ("tests/multi/test_a.py::test_y", 2),
    ]
    known = {"rows": [{"file": "tests/multi/test_a.py", "cases": 9, "run": 0}], "runs": [{"date": "first"}]}
    by_test = test_reports.joined(known, rows, {"date": "second"})
    assert [row["cases"] for row in by_test["rows"]] == [9, 2, 2]
    complete = test_reports.joined(by_test, test_reports.rows_of(xml), {"date": "third"})
    assert [(row["file"], row["cases"]) for row in complete["rows"]] == [("tests/multi/test_a.py", 2)]
    assert complete["runs"] == [{"date": "third"}]


def test_slow_test_report_names_duration_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The duration is wall-clock time, which is less than the sum over tests that run in parallel."""
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
