"""Summarize the test metrics of finished runs: means over seeds with intervals over users, and paired differences.

The benchmark trains nothing: `nestrec train` wrote the runs, and the machine is read from their folders.

    nestrec bench quality runs/beauty --pair hstu:sasrec --page quality.md
"""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nestrec.base.config import config
from nestrec.base.errors import UserError, require
from nestrec.report.result_file import make_frame
from nestrec_bench.bench import Bench, ExtraFields, OutputPart, Row
from nestrec_bench.pages.quality_page import comparison_rows, quality_page, quality_rows

MACHINE = {"device": "device", "cores": "cpu_count", "python": "python", "torch": "torch", "system": "platform"}
"""Name in a result file to name in the versions of a run."""


def quality_frame(runs: Sequence[Path], pairs: Sequence[str], *, command: str) -> dict[str, Any]:
    """Return the content of the result file: one row per recipe, and under `comparisons` one row per pair.

    Args:
        runs: Run folders, or folders of run folders.
        pairs: Pairs to compare: `A:B` compares recipe A with recipe B.
        command: Command to record in the file.
    """
    folders = [folder for path in runs for folder in run_folders(path)]
    rows = quality_rows(folders)
    machine = trained_on(folders)
    frame = make_frame(bench="quality", command=command, rows=rows, measured_on=machine)
    return frame | {"comparisons": comparison_rows(folders, [parse_pair(pair) for pair in pairs])}


def run_folders(path: Path) -> Iterator[Path]:
    """Yield the run folder itself, or the run folders in a folder, sorted by name."""
    found = [path]
    if not _is_run(path):
        found = sorted(filter(_is_run, path.iterdir())) if path.is_dir() else []
    remedy = "name folders that `nestrec train` wrote, or a folder that contains them"
    require(found, "the folder does not contain a run", option="RUN", value=str(path), remedy=remedy)
    yield from found


def parse_pair(text: str) -> tuple[str, str]:
    """Parse `A:B` to (A, B)."""
    first, colon, second = text.partition(":")
    if not (first and colon and second):
        problem = "expected two recipes with a colon between them"
        raise UserError(problem, option="--pair", value=text, remedy="write RECIPE:OTHER_RECIPE")
    return first, second


def trained_on(runs: Sequence[Path]) -> dict[str, Any]:
    """Return the machine of the runs; if there are several machines, a field lists all its values."""
    versions = [json.loads((run / "versions.json").read_text()) for run in runs]
    machine: dict[str, Any] = {}
    for name, source in MACHINE.items():
        values = list(dict.fromkeys(version.get(source) for version in versions))
        machine[name] = values[0] if len(values) == 1 else values
    return machine


def short_rows(rows: Sequence[Mapping[str, Any]], suffix: str = "") -> list[dict[str, Any]]:
    """Return the recipes, the number of seeds, and two metrics with their intervals, for a terminal."""
    short = []
    for row in rows:
        recipe = f"{row['recipe']}\n- {row['against']}" if "against" in row else row["recipe"]
        cells = {name: _with_interval(row, f"{name}{suffix}") for name in ("recall@10", "ndcg@10")}
        short.append({"recipe": recipe, "seeds": len(row["seeds"]), **cells})
    return short


def write_page(path: Path, frame: Mapping[str, Any]) -> None:
    """Write the tables into a page and preserve the text around them."""
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
class QualityBenchConfig:
    runs: tuple[str, ...] = ()
    """Evaluated runs, or folders of them."""
    pair: tuple[str, ...] = ()
    """Recipes to compare user by user, as RECIPE:OTHER."""


def _measure(bench: QualityBenchConfig) -> Generator[Row, None, ExtraFields]:
    frame = quality_frame([Path(run) for run in bench.runs], bench.pair, command="")
    yield from frame["rows"]
    return {name: frame[name] for name in ("hardware", "comparisons")}


def _show(rows: Sequence[Row], more: ExtraFields) -> list[OutputPart]:
    means = "quality, mean of seeds [95% interval over users]", short_rows(rows)
    return [means, ("paired differences", short_rows(more["comparisons"], "_difference"))]


BENCH = Bench(config=QualityBenchConfig, measure=_measure, show=_show, page=write_page, argument="runs")
