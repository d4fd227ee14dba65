"""Tests of the registry and the command of benchmarks; the commands in result files can be repeated."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import nestrec
from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.base.renamed_fields import with_present_names
from nestrec_bench.bench import BENCHES, Bench
from nestrec_bench.command import app, parse_config, run_bench

FORMER_BENCH_OPTIONS = {"front_processes": "frontend_workers"}
"""Former names of options of benchmarks in recorded commands, and their present names."""
RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


@config
class Squares:
    """Options of the benchmark."""

    numbers: tuple[int, ...] = (1, 2)
    """Numbers to square."""


def squares(bench: Squares) -> Generator[dict[str, Any], None, dict[str, Any]]:
    for number in bench.numbers:
        if number < 0:
            raise UserError("must not be negative", option="numbers", value=number, remedy="remove it")
        yield {"number": number, "square": number**2}
    return {"sum": sum(number**2 for number in bench.numbers)}


BENCH = Bench(config=Squares, measure=squares, argument="numbers")


@pytest.fixture(autouse=True)
def squares_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHES._built_in, "squares", f"{__name__}:BENCH")


def test_bench_result_file_has_rows_and_returned_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_bench("squares", ["3", "4"], tmp_path / "result.json")
    frame = json.loads((tmp_path / "result.json").read_text())
    assert frame["rows"] == [{"number": 3, "square": 9}, {"number": 4, "square": 16}]
    assert frame["sum"] == 25
    assert "16" in capsys.readouterr().out


def test_bench_interrupted_run_keeps_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must not be negative"):
        run_bench("squares", ["--numbers", "5", "--numbers", "-1"], tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["rows"] == [{"number": 5, "square": 25}]


def test_bench_rejects_unknown_options_and_pages(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unexpected argument"):
        parse_config("simulator", ["nested"])
    with pytest.raises(UserError, match="does not write a page"):
        run_bench("squares", [], page=tmp_path / "page.md")


def test_bench_help_is_module_docstring_with_example() -> None:
    for name in BENCHES:
        if name != "squares":
            text = CliRunner().invoke(app, [name, "--help"]).output
            assert f"nestrec bench {name} " in text, name


def test_bench_broken_plugin_does_not_affect_others(tmp_path: Path) -> None:
    (tmp_path / "broken_bench.py").write_text("BENCH = (\n")
    (tmp_path / "half-1.0.dist-info").mkdir()
    (tmp_path / "half-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 1.0\n")
    points = "[nestrec.benches]\nhalf = broken_bench:BENCH\nmissing = no_such_package.bench:BENCH\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def run(points: str, *words: str) -> tuple[int, str]:
        (tmp_path / "half-1.0.dist-info" / "entry_points.txt").write_text(points)
        command = [sys.executable, "-m", "nestrec", *words]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return process.returncode, process.stdout + process.stderr

    assert run(points, "--version") == (0, f"nestrec {nestrec.__version__}\n")
    code, output = run(points, "bench", "half")
    assert code == 2
    assert "nestrec.benches: half" in output
    assert "SyntaxError" in output
    assert "Traceback" not in output
    duplicate = "[nestrec.benches]\nsimulator = broken_bench:BENCH\n"
    assert run(duplicate, "--version")[0] == 0
    code, output = run(duplicate, "bench", "simulator")
    assert code == 2
    assert "two benchmarks have this name" in output
    assert "Traceback" not in output


def recorded_commands() -> list[str]:
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        frame = json.loads(path.read_text())
        found += [frame["command"], *(run["command"] for run in frame.get("runs", []))]
    return [command for command in dict.fromkeys(found) if command.startswith("nestrec bench ")]


def with_present_option(name: str, word: str) -> str:
    """Return a word of a recorded command; an option with a former name gets its present name."""
    if not word.startswith("--"):
        return word
    option, equals, value = word.removeprefix("--").partition("=")
    part = BENCHES.default_config(name, "config")
    present: list[str] = []
    for field in FORMER_BENCH_OPTIONS.get(option, option).split("."):
        (field_present,) = with_present_names(type(part), {field: None})
        present.append(field_present)
        part = getattr(part, field_present, None)
    return f"--{'.'.join(present)}{equals}{value}"


@pytest.mark.parametrize("command", recorded_commands())
def test_bench_commands_of_result_files_parse(command: str) -> None:
    _, _, name, *arguments = shlex.split(command)
    if name == "join":
        return
    for option in ("--json", "--page"):
        if option in arguments:
            index = arguments.index(option)
            del arguments[index : index + 2]
    parse_config(name, [with_present_option(name, word) for word in arguments])


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (lambda bench: None, r"squares=measure: its `measure` returned None instead of an iterable of rows"),
        (lambda bench: ["a row"], r"returned the row 'a row', which is not a mapping"),
        (lambda bench: [{"time": object()}], r"returned the row .* which cannot be encoded as JSON"),
    ],
    ids=["no_rows", "not_a_mapping", "not_json"],
)
def test_bench_plugin_with_invalid_rows_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measure: Any, message: str
) -> None:
    monkeypatch.setitem(BENCHES._loaded, "squares", Bench(config=Squares, measure=measure))
    with pytest.raises(UserError, match=message):
        run_bench("squares", [], tmp_path / "result.json")
    assert not (tmp_path / "result.json").exists()
