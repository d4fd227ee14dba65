"""Rows of 16 bits against float32: a recipe trained with each, over seeds; quality, and bytes as the runs counted them.

nestrec bench half_rows --recipe ml_1m_ordered_hstu --seeds 1,2,3 --json half-rows.json

A run that has ended is not trained again: a command that was cut goes on where it stopped.
"""

import json
import tempfile
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from nestrec.base.bounds import Count, Natural
from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.bench.bench import Bench, More, Row, Shown
from nestrec.bench.quality.quality import short_rows, trained_on
from nestrec.library.configured import configured
from nestrec.library.runs import topology_of
from nestrec.report.quality import comparison_rows, quality_rows
from nestrec.training.run_digest import run_digest
from nestrec.training.trainer import Trainer

COUNTERS_FILE = "counters.json"


@config
class HalfRowsBench:
    recipe: str = "ml_1m_ordered_hstu"
    """what is trained: a recipe of next-item retrieval, or the config.json of a run"""
    folder: str | None = None
    """its prepared data; none: where the recipe looks for it"""
    table: str = "items"
    """the table whose rows change"""
    types: tuple[str, ...] = ("float32", "bfloat16")
    """of its rows; the others are compared with the first"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """each of them trained with every type"""
    epochs: Count | None = None
    """at most so many; none: as the recipe"""
    exact_steps: Natural = 20
    """so many steps of each type are also made under `serial` and `nested`, and their bits compared; 0: none"""
    output: str = "runs/half-rows"
    """where the runs lie"""


def _measure(bench: HalfRowsBench) -> Generator[Row, None, More]:
    if len(set(bench.types)) < 2:
        raise UserError("leaves nothing to compare", field="types", value=bench.types, remedy="give two types")
    runs = []
    for seed in bench.seeds:
        for dtype in bench.types:
            run = Path(bench.output) / f"{dtype}-{seed}"
            yield {"recipe": bench.recipe, "dtype": dtype, "seed": seed, **_trained(bench, dtype, seed, run)}
            runs.append(run)
    pairs = [(_name(bench, dtype), _name(bench, bench.types[0])) for dtype in bench.types[1:]]
    found = {"quality": quality_rows(runs), "comparisons": comparison_rows(runs, pairs), "hardware": trained_on(runs)}
    if bench.exact_steps:
        found["nested_equals_serial"] = {dtype: _are_equal(bench, dtype) for dtype in bench.types}
    return found


def _are_equal(bench: HalfRowsBench, dtype: str) -> bool:
    """Whether some steps under `nested` leave the bits that they leave under `serial`: weights, state and tables."""
    short = {"training.max_steps": bench.exact_steps, "batch.micro_batches": 4, "training.evaluate_every_epochs": 0}
    digests = []
    with tempfile.TemporaryDirectory() as folder:
        for schedule in ("serial", "nested"):
            cfg = configured(bench.recipe, {**_given(bench, dtype), **short, "pipeline.schedule": schedule})
            with closing(Trainer(cfg, Path(folder, schedule), topology_of(cfg, cfg.ranks))) as trainer:
                trainer.train()
            digests.append(run_digest(Path(folder, schedule)))
    return digests[0] == digests[1]


def _name(bench: HalfRowsBench, dtype: str) -> str:
    return f"{configured(bench.recipe).name}_{dtype}"


def _given(bench: HalfRowsBench, dtype: str) -> dict[str, Any]:
    folder = {} if bench.folder is None else {"data.folder": bench.folder}
    return {"name": _name(bench, dtype), f"tables.{bench.table}.dtype": dtype, **folder}


def _trained(bench: HalfRowsBench, dtype: str, seed: int, run: Path) -> Row:
    """Train and test a run where that has not been done; its score and bytes."""
    counted = run / COUNTERS_FILE
    if not counted.exists():
        epochs = {} if bench.epochs is None else {"training.epochs": bench.epochs}
        cfg = configured(bench.recipe, {**_given(bench, dtype), **epochs, "training.seed": seed})
        with closing(Trainer(cfg, run, topology_of(cfg, cfg.ranks))) as trainer:
            found = {"steps": trainer.train().step, **_counters(trainer, bench.table)}
            trainer.evaluate("test")
        counted.write_text(json.dumps(found))
    tested = json.loads((run / "eval" / "test.json").read_text())["metrics"]["model"]
    return {**json.loads(counted.read_text()), **{name: round(values[0], 5) for name, values in tested.items()}}


def _counters(trainer: Trainer, table: str) -> Row:
    """Of a rank: bytes of the table, and what its vectors and gradients came to in a step."""
    engine = trainer.session.engine
    store, seen, layout = engine.store_statistics()[table], engine.statistics, engine.shards[table].layout
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
    columns = ("dtype", "seed", "steps", "ndcg@10", "row_bytes", "weight_bytes", "table_bytes", "vector_bytes_a_row")
    exact = (
        [f"nested equals serial to the bit: {more['nested_equals_serial']}"] if "nested_equals_serial" in more else []
    )
    shown: list[Shown] = [*exact, ("rows of 16 bits", [{name: row[name] for name in columns} for row in rows])]
    means = "mean of seeds [95% interval over users]", short_rows(more["quality"])
    return [*shown, means, ("against the first type", short_rows(more["comparisons"], "_difference"))]


BENCH = Bench(config=HalfRowsBench, measure=_measure, show=_show)
