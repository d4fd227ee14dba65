"""Compare choices of options of one recipe over seeds: quality, loss curves, and bytes counted by the runs.

nestrec bench choices --recipe ml_1m_ordered_hstu --seeds 1,2,3 \\
    --choices float32:tables.items.dtype=float32,bfloat16:tables.items.dtype=bfloat16 --json half-rows.json

Finished runs are not trained again: an interrupted command can be repeated and continues, and commands with other seeds
may run at the same time.
"""

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from nestrec.api import create_topology, resolve_config
from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural
from nestrec.base.errors import UserError
from nestrec.training.run_folder import read_evaluation
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from nestrec_bench.bench import Bench, ExtraFields, OutputPart, Row
from nestrec_bench.pages.quality_page import comparison_rows, has_ranks, quality_rows
from nestrec_bench.quality.quality_bench import short_rows, trained_on

COUNTERS_FILE = "counters.json"


@config
class ChoicesBenchConfig:
    choices: tuple[str, ...] = ("float32:", "bfloat16:tables.items.dtype=bfloat16")
    """Choices to compare with the first one, each as NAME:OPTION=VALUE, with further options after a +."""
    recipe: str = "ml_1m_ordered_hstu"
    """Recipe to train, or config.json of a run."""
    options: str = ""
    """Options of all choices, as OPTION=VALUE joined by +."""
    folder: str | None = None
    """Folder of the prepared data. None: that of the recipe."""
    table: str | None = "items"
    """Table whose bytes are counted. None: bytes are not counted."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds with which every choice is trained."""
    epochs: Count | None = None
    """Maximum number of epochs. None: that of the recipe."""
    exact_steps: Natural = 0
    """Number of steps that each choice trains under `serial` and `nested` to compare the results bitwise; 0 disables
    it."""
    output: str = "runs/choices"
    """Folder of the run folders."""


def _measure(bench: ChoicesBenchConfig) -> Generator[Row, None, ExtraFields]:
    choices = dict(_parse_choice(choice) for choice in bench.choices)
    if len(choices) < 2:
        problem = "a comparison requires at least two choices"
        raise UserError(problem, option="choices", value=bench.choices, remedy="add a choice")
    rows, runs = [], []
    for seed in bench.seeds:
        for name, options in choices.items():
            run = Path(bench.output) / f"{name}-{seed}"
            rows.append(
                {"recipe": bench.recipe, "choice": name, "seed": seed, **_train(bench, name, options, seed, run)}
            )
            yield rows[-1]
            runs.append(run)
    found = {
        "differences": _differences(rows),
        "loss_curves": _curves(bench, list(choices)),
        "hardware": trained_on(runs),
    }
    if all(map(has_ranks, runs)):
        first, *others = (_name(bench, name) for name in choices)
        pairs = [(other, first) for other in others]
        found |= {"quality": quality_rows(runs), "comparisons": comparison_rows(runs, pairs)}
    if bench.exact_steps:
        found["nested_equals_serial"] = {name: _are_equal(bench, name, options) for name, options in choices.items()}
    return found


def _parse_choice(choice: str) -> tuple[str, dict[str, str]]:
    name, colon, options = choice.partition(":")
    if not (name and colon):
        problem = "a choice must have a name before a colon"
        raise UserError(problem, option="choices", value=choice, remedy="write NAME:OPTION=VALUE+OPTION=VALUE")
    return name, _parse_options(options)


def _parse_options(text: str) -> dict[str, str]:
    """Parse options of the form OPTION=VALUE, joined by +."""
    pairs = [word.partition("=") for word in text.split("+") if word]
    for option, equals, _ in pairs:
        if not (option and equals):
            raise UserError("expected OPTION=VALUE", option="options", value=text, remedy="write OPTION=VALUE")
    return {option: value for option, _, value in pairs}


def _differences(rows: Sequence[Row]) -> list[Row]:
    """Return, per metric, the mean over seeds of a choice minus the first one, with its standard error."""
    by_choice: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        by_choice[row["choice"]][row["seed"]] = row["metrics"]
    (first, base), *others = by_choice.items()
    return [
        {
            "choice": name,
            "against": first,
            "metric": metric,
            **_paired([m[metric] - base[s][metric] for s, m in own.items()]),
        }
        for name, own in others
        for metric in next(iter(own.values()))
    ]


def _paired(values: Sequence[float]) -> Row:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"difference": statistics.fmean(values), "seed_error": error}


