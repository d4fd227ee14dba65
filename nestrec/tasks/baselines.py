"""The two baselines that stand beside every retrieval result: popularity, and what usually follows the last item."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Baseline(Protocol):
    """Ranks items without a model."""

    def top(self, last_item: int, exclude: set[int], k: int) -> list[int]:
        """The best k items that are not excluded."""


class Popularity:
    """Ranks items by their number of training events; ties by smaller id."""

    def __init__(self, items: NDArray[np.int64], num_items: int):
        count = np.bincount(items, minlength=num_items + 1)
        count[0] = -1
        self._order = np.lexsort((np.arange(num_items + 1), -count))[:num_items]

    def top(self, last_item: int, exclude: set[int], k: int) -> list[int]:
        return take_allowed(self._order, exclude, k)


class LastItem:
    """Ranks the items that most often directly followed the user's last item in training, then by popularity."""

    def __init__(self, items: NDArray[np.int64], offsets: NDArray[np.int64], popularity: Popularity):
        inside = np.ones(len(items), dtype=bool)
        inside[offsets[1:][offsets[1:] > 0] - 1] = False
        source, target = items[:-1][inside[:-1]], items[1:][inside[:-1]]
        pairs, count = np.unique(np.stack([source, target], axis=1), axis=0, return_counts=True)
        order = np.lexsort((pairs[:, 1], -count, pairs[:, 0]))
        self._target = pairs[order, 1]
        self._start = np.searchsorted(pairs[order, 0], np.arange(int(items.max(initial=0)) + 2))
        self._popularity = popularity

    def top(self, last_item: int, exclude: set[int], k: int) -> list[int]:
        followers = (
            self._target[self._start[last_item] : self._start[last_item + 1]]
            if last_item + 1 < len(self._start)
            else []
        )
        best = take_allowed(np.asarray(followers, dtype=np.int64), exclude, k)
        return best + self._popularity.top(last_item, exclude | set(best), k - len(best)) if len(best) < k else best


def take_allowed(order: NDArray[np.int64], exclude: set[int], k: int) -> list[int]:
    """The first k of `order` that are not excluded."""
    head = order[: k + len(exclude)].tolist()
    return [item for item in head if item not in exclude][:k]
