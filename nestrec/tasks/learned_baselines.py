"""Learned ranking baselines: gradient-boosted trees and logistic regression on engineered features.

Gradient-boosted trees are hard to beat if the features are informative. The columns of an event are: smoothed positive
rates of its item, its user and each category (target encoding, computed out of fold), the ids of categories with few
values, the numeric features, the number of training events of its item and user, and the hour of the day.
HistGradientBoostingClassifier of scikit-learn fits them (extra `trees`).

Logistic regression is the minimum that a ranking model must beat. The features of an event are: the logit of the
smoothed rate of its item, the logit of the smoothed rate of its user, and one category (such as the tab), one-hot
encoded or, if it has many values, as the logit of its rate. Rates are computed from training events; while fitting, an
event's own label is excluded from them.
"""

import importlib.util
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestrec.base.lazy import install_extra
from nestrec.base.random import mix64_array
from nestrec.base.thread_team import cores_per_rank

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NUM_FOLDS = 5
MAX_FITTED_EVENTS = 500_000
"""Maximum number of training events that the trees are fitted on, the latest ones; all events count for rates."""
MAX_ID_VALUES = 32
SMOOTHING = 10.0
MISSING_PACKAGE = f"baseline 'boosted trees' is skipped: it needs scikit-learn ({install_extra('trees')})"


def is_available() -> bool:
    """Return whether scikit-learn is installed."""
    return importlib.util.find_spec("sklearn") is not None


@dataclass(frozen=True, slots=True)
class EventTable:
    """Features of events that are known before the user reacts, one row per event."""

    ids: dict[str, Ints]
    """Non-negative ids of each category, including `item` and `user`."""
    numbers: dict[str, Floats]
    """Values of each numeric feature; NaN if missing."""
    times_ms: Ints

    def select(self, index: Ints) -> "EventTable":
        return EventTable(
            {name: values[index] for name, values in self.ids.items()},
            {name: values[index] for name, values in self.numbers.items()},
            self.times_ms[index],
        )


