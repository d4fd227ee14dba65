"""Metrics as arrays of one value a user or event: means, intervals and paired comparisons come from one place.

Parts of what is measured: a mean over all hides whom a model serves badly.

items     new (no training event), rare (1 to 5) and other targets
users     new (no training event) and known
history   events before the target; a ranking model is also asked for events that have none
a column  values of a category of items, users or events, the most frequent ones
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
    """hr@k, ndcg@k, mrr@k of each user from the 1-based rank of the target; 0 means not among the ranked items."""
    found = rank > 0
    safe = np.where(found, rank, 1)
    metrics: dict[str, Values] = {}
    for k in ks:
        hit = found & (rank <= k)
        metrics[f"hr@{k}"] = hit.astype(np.float64)
        metrics[f"ndcg@{k}"] = np.where(hit, 1.0 / np.log2(safe + 1.0), 0.0)
        metrics[f"mrr@{k}"] = np.where(hit, 1.0 / safe, 0.0)
    return metrics


def bootstrap(
    values: Mapping[str, Values], *, num_draws: int = 1000, seed: int = 0, groups: NDArray[np.int64] | None = None
) -> dict[str, ConfidenceInterval]:
    """Mean of each metric and its interval under resampling of the users, the same draws for all metrics.

    groups: user of each value, where users have several: a user's values are not independent. One user alone has no
    interval.
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
    """Area under the ROC curve; equal scores count half. `weight` counts an event several times (for the bootstrap)."""
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
    """Of each event, from logits."""
    return np.logaddexp(0.0, logit) - label * logit


def normalised_entropy(label: NDArray[np.int64], logit: Values) -> float:
    """Mean log loss over that of always predicting the base rate; below 1 is better than the base rate."""
    if len(label) == 0:
        return float("nan")
    rate = label.mean()
    base = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)) if 0 < rate < 1 else float("nan")
    return float(log_loss(label, logit).mean() / base)


def bootstrap_auc(
    label: NDArray[np.int64], score: Values, group: NDArray[np.int64], *, num_draws: int = 200, seed: int = 0
) -> ConfidenceInterval:
    """AUC with its interval, resampling groups (users), since a user's events are not independent."""
    generator = np.random.default_rng(seed)
    _, member = np.unique(group, return_inverse=True)
    whole = auc(label, score)
    if np.isnan(whole):
        return ConfidenceInterval(whole, whole, whole)
    num_groups = int(member.max()) + 1
    if num_groups == 1:
        return ConfidenceInterval(whole, float("nan"), float("nan"))
    draws = np.empty(num_draws)
    for i in range(num_draws):
        times_drawn = np.bincount(generator.integers(0, num_groups, num_groups), minlength=num_groups)
        draws[i] = auc(label, score, times_drawn[member].astype(np.float64))
    known = draws[~np.isnan(draws)]  # a draw may have users of one label alone
    if len(known) == 0:
        return ConfidenceInterval(whole, float("nan"), float("nan"))
    low, high = np.quantile(known, [0.025, 0.975])
    return ConfidenceInterval(whole, float(low), float(high))


def user_aucs(label: NDArray[np.int64], score: Values, group: NDArray[np.int64]) -> tuple[Values, Values]:
    """AUC of each group (user) that has both labels, and its number of events; equal scores count half."""
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
    """NDCG@k of each group's events, sorted by score, that has a positive one."""
    order = np.lexsort((-score, group))
    label, group = label[order], group[order]
    _, member, counts = np.unique(group, return_inverse=True, return_counts=True)
    place = np.arange(len(label)) - np.repeat(np.cumsum(counts) - counts, counts)
    gain = np.where(place < k, 1.0 / np.log2(place + 2.0), 0.0)
    found = np.bincount(member, weights=gain * label, minlength=len(counts))
    positive = np.bincount(member, weights=label, minlength=len(counts)).astype(np.int64)
    best = np.concatenate([[0.0], np.cumsum(1.0 / np.log2(np.arange(k) + 2.0))])
    has_any = positive > 0
    values: Values = found[has_any] / best[np.minimum(positive[has_any], k)]
    return values


def weighted_bootstrap(values: Values, weights: Values, *, num_draws: int = 200, seed: int = 0) -> ConfidenceInterval:
    """Weighted mean with its interval under resampling of the users."""
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
    """Of the events of a window: AUC; GAUC, the mean over users weighted by their events; NDCG of users' own events;
    normalised entropy.

    Scores that know how a user reacted to the events before each are right for AUC and entropy. Of one user's events
    they are biased against each other: after a user's only click the next event, which is none, is given a higher score
    (docs/splits-and-metrics.md). Compare GAUC and NDCG of windows among themselves, or see `windows_at_once`.
    """
    entropy = normalised_entropy(label, logit)
    ndcg = user_ndcgs(label, logit, user, 10)
    return {
        "auc": bootstrap_auc(label, logit, user, num_draws=100),
        "gauc": weighted_bootstrap(*user_aucs(label, logit, user)),
        "ndcg@10": weighted_bootstrap(ndcg, np.ones(len(ndcg))),
        "ne": ConfidenceInterval(entropy, float("nan"), float("nan")),
    }


@dataclass(frozen=True, slots=True)
class ExposureCounts:
    """How often a system showed each item among its best k, over all queries."""

    counts: NDArray[np.int64]
    """(N + 1,) by item id; id 0 is no item"""
    k: int


