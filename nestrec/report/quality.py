"""Quality over several seeds: means with intervals over users, and paired differences between recipes.

A user's value of a metric is averaged over seeds first; the interval is a bootstrap over users of these averages, so it
tells how sure the mean is for other users of the same kind. It holds for these seeds: how much seeds differ is given
beside it.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nestrec.base.errors import UserError
from nestrec.report.ranks import Ranks, load_ranks
from nestrec.tasks.metrics import Values, bootstrap, ranking_metrics

METRICS = {
    "recall@10": (10, "hr@10"),
    "ndcg@10": (10, "ndcg@10"),
    "mrr@10": (10, "mrr@10"),
    "hr@50": (50, "hr@50"),
    "ndcg@50": (50, "ndcg@50"),
}
"""Name in the results to (k, name among the ranking metrics). With one target a user, recall is the hit rate."""

Row = dict[str, Any]


def quality_rows(runs: Sequence[Path]) -> list[Row]:
    """One row for each recipe, in the order of the runs; runs of one recipe are its seeds.

    Fields: recipe, dataset, model, device, seeds, users; of each seed the `epochs` made and the `best_epochs` that were
    tested; `validations`, pairs of an epoch and the mean over seeds of the metric that chooses the best one; for each
    metric `m` its mean `m`, `m_interval`, `m_of_seeds`, `m_seed_sd`; and `baselines` of system to metric to mean.
    """
    return [_quality_row(group) for group in _by_recipe(runs).values()]


def comparison_rows(
    runs: Sequence[Path], pairs: Sequence[tuple[str, str]], most_events: int | None = None
) -> list[Row]:
    """For each pair of recipes, the first minus the second: mean over users of the difference of seed averages.

    Fields: recipe, against, dataset, seeds, against_seeds, users; for each metric `m_difference`,
    `m_difference_interval` over users, `m_difference_seed_error`, the standard error that comes from seeds alone, and
    where both have the same seeds `m_difference_of_seeds`: runs of one seed share order, negatives and dropout, so
    that error is then of these differences. most_events: only targets with so many training events at most.
    """
    groups = _by_recipe(runs)
    if most_events is not None:
        groups = {name: [run.of_rare(most_events) for run in group] for name, group in groups.items()}
    for name in (name for pair in pairs for name in pair):
        if name not in groups:
            raise UserError("has no run", field="recipe", value=name, remedy=f"known: {', '.join(groups)}")
    return [_comparison_row(groups[first], groups[second]) for first, second in pairs]


def _quality_row(group: list[Ranks]) -> Row:
    one, metrics = group[0], _metrics_of(group)
    row: Row = {
        "recipe": one.recipe,
        "dataset": one.dataset,
        "model": one.model,
        "device": one.device,
        "seeds": [run.seed for run in group],
        "users": len(one.users),
        "epochs": [run.epochs for run in group],
        "best_epochs": [run.best_epoch for run in group],
        "validations": _validations(group),
    }
    values = {name: _seed_average(group, name) for name in metrics}
    for metric, interval in bootstrap(values, groups=one.users).items():
        of_seeds = _of_seeds(group, metric)
        row[metric], row[f"{metric}_interval"] = interval.mean, [interval.low, interval.high]
        row[f"{metric}_of_seeds"] = of_seeds
        row[f"{metric}_seed_sd"] = statistics.stdev(of_seeds) if len(of_seeds) > 1 else None
    row["baselines"] = {
        system: {metric: float(_values(one, system, metric).mean()) for metric in metrics}
        for system in one.ranks
        if not system.startswith("model")
    }
    return row


def _comparison_row(first: list[Ranks], second: list[Ranks]) -> Row:
    one, other = first[0], second[0]
    _check_same_users([one, other])
    row: Row = {
        "recipe": one.recipe,
        "against": other.recipe,
        "dataset": one.dataset,
        "seeds": [run.seed for run in first],
        "against_seeds": [run.seed for run in second],
        "users": len(one.users),
    }
    metrics = _metrics_of([*first, *second])
    differences = {name: _seed_average(first, name) - _seed_average(second, name) for name in metrics}
    for metric, interval in bootstrap(differences, groups=one.users).items():
        row[f"{metric}_difference"] = interval.mean
        row[f"{metric}_difference_interval"] = [interval.low, interval.high]
        row |= _seed_differences(f"{metric}_difference", _of_seeds(first, metric), _of_seeds(second, metric), row)
    return row


def _by_recipe(runs: Sequence[Path]) -> dict[str, list[Ranks]]:
    groups: dict[str, list[Ranks]] = {}
    for run in map(load_ranks, runs):
        groups.setdefault(run.recipe, []).append(run)
    for group in groups.values():
        _check_same_users(group)
        seeds = [run.seed for run in group]
        if len(set(seeds)) < len(seeds):
            raise UserError(
                f"two runs of {group[0].recipe} have the same seed",
                field="seeds",
                value=seeds,
                remedy="give each seed once",
            )
        group.sort(key=lambda run: run.seed)
    return groups


def _check_same_users(group: Sequence[Ranks]) -> None:
    for run in group[1:]:
        if run.dataset != group[0].dataset or not np.array_equal(run.users, group[0].users):
            problem = f"was not measured on the same users as {group[0].folder}"
            remedy = "compare runs on one dataset with one split"
            raise UserError(problem, field="run", value=str(run.folder), remedy=remedy)


def _metrics_of(group: Sequence[Ranks]) -> list[str]:
    """Metrics whose k all runs have ranked to."""
    deepest = min(run.max_k for run in group)
    return [name for name, (k, _) in METRICS.items() if k <= deepest]


def _values(run: Ranks, system: str, metric: str) -> Values:
    k, name = METRICS[metric]
    return ranking_metrics(run.ranks[system], (k,))[name]


def _of_seeds(group: Sequence[Ranks], metric: str) -> list[float]:
    return [float(_values(run, "model", metric).mean()) for run in group]


def _seed_differences(name: str, first: Sequence[float], second: Sequence[float], row: Row) -> Row:
    """What seeds tell of a difference: one for each, where both have the same, and its standard error."""
    if row["seeds"] != row["against_seeds"]:
        return {f"{name}_seed_error": _standard_error(first, second)}
    differences = [a - b for a, b in zip(first, second, strict=True)]
    return {f"{name}_seed_error": _standard_error(differences), f"{name}_of_seeds": differences}


def _standard_error(*samples: Sequence[float]) -> float | None:
    """Of the sum or difference of their means; unknown where a sample has one value."""
    if any(len(sample) < 2 for sample in samples):
        return None
    return math.sqrt(sum(statistics.variance(sample) / len(sample) for sample in samples))


def _validations(group: Sequence[Ranks]) -> list[tuple[int, float]]:
    """The learning curve: epochs that every seed was validated at, with the mean over seeds."""
    epochs = set.intersection(*(set(run.validations) for run in group))
    return [(epoch, statistics.fmean(run.validations[epoch] for run in group)) for epoch in sorted(epochs)]


def _seed_average(group: Sequence[Ranks], metric: str) -> Values:
    average: Values = np.mean([_values(run, "model", metric) for run in group], axis=0)
    return average
