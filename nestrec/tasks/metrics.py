"""Evaluation metrics with bootstrap confidence intervals, and slice metrics (cohorts).

Metrics are arrays with one value per user or event, from which means, intervals and paired comparisons are computed:
HR, NDCG and MRR for retrieval; AUC, GAUC, normalized entropy and calibration for ranking; coverage, Gini index and
novelty of recommendations.

Slices show for which users and items a model works badly, which a mean over all events hides:

items     new (no training event), rare (1 to 5) and other targets
users     new (no training event) and known
history   number of events before the target; it can be 0 in ranking
a column  the most frequent values of a category of items, users or events
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import UserError, did_you_mean
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_card import Feature

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """A mean with the bounds of its 95% bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def ranking_metrics(rank: NDArray[np.int64], ks: tuple[int, ...]) -> dict[str, Values]:
    """Compute hr@k, ndcg@k and mrr@k per query from the 1-based rank of the target (0 if it was not ranked)."""
    is_ranked = rank > 0
    safe = np.where(is_ranked, rank, 1)
    metrics: dict[str, Values] = {}
    for k in ks:
        hit = is_ranked & (rank <= k)
        metrics[f"hr@{k}"] = hit.astype(np.float64)
        metrics[f"ndcg@{k}"] = np.where(hit, 1.0 / np.log2(safe + 1.0), 0.0)
        metrics[f"mrr@{k}"] = np.where(hit, 1.0 / safe, 0.0)
    return metrics


def bootstrap(
    values: Mapping[str, Values], *, num_draws: int = 1000, seed: int = 0, groups: NDArray[np.int64] | None = None
) -> dict[str, ConfidenceInterval]:
    """Compute the mean of each metric and its 95% bootstrap interval under resampling of users.

    Args:
        values: Metric name to values, arrays of the same length. All metrics use the same draws.
        num_draws: Number of bootstrap draws.
        seed: Seed of the draws.
        groups: User of each value if users have several values, which are not independent (cluster bootstrap).

    Returns:
        Metric name to mean and interval; the bounds are NaN if there is only one user.
    """
    names = list(values)
    stacked = np.stack([values[name] for name in names], axis=1)
    if len(stacked) == 0:
        return {name: ConfidenceInterval(float("nan"), float("nan"), float("nan")) for name in names}
    member = np.arange(len(stacked)) if groups is None else np.unique(groups, return_inverse=True)[1]
    size = np.bincount(member)
    sums = np.stack([np.bincount(member, weights=column) for column in stacked.T], axis=1)
    num_users = len(size)
    mean = stacked.mean(axis=0)
    if num_users == 1:
        return {name: ConfidenceInterval(float(mean[i]), float("nan"), float("nan")) for i, name in enumerate(names)}
    generator = np.random.default_rng(seed)
    means = np.empty((num_draws, len(names)))
    for i in range(num_draws):
        times_drawn = np.bincount(generator.integers(0, num_users, num_users), minlength=num_users)
        means[i] = times_drawn @ sums / (times_drawn @ size)
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return {name: ConfidenceInterval(float(mean[i]), float(low[i]), float(high[i])) for i, name in enumerate(names)}


def auc(label: NDArray[np.int64], score: Values, weight: Values | None = None) -> float:
    """Compute the area under the ROC curve; ties count half. `weight` repeats events (for the bootstrap)."""
    if len(label) == 0:
        return float("nan")
    w = np.ones(len(label)) if weight is None else weight
    order = np.argsort(score, kind="stable")
    label, score, w = label[order], score[order], w[order]
    group = np.concatenate([[0], np.cumsum(np.diff(score) != 0)]).astype(np.int64)
    positive = np.bincount(group, weights=w * label)
    negative = np.bincount(group, weights=w * (1 - label))
    below = np.cumsum(negative) - negative
    total = positive.sum() * negative.sum()
    return float((positive * (below + negative / 2)).sum() / total) if total else float("nan")


def log_loss(label: NDArray[np.int64], logit: Values) -> Values:
    """Compute the log loss (binary cross-entropy) of each event from logits."""
    return np.logaddexp(0.0, logit) - label * logit


def normalized_entropy(label: NDArray[np.int64], logit: Values) -> float:
    """Compute the mean log loss divided by that of the base rate; below 1 is better than predicting the base rate."""
    if len(label) == 0:
        return float("nan")
    rate = label.mean()
    base = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)) if 0 < rate < 1 else float("nan")
    return float(log_loss(label, logit).mean() / base)


