"""Collect the test metrics of finished runs of any task, for the model and its baselines.

nestrec bench evaluations runs/demo
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nestrec.base.config import config
from nestrec.base.errors import require
from nestrec.training.run_folder import read_evaluation
from nestrec_bench.bench import Bench


def evaluation_rows(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Return one row per run and system: recipe, dataset, seed, and each metric with its interval if it has one."""
    return [row for run in runs for row in _run_rows(run)]


def _run_rows(run: Path) -> Iterator[dict[str, Any]]:
    result = run / "eval" / "test.json"
    problem = "the run has not been evaluated on the test set"
    remedy = "wait for `nestrec train` to finish, or run `nestrec eval`"
    require(result.exists(), problem, option="RUN", value=str(run), remedy=remedy)
    config, card = (json.loads(p.read_text()) for p in (run / "config.json", run / "card.json"))
    found = read_evaluation(result)
    for system, metrics in found["metrics"].items():
        row = {"recipe": config["name"], "dataset": card["name"], "seed": config["training"]["seed"], "system": system}
        for name, (mean, low, high) in metrics.items():
            row[name] = round(mean, 5)
            if not math.isnan(low):
                row[f"{name}_interval"] = [round(low, 5), round(high, 5)]
        yield row


def by_recipe(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group the rows into one table per recipe, without its name and without intervals."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        shown = {k: v for k, v in row.items() if k not in ("recipe", "dataset") and not k.endswith("_interval")}
        tables.setdefault(f"{row['recipe']} on {row['dataset']}", []).append(shown)
    return tables


@config
class EvaluationsBenchConfig:
    runs: tuple[str, ...] = ()
    """Evaluated runs of any task."""


BENCH = Bench(
    config=EvaluationsBenchConfig,
    measure=lambda bench: evaluation_rows([Path(run) for run in bench.runs]),
    show=lambda rows, more: by_recipe(rows).items(),
    argument="runs",
)