def exposure_metrics(exposed: ExposureCounts, trained: NDArray[np.int64]) -> dict[str, ConfidenceInterval]:
    """What a system shows, whether it is right or not. trained: (N + 1,) training events of each item.

    coverage: share of the catalogue that is shown at all; gini: 0 where all items are shown equally often, near 1 where
    few have all; novelty: mean of -log2 of a shown item's share of the training events, each item counted once more.
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
    """Mean probability over the share of positives: 1 is right on the whole, above 1 too sure."""
    rate = label.mean() if len(label) else 0.0
    return float((1.0 / (1.0 + np.exp(-logit))).mean() / rate) if rate > 0 else float("nan")


def binary_metrics(
    label: NDArray[np.int64], logit: Values, user: NDArray[np.int64], *, num_draws: int = 200
) -> dict[str, ConfidenceInterval]:
    """AUC; GAUC, the mean over users of their own AUC weighted by their events; normalised entropy; calibration."""
    unknown = float("nan")
    return {
        "auc": bootstrap_auc(label, logit, user, num_draws=num_draws),
        "gauc": weighted_bootstrap(*user_aucs(label, logit, user), num_draws=num_draws),
        "ne": ConfidenceInterval(normalised_entropy(label, logit), unknown, unknown),
        "calibration": ConfidenceInterval(calibration(label, logit), unknown, unknown),
    }


Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
RARE = 5
HISTORY_BOUNDS = (0, 1, 5, 10, 20, 50, 100)
MOST_VALUES = 8
"""Of a category; the others are one slice."""
MIN_MEMBERS = 10
"""A smaller slice says nothing and is left out."""
NAMES = ("items", "users", "history")


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What was measured on one slice."""

    count: int
    """queries or events"""
    metrics: Mapping[str, Mapping[str, ConfidenceInterval]]
    """system to metric to value"""

    def to_plain(self) -> dict[str, object]:
        systems = {s: {m: [v.mean, v.low, v.high] for m, v in values.items()} for s, values in self.metrics.items()}
        return {"count": self.count, "metrics": systems}


@dataclass(frozen=True, slots=True)
class Targets:
    """What is measured: one target a query or event."""

    item: Ints
    user: Ints
    place: Ints
    """events of the user before it"""
    item_events: Ints
    """training events of the item"""
    user_events: Ints
    """training events of the user"""


def check_slices(names: Sequence[str], dataset: Dataset, field: str) -> None:
    """A UserError where a name is no slice that this dataset has."""
    known = [*NAMES, *(feature.column for feature in sliced_features(dataset))]
    for name in names:
        if name not in known:
            raise UserError("is nothing to slice by", option=field, value=name, remedy=did_you_mean(name, known))


def sliced_features(dataset: Dataset) -> list[Feature]:
    """Categories that can be sliced by."""
    return [f for f in dataset.card.features if f.kind == "category" or (f.kind == "categories" and f.owner == "item")]


def slice_masks(names: Sequence[str], dataset: Dataset, targets: Targets) -> dict[str, Mask]:
    """Slices by name, of enough members each."""
    masks: dict[str, Mask] = {}
    if "items" in names:
        events = targets.item_events
        masks |= {"new items": events == 0, "rare items": (events > 0) & (events <= RARE), "other items": events > RARE}
    if "users" in names:
        masks |= {"new users": targets.user_events == 0, "known users": targets.user_events > 0}
    if "history" in names:
        for low, high in zip(HISTORY_BOUNDS, (*HISTORY_BOUNDS[1:], None), strict=True):
            name = f"history {low}+" if high is None else f"history {low}-{high - 1}" if high - 1 > low else "history 0"
            masks[name] = (targets.place >= low) & ((targets.place < high) if high else True)
    for feature in sliced_features(dataset):
        if feature.column in names:
            masks |= _by_category(dataset, feature, targets)
    return {name: mask for name, mask in masks.items() if mask.sum() >= MIN_MEMBERS}


def measure_slices(
    masks: Mapping[str, Mask], systems: Sequence[str], measure: Callable[[str, Mask], Mapping[str, ConfidenceInterval]]
) -> dict[str, SliceResult]:
    """What `measure` says of each system on each slice."""
    return {
        name: SliceResult(int(mask.sum()), {system: measure(system, mask) for system in systems})
        for name, mask in masks.items()
    }


def _by_category(dataset: Dataset, feature: Feature, targets: Targets) -> dict[str, Mask]:
    keys = dataset.vocabulary(feature.column).column("key")
    if feature.is_list:
        values, offsets = dataset.item_lists(feature)
        held = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        has = {i: np.isin(targets.item, held[values == i]) for i in _most_frequent(values)}
        return {f"{feature.column}={keys[i - 1]}": mask for i, mask in has.items()}
    ids = _ids(dataset, feature, targets)
    top = _most_frequent(ids[ids > 0])
    masks = {f"{feature.column}={keys[i - 1]}": ids == i for i in top}
    others = ~np.isin(ids, top) & (ids > 0)
    return {**masks, f"{feature.column}: others": others, f"{feature.column}: unknown": ids == 0}


def _most_frequent(ids: Ints) -> list[int]:
    distinct, counts = np.unique(ids, return_counts=True)
    return distinct[np.argsort(-counts, kind="stable")[:MOST_VALUES]].tolist()  # type: ignore[no-any-return]


def _ids(dataset: Dataset, feature: Feature, targets: Targets) -> Ints:
    if feature.owner == "item":
        column = dataset.items().column(feature.column).to_numpy().astype(np.int64)
        return np.asarray(np.concatenate([[0], column])[targets.item])
    users, inverse = np.unique(targets.user, return_inverse=True)
    rows = dataset.rows(users)
    if feature.owner == "user":
        return np.asarray(rows.scalars[feature.column].astype(np.int64)[inverse])
    values, offsets = rows.lists[feature.column]
    return np.asarray(values[offsets[inverse] + targets.place].astype(np.int64))
