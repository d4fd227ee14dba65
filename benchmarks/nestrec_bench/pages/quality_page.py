"""Model quality over several seeds, as a Markdown page: means with intervals, and paired differences between recipes.

The input is the rank of each user's target under each system, which the evaluation on the test set stores in the run
folder.

The value of a metric for a user is first averaged over seeds. The interval is a bootstrap over users of these averages,
so it covers the mean for other users of the same kind, but only for these seeds. The standard deviation between seeds
is reported separately.
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
    """Test ranks of one run, sorted by user."""

    folder: Path
    """Run folder."""
    recipe: str
    """Name of the recipe in the config of the run."""
    dataset: str
    """Name of the dataset on its card."""
    model: str
    """Kind of the encoder."""
    device: str
    """Device that trained the model."""
    seed: int
    """Seed of the run."""
    max_k: int
    """Largest recorded rank; ranks beyond it are recorded as 0."""
    users: NDArray[np.int64]
    """User codes, sorted."""
    ranks: Mapping[str, NDArray[np.int64]]
    """System to the 1-based rank of each user's target; 0 beyond `max_k`."""
    item_events: NDArray[np.int64] | None
    """Number of training events of each target; None if an earlier version evaluated the run."""
    validations: Mapping[int, float]
    """Epoch to the main metric on the validation set; empty if the records were deleted."""
    best_epoch: int | None
    """Epoch whose weights were tested."""

    @property
    def epochs(self) -> int | None:
        """Number of epochs until the last validation of the run."""
        return max(self.validations, default=None)

    def with_rare_targets(self, max_events: int) -> "Ranks":
        """Return the ranks of the targets that have at most `max_events` training events."""
        if self.item_events is None:
            raise UserError(
                "the test result does not contain the number of training events of each target",
                option="run",
                value=str(self.folder),
                remedy=f"run `nestrec eval {self.folder}` again",
            )
        is_rare = self.item_events <= max_events
        ranks = {system: rank[is_rare] for system, rank in self.ranks.items()}
        return replace(self, users=self.users[is_rare], ranks=ranks, item_events=self.item_events[is_rare])


def load_ranks(run: Path) -> Ranks:
    """Read RUN/eval/test.npz and the description of the run."""
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
        problem = f"the folder is not a run of next-item retrieval: {error!r}"
        raise UserError(problem, option="run", value=str(run), remedy="name runs whose task is retrieval") from error


def has_ranks(run: Path) -> bool:
    """Return whether a run folder contains test ranks, which only the evaluation of next-item retrieval writes."""
    path = run / RANKS_FILE
    if not path.is_file():
        return False
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        return f"{_PREFIX}model" in file.files


def _load_arrays(run: Path) -> dict[str, NDArray[Any]]:
    path = run / RANKS_FILE
    require(
        path.is_file(),
        "the run folder does not contain a test result",
        option="run",
        value=str(run),
        remedy=f"run `nestrec eval {run}` first",
    )
    try:
        # The file is opened here because numpy does not close its own handle if the archive is corrupt.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise _corrupt_file(path, str(error)) from error
    if "users" not in arrays or f"{_PREFIX}model" not in arrays:
        raise _corrupt_file(path, "the file does not contain ranks of users")
    if any(array.shape != arrays["users"].shape for name, array in arrays.items() if name.startswith(_PREFIX)):
        raise _corrupt_file(path, "the file does not contain one rank for each user")
    return arrays


def _validation_curve(run: Path) -> tuple[dict[int, float], int | None]:
    """Return the main metric by epoch, and the epoch at whose step the run was tested."""
    records = [record for record in load_run(run).part("valid") if record.get("epoch") is not None]
    epoch_at = {record["step"]: record["epoch"] for record in records}
    result = run / RANKS_FILE.with_suffix(".json")
    tested_step = _load_json(result).get("step") if result.is_file() else None
    values = {r["epoch"]: mean_of_metric(r["metrics"], "model", r["headline"]) for r in records}
    return values, epoch_at.get(tested_step)


def _load_json(path: Path) -> dict[str, Any]:
    require(
        path.is_file(),
        f"the folder does not contain {path.name}",
        option="run",
        value=str(path.parent),
        remedy="name a run folder",
    )
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise _corrupt_file(path, str(error)) from error
    return value


def _corrupt_file(path: Path, problem: str) -> CorruptFileError:
    return CorruptFileError(problem, option="file", value=str(path), remedy="repeat the evaluation")


METRICS = {
    "recall@10": (10, "hr@10"),
    "ndcg@10": (10, "ndcg@10"),
    "mrr@10": (10, "mrr@10"),
    "hr@50": (50, "hr@50"),
    "ndcg@50": (50, "ndcg@50"),
}
"""Name in the results to (k, name of the ranking metric). With one target per user, recall equals the hit rate."""

Row = dict[str, Any]


def quality_rows(runs: Sequence[Path]) -> list[Row]:
    """Return one row per recipe, in the order of the runs; runs of the same recipe are its seeds.

    Fields: recipe, dataset, model, device, seeds, users; `epochs` and `best_epochs`, the number of epochs and the
    tested epoch of each seed; `validations`, pairs of an epoch and the mean over seeds of the metric that selects the
    best one; for each metric `m` its mean `m`, `m_interval`, `m_of_seeds` and `m_seed_sd`; and `baselines`, system to
    metric to mean."""
    return [_quality_row(group) for group in _by_recipe(runs).values()]


