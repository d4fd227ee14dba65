"""A bench is one file and one entry; what it wrote can be repeated."""

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
from nestrec_bench.bench import BENCHES, Bench
from nestrec_bench.command import app, configured, run_bench

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


@config
class Squares:
    numbers: tuple[int, ...] = (1, 2)
    """to be squared"""


def squares(bench: Squares) -> Generator[dict[str, Any], None, dict[str, Any]]:
    for number in bench.numbers:
        if number < 0:
            raise UserError("is negative", option="numbers", value=number, remedy="give none below 0")
        yield {"number": number, "square": number**2}
    return {"sum": sum(number**2 for number in bench.numbers)}


BENCH = Bench(config=Squares, measure=squares, argument="numbers")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHES._built_in, "squares", f"{__name__}:BENCH")


def test_rows_and_what_the_measurement_returned_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_bench("squares", ["3", "4"], tmp_path / "result.json")
    frame = json.loads((tmp_path / "result.json").read_text())
    assert frame["rows"] == [{"number": 3, "square": 9}, {"number": 4, "square": 16}]
    assert frame["sum"] == 25
    assert "16" in capsys.readouterr().out


def test_a_run_that_is_cut_keeps_the_rows_it_has(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is negative"):
        run_bench("squares", ["--numbers", "5", "--numbers", "-1"], tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["rows"] == [{"number": 5, "square": 25}]


def test_words_without_a_field_and_pages_without_a_writer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not belong to an option"):
        configured("simulator", ["nested"])
    with pytest.raises(UserError, match="has no page"):
        run_bench("squares", [], page=tmp_path / "page.md")


def test_help_of_a_bench_is_its_docstring_with_an_example() -> None:
    for name in BENCHES:
        if name != "squares":
            text = CliRunner().invoke(app, [name, "--help"]).output
            assert f"nestrec bench {name} " in text, name


def test_benches_of_others_that_cannot_be_read_end_no_other_command(tmp_path: Path) -> None:
    (tmp_path / "half_a_bench.py").write_text("BENCH = (\n")
    (tmp_path / "half-1.0.dist-info").mkdir()
    (tmp_path / "half-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 1.0\n")
    points = "[nestrec.benches]\nhalf = half_a_bench:BENCH\ngone = no_such_package.bench:BENCH\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def run(points: str, *words: str) -> tuple[int, str]:
        (tmp_path / "half-1.0.dist-info" / "entry_points.txt").write_text(points)
        command = [sys.executable, "-m", "nestrec", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert run(points, "--version") == (0, f"nestrec {nestrec.__version__}\n")
    code, said = run(points, "bench", "half")
    assert (code, "nestrec.benches: half" in said, "SyntaxError" in said, "Traceback" in said) == (2, True, True, False)
    twice = "[nestrec.benches]\nsimulator = half_a_bench:BENCH\n"
    assert run(twice, "--version")[0] == 0
    code, said = run(twice, "bench", "simulator")
    assert (code, "of one name" in said, "Traceback" in said) == (2, True, False)


def commands() -> list[str]:
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        frame = json.loads(path.read_text())
        found += [frame["command"], *(run["command"] for run in frame.get("runs", []))]
    return [command for command in dict.fromkeys(found) if command.startswith("nestrec bench ")]


@pytest.mark.parametrize("command", commands())
def test_the_command_of_every_result_file_still_parses(command: str) -> None:
    _, _, name, *arguments = shlex.split(command)
    if name == "join":
        return
    for option in ("--json", "--page"):
        if option in arguments:
            place = arguments.index(option)
            del arguments[place : place + 2]
    configured(name, arguments)


@pytest.mark.parametrize(
    ("measure", "said"),
    [
        (lambda bench: None, r"squares=measure: its `measure` gives None, which holds no rows"),
        (lambda bench: ["a row"], r"gives the row 'a row', which is no mapping"),
        (lambda bench: [{"time": object()}], r"gives the row .* which no result file can hold"),
    ],
)
def test_a_measurement_whose_rows_cannot_be_kept_is_named_at_its_first_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measure: Any, said: str
) -> None:
    monkeypatch.setitem(BENCHES._loaded, "squares", Bench(config=Squares, measure=measure))
    with pytest.raises(UserError, match=said):
        run_bench("squares", [], tmp_path / "result.json")
    assert not (tmp_path / "result.json").exists()