def bootstrap_auc(
    label: NDArray[np.int64], score: Values, group: NDArray[np.int64], *, num_draws: int = 200, seed: int = 0
) -> ConfidenceInterval:
    """Compute the AUC with its interval; users (groups) are resampled, because a user's events are not independent."""
    generator = np.random.default_rng(seed)
    _, member = np.unique(group, return_inverse=True)
    overall = auc(label, score)
    if np.isnan(overall):
        return ConfidenceInterval(overall, overall, overall)
    num_groups = int(member.max()) + 1
    if num_groups == 1:
        return ConfidenceInterval(overall, float("nan"), float("nan"))
    draws = np.empty(num_draws)
    for i in range(num_draws):
        times_drawn = np.bincount(generator.integers(0, num_groups, num_groups), minlength=num_groups)
        draws[i] = auc(label, score, times_drawn[member].astype(np.float64))
    known = draws[~np.isnan(draws)]  # the AUC of a draw is NaN if its users have only one of the labels
    if len(known) == 0:
        return ConfidenceInterval(overall, float("nan"), float("nan"))
    low, high = np.quantile(known, [0.025, 0.975])
    return ConfidenceInterval(overall, float(low), float(high))


def user_aucs(label: NDArray[np.int64], score: Values, group: NDArray[np.int64]) -> tuple[Values, Values]:
    """Compute the AUC of each user (group) with both labels, and the user's number of events; ties count half."""
    order = np.lexsort((score, group))
    label, score, group = label[order], score[order], group[order]
    _, member = np.unique(group, return_inverse=True)
    num_groups = int(member.max(initial=-1)) + 1
    is_new = np.concatenate([[True], (np.diff(member) != 0) | (np.diff(score) != 0)])[: len(label)]
    tie = np.cumsum(is_new) - 1
    negatives = np.cumsum(1 - label)
    starts = np.flatnonzero(np.concatenate([[True], np.diff(member) != 0])[: len(label)])
    before_group = negatives[starts] - (1 - label[starts])
    tie_negatives = np.bincount(tie, weights=1.0 - label)
    before_tie = np.concatenate([[0.0], np.cumsum(tie_negatives)])[:-1]
    below = before_tie[tie] - before_group[member] + tie_negatives[tie] / 2
    wins = np.bincount(member, weights=label * below, minlength=num_groups)
    total = np.bincount(member, minlength=num_groups).astype(np.float64)
    positive = np.bincount(member, weights=label, minlength=num_groups)
    pairs = positive * (total - positive)
    has_both = pairs > 0
    return wins[has_both] / pairs[has_both], total[has_both]


def user_ndcgs(label: NDArray[np.int64], score: Values, group: NDArray[np.int64], k: int) -> Values:
    """Compute NDCG@k of the events of each user (group) with a positive label, sorted by score."""
    order = np.lexsort((-score, group))
    label, group = label[order], group[order]
    _, member, counts = np.unique(group, return_inverse=True, return_counts=True)
    position = np.arange(len(label)) - np.repeat(np.cumsum(counts) - counts, counts)
    gain = np.where(position < k, 1.0 / np.log2(position + 2.0), 0.0)
    dcg = np.bincount(member, weights=gain * label, minlength=len(counts))
    positive = np.bincount(member, weights=label, minlength=len(counts)).astype(np.int64)
    ideal_dcg = np.concatenate([[0.0], np.cumsum(1.0 / np.log2(np.arange(k) + 2.0))])
    has_any = positive > 0
    values: Values = dcg[has_any] / ideal_dcg[np.minimum(positive[has_any], k)]
    return values


def weighted_bootstrap(values: Values, weights: Values, *, num_draws: int = 200, seed: int = 0) -> ConfidenceInterval:
    """Compute the weighted mean and its 95% bootstrap interval under resampling of users."""
    if not len(values):
        return ConfidenceInterval(float("nan"), float("nan"), float("nan"))
    if len(values) == 1:
        return ConfidenceInterval(float(values[0]), float("nan"), float("nan"))
    generator = np.random.default_rng(seed)
    draws = np.empty(num_draws)
    for i in range(num_draws):
        times_drawn = np.bincount(generator.integers(0, len(values), len(values)), minlength=len(values))
        draws[i] = (times_drawn * weights) @ values / max(float(times_drawn @ weights), 1e-300)
    low, high = np.quantile(draws, [0.025, 0.975])
    return ConfidenceInterval(float(weights @ values / weights.sum()), float(low), float(high))


