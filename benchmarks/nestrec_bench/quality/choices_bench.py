"""One recipe with different choices of options, over seeds: quality, loss curves, and bytes as the runs counted them.

nestrec bench choices --recipe ml_1m_ordered_hstu --seeds 1,2,3 \\
    --choices float32:tables.items.dtype=float32,bfloat16:tables.items.dtype=bfloat16 --json half-rows.json

A run that has ended is not trained again: a command that was cut goes on where it stopped, and commands with other
seeds may run beside it.
"""

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from nestrec.api import configured, topology_of
from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural
from nestrec.base.errors import UserError
from nestrec.training.run_folder import read_evaluation
from nestrec.training.state import run_digest
from nestrec.training.trainer import Trainer
from nestrec_bench.bench import Bench, More, Row, Shown
from nestrec_bench.pages.quality_page import comparison_rows, has_ranks, quality_rows
from nestrec_bench.quality.quality_bench import short_rows, trained_on

COUNTERS_FILE = "counters.json"


@config
class ChoicesBench:
    choices: tuple[str, ...] = ("float32:", "bfloat16:tables.items.dtype=bfloat16")
    """NAME:OPTION=VALUE each, further options behind a +; the others are compared with the first"""
    recipe: str = "ml_1m_ordered_hstu"
    """what is trained, or the config.json of a run"""
    options: str = ""
    """OPTION=VALUE, joined by +, of all choices"""
    folder: str | None = None
    """its prepared data; none: where the recipe looks for it"""
    table: str | None = "items"
    """the table whose bytes are counted; none: none"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """each of them trained with every choice"""
    epochs: Count | None = None
    """at most so many; none: as the recipe"""
    exact_steps: Natural = 0
    """so many steps of each choice are also made under `serial` and `nested`, and their bits compared; 0: none"""
    output: str = "runs/choices"
    """where the runs lie"""


def _measure(bench: ChoicesBench) -> Generator[Row, None, More]:
    choices = dict(_parsed(choice) for choice in bench.choices)
    if len(choices) < 2:
        raise UserError("leaves nothing to compare", option="choices", value=bench.choices, remedy="give two choices")
    rows, runs = [], []
    for seed in bench.seeds:
        for name, given in choices.items():
            run = Path(bench.output) / f"{name}-{seed}"
            rows.append(
                {"recipe": bench.recipe, "choice": name, "seed": seed, **_trained(bench, name, given, seed, run)}
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
        found["nested_equals_serial"] = {name: _are_equal(bench, name, given) for name, given in choices.items()}
    return found


def _parsed(choice: str) -> tuple[str, dict[str, str]]:
    name, colon, given = choice.partition(":")
    if not (name and colon):
        raise UserError("names no choice", option="choices", value=choice, remedy="write NAME:OPTION=VALUE+OPTION=VALUE")
    return name, _options(given)


def _options(text: str) -> dict[str, str]:
    """OPTION=VALUE, joined by +."""
    pairs = [word.partition("=") for word in text.split("+") if word]
    for option, equals, _ in pairs:
        if not (option and equals):
            raise UserError("is no option with a value", option="options", value=text, remedy="write OPTION=VALUE")
    return {option: value for option, _, value in pairs}


def _differences(rows: Sequence[Row]) -> list[Row]:
    """Of each metric, over seeds: mean of a choice minus the first one's, and the standard error of that mean."""
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


def _curves(bench: ChoicesBench, names: Sequence[str]) -> list[Row]:
    """For each choice and epoch that all its seeds have: mean training loss, and the smallest and largest of a seed."""
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


def _are_equal(bench: ChoicesBench, name: str, given: dict[str, str]) -> bool:
    """Whether some steps under `nested` leave the bits that they leave under `serial`: weights, state and tables."""
    short = {"training.max_steps": bench.exact_steps, "batch.micro_batches": 4, "training.evaluate_every_epochs": 0}
    digests = []
    with tempfile.TemporaryDirectory() as folder:
        for schedule in ("serial", "nested"):
            cfg = configured(bench.recipe, {**_given(bench, name, given), **short, "pipeline.schedule": schedule})
            with closing(Trainer(cfg, Path(folder, schedule), topology_of(cfg, cfg.ranks))) as trainer:
                trainer.train()
            digests.append(run_digest(Path(folder, schedule)))
    return digests[0] == digests[1]


def _name(bench: ChoicesBench, name: str) -> str:
    return f"{configured(bench.recipe).name}_{name}"


def _given(bench: ChoicesBench, name: str, given: dict[str, str]) -> dict[str, Any]:
    folder = {} if bench.folder is None else {"data.folder": bench.folder}
    return {"name": _name(bench, name), **folder, **_options(bench.options), **given}


def _trained(bench: ChoicesBench, name: str, given: dict[str, str], seed: int, run: Path) -> Row:
    """Train and test a run where that has not been done; its score and bytes."""
    counted = run / COUNTERS_FILE
    if not counted.exists():
        epochs = {} if bench.epochs is None else {"training.epochs": bench.epochs}
        cfg = configured(bench.recipe, {**_given(bench, name, given), **epochs, "training.seed": seed})
        with closing(Trainer(cfg, run, topology_of(cfg, cfg.ranks))) as trainer:
            found = {"steps": trainer.train().step, **(_counters(trainer, bench.table) if bench.table else {})}
            trainer.evaluate("test")
        counted.write_text(json.dumps(found))
    tested = read_evaluation(run / "eval" / "test.json")["metrics"]["model"]
    return {
        **json.loads(counted.read_text()),
        "metrics": {name: round(values[0], 5) for name, values in tested.items()},
    }


def _counters(trainer: Trainer, table: str) -> Row:
    """Of a rank: bytes of the table, and what its vectors and gradients came to in a step."""
    engine = trainer.session.engine
    store = engine.store_statistics()[table]
    seen = engine.statistics
    layout = engine.shards[table].layout
    rows = max(1, seen.vectors.rows)
    return {
        "row_bytes": layout.row_bytes,
        "weight_bytes": layout.weight.width * layout.weight.dtype.itemsize,
        "table_bytes": store["device_bytes"] + store["host_bytes"],
        "vector_bytes_a_row": seen.vector_bytes / rows,
        "vectors_looked_up": seen.vectors.rows,
        "gradient_bytes_a_row": engine.tables[table].dim * engine.tables[table].state_dtype.itemsize,
    }


def _show(rows: Sequence[Row], more: More) -> list[Shown]:
    columns = ("choice", "seed", "steps", "row_bytes", "table_bytes")
    found = [{name: row[name] for name in columns if name in row} | row["metrics"] for row in rows]
    exact = (
        [f"nested equals serial to the bit: {more['nested_equals_serial']}"] if "nested_equals_serial" in more else []
    )
    shown: list[Shown] = [*exact, ("runs", found), ("against the first choice, over seeds", more["differences"])]
    if "quality" not in more:
        return shown
    means = "mean of seeds [95% interval over users]", short_rows(more["quality"])
    return [*shown, means, ("against the first choice", short_rows(more["comparisons"], "_difference"))]


BENCH = Bench(config=ChoicesBench, measure=_measure, show=_show)
