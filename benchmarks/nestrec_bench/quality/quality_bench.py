"""The tests of finished runs: means of seeds with intervals over users, baselines, and paired differences.

It trains nothing: the runs were made by `nestrec train`, on a machine whose facts they carry.

    nestrec bench quality runs/beauty --pair hstu:sasrec --page quality.md
"""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nestrec.base.config import config
from nestrec.base.errors import UserError, require
from nestrec.report.result_file import make_frame
from nestrec_bench.bench import Bench, More, Row, Shown
from nestrec_bench.pages.quality_page import comparison_rows, quality_page, quality_rows

MACHINE = {"device": "device", "cores": "cpu_count", "python": "python", "torch": "torch", "system": "platform"}
"""Name in a result file to name among the versions of a run."""


def quality_frame(runs: Sequence[Path], pairs: Sequence[str], *, command: str) -> dict[str, Any]:
    """The content of the result file: a row a recipe, and under `comparisons` a row a pair.

    runs: run folders, or folders of run folders. pairs: `A:B` compares recipe A with recipe B.
    """
    folders = [folder for path in runs for folder in run_folders(path)]
    rows = quality_rows(folders)
    machine = trained_on(folders)
    frame = make_frame(bench="quality", command=command, rows=rows, measured_on=machine)
    return frame | {"comparisons": comparison_rows(folders, [parse_pair(pair) for pair in pairs])}


def run_folders(path: Path) -> Iterator[Path]:
    """The run itself, or the runs in a folder by name."""
    found = [path] if _is_run(path) else sorted(filter(_is_run, path.iterdir())) if path.is_dir() else []
    remedy = "name folders that `nestrec train` wrote, or a folder that holds them"
    require(found, "holds no run", option="RUN", value=str(path), remedy=remedy)
    yield from found


def parse_pair(text: str) -> tuple[str, str]:
    """`A:B` as (A, B)."""
    first, colon, second = text.partition(":")
    if not (first and colon and second):
        raise UserError("is no pair of recipes", option="--pair", value=text, remedy="write RECIPE:OTHER_RECIPE")
    return first, second


def trained_on(runs: Sequence[Path]) -> dict[str, Any]:
    """The machine of the runs; where they were made on several, a field lists all its values."""
    versions = [json.loads((run / "versions.json").read_text()) for run in runs]
    machine: dict[str, Any] = {}
    for name, source in MACHINE.items():
        values = list(dict.fromkeys(version.get(source) for version in versions))
        machine[name] = values[0] if len(values) == 1 else values
    return machine


def short_rows(rows: Sequence[Mapping[str, Any]], suffix: str = "") -> list[dict[str, Any]]:
    """What fits a terminal: the recipes, the number of seeds, and two metrics with their intervals."""
    short = []
    for row in rows:
        recipe = f"{row['recipe']}\n- {row['against']}" if "against" in row else row["recipe"]
        cells = {name: _with_interval(row, f"{name}{suffix}") for name in ("recall@10", "ndcg@10")}
        short.append({"recipe": recipe, "seeds": len(row["seeds"]), **cells})
    return short


def write_page(path: Path, frame: Mapping[str, Any]) -> None:
    """Put the tables into a page; what stands around them is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(quality_page(frame, path.read_text() if path.exists() else None))


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return "-"
    low, high = row[f"{name}_interval"]
    return f"{row[name]:.4f}\n[{low:.4f}, {high:.4f}]"


def _is_run(path: Path) -> bool:
    return (path / "config.json").is_file()


@config
class QualityBench:
    runs: tuple[str, ...] = ()
    """tested runs, or folders of them"""
    pair: tuple[str, ...] = ()
    """RECIPE:OTHER, compared user by user"""


def _measure(bench: QualityBench) -> Generator[Row, None, More]:
    frame = quality_frame([Path(run) for run in bench.runs], bench.pair, command="")
    yield from frame["rows"]
    return {name: frame[name] for name in ("hardware", "comparisons")}


def _show(rows: Sequence[Row], more: More) -> list[Shown]:
    means = "quality, mean of seeds [95% interval over users]", short_rows(rows)
    return [means, ("paired differences", short_rows(more["comparisons"], "_difference"))]


BENCH = Bench(config=QualityBench, measure=_measure, show=_show, page=write_page, argument="runs")