def window_metrics(label: NDArray[np.int64], logit: Values, user: NDArray[np.int64]) -> dict[str, ConfidenceInterval]:
    """Compute the metrics of the events of a time window.

    AUC; GAUC, the mean of per-user AUCs weighted by the number of events; NDCG@10 of each user's own events; normalized
    entropy (NE).

    The model knows the user's reactions to earlier events of the window. That is correct for AUC and entropy, but
    biases scores within a user: after a user's only click, the next event (not a click) gets a higher score
    (docs/splits-and-metrics.md). Compare GAUC and NDCG only between windows, or set
    `task.evaluation.listwise_window_events`.
    """
    entropy = normalized_entropy(label, logit)
    ndcg = user_ndcgs(label, logit, user, 10)
    return {
        "auc": bootstrap_auc(label, logit, user, num_draws=100),
        "gauc": weighted_bootstrap(*user_aucs(label, logit, user)),
        "ndcg@10": weighted_bootstrap(ndcg, np.ones(len(ndcg))),
        "ne": ConfidenceInterval(entropy, float("nan"), float("nan")),
    }


@dataclass(frozen=True, slots=True)
class ExposureCounts:
    """Number of queries for which a system recommended each item in its top k."""

    counts: NDArray[np.int64]
    """Counts by item id, with the shape (N + 1,); id 0 is padding."""
    k: int
    """Number of recommended items per query."""


def exposure_metrics(exposed: ExposureCounts, trained: NDArray[np.int64]) -> dict[str, ConfidenceInterval]:
    """Compute coverage, Gini index and novelty of the recommendations, whether they are correct or not.

    Args:
        exposed: How often each item was recommended.
        trained: Number of training events of each item, with the shape (N + 1,).

    Returns:
        coverage: fraction of the catalog that is recommended at all; gini: 0 if all items are recommended equally
        often, close to 1 if a few items get all recommendations; novelty: mean of -log2 of a recommended item's share
        of the training events, with add-one smoothing.
    """
    shown = exposed.counts[1:].astype(np.float64)
    if not shown.sum():
        values = dict.fromkeys(("coverage", "gini", "novelty"), float("nan"))
    else:
        ordered = np.sort(shown)
        size = len(shown)
        rank = np.arange(1, size + 1)
        share = (trained[1:] + 1) / (trained[1:].sum() + size)
        values = {
            "coverage": float((shown > 0).mean()),
            "gini": float(((2 * rank - size - 1) @ ordered) / (size * ordered.sum())),
            "novelty": float(-(shown @ np.log2(share)) / shown.sum()),
        }
    return {
        f"{name}@{exposed.k}": ConfidenceInterval(value, float("nan"), float("nan")) for name, value in values.items()
    }


def calibration(label: NDArray[np.int64], logit: Values) -> float:
    """Compute the mean predicted probability divided by the positive rate: 1 is calibrated, above 1 overestimates."""
    rate = label.mean() if len(label) else 0.0
    return float((1.0 / (1.0 + np.exp(-logit))).mean() / rate) if rate > 0 else float("nan")


def binary_metrics(
    label: NDArray[np.int64], logit: Values, user: NDArray[np.int64], *, num_draws: int = 200
) -> dict[str, ConfidenceInterval]:
    """Compute AUC, GAUC (mean of per-user AUCs weighted by events), normalized entropy and calibration."""
    unknown = float("nan")
    return {
        "auc": bootstrap_auc(label, logit, user, num_draws=num_draws),
        "gauc": weighted_bootstrap(*user_aucs(label, logit, user), num_draws=num_draws),
        "ne": ConfidenceInterval(normalized_entropy(label, logit), unknown, unknown),
        "calibration": ConfidenceInterval(calibration(label, logit), unknown, unknown),
    }


Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
MAX_RARE_EVENTS = 5
HISTORY_BOUNDS = (0, 1, 5, 10, 20, 50, 100)
MAX_VALUES = 8
"""Maximum number of slices of a category, its most frequent values; the other values form one slice."""
MIN_MEMBERS = 10
"""Minimum number of queries or events of a slice; smaller slices are too noisy and are omitted."""
NAMES = ("items", "users", "history")