class BoostedTrees:
    """Gradient-boosted trees for one label, fitted on training events; `logits` scores other events."""

    def __init__(self, events: EventTable, label: Ints, *, seed: int = 0):
        from sklearn.ensemble import HistGradientBoostingClassifier  # type: ignore[import-untyped,unused-ignore]

        self._overall = float(label.mean())
        self._sums = {name: _Sums.of(ids, label, fold_of(len(label))) for name, ids in events.ids.items()}
        small = {name for name, ids in events.ids.items() if ids.max(initial=0) < MAX_ID_VALUES}
        self._id_columns = small - {"item", "user"}
        columns = self._columns(events, fold_of(len(label)))
        chosen = np.argsort(events.times_ms, kind="stable")[-MAX_FITTED_EVENTS:]
        self._model = HistGradientBoostingClassifier(
            max_iter=200, learning_rate=0.08, max_leaf_nodes=31, l2_regularization=1.0, early_stopping=False,
            random_state=seed,
        )  # fmt: skip
        with _limit_threads():
            self._model.fit(columns[chosen], label[chosen])

    def logits(self, events: EventTable) -> Floats:
        with _limit_threads():
            probability = self._model.predict_proba(self._columns(events, None))[:, 1].clip(1e-7, 1 - 1e-7)
        odds: Floats = np.log(probability) - np.log1p(-probability)
        return odds

    def _columns(self, events: EventTable, fold: Ints | None) -> Floats:
        """Build the feature matrix; `fold` is set for training events, whose own fold is excluded from the rates."""
        columns = []
        for name, ids in events.ids.items():
            positive, total = self._sums[name].of_others(ids, fold)
            columns.append((positive + SMOOTHING * self._overall) / (total + SMOOTHING))
            if name in ("item", "user"):
                columns.append(total)
            if name in self._id_columns:
                columns.append(ids.astype(np.float64))
        columns += [values.astype(np.float64) for values in events.numbers.values()]
        columns.append((events.times_ms // 3_600_000 % 24).astype(np.float64))
        return np.stack(columns, axis=1)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Number of positives and of events per fold and id, with the shape (folds, ids)."""

    positive: Floats
    total: Floats

    @staticmethod
    def of(ids: Ints, label: Ints, fold: Ints) -> "_Sums":
        size = int(ids.max(initial=0)) + 1
        index = fold * size + ids
        positive = np.bincount(index, weights=label, minlength=NUM_FOLDS * size).reshape(NUM_FOLDS, size)
        total = np.bincount(index, minlength=NUM_FOLDS * size).reshape(NUM_FOLDS, size).astype(np.float64)
        return _Sums(positive.astype(np.float64), total)

    def of_others(self, ids: Ints, fold: Ints | None) -> tuple[Floats, Floats]:
        """Return the sums over all folds except `fold`; they are 0 for unseen ids."""
        known = np.where(ids < self.total.shape[1], ids, 0)
        is_known = ids < self.total.shape[1]
        positive = self.positive.sum(0)[known]
        total = self.total.sum(0)[known]
        if fold is not None:
            positive, total = positive - self.positive[fold, known], total - self.total[fold, known]
        return positive * is_known, total * is_known


def _limit_threads() -> AbstractContextManager[object]:
    """Limit OpenMP to half of the cores of the process and at most OMP_NUM_THREADS threads.

    With all cores of a busy machine, threads that waited for each other made fitting ten times slower.
    """
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped,unused-ignore]

    pools = ThreadpoolController().select(user_api="openmp")
    limit = min([cores_per_rank() // 2, *(pool["num_threads"] for pool in pools.info())])
    return pools.limit(limits=max(1, limit))  # type: ignore[no-any-return,unused-ignore]


def fold_of(num_events: int) -> Ints:
    """Return the fold of each training event, a function of its index only."""
    return (mix64_array(np.arange(num_events)) % np.uint64(NUM_FOLDS)).astype(np.int64)


_LEAST_RATE = 1e-6
MAX_ONE_HOT = 100
"""Maximum number of values of a one-hot encoded category: memory grows with the number of columns, time with its
cube."""


@dataclass(frozen=True, slots=True)
class IdRates:
    """Positive rate of each id, smoothed towards the overall rate."""

    positive: Floats
    total: Floats
    overall: float

    @staticmethod
    def of(ids: Ints, label: Ints, size: int) -> "IdRates":
        positive = np.bincount(ids, weights=label, minlength=size)
        total = np.bincount(ids, minlength=size).astype(np.float64)
        return IdRates(positive.astype(np.float64), total, float(label.mean()))

    def logit(self, ids: Ints, own_label: Ints | None = None) -> Floats:
        """Return the log odds of each id's rate; with `own_label` each event is excluded from its own rate."""
        positive = self.positive[ids]
        total = self.total[ids]
        if own_label is not None:
            positive, total = positive - own_label, total - 1
        rate = (positive + SMOOTHING * self.overall) / (total + SMOOTHING)
        rate = rate.clip(_LEAST_RATE, 1 - _LEAST_RATE)  # all labels may be equal
        odds: Floats = np.log(rate) - np.log1p(-rate)
        return odds


class LogisticBaseline:
    """Logistic regression for one label, fitted on training events; `logits` scores other events."""

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
        self._num_columns = num_categories if num_categories <= MAX_ONE_HOT else 1
        self._categories = None if num_categories <= MAX_ONE_HOT else IdRates.of(category, label, num_categories)
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
            category = np.zeros_like(category)  # a single constant column replaces the one-hot columns
        return np.concatenate([np.stack(rates, axis=1), np.eye(self._num_columns)[category]], axis=1)


def fit(features: Floats, label: Ints, *, ridge: float = 1.0, num_steps: int = 25) -> Floats:
    """Return the weights of a ridge-penalized logistic regression, fitted by Newton's method."""
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
