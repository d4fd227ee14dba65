"""Learned baselines: gradient-boosted trees and logistic regression.

Gradient-boosted trees on hand-made columns: the baseline of ranking that is hard to beat where features tell much.

Columns of an event: smoothed rates of its item, user and of every category with many values, learnt on other folds of
the training events than the event's own; the ids of categories with few values; numbers as they came; the training
events of its item and user; the hour of the day. HistGradientBoostingClassifier of scikit-learn fits them (extra
`trees`).

Logistic regression on a few hand-made features: the baseline that a ranking model must beat.

Features of an event: logit of the smoothed rate of its item, logit of the smoothed rate of its user, and its category
(such as the tab) as one-hot, or by its rate too where it has many values. Rates come from training events; while
fitting, an event's own label is left out of them.
"""

import importlib.util
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestrec.base.random import mix64_array
from nestrec.base.thread_team import cores_of_rank

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NUM_FOLDS = 5
MOST_EVENTS = 500_000
"""Of more training events, so many of the last ones in time are fitted; all of them count for rates."""
FEW_VALUES = 32
SMOOTHING = 10.0
MISSING_PACKAGE = "baseline 'boosted trees' is left out: pip install 'nestrec[trees]' brings scikit-learn"


def is_available() -> bool:
    """Whether scikit-learn is installed."""
    return importlib.util.find_spec("sklearn") is not None


@dataclass(frozen=True, slots=True)
class EventTable:
    """What is known of each event before the user reacts, one row an event."""

    ids: dict[str, Ints]
    """Category to id, `item` and `user` among them; 0 or more."""
    numbers: dict[str, Floats]
    """NaN where blank."""
    times_ms: Ints

    def take(self, places: Ints) -> "EventTable":
        return EventTable(
            {name: values[places] for name, values in self.ids.items()},
            {name: values[places] for name, values in self.numbers.items()},
            self.times_ms[places],
        )