@dataclass(frozen=True, slots=True)
class SliceResult:
    """Metrics of one slice."""

    count: int
    """Number of queries or events in the slice."""
    metrics: Mapping[str, Mapping[str, ConfidenceInterval]]
    """Metrics by name of each system (the model and the baselines)."""

    def to_plain(self) -> dict[str, object]:
        systems = {s: {m: [v.mean, v.low, v.high] for m, v in values.items()} for s, values in self.metrics.items()}
        return {"count": self.count, "metrics": systems}


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of an evaluation, one per query or event."""

    item: Ints
    user: Ints
    position: Ints
    """Number of events of the user before the target."""
    item_events: Ints
    """Number of training events of the target item."""
    user_events: Ints
    """Number of training events of the user."""


def check_slices(names: Sequence[str], dataset: Dataset, field: str) -> None:
    """Raise a UserError if a name is not a slice of this dataset."""
    known = [*NAMES, *(feature.column for feature in sliced_features(dataset))]
    for name in names:
        if name not in known:
            raise UserError("no such slice or category", option=field, value=name, remedy=did_you_mean(name, known))


def sliced_features(dataset: Dataset) -> list[Feature]:
    """Return the categories of a dataset that can define slices."""
    return [f for f in dataset.card.features if f.kind == "category" or (f.kind == "categories" and f.owner == "item")]


def slice_masks(names: Sequence[str], dataset: Dataset, targets: Targets) -> dict[str, Mask]:
    """Return the mask of each slice that has enough members, by name."""
    masks: dict[str, Mask] = {}
    if "items" in names:
        events = targets.item_events
        masks |= {
            "new items": events == 0,
            "rare items": (events > 0) & (events <= MAX_RARE_EVENTS),
            "other items": events > MAX_RARE_EVENTS,
        }
    if "users" in names:
        masks |= {"new users": targets.user_events == 0, "known users": targets.user_events > 0}
    if "history" in names:
        for low, high in zip(HISTORY_BOUNDS, (*HISTORY_BOUNDS[1:], None), strict=True):
            if high is None:
                name = f"history {low}+"
            else:
                name = f"history {low}-{high - 1}" if high - 1 > low else "history 0"
            masks[name] = (targets.position >= low) & ((targets.position < high) if high else True)
    for feature in sliced_features(dataset):
        if feature.column in names:
            masks |= _by_category(dataset, feature, targets)
    return {name: mask for name, mask in masks.items() if mask.sum() >= MIN_MEMBERS}


def measure_slices(
    masks: Mapping[str, Mask], systems: Sequence[str], measure: Callable[[str, Mask], Mapping[str, ConfidenceInterval]]
) -> dict[str, SliceResult]:
    """Return the results of `measure` for each system on each slice."""
    return {
        name: SliceResult(int(mask.sum()), {system: measure(system, mask) for system in systems})
        for name, mask in masks.items()
    }


def _by_category(dataset: Dataset, feature: Feature, targets: Targets) -> dict[str, Mask]:
    keys = dataset.vocabulary(feature.column).column("key")
    if feature.is_list:
        values, offsets = dataset.item_lists(feature)
        items = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        has = {i: np.isin(targets.item, items[values == i]) for i in _most_frequent(values)}
        return {f"{feature.column}={keys[i - 1]}": mask for i, mask in has.items()}
    ids = _ids(dataset, feature, targets)
    top = _most_frequent(ids[ids > 0])
    masks = {f"{feature.column}={keys[i - 1]}": ids == i for i in top}
    others = ~np.isin(ids, top) & (ids > 0)
    return {**masks, f"{feature.column}: others": others, f"{feature.column}: unknown": ids == 0}


def _most_frequent(ids: Ints) -> list[int]:
    unique, counts = np.unique(ids, return_counts=True)
    return unique[np.argsort(-counts, kind="stable")[:MAX_VALUES]].tolist()  # type: ignore[no-any-return]


def _ids(dataset: Dataset, feature: Feature, targets: Targets) -> Ints:
    if feature.owner == "item":
        column = dataset.items().column(feature.column).to_numpy().astype(np.int64)
        return np.asarray(np.concatenate([[0], column])[targets.item])
    users, inverse = np.unique(targets.user, return_inverse=True)
    rows = dataset.rows(users)
    if feature.owner == "user":
        return np.asarray(rows.scalars[feature.column].astype(np.int64)[inverse])
    values, offsets = rows.lists[feature.column]
    return np.asarray(values[offsets[inverse] + targets.position].astype(np.int64))
