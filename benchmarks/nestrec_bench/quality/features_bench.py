"""What features bring: datasets with them and by ids alone, over seeds; and recipes by hand beside `train auto`.

nestrec bench features --data data --what kuairand,ml_100k --seeds 1,2,3 --json docs/results/features.json
nestrec bench features --data data --what auto_ml_100k,auto_criteo --seeds 1

`--data` holds the prepared datasets by the names of their recipes' folders. Runs that have ended are not trained again:
commands with `--inputs ids --seeds 1` and the like may train beside each other, one with all of them tells the rows.
"""

from collections.abc import Generator
from pathlib import Path

from nestrec.report.formatting import verdict_on
from nestrec.tasks.metrics import RARE
from nestrec_bench.bench import Bench, More, Row
from nestrec_bench.pages.quality_page import comparison_rows, has_ranks
from nestrec_bench.quality.input_comparison import InputComparison, Tested, experiment_of, rows_of, runs_of, tested
from nestrec_bench.quality.quality_bench import trained_on


def _measure(bench: InputComparison) -> Generator[Row, None, More]:
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


BENCH = Bench(config=InputComparison, measure=_measure)
