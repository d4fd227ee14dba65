"""Ablation of input features over seeds: datasets with features and with ids only; also recipes against `train auto`.

nestrec bench features --data data --what kuairand,ml_100k --seeds 1,2,3 --json docs/results/features.json
nestrec bench features --data data --what auto_ml_100k,auto_criteo --seeds 1

`--data` contains the prepared datasets, under the folder names of their recipes. Finished runs are not trained again:
commands with, for example, `--inputs ids --seeds 1` may train at the same time, and a command with all inputs and seeds
then returns the rows.
"""

from collections.abc import Generator
from pathlib import Path

from nestrec.report.formatting import verdict_on
from nestrec.tasks.metrics import MAX_RARE_EVENTS
from nestrec_bench.bench import Bench, ExtraFields, Row
from nestrec_bench.pages.quality_page import comparison_rows, has_ranks
from nestrec_bench.quality.input_comparison import (
    Evaluation,
    InputComparison,
    evaluation_rows,
    find_experiment,
    load_evaluation,
    train_runs,
)
from nestrec_bench.quality.quality_bench import trained_on


def _measure(bench: InputComparison) -> Generator[Row, None, ExtraFields]:
    all_runs: list[Path] = []
    comparisons, verdicts = [], []
    for name in bench.what:
        runs = train_runs(bench, name)
        found = {inputs: [load_evaluation(run) for run in folders] for inputs, folders in runs.items()}
        yield from evaluation_rows(name, find_experiment(name), found)
        flat = [run for folders in runs.values() for run in folders]
        verdicts += [_verdict(name, inputs, one) for inputs, evaluations in found.items() for one in evaluations]
        if len(runs) > 1 and all(map(has_ranks, flat)):
            base, *others = (evaluations[0]["name"] for evaluations in found.values())
            pairs = [(other, base) for other in others]
            parts = {
                "all": comparison_rows(flat, pairs),
                f"at most {MAX_RARE_EVENTS} events": comparison_rows(flat, pairs, MAX_RARE_EVENTS),
            }
            comparisons += [{"what": name, "part": part, **row} for part, found in parts.items() for row in found]
        all_runs += flat
    return {"hardware": trained_on(all_runs), "comparisons": comparisons, "verdicts": verdicts}


def _verdict(name: str, inputs: str, evaluation: Evaluation) -> Row:
    """Compare a run with the best of its baselines, as `nestrec train` does at its end."""
    found = verdict_on(evaluation["metrics"], evaluation["headline"])
    verdict = {} if found is None else {"baseline": found.baseline, "ratio": found.ratio, "said": found.sentence}
    return {"dataset": name, "inputs": inputs, "metric": evaluation["headline"], **verdict}


BENCH = Bench(config=InputComparison, measure=_measure)
