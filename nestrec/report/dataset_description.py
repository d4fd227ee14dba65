"""Statistics of the features of a dataset (coverage, cardinality, examples), and detection of label leaks.

A leak is a feature that reveals the label: it (nearly) determines an action of the same event, or it is a statistic of
an item that was computed over the complete log. Columns that are declared as known only after the event are not
checked.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.data.dataset import Dataset, DatasetRows
from nestrec.data.dataset_card import Feature
from nestrec.data.dataset_schema import TIMESTAMPS_MS
from nestrec.tasks.metrics import auc

MAX_GROUPS = 16
"""Maximum number of row groups of users that are read; larger datasets are sampled evenly."""
SUSPICIOUS_AUC = 0.95
SUSPICIOUS_CORRELATION = 0.9
MANY_SAME_TIMES = 0.2
_MIN_EVENTS = 50
"""Minimum number of events of either outcome; with fewer events, the AUC is not reliable."""
_NUM_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class FeatureStats:
    """Statistics of one feature."""

    feature: Feature
    coverage: float
    """Fraction of the events, items or users that have a value."""
    distinct: int | None
    """Number of distinct ids or numbers; None for vectors."""
    examples: tuple[str, ...]
    """Examples of values, most frequent first."""

    def row(self) -> dict[str, Any]:
        """Return the statistics as a table row."""
        feature = self.feature
        size = feature.width if feature.kind == "vector" else feature.vocabulary_size
        return {
            "feature": feature.column,
            "kind": feature.kind,
            "size": size or None,
            "coverage": round(self.coverage, 4),
            "distinct": self.distinct,
            "transform": feature.transform.kind if feature.transform.kind != "none" else "",
            "known": feature.known if feature.owner == "event" else "",
            "examples": ", ".join(self.examples),
        }


@dataclass(frozen=True, slots=True)
class Description:
    """Statistics of a dataset, with warnings."""

    features: tuple[FeatureStats, ...]
    actions: dict[str, float]
    """Fraction of the events with each action."""
    warnings: tuple[str, ...]
    num_events: int
    """Number of events that were read."""


def describe(dataset: Dataset) -> Description:
    """Compute the statistics of a dataset of sequences, from all items and the users of a sample of row groups."""
    rows = dataset.rows(_sampled_users(dataset))
    features = tuple(_feature_stats(dataset, rows, feature) for feature in dataset.card.features)
    actions = {name: _labels(rows, bit) for name, bit in dataset.card.action_bits.items()}
    fractions = {name: float(label.mean()) if label.size else 0.0 for name, label in actions.items()}
    warnings = (
        *_equal_time_warnings(rows),
        *_constant_warnings(features),
        *_label_leak_warnings(dataset, rows, actions),
        *_lookahead_warnings(dataset),
    )
    return Description(features, fractions, warnings, int(rows.lists["item_ids"][0].size))


def measure_actions(dataset: Dataset) -> tuple[dict[str, float], int]:
    """Return the fraction of the events with each action, and the number of events of the sample that was read."""
    if not dataset.card.action_bits:
        return {}, 0
    rows = dataset.select_columns(["actions"]).rows(_sampled_users(dataset))
    fractions = {name: float(_labels(rows, bit).mean()) for name, bit in dataset.card.action_bits.items()}
    return fractions, int(rows.lists["actions"][0].size)


def _sampled_users(dataset: Dataset) -> NDArray[np.int64]:
    groups = np.unique(np.linspace(0, dataset.num_row_groups - 1, MAX_GROUPS).astype(np.int64))
    bounds = dataset.row_group_bounds
    return np.concatenate([np.arange(bounds[g], bounds[g + 1]) for g in groups])


def _labels(rows: DatasetRows, bit: int) -> NDArray[np.int64]:
    return (rows.lists["actions"][0].astype(np.int64) & bit > 0).astype(np.int64)


def _feature_stats(dataset: Dataset, rows: DatasetRows, feature: Feature) -> FeatureStats:
    if feature.kind == "vector":
        return FeatureStats(feature, _filled_rows(dataset, feature), None, ())
    values, coverage = _values(dataset, rows, feature)
    if feature.kind == "text":
        return FeatureStats(feature, coverage, len(np.unique(values)), tuple(str(v) for v in values[:_NUM_EXAMPLES]))
    known = values[~np.isnan(values)] if values.dtype.kind == "f" else values[values > 0]
    distinct, counts = np.unique(known, return_counts=True)
    top = distinct[np.argsort(-counts, kind="stable")[:_NUM_EXAMPLES]]
    if feature.kind == "number":
        low_mid_high = np.quantile(known, [0, 0.5, 1]) if known.size else []
        return FeatureStats(feature, coverage, distinct.size, tuple(f"{v:g}" for v in low_mid_high))
    keys = dataset.vocabulary(feature.column).column("key") if feature.kind != "bag" else None
    examples = () if keys is None else tuple(str(keys[int(i) - 1]) for i in top)
    return FeatureStats(feature, coverage, distinct.size, examples)


def _filled_rows(dataset: Dataset, feature: Feature) -> float:
    vectors = dataset.vectors(feature)
    first = 1 if feature.owner == "item" else 0
    filled = sum(int(vectors[start : start + 8192].any(1).sum()) for start in range(first, len(vectors), 8192))
    return filled / max(1, len(vectors) - first)


def _values(dataset: Dataset, rows: DatasetRows, feature: Feature) -> tuple[NDArray[Any], float]:
    """Return the values of a feature, and the fraction of its owners (events, items or users) that have one."""
    if feature.owner == "item":
        column = dataset.items().column(feature.column)
        if feature.is_list:
            values, offsets = dataset.item_lists(feature)
            return values, _fraction(np.diff(offsets)[1:] > 0)
        array = np.asarray(column.to_numpy())
    elif feature.owner == "user" and not feature.is_list:
        array = np.asarray(rows.scalars[feature.column])
    else:
        array, offsets = rows.lists[feature.column]
        if feature.is_list:
            counts = rows.lists[feature.counts_column][0] if feature.owner == "event" else np.diff(offsets)
            return array, _fraction(counts > 0)
    if array.dtype == object:
        texts = np.array([str(text) for text in array if text], dtype=object)
        return texts, texts.size / max(1, array.size)
    return array, _fraction(~np.isnan(array) if array.dtype.kind == "f" else array > 0)


def _fraction(flags: NDArray[Any]) -> float:
    return float(flags.mean()) if flags.size else 0.0


def _equal_time_warnings(rows: DatasetRows) -> Iterator[str]:
    """Warn about coarse times: then models learn the order of the input, which may be sorted by another column."""
    if TIMESTAMPS_MS not in rows.lists:
        return
    times, offsets = rows.lists[TIMESTAMPS_MS]
    follows = np.ones(times.size, dtype=np.bool_)
    follows[offsets[:-1][np.diff(offsets) > 0]] = False
    fraction = _fraction((np.diff(times, prepend=0) == 0)[follows])
    if fraction >= MANY_SAME_TIMES:
        yield (
            f"{fraction:.0%} of events have the same time as the user's previous event and stay in the order of the "
            "input: check that this is the true order, or set --log.position to a column that orders them"
        )


def _constant_warnings(features: tuple[FeatureStats, ...]) -> Iterator[str]:
    for stats in features:
        if stats.coverage == 0:
            yield f"{stats.feature.column} is empty: check its column, or remove it"
        elif stats.distinct == 1 and stats.coverage == 1:
            yield f"{stats.feature.column} is constant and not useful for a model"


def _label_leak_warnings(dataset: Dataset, rows: DatasetRows, actions: dict[str, NDArray[np.int64]]) -> Iterator[str]:
    """Warn about features of events, users and items that (nearly) determine an action of the same event."""
    users = np.repeat(np.arange(rows.num_rows), np.diff(rows.lists["item_ids"][1]))
    for feature in dataset.card.features:
        if feature.known == "after" or feature.kind in ("text", "vector"):
            continue
        value = _value_of_events(dataset, rows, feature, users)
        for name, label in actions.items():
            if min(label.sum(), (1 - label).sum()) < _MIN_EVENTS:
                continue
            label_auc = _label_auc(feature, value, label, users)
            if label_auc >= SUSPICIOUS_AUC:
                yield (
                    f"{feature.column} nearly determines {name!r} of the same event (AUC {label_auc:.3f}): if it is "
                    "known only after the event, move its column to --log.outcome_features, or remove it"
                )


def _value_of_events(dataset: Dataset, rows: DatasetRows, feature: Feature, users: NDArray[np.int64]) -> NDArray[Any]:
    """Return one number or id per event; for a list feature, its length."""
    if feature.owner == "event":
        return rows.lists[feature.counts_column if feature.is_list else feature.column][0]
    if feature.owner == "user":
        user_values = np.diff(rows.lists[feature.column][1]) if feature.is_list else rows.scalars[feature.column]
        return np.asarray(user_values[users])
    items = rows.lists["item_ids"][0]
    if feature.is_list:
        return np.asarray(np.diff(dataset.item_lists(feature)[1])[items])
    column = np.asarray(dataset.items().column(feature.column).to_numpy())
    return np.asarray(column[items - 1])


def _label_auc(feature: Feature, value: NDArray[Any], label: NDArray[np.int64], users: NDArray[np.int64]) -> float:
    """Return the AUC of a feature for a label.

    The score of a number is the number itself. The score of a category is its label rate among the other half of the
    users, so that rare categories do not predict their own labels.
    """
    if feature.kind != "category":
        is_blank = np.isnan(value.astype(np.float64))
        filled = np.where(is_blank, np.nanmin(value) - 1 if not is_blank.all() else 0, value).astype(np.float64)
        aucs = [auc(label, filled), auc(label, is_blank.astype(np.float64))]
        return max(max(a, 1 - a) for a in aucs)
    half = (users % 2).astype(bool)
    size = int(value.max(initial=0)) + 1
    score = np.zeros(label.size)
    for side in (half, ~half):
        positive = np.bincount(value[~side], weights=label[~side], minlength=size)
        total = np.bincount(value[~side], minlength=size)
        score[side] = ((positive + label.mean()) / (total + 1))[value[side]]
    return auc(label, score)


def _lookahead_warnings(dataset: Dataset) -> Iterator[str]:
    """Warn about item features that correlate with the popularity in the complete log, which is future information."""
    counts = dataset.items().column("count").to_numpy()
    for feature in dataset.card.item_features:
        if feature.kind != "number" and feature.transform.kind != "quantiles":
            continue
        value = dataset.items().column(feature.column).to_numpy().astype(np.float64)
        known = ~np.isnan(value)
        if known.sum() < _MIN_EVENTS or np.ptp(value[known]) == 0 or np.ptp(counts[known]) == 0:
            continue
        correlation = float(np.corrcoef(_ranks(value[known]), _ranks(counts[known]))[0, 1])
        if abs(correlation) >= SUSPICIOUS_CORRELATION:
            yield (
                f"{feature.column} correlates with the popularity of items in the complete log (rank correlation "
                f"{correlation:.2f}): if it was counted over the log, it contains future information; count it up to "
                "each event, or remove it"
            )


def _ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the rank of each value; equal values get their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[inverse])
