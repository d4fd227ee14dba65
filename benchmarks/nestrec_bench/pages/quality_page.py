"""Quality rows as a Markdown page.

The ranks that a run's test left behind: where each user's target stood under each system.

Quality over several seeds: means with intervals over users, and paired differences between recipes.

A user's value of a metric is averaged over seeds first; the interval is a bootstrap over users of these averages, so it
tells how sure the mean is for other users of the same kind. It holds for these seeds: how much seeds differ is given
beside it.
"""

import json
import math
import statistics
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import CorruptFileError, UserError, require
from nestrec.report.formatting import mean_of_metric
from nestrec.report.run_records import load_run
from nestrec.tasks.metrics import Values, bootstrap, ranking_metrics

RANKS_FILE = Path("eval") / "test.npz"
_PREFIX = "rank/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Test ranks of one run, in order of users."""

    folder: Path
    """The run."""
    recipe: str
    """Name in its config."""
    dataset: str
    """Name on the dataset card."""
    model: str
    """Kind of the encoder."""
    device: str
    """What it was trained on."""
    seed: int
    """Of the run."""
    max_k: int
    """Ranks beyond it are recorded as 0."""
    users: NDArray[np.int64]
    """Sorted."""
    ranks: Mapping[str, NDArray[np.int64]]
    """Of each system and user: 1-based rank of the target, 0 beyond `max_k`."""
    item_events: NDArray[np.int64] | None
    """Training events of each target; none where the test is an older one."""
    validations: Mapping[int, float]
    """Epoch to the headline metric on the validation part; empty where the records are gone."""
    best_epoch: int | None
    """The epoch whose weights were tested."""

    @property
    def epochs(self) -> int | None:
        """Epochs after which the run was validated for the last time."""
        return max(self.validations, default=None)

    def of_rare(self, most_events: int) -> "Ranks":
        """Of the targets with so many training events at most."""
        if self.item_events is None:
            raise UserError("does not tell rare targets", option="run", value=str(self.folder), remedy="repeat its test")
        is_rare = self.item_events <= most_events
        kept = {system: rank[is_rare] for system, rank in self.ranks.items()}
        return replace(self, users=self.users[is_rare], ranks=kept, item_events=self.item_events[is_rare])


