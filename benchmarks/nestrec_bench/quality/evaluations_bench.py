"""What `nestrec train` or `nestrec eval` measured on the test part of runs of any task, model and baselines.

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
    """One row a run and system: recipe, dataset, seed, and each metric with its interval where it has one."""
    return [row for run in runs for row in _rows_of(run)]


def _rows_of(run: Path) -> Iterator[dict[str, Any]]:
    tested = run / "eval" / "test.json"
    remedy = "let `nestrec train` finish, or run `nestrec eval`"
    require(tested.exists(), "has not been measured on its test part", option="RUN", value=str(run), remedy=remedy)
    config, card = (json.loads(p.read_text()) for p in (run / "config.json", run / "card.json"))
    found = read_evaluation(tested)
    for system, metrics in found["metrics"].items():
        row = {"recipe": config["name"], "dataset": card["name"], "seed": config["training"]["seed"], "system": system}
        for name, (mean, low, high) in metrics.items():
            row[name] = round(mean, 5)
            if not math.isnan(low):
                row[f"{name}_interval"] = [round(low, 5), round(high, 5)]
        yield row


def by_recipe(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows for a table of each recipe, without its name and without intervals."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        shown = {k: v for k, v in row.items() if k not in ("recipe", "dataset") and not k.endswith("_interval")}
        tables.setdefault(f"{row['recipe']} on {row['dataset']}", []).append(shown)
    return tables


@config
class EvaluationsBench:
    runs: tuple[str, ...] = ()
    """tested runs of any task"""


BENCH = Bench(
    config=EvaluationsBench,
    measure=lambda bench: evaluation_rows([Path(run) for run in bench.runs]),
    show=lambda rows, more: by_recipe(rows).items(),
    argument="runs",
)
