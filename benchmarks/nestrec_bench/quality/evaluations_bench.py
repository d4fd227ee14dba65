"""What `nestrec train` or `nestrec eval` measured on the test part of runs of any task, model and baselines.

nestrec bench evaluations runs/demo

What features bring: datasets with them and by ids alone, over seeds; and recipes by hand beside `train auto`.

nestrec bench features --data data --what kuairand,ml_100k --seeds 1,2,3 --json docs/results/features.json
nestrec bench features --data data --what auto_ml_100k,auto_criteo --seeds 1

`--data` holds the prepared datasets by the names of their recipes' folders. Runs that have ended are not trained again:
commands with `--inputs ids --seeds 1` and the like may train beside each other, one with all of them tells the rows.

Is it worth following? Window by window of time: a model frozen after the first part, trained anew, and followed.

nestrec bench fresh --recipe kuairand_ranking --folder data/kuairand-pure --hours 24 --metric auc/click
"""

import json
import math
import tempfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.report.formatting import verdict_on
from nestrec.tasks.metrics import RARE
from nestrec.training.run_folder import read_evaluation
from nestrec_bench.bench import Bench, More, Row
from nestrec_bench.pages.quality_page import comparison_rows, has_ranks
from nestrec_bench.quality.fresh_comparison import FreshComparison, compared
from nestrec_bench.quality.input_comparison import InputComparison, Tested, experiment_of, rows_of, runs_of, tested
from nestrec_bench.quality.quality_bench import trained_on


def evaluation_rows(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """One row a run and system: recipe, dataset, seed, and each metric with its interval where it has one."""
    return [row for run in runs for row in _rows_of(run)]


def _rows_of(run: Path) -> Iterator[dict[str, Any]]:
    tested = run / "eval" / "test.json"
    if not tested.exists():
        remedy = "let `nestrec train` finish, or run `nestrec eval`"
        raise UserError("has not been measured on its test part", field="RUN", value=str(run), remedy=remedy)
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


def _measure_features(bench: InputComparison) -> Generator[Row, None, More]:
    all_runs: list[Path] = []
    comparisons, verdicts = [], []
    for name in bench.what:
        runs = runs_of(bench, name)
        found = {inputs: [tested(run) for run in of] for inputs, of in runs.items()}
        yield from rows_of(name, experiment_of(name), found)
        flat = [run for of in runs.values() for run in of]
        verdicts += [_verdict(name, inputs, one) for inputs, of in found.items() for one in of]
        if len(runs) > 1 and all(map(has_ranks, flat)):
            base, *others = (of[0]["name"] for of in found.values())
            pairs = [(other, base) for other in others]
            parts = {"all": comparison_rows(flat, pairs), f"at most {RARE} events": comparison_rows(flat, pairs, RARE)}
            comparisons += [{"what": name, "part": part, **row} for part, found in parts.items() for row in found]
        all_runs += flat
    return {"hardware": trained_on(all_runs), "comparisons": comparisons, "verdicts": verdicts}


def _verdict(name: str, inputs: str, of: Tested) -> Row:
    """A run beside the best of its baselines: what is printed at its end."""
    found = verdict_on(of["metrics"], of["headline"])
    said = {} if found is None else {"baseline": found.baseline, "ratio": found.ratio, "said": found.sentence}
    return {"dataset": name, "inputs": inputs, "metric": of["headline"], **said}


FEATURES_BENCH = Bench(config=InputComparison, measure=_measure_features)


def _measure_fresh(bench: FreshComparison) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="nestrec-fresh-") as scratch:
        yield from compared(bench, Path(scratch))


def _said(row: Row) -> str:
    if "window" not in row:
        ahead = f"{row['ahead']:+.4f} [{row['ahead_low']:+.4f}, {row['ahead_high']:+.4f}] of frozen"
        return f"{row['way']:>8}: {row['metric']} {row['value']:.4f}, {ahead}, {row['train_s']:.1f} s"
    where = f"{row['way']:>8}, window {row['window']} of {row['events']} events"
    return f"{where}: {row['metric']} {row['value']:.4f} [{row['low']:.4f}, {row['high']:.4f}], {row['train_s']:.1f} s"


FRESH_BENCH = Bench(config=FreshComparison, measure=_measure_fresh, said=_said)