def load_ranks(run: Path) -> Ranks:
    """Read RUN/eval/test.npz and what the run was."""
    config, card, versions = (_load_json(run / name) for name in ("config.json", "card.json", "versions.json"))
    arrays = _load_arrays(run)
    order = np.argsort(arrays["users"], kind="stable")
    validations, best_epoch = _validation_curve(run)
    try:
        return Ranks(
            folder=run,
            recipe=config["name"],
            dataset=card["name"],
            model=config["task"]["encoder"]["kind"],
            device=str(versions.get("device", "unknown")),
            seed=config["training"]["seed"],
            max_k=max(config["task"]["evaluation"]["ks"]),
            users=arrays["users"][order],
            ranks={name.removeprefix(_PREFIX): arrays[name][order] for name in arrays if name.startswith(_PREFIX)},
            item_events=arrays["item_events"][order] if "item_events" in arrays else None,
            validations=validations,
            best_epoch=best_epoch,
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        problem = f"is not a run of next-item retrieval: {error!r}"
        raise UserError(problem, option="run", value=str(run), remedy="name runs whose task is retrieval") from error


def has_ranks(run: Path) -> bool:
    """Whether the test of a run left ranks: that of next-item retrieval does."""
    path = run / RANKS_FILE
    if not path.is_file():
        return False
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        return f"{_PREFIX}model" in file.files


def _load_arrays(run: Path) -> dict[str, NDArray[Any]]:
    path = run / RANKS_FILE
    require(path.is_file(), "has no test result", option="run", value=str(run), remedy=f"run `nestrec eval {run}` first")
    try:
        # Opened here: numpy leaves its own handle open when the archive is damaged.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise _damaged(path, str(error)) from error
    if "users" not in arrays or f"{_PREFIX}model" not in arrays:
        raise _damaged(path, "holds no ranks of users")
    if any(array.shape != arrays["users"].shape for name, array in arrays.items() if name.startswith(_PREFIX)):
        raise _damaged(path, "does not hold one rank for each user")
    return arrays


def _validation_curve(run: Path) -> tuple[dict[int, float], int | None]:
    """The headline metric by epoch, and the epoch at whose step the test was made."""
    records = [record for record in load_run(run).part("valid") if record.get("epoch") is not None]
    epoch_at = {record["step"]: record["epoch"] for record in records}
    result = run / RANKS_FILE.with_suffix(".json")
    tested_step = _load_json(result).get("step") if result.is_file() else None
    headlines = {r["epoch"]: mean_of_metric(r["metrics"], "model", r["headline"]) for r in records}
    return headlines, epoch_at.get(tested_step)


def _load_json(path: Path) -> dict[str, Any]:
    require(path.is_file(), f"has no {path.name}", option="run", value=str(path.parent), remedy="name a run folder")
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    return value


def _damaged(path: Path, problem: str) -> CorruptFileError:
    return CorruptFileError(problem, option="file", value=str(path), remedy="repeat the evaluation")


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
            raise UserError("has no run", option="recipe", value=name, remedy=f"known: {', '.join(groups)}")
    return [_comparison_row(groups[first], groups[second]) for first, second in pairs]


def _quality_row(group: list[Ranks]) -> Row:
    one = group[0]
    metrics = _metrics_of(group)
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
        row[metric] = interval.mean
        row[f"{metric}_interval"] = [interval.low, interval.high]
        row[f"{metric}_of_seeds"] = of_seeds
        row[f"{metric}_seed_sd"] = statistics.stdev(of_seeds) if len(of_seeds) > 1 else None
    row["baselines"] = {
        system: {metric: float(_values(one, system, metric).mean()) for metric in metrics}
        for system in one.ranks
        if not system.startswith("model")
    }
    return row


def _comparison_row(first: list[Ranks], second: list[Ranks]) -> Row:
    one = first[0]
    other = second[0]
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
                option="seeds",
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
            raise UserError(problem, option="run", value=str(run.folder), remedy=remedy)


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


ResultRow = Mapping[str, Any]


FIRST, LAST = "<!-- tables -->", "<!-- end of tables -->"
"""The lines between which the tables of a page stand; what people write around them is kept."""


def quality_page(frame: Mapping[str, Any], page: str | None = None) -> str:
    """The text of docs/results/quality.md, from the frame of docs/results/quality.json.

    page: the page as it is, whose tables are replaced; none makes a new one.
    """
    before, after = ("# Quality\n\n", "\n") if page is None else around_tables(page)
    return f"{before}{FIRST}\n{quality_tables(frame)}\n{LAST}{after}"


def quality_tables(frame: Mapping[str, Any]) -> str:
    """Rows, baselines and comparisons as Markdown tables."""
    rows = frame["rows"]
    metrics = _metrics(frame["rows"])
    heads = ["recipe", "dataset", "model", "seeds", "best epoch / epochs", "users", "trained on", *metrics]
    paragraphs = [
        f"Written on {frame['date']} by `{frame['command']}`. Values are means over users of each user's average over "
        "seeds; brackets are 95% bootstrap intervals over users, ± is the standard deviation between seeds.",
        _table(heads, [_row(row, metrics) for row in rows]),
    ]
    if any(row.get("baselines") for row in rows):
        paragraphs += ["### Baselines", _table(["dataset", "system", *metrics], _baselines(rows))]
    comparisons = frame.get("comparisons", ())
    if comparisons:
        names = [name for name in METRICS if any(f"{name}_difference" in row for row in comparisons)]
        heads = ["recipe", "against", "dataset", "seeds", "users", *names]
        legend = (
            "First minus second, paired over users; ± is the standard error that comes from seeds alone, paired over "
            "seeds where both have the same."
        )
        table = _table(heads, [_difference(row, names) for row in comparisons])
        paragraphs += ["### Paired differences", legend, table]
    return "\n\n".join(paragraphs)


def around_tables(page: str) -> tuple[str, str]:
    """What stands before and after the tables of a page."""
    before, first, rest = page.partition(FIRST)
    _, last, after = rest.partition(LAST)
    if not (first and last):
        remedy = f"add the lines {FIRST} and {LAST}, or name a page that does not exist yet"
        raise UserError("has no place for the tables", option="page", value=before[:40], remedy=remedy)
    return before, after


def _metrics(rows: Sequence[ResultRow]) -> list[str]:
    return [name for name in METRICS if any(name in row for row in rows)]


def _row(row: ResultRow, metrics: Sequence[str]) -> list[str]:
    about = [row["recipe"], row["dataset"], row["model"], _seeds(row["seeds"]), _epochs(row), f"{row['users']:,}"]
    return [*about, row["device"], *(_value(row, name) for name in metrics)]


def _value(row: ResultRow, name: str) -> str:
    if name not in row:
        return "-"
    low, high = row[f"{name}_interval"]
    spread = row.get(f"{name}_seed_sd")
    return f"{row[name]:.4f} [{low:.4f}, {high:.4f}]" + (f" ± {spread:.4f}" if spread is not None else "")


def _baselines(rows: Sequence[ResultRow]) -> list[list[str]]:
    """Baselines do not depend on the recipe: each once for a dataset."""
    found: dict[tuple[str, str], list[str]] = {}
    metrics = _metrics(rows)
    for row in rows:
        for system, values in row.get("baselines", {}).items():
            shown = [f"{values[name]:.4f}" if name in values else "-" for name in metrics]
            found.setdefault((row["dataset"], system), [row["dataset"], system, *shown])
    return list(found.values())


def _difference(row: ResultRow, metrics: Sequence[str]) -> list[str]:
    seeds = f"{_seeds(row['seeds'])} / {_seeds(row['against_seeds'])}"
    about = [row["recipe"], row["against"], row["dataset"], seeds, f"{row['users']:,}"]
    return [*about, *(_difference_cell(row, f"{name}_difference") for name in metrics)]


def _difference_cell(row: ResultRow, name: str) -> str:
    if name not in row:
        return "-"
    low, high = row[f"{name}_interval"]
    error = row.get(f"{name}_seed_error")
    return f"{row[name]:+.4f} [{low:+.4f}, {high:+.4f}]" + (f" ± {error:.4f}" if error is not None else "")


def _epochs(row: ResultRow) -> str:
    pairs = zip(row["best_epochs"], row["epochs"], strict=True)
    return ", ".join("-" if best is None else f"{best} / {made}" for best, made in pairs)


def _seeds(seeds: Sequence[int]) -> str:
    return ", ".join(str(seed) for seed in seeds)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
