"""Logistic regression on a few hand-made features: the baseline that a ranking model must beat.

Features of an event: logit of the smoothed rate of its item, logit of the smoothed rate of its user, and its category
(such as the tab) as one-hot, or by its rate too where it has many values. Rates come from training events; while
fitting, an event's own label is left out of them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SMOOTHING = 10.0
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
        positive, total = self.positive[ids], self.total[ids]
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