def comparison_rows(runs: Sequence[Path], pairs: Sequence[tuple[str, str]], max_events: int | None = None) -> list[Row]:
    """Return, for each pair of recipes, the mean over users of the first minus the second seed average.

    Fields: recipe, against, dataset, seeds, against_seeds, users; for each metric `m_difference`,
    `m_difference_interval` over users, and `m_difference_seed_error`, the standard error due to seeds alone. If both
    recipes have the same seeds, also `m_difference_of_seeds`: runs of one seed share order, negatives and dropout, so
    the error is then computed from these differences.

    Args:
        runs: Run folders of all recipes.
        pairs: Names of the recipes to compare.
        max_events: Largest number of training events of the targets to include. None: all targets.
    """
    groups = _by_recipe(runs)
    if max_events is not None:
        groups = {name: [run.with_rare_targets(max_events) for run in group] for name, group in groups.items()}
    for name in (name for pair in pairs for name in pair):
        if name not in groups:
            problem = "the named folders do not contain a run of this recipe"
            raise UserError(problem, option="recipe", value=name, remedy=f"choose from: {', '.join(groups)}")
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
        means = _means_by_seed(group, metric)
        row[metric] = interval.mean
        row[f"{metric}_interval"] = [interval.low, interval.high]
        row[f"{metric}_of_seeds"] = means
        row[f"{metric}_seed_sd"] = statistics.stdev(means) if len(means) > 1 else None
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
        row |= _seed_differences(
            f"{metric}_difference", _means_by_seed(first, metric), _means_by_seed(second, metric), row
        )
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
                remedy="name one run per seed",
            )
        group.sort(key=lambda run: run.seed)
    return groups


def _check_same_users(group: Sequence[Ranks]) -> None:
    for run in group[1:]:
        if run.dataset != group[0].dataset or not np.array_equal(run.users, group[0].users):
            problem = f"the users differ from those of {group[0].folder}"
            remedy = "compare runs on one dataset with one split"
            raise UserError(problem, option="run", value=str(run.folder), remedy=remedy)


def _metrics_of(group: Sequence[Ranks]) -> list[str]:
    """Return the metrics whose k is recorded in all runs."""
    max_k = min(run.max_k for run in group)
    return [name for name, (k, _) in METRICS.items() if k <= max_k]


def _values(run: Ranks, system: str, metric: str) -> Values:
    k, name = METRICS[metric]
    return ranking_metrics(run.ranks[system], (k,))[name]


def _means_by_seed(group: Sequence[Ranks], metric: str) -> list[float]:
    return [float(_values(run, "model", metric).mean()) for run in group]


def _seed_differences(name: str, first: Sequence[float], second: Sequence[float], row: Row) -> Row:
    """Return the standard error of a difference over seeds, and the difference per seed if both have the same seeds."""
    if row["seeds"] != row["against_seeds"]:
        return {f"{name}_seed_error": _standard_error(first, second)}
    differences = [a - b for a, b in zip(first, second, strict=True)]
    return {f"{name}_seed_error": _standard_error(differences), f"{name}_of_seeds": differences}


def _standard_error(*samples: Sequence[float]) -> float | None:
    """Return the standard error of the sum or difference of the means; None if a sample has a single value."""
    if any(len(sample) < 2 for sample in samples):
        return None
    return math.sqrt(sum(statistics.variance(sample) / len(sample) for sample in samples))


def _validations(group: Sequence[Ranks]) -> list[tuple[int, float]]:
    """Return the learning curve: the epochs at which every seed was validated, with the mean over seeds."""
    epochs = set.intersection(*(set(run.validations) for run in group))
    return [(epoch, statistics.fmean(run.validations[epoch] for run in group)) for epoch in sorted(epochs)]


def _seed_average(group: Sequence[Ranks], metric: str) -> Values:
    average: Values = np.mean([_values(run, "model", metric) for run in group], axis=0)
    return average


ResultRow = Mapping[str, Any]


FIRST, LAST = "<!-- tables -->", "<!-- end of tables -->"
"""Lines around the tables of a page; the text before and after them is preserved."""


def quality_page(frame: Mapping[str, Any], page: str | None = None) -> str:
    """Return the text of docs/results/quality.md.

    Args:
        frame: Content of docs/results/quality.json.
        page: Present text of the page, in which the tables are replaced. None: return a new page.
    """
    before, after = ("# Quality\n\n", "\n") if page is None else around_tables(page)
    return f"{before}{FIRST}\n{quality_tables(frame)}\n{LAST}{after}"


def quality_tables(frame: Mapping[str, Any]) -> str:
    """Return rows, baselines and comparisons as Markdown tables."""
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
            "First minus second, paired over users; ± is the standard error due to seeds alone, paired over seeds if "
            "both recipes have the same seeds."
        )
        table = _table(heads, [_difference(row, names) for row in comparisons])
        paragraphs += ["### Paired differences", legend, table]
    return "\n\n".join(paragraphs)


def around_tables(page: str) -> tuple[str, str]:
    """Return the text before and after the tables of a page."""
    before, first, rest = page.partition(FIRST)
    _, last, after = rest.partition(LAST)
    if not (first and last):
        remedy = f"add the lines {FIRST} and {LAST}, or name a page that does not exist yet"
        problem = "the page does not contain the lines between which the tables are written"
        raise UserError(problem, option="page", value=before[:40], remedy=remedy)
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
    """Return the rows of the baselines, once per dataset because they do not depend on the recipe."""
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
    return ", ".join("-" if best is None else f"{best} / {epochs}" for best, epochs in pairs)


def _seeds(seeds: Sequence[int]) -> str:
    return ", ".join(str(seed) for seed in seeds)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
