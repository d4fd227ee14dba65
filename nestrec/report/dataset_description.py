"""What a dataset holds: coverage, cardinality and examples of each feature, and what looks like a leak.

A leak is a feature that tells the answer: one that (nearly) determines an action of the same event, or a figure of an
item that was counted over the whole log. Columns that are said to be known after the event are named and not judged.
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
"""Row groups of users that are looked at; a dataset of more is sampled evenly."""
SUSPICIOUS_AUC = 0.95
SUSPICIOUS_CORRELATION = 0.9
MANY_SAME_TIMES = 0.2
_MIN_EVENTS = 50
"""Fewer events of either outcome say nothing."""
_NUM_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class FeatureStats:
    """What was found of a feature."""

    feature: Feature
    coverage: float
    """share of its events, items or users that have a value"""
    distinct: int | None
    """different ids or numbers that were seen"""
    examples: tuple[str, ...]
    """the most frequent first"""

    def row(self) -> dict[str, Any]:
        """For a table."""
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
    """Facts of all features, shares of the actions, and warnings for people."""

    features: tuple[FeatureStats, ...]
    actions: dict[str, float]
    warnings: tuple[str, ...]
    num_events: int
    """that were looked at"""


def describe(dataset: Dataset) -> Description:
    """Look at a dataset of sequences: all its items, and the users of some row groups."""
    rows = dataset.rows(_sampled_users(dataset))
    features = tuple(_facts(dataset, rows, feature) for feature in dataset.card.features)
    actions = {name: _labels(rows, bit) for name, bit in dataset.card.action_bits.items()}
    shares = {name: float(label.mean()) if label.size else 0.0 for name, label in actions.items()}
    warnings = (*_same_times(rows), *_blank(features), *_answers(dataset, rows, actions), *_counted(dataset))
    return Description(features, shares, warnings, int(rows.lists["item_ids"][0].size))


def _sampled_users(dataset: Dataset) -> NDArray[np.int64]:
    groups = np.unique(np.linspace(0, dataset.num_row_groups - 1, MAX_GROUPS).astype(np.int64))
    bounds = dataset.row_group_bounds
    return np.concatenate([np.arange(bounds[g], bounds[g + 1]) for g in groups])


def _labels(rows: DatasetRows, bit: int) -> NDArray[np.int64]:
    return (rows.lists["actions"][0].astype(np.int64) & bit > 0).astype(np.int64)


def _facts(dataset: Dataset, rows: DatasetRows, feature: Feature) -> FeatureStats:
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
    filled = sum(int(vectors[at : at + 8192].any(1).sum()) for at in range(first, len(vectors), 8192))
    return filled / max(1, len(vectors) - first)


def _values(dataset: Dataset, rows: DatasetRows, feature: Feature) -> tuple[NDArray[Any], float]:
    """All values that were looked at, and the share of owners that have one."""
    if feature.owner == "item":
        column = dataset.items().column(feature.column)
        if feature.is_list:
            values, offsets = dataset.item_lists(feature)
            return values, _share(np.diff(offsets)[1:] > 0)
        array = np.asarray(column.to_numpy())
    elif feature.owner == "user" and not feature.is_list:
        array = np.asarray(rows.scalars[feature.column])
    else:
        array, offsets = rows.lists[feature.column]
        if feature.is_list:
            counts = rows.lists[feature.counts_column][0] if feature.owner == "event" else np.diff(offsets)
            return array, _share(counts > 0)
    if array.dtype == object:
        texts = np.array([str(text) for text in array if text], dtype=object)
        return texts, texts.size / max(1, array.size)
    return array, _share(~np.isnan(array) if array.dtype.kind == "f" else array > 0)


def _share(flags: NDArray[Any]) -> float:
    return float(flags.mean()) if flags.size else 0.0


def _same_times(rows: DatasetRows) -> Iterator[str]:
    """Where times are coarse, models learn the order of the input, which may be that of another column."""
    if TIMESTAMPS_MS not in rows.lists:
        return
    times, offsets = rows.lists[TIMESTAMPS_MS]
    follows = np.ones(times.size, dtype=np.bool_)
    follows[offsets[:-1][np.diff(offsets) > 0]] = False
    share = _share((np.diff(times, prepend=0) == 0)[follows])
    if share >= MANY_SAME_TIMES:
        yield (
            f"{share:.0%} of events have the time of the user's event before: their order is that of the input, so see "
            "that it is the true one, or name what orders them (--log.position)"
        )


def _blank(facts: tuple[FeatureStats, ...]) -> Iterator[str]:
    for found in facts:
        if found.coverage == 0:
            yield f"{found.feature.column} has no value at all: check its column, or leave it out"
        elif found.distinct == 1 and found.coverage == 1:
            yield f"{found.feature.column} has one value everywhere: it tells a model nothing"


def _answers(dataset: Dataset, rows: DatasetRows, actions: dict[str, NDArray[np.int64]]) -> Iterator[str]:
    """Features of events, users and items that (nearly) determine an action of the same event."""
    users = np.repeat(np.arange(rows.num_rows), np.diff(rows.lists["item_ids"][1]))
    for feature in dataset.card.features:
        if feature.known == "after" or feature.kind in ("text", "vector"):
            continue
        value = _value_of_events(dataset, rows, feature, users)
        for name, label in actions.items():
            if min(label.sum(), (1 - label).sum()) < _MIN_EVENTS:
                continue
            found = _tells(feature, value, label, users)
            if found >= SUSPICIOUS_AUC:
                yield (
                    f"{feature.column} nearly tells {name!r} of the same event (AUC {found:.3f}): if it is known only "
                    "after the event, name its column in --log.values instead, or leave it out"
                )


def _value_of_events(dataset: Dataset, rows: DatasetRows, feature: Feature, users: NDArray[np.int64]) -> NDArray[Any]:
    """One number or id an event; of a list how many it has."""
    if feature.owner == "event":
        return rows.lists[feature.counts_column if feature.is_list else feature.column][0]
    if feature.owner == "user":
        of_users = np.diff(rows.lists[feature.column][1]) if feature.is_list else rows.scalars[feature.column]
        return np.asarray(of_users[users])
    items = rows.lists["item_ids"][0]
    if feature.is_list:
        return np.asarray(np.diff(dataset.item_lists(feature)[1])[items])
    column = np.asarray(dataset.items().column(feature.column).to_numpy())
    return np.asarray(column[items - 1])


def _tells(feature: Feature, value: NDArray[Any], label: NDArray[np.int64], users: NDArray[np.int64]) -> float:
    """AUC of the value itself; of a category, that of its rate among the other half of the users."""
    if feature.kind != "category":
        is_blank = np.isnan(value.astype(np.float64))
        filled = np.where(is_blank, np.nanmin(value) - 1 if not is_blank.all() else 0, value).astype(np.float64)
        found = [auc(label, filled), auc(label, is_blank.astype(np.float64))]
        return max(max(a, 1 - a) for a in found)
    half = (users % 2).astype(bool)
    size = int(value.max(initial=0)) + 1
    score = np.zeros(label.size)
    for side in (half, ~half):
        positive = np.bincount(value[~side], weights=label[~side], minlength=size)
        total = np.bincount(value[~side], minlength=size)
        score[side] = ((positive + label.mean()) / (total + 1))[value[side]]
    return auc(label, score)


def _counted(dataset: Dataset) -> Iterator[str]:
    """Numbers of items that go with how often the whole log has them: they look into the future."""
    counts = dataset.items().column("count").to_numpy()
    for feature in dataset.card.item_features:
        if feature.kind != "number" and feature.transform.kind != "quantiles":
            continue
        value = dataset.items().column(feature.column).to_numpy().astype(np.float64)
        known = ~np.isnan(value)
        if known.sum() < _MIN_EVENTS or np.ptp(value[known]) == 0 or np.ptp(counts[known]) == 0:
            continue
        together = float(np.corrcoef(_ranks(value[known]), _ranks(counts[known]))[0, 1])
        if abs(together) >= SUSPICIOUS_CORRELATION:
            yield (
                f"{feature.column} goes with how often the whole log has an item (rank correlation {together:.2f}): if "
                "it was counted over the log, it looks into the future; count it up to each event, or leave it out"
            )


def _ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Mean rank of equal values."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[inverse])