def _curves(bench: ChoicesBenchConfig, names: Sequence[str]) -> list[Row]:
    """Return the mean, smallest and largest training loss over seeds, per choice and epoch that all seeds have."""
    rows = []
    for name in names:
        seeds = [dict(_epoch_losses(Path(bench.output) / f"{name}-{seed}")) for seed in bench.seeds]
        for epoch in sorted(set.intersection(*map(set, seeds))):
            values = [losses[epoch] for losses in seeds]
            rows.append(
                {
                    "choice": name,
                    "epoch": epoch,
                    "loss": statistics.fmean(values),
                    "low": min(values),
                    "high": max(values),
                }
            )
    return rows


def _epoch_losses(run: Path) -> Iterator[tuple[int, float]]:
    losses: dict[int, list[float]] = defaultdict(list)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record and "epoch" in record:
            losses[record["epoch"]].append(record["loss"])
    yield from ((epoch, statistics.fmean(values)) for epoch, values in losses.items())


def _are_equal(bench: ChoicesBenchConfig, name: str, options: dict[str, str]) -> bool:
    """Return whether weights, state and tables after some steps are bitwise identical under `nested` and `serial`."""
    short = {"training.max_steps": bench.exact_steps, "batch.num_micro_batches": 4, "training.eval_every_epochs": 0}
    digests = []
    with tempfile.TemporaryDirectory() as folder:
        for schedule in ("serial", "nested"):
            cfg = resolve_config(
                bench.recipe, {**_all_options(bench, name, options), **short, "pipeline.schedule": schedule}
            )
            with closing(Trainer(cfg, Path(folder, schedule), create_topology(cfg, cfg.parallel))) as trainer:
                trainer.train()
            digests.append(run_digest(Path(folder, schedule)))
    return digests[0] == digests[1]


def _name(bench: ChoicesBenchConfig, name: str) -> str:
    return f"{resolve_config(bench.recipe).name}_{name}"


def _all_options(bench: ChoicesBenchConfig, name: str, options: dict[str, str]) -> dict[str, Any]:
    folder = {} if bench.folder is None else {"data.folder": bench.folder}
    return {"name": _name(bench, name), **folder, **_parse_options(bench.options), **options}


def _train(bench: ChoicesBenchConfig, name: str, options: dict[str, str], seed: int, run: Path) -> Row:
    """Train and evaluate a run, unless it is finished, and return its metrics and byte counts."""
    counters = run / COUNTERS_FILE
    if not counters.exists():
        epochs = {} if bench.epochs is None else {"training.epochs": bench.epochs}
        cfg = resolve_config(bench.recipe, {**_all_options(bench, name, options), **epochs, "training.seed": seed})
        with closing(Trainer(cfg, run, create_topology(cfg, cfg.parallel))) as trainer:
            found = {"steps": trainer.train().step, **(_counters(trainer, bench.table) if bench.table else {})}
            trainer.evaluate("test")
        counters.write_text(json.dumps(found))
    metrics = read_evaluation(run / "eval" / "test.json")["metrics"]["model"]
    return {
        **json.loads(counters.read_text()),
        "metrics": {name: round(values[0], 5) for name, values in metrics.items()},
    }


def _counters(trainer: Trainer, table: str) -> Row:
    """Return the bytes of the table on a rank, and the bytes per row of its vectors and gradients."""
    engine = trainer.session.engine
    store = engine.store_statistics()[table]
    statistics = engine.statistics
    layout = engine.shards[table].layout
    rows = max(1, statistics.vectors.rows)
    return {
        "row_bytes": layout.row_bytes,
        "weight_bytes": layout.weight.width * layout.weight.dtype.itemsize,
        "table_bytes": store["device_bytes"] + store["host_bytes"],
        "vector_bytes_a_row": statistics.vector_bytes / rows,
        "vectors_looked_up": statistics.vectors.rows,
        "gradient_bytes_a_row": engine.tables[table].dim * engine.tables[table].state_dtype.itemsize,
    }


def _show(rows: Sequence[Row], more: ExtraFields) -> list[OutputPart]:
    columns = ("choice", "seed", "steps", "row_bytes", "table_bytes")
    found = [{name: row[name] for name in columns if name in row} | row["metrics"] for row in rows]
    exact = (
        [f"bitwise identical under nested and serial: {more['nested_equals_serial']}"]
        if "nested_equals_serial" in more
        else []
    )
    shown: list[OutputPart] = [*exact, ("runs", found), ("against the first choice, over seeds", more["differences"])]
    if "quality" not in more:
        return shown
    means = "mean of seeds [95% interval over users]", short_rows(more["quality"])
    return [*shown, means, ("against the first choice", short_rows(more["comparisons"], "_difference"))]


BENCH = Bench(config=ChoicesBenchConfig, measure=_measure, show=_show)
