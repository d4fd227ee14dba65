"""Systems without a model that stand beside every retrieval result: what does not beat them is not worth its cost.

popularity          items by their training events
recent popularity   items by their events in the last tenth of the training events in time
last item           what most often followed the user's last item directly, then by popularity
item knn            items whose users are those of the history's items, by the cosine of their sets of users
ease                a linear model of all pairs of items in closed form (arXiv 1905.03375)
"""

from typing import Protocol

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.data.flat_arrays import offsets_of_lengths

Ints = NDArray[np.int64]
NUM_NEIGHBOURS = 100
SHRINKAGE = 10.0
"""Added to the norm of a pair of items, so that items of few users are no sure neighbours."""
EASE_PENALTY = 250.0
LONGEST_PAIRED = 200
"""Of a user's events, so many of the last ones are paired with each other."""


class Baseline(Protocol):
    """Ranks items without a model."""

    def top(self, history: Ints, exclude: set[int], k: int) -> list[int]:
        """The best k items that are not excluded, for a user with these items, the last one last."""


class Popularity:
    """Ranks items by their number of training events; ties by smaller id."""

    def __init__(self, items: Ints, num_items: int):
        count = np.bincount(items, minlength=num_items + 1)
        count[0] = -1
        self._order = np.lexsort((np.arange(num_items + 1), -count))[:num_items]

    def top(self, history: Ints, exclude: set[int], k: int) -> list[int]:
        return take_allowed(self._order, exclude, k)


