"""Parts of what is measured: a mean over all hides whom a model serves badly.

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
from nestrec.data.card import Feature
from nestrec.data.dataset import Dataset
from nestrec.tasks.metrics import Interval

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
    metrics: Mapping[str, Mapping[str, Interval]]
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
            raise UserError("is nothing to slice by", field=field, value=name, remedy=did_you_mean(name, known))


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
    masks: Mapping[str, Mask], systems: Sequence[str], measure: Callable[[str, Mask], Mapping[str, Interval]]
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