class BoostedTrees:
    """Fitted on training events; `logits` scores any others."""

    def __init__(self, events: EventTable, label: Ints, *, seed: int = 0):
        from sklearn.ensemble import HistGradientBoostingClassifier  # type: ignore[import-untyped,unused-ignore]

        self._overall = float(label.mean())
        self._sums = {name: _Sums.of(ids, label, fold_of(len(label))) for name, ids in events.ids.items()}
        of_few = {name for name, ids in events.ids.items() if ids.max(initial=0) < FEW_VALUES}
        self._few = of_few - {"item", "user"}
        columns = self._columns(events, fold_of(len(label)))
        chosen = np.argsort(events.times_ms, kind="stable")[-MOST_EVENTS:]
        self._model = HistGradientBoostingClassifier(
            max_iter=200, learning_rate=0.08, max_leaf_nodes=31, l2_regularization=1.0, early_stopping=False,
            random_state=seed,
        )  # fmt: skip
        with _fewer_threads():
            self._model.fit(columns[chosen], label[chosen])

    def logits(self, events: EventTable) -> Floats:
        with _fewer_threads():
            probability = self._model.predict_proba(self._columns(events, None))[:, 1].clip(1e-7, 1 - 1e-7)
        odds: Floats = np.log(probability) - np.log1p(-probability)
        return odds

    def _columns(self, events: EventTable, fold: Ints | None) -> Floats:
        """fold: of training events, whose own fold is left out of the rates."""
        columns = []
        for name, ids in events.ids.items():
            positive, total = self._sums[name].of_others(ids, fold)
            columns.append((positive + SMOOTHING * self._overall) / (total + SMOOTHING))
            if name in ("item", "user"):
                columns.append(total)
            if name in self._few:
                columns.append(ids.astype(np.float64))
        columns += [values.astype(np.float64) for values in events.numbers.values()]
        columns.append((events.times_ms // 3_600_000 % 24).astype(np.float64))
        return np.stack(columns, axis=1)


@dataclass(frozen=True, slots=True)
class _Sums:
    """(folds, ids) positives and events."""

    positive: Floats
    total: Floats

    @staticmethod
    def of(ids: Ints, label: Ints, fold: Ints) -> "_Sums":
        size = int(ids.max(initial=0)) + 1
        place = fold * size + ids
        positive = np.bincount(place, weights=label, minlength=NUM_FOLDS * size).reshape(NUM_FOLDS, size)
        total = np.bincount(place, minlength=NUM_FOLDS * size).reshape(NUM_FOLDS, size).astype(np.float64)
        return _Sums(positive.astype(np.float64), total)

    def of_others(self, ids: Ints, fold: Ints | None) -> tuple[Floats, Floats]:
        """Sums over all folds but the given one; an id that was never seen has none."""
        known = np.where(ids < self.total.shape[1], ids, 0)
        is_known = ids < self.total.shape[1]
        positive = self.positive.sum(0)[known]
        total = self.total.sum(0)[known]
        if fold is not None:
            positive, total = positive - self.positive[fold, known], total - self.total[fold, known]
        return positive * is_known, total * is_known


def _fewer_threads() -> AbstractContextManager[object]:
    """Half of the cores that the process may use, and no more than it was given (OMP_NUM_THREADS).

    Threads that wait for each other on a machine that is busy made it ten times as slow.
    """
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped,unused-ignore]

    pools = ThreadpoolController().select(user_api="openmp")
    most = min([cores_of_rank() // 2, *(pool["num_threads"] for pool in pools.info())])
    return pools.limit(limits=max(1, most))  # type: ignore[no-any-return,unused-ignore]


def fold_of(num_events: int) -> Ints:
    """The fold of each training event, by its place alone."""
    return (mix64_array(np.arange(num_events)) % np.uint64(NUM_FOLDS)).astype(np.int64)


_LEAST_RATE = 1e-6
MOST_ONE_HOT = 100
"""Values of a category that have a column each: memory is events times columns, and time goes with their cube."""


@dataclass(frozen=True, slots=True)
class IdRates:
    """Positives and events of each id, smoothed towards the overall rate."""

    positive: Floats
    total: Floats
    overall: float

    @staticmethod
    def of(ids: Ints, label: Ints, size: int) -> "IdRates":
        positive = np.bincount(ids, weights=label, minlength=size)
        total = np.bincount(ids, minlength=size).astype(np.float64)
        return IdRates(positive.astype(np.float64), total, float(label.mean()))

    def logit(self, ids: Ints, own_label: Ints | None = None) -> Floats:
        """Log odds of each id's rate; with `own_label` the event itself is left out."""
        positive = self.positive[ids]
        total = self.total[ids]
        if own_label is not None:
            positive, total = positive - own_label, total - 1
        rate = (positive + SMOOTHING * self.overall) / (total + SMOOTHING)
        rate = rate.clip(_LEAST_RATE, 1 - _LEAST_RATE)  # labels may be all alike
        odds: Floats = np.log(rate) - np.log1p(-rate)
        return odds


class LogisticBaseline:
    """Fitted on training events; `logits` scores any others."""

    def __init__(
        self,
        item: Ints,
        user: Ints,
        category: Ints,
        label: Ints,
        *,
        num_items: int,
        num_users: int,
        num_categories: int,
    ):
        self._num_columns = num_categories if num_categories <= MOST_ONE_HOT else 1
        self._categories = None if num_categories <= MOST_ONE_HOT else IdRates.of(category, label, num_categories)
        self._items = IdRates.of(item, label, num_items)
        self._users = IdRates.of(user, label, num_users)
        features = self._features(item, user, category, label)
        self._weight = fit(features, label)

    def logits(self, item: Ints, user: Ints, category: Ints) -> Floats:
        return self._features(item, user, category, None) @ self._weight

    def _features(self, item: Ints, user: Ints, category: Ints, own_label: Ints | None) -> Floats:
        rates = [self._items.logit(item, own_label), self._users.logit(user, own_label)]
        if self._categories is not None:
            rates.append(self._categories.logit(category, own_label))
            category = np.zeros_like(category)  # one column for all of them
        return np.concatenate([np.stack(rates, axis=1), np.eye(self._num_columns)[category]], axis=1)


def fit(features: Floats, label: Ints, *, ridge: float = 1.0, num_steps: int = 25) -> Floats:
    """Newton's method on the ridge-penalised log loss."""
    weight = np.zeros(features.shape[1])
    for _ in range(num_steps):
        probability = 1.0 / (1.0 + np.exp(-(features @ weight)))
        gradient = features.T @ (probability - label) + ridge * weight
        curvature = (features * (probability * (1 - probability))[:, None]).T @ features
        change = np.linalg.solve(curvature + ridge * np.eye(len(weight)), gradient)
        weight -= change
        if np.abs(change).max() < 1e-10:
            break
    return weight