def recent_popularity(items: Ints, times_ms: Ints, num_items: int) -> Popularity:
    """Popularity in the last tenth of the events in time."""
    if not len(times_ms):
        return Popularity(items, num_items)
    since = np.sort(times_ms)[len(times_ms) - max(1, len(times_ms) // 10)]
    return Popularity(items[times_ms >= since], num_items)


class LastItem:
    """Ranks the items that most often directly followed the user's last item in training, then by popularity."""

    def __init__(self, items: Ints, offsets: Ints, popularity: Popularity):
        inside = np.ones(len(items), dtype=bool)
        inside[offsets[1:][offsets[1:] > 0] - 1] = False
        source, target = items[:-1][inside[:-1]], items[1:][inside[:-1]]
        pairs, count = np.unique(np.stack([source, target], axis=1), axis=0, return_counts=True)
        order = np.lexsort((pairs[:, 1], -count, pairs[:, 0]))
        self._target = pairs[order, 1]
        self._start = np.searchsorted(pairs[order, 0], np.arange(int(items.max(initial=0)) + 2))
        self._popularity = popularity

    def top(self, history: Ints, exclude: set[int], k: int) -> list[int]:
        last = int(history[-1])
        followers = self._target[self._start[last] : self._start[last + 1]] if last + 1 < len(self._start) else []
        best = take_allowed(np.asarray(followers, dtype=np.int64), exclude, k)
        return _filled(best, self._popularity, history, exclude, k)


class ItemKNNBaseline:
    """Ranks items by the sum of their similarities with the items of the history, then by popularity."""

    def __init__(self, items: Ints, offsets: Ints, num_items: int, popularity: Popularity):
        users_items, users_offsets = distinct_items(items, offsets)
        of_item, item_offsets = _users_of_items(users_items, users_offsets, num_items)
        self._neighbour, self._similarity = _neighbours(
            users_items, users_offsets, of_item, item_offsets, NUM_NEIGHBOURS, SHRINKAGE
        )
        self._popularity = popularity
        self._num_items = num_items

    def top(self, history: Ints, exclude: set[int], k: int) -> list[int]:
        seen = np.unique(history)
        neighbour = self._neighbour[seen].ravel()
        similarity = self._similarity[seen].ravel()
        score = np.bincount(neighbour, weights=similarity, minlength=self._num_items + 1).astype(np.float64)
        return _filled(_best(score, exclude, k), self._popularity, history, exclude, k)


class EASEBaseline:
    """Ranks items by a linear model of the history: the weights of all pairs, none of an item with itself."""

    def __init__(self, items: Ints, offsets: Ints, num_items: int, device: torch.device):
        gram = _pair_counts(*distinct_items(items, offsets), num_items)
        matrix = torch.from_numpy(gram[1:, 1:]).to(device)
        matrix.diagonal().add_(EASE_PENALTY)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
        weight = inverse / -inverse.diagonal()
        weight.fill_diagonal_(0.0)
        self._weight = weight.cpu().numpy()

    def top(self, history: Ints, exclude: set[int], k: int) -> list[int]:
        score = self._weight[np.unique(history) - 1].sum(0)
        return _best(np.concatenate([[-np.inf], score]), exclude, k, positive=False)


def distinct_items(items: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    """The items of each user once, of the last ones of a long history."""
    lengths = np.diff(offsets)
    place = np.arange(len(items)) - np.repeat(offsets[:-1], lengths)
    is_late = place >= np.repeat(lengths, lengths) - LONGEST_PAIRED
    user = np.repeat(np.arange(len(lengths)), lengths)[is_late]
    pairs = np.unique(np.stack([user, items[is_late]], axis=1), axis=0)
    return pairs[:, 1].copy(), offsets_of_lengths(np.bincount(pairs[:, 0], minlength=len(lengths)))


def num_pairs(offsets: Ints) -> float:
    """About how many pairs of items are met when those of each user are counted."""
    return float((np.minimum(np.diff(offsets), LONGEST_PAIRED).astype(np.float64) ** 2).sum())


def take_allowed(order: Ints, exclude: set[int], k: int) -> list[int]:
    """The first k of `order` that are not excluded."""
    head = order[: k + len(exclude)].tolist()
    return [item for item in head if item not in exclude][:k]


def _best(score: NDArray[np.floating], exclude: set[int], k: int, *, positive: bool = True) -> list[int]:
    """Items by score, ties by smaller id; only those with a score above 0 unless told otherwise."""
    score = score.copy()
    score[[0, *exclude]] = -np.inf
    found = np.flatnonzero(score > (0.0 if positive else -np.inf))
    if len(found) > k:
        least = np.partition(score[found], len(found) - k)[len(found) - k]
        found = found[score[found] >= least]
    return found[np.lexsort((found, -score[found]))][:k].tolist()  # type: ignore[no-any-return]


def _filled(best: list[int], popularity: Popularity, history: Ints, exclude: set[int], k: int) -> list[int]:
    return best + popularity.top(history, exclude | set(best), k - len(best)) if len(best) < k else best


def _users_of_items(items: Ints, offsets: Ints, num_items: int) -> tuple[Ints, Ints]:
    user = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    order = np.argsort(items, kind="stable")
    return user[order], offsets_of_lengths(np.bincount(items, minlength=num_items + 1))


@njit(cache=True, nogil=True)
def _neighbours(items, offsets, users, item_offsets, most, shrinkage):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """(N + 1, most) the most similar items of each item and their cosines; 0 where there are fewer."""
    num_items = item_offsets.size - 1
    neighbour, similarity = np.zeros((num_items, most), np.int64), np.zeros((num_items, most), np.float64)
    together = np.zeros(num_items, np.int64)
    touched = np.empty(num_items, np.int64)
    for item in range(1, num_items):
        size = 0
        for place in range(item_offsets[item], item_offsets[item + 1]):
            for at in range(offsets[users[place]], offsets[users[place] + 1]):
                other = items[at]
                if other != item:
                    if together[other] == 0:
                        touched[size] = other
                        size += 1
                    together[other] += 1
        score = np.empty(size)
        own = item_offsets[item + 1] - item_offsets[item]
        for i in range(size):
            norm = np.sqrt(own * (item_offsets[touched[i] + 1] - item_offsets[touched[i]]))
            score[i] = together[touched[i]] / (norm + shrinkage)
            together[touched[i]] = 0
        order = np.argsort(-score, kind="mergesort")[:most]
        for i in range(order.size):
            neighbour[item, i], similarity[item, i] = touched[order[i]], score[order[i]]
    return neighbour, similarity


@njit(cache=True, nogil=True)
def _pair_counts(items, offsets, num_items):  # type: ignore[no-untyped-def]
    """(N + 1, N + 1) users that have both items."""
    counts = np.zeros((num_items + 1, num_items + 1), np.float32)
    for user in range(offsets.size - 1):
        for a in range(offsets[user], offsets[user + 1]):
            for b in range(offsets[user], offsets[user + 1]):
                counts[items[a], items[b]] += 1
    return counts
