"""Non-neural retrieval baselines, reported next to every retrieval result: a model should beat them to pay off.

popularity          items by number of training events
recent popularity   items by number of events in the latest tenth of the training events
last item           items that most often directly followed the user's last item, then by popularity
item knn            items whose sets of users are most similar (cosine) to those of the items in the history
ease                EASE, a linear item-item model with a closed-form solution (arXiv 1905.03375)
"""

from typing import Protocol

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.data.flat_arrays import offsets_of_lengths

Ints = NDArray[np.int64]
NUM_NEIGHBORS = 100
SHRINKAGE = 10.0
"""Constant added to the cosine denominator of an item pair, so that items with few users get a low similarity."""
EASE_PENALTY = 250.0
MAX_PAIRED_EVENTS = 200
"""Maximum number of a user's most recent events that are paired with each other."""


class Baseline(Protocol):
    """Interface of the baselines: ranks items without a neural model."""

    def top(self, history: Ints, exclude: set[int], k: int) -> list[int]:
        """Return the k best items for a user.

        Args:
            history: Item ids of the user, oldest first.
            exclude: Item ids that must not be returned.
            k: Maximum number of items to return.
        """


class Popularity:
    """Ranks items by their number of training events; ties are broken by the smaller id."""

    def __init__(self, items: Ints, num_items: int):
        count = np.bincount(items, minlength=num_items + 1)
        count[0] = -1
        self._order = np.lexsort((np.arange(num_items + 1), -count))[:num_items]

    def top(self, history: Ints, exclude: set[int], k: int) -> list[int]:
        return take_allowed(self._order, exclude, k)


def recent_popularity(items: Ints, times_ms: Ints, num_items: int) -> Popularity:
    """Return the popularity baseline of the latest tenth of the events."""
    if not len(times_ms):
        return Popularity(items, num_items)
    since = np.sort(times_ms)[len(times_ms) - max(1, len(times_ms) // 10)]
    return Popularity(items[times_ms >= since], num_items)


class LastItem:
    """Ranks the items that most often directly followed the user's last item in training, then popular items."""

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
        return _fill_up(best, self._popularity, history, exclude, k)


class ItemKNNBaseline:
    """Item-based k-nearest neighbors: ranks by the sum of similarities to the history, then by popularity."""

    def __init__(self, items: Ints, offsets: Ints, num_items: int, popularity: Popularity):
        users_items, users_offsets = distinct_items(items, offsets)
        of_item, item_offsets = _users_of_items(users_items, users_offsets, num_items)
        self._neighbor, self._similarity = _nearest_neighbors(
            users_items, users_offsets, of_item, item_offsets, NUM_NEIGHBORS, SHRINKAGE
        )
        self._popularity = popularity
        self._num_items = num_items

    def top(self, history: Ints, exclude: set[int], k: int) -> list[int]:
        seen = np.unique(history)
        neighbor = self._neighbor[seen].ravel()
        similarity = self._similarity[seen].ravel()
        score = np.bincount(neighbor, weights=similarity, minlength=self._num_items + 1).astype(np.float64)
        return _fill_up(_best(score, exclude, k), self._popularity, history, exclude, k)


class EASEBaseline:
    """EASE: ranks items by a linear model of the history with item-item weights and a zero diagonal."""

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
    """Return the unique items of each user and their offsets; only the most recent events of long histories count."""
    lengths = np.diff(offsets)
    position = np.arange(len(items)) - np.repeat(offsets[:-1], lengths)
    is_late = position >= np.repeat(lengths, lengths) - MAX_PAIRED_EVENTS
    user = np.repeat(np.arange(len(lengths)), lengths)[is_late]
    pairs = np.unique(np.stack([user, items[is_late]], axis=1), axis=0)
    return pairs[:, 1].copy(), offsets_of_lengths(np.bincount(pairs[:, 0], minlength=len(lengths)))


def num_pairs(offsets: Ints) -> float:
    """Estimate how many item pairs must be counted over all users."""
    return float((np.minimum(np.diff(offsets), MAX_PAIRED_EVENTS).astype(np.float64) ** 2).sum())


def take_allowed(order: Ints, exclude: set[int], k: int) -> list[int]:
    """Return the first k items of `order` that are not excluded."""
    head = order[: k + len(exclude)].tolist()
    return [item for item in head if item not in exclude][:k]


def _best(score: NDArray[np.floating], exclude: set[int], k: int, *, positive: bool = True) -> list[int]:
    """Return the k best items by score, ties broken by the smaller id; with `positive` only scores above 0."""
    score = score.copy()
    score[[0, *exclude]] = -np.inf
    candidates = np.flatnonzero(score > (0.0 if positive else -np.inf))
    if len(candidates) > k:
        threshold = np.partition(score[candidates], len(candidates) - k)[len(candidates) - k]
        candidates = candidates[score[candidates] >= threshold]
    return candidates[np.lexsort((candidates, -score[candidates]))][:k].tolist()  # type: ignore[no-any-return]


def _fill_up(best: list[int], popularity: Popularity, history: Ints, exclude: set[int], k: int) -> list[int]:
    return best + popularity.top(history, exclude | set(best), k - len(best)) if len(best) < k else best


def _users_of_items(items: Ints, offsets: Ints, num_items: int) -> tuple[Ints, Ints]:
    user = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    order = np.argsort(items, kind="stable")
    return user[order], offsets_of_lengths(np.bincount(items, minlength=num_items + 1))


@njit(cache=True, nogil=True)
def _nearest_neighbors(items, offsets, users, item_offsets, limit, shrinkage):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """Return the (N + 1, limit) most similar items of each item and their cosines, padded with 0."""
    num_items = item_offsets.size - 1
    neighbor, similarity = np.zeros((num_items, limit), np.int64), np.zeros((num_items, limit), np.float64)
    num_common = np.zeros(num_items, np.int64)
    touched = np.empty(num_items, np.int64)
    for item in range(1, num_items):
        size = 0
        for i in range(item_offsets[item], item_offsets[item + 1]):
            for j in range(offsets[users[i]], offsets[users[i] + 1]):
                other = items[j]
                if other != item:
                    if num_common[other] == 0:
                        touched[size] = other
                        size += 1
                    num_common[other] += 1
        score = np.empty(size)
        own = item_offsets[item + 1] - item_offsets[item]
        for i in range(size):
            norm = np.sqrt(own * (item_offsets[touched[i] + 1] - item_offsets[touched[i]]))
            score[i] = num_common[touched[i]] / (norm + shrinkage)
            num_common[touched[i]] = 0
        order = np.argsort(-score, kind="mergesort")[:limit]
        for i in range(order.size):
            neighbor[item, i], similarity[item, i] = touched[order[i]], score[order[i]]
    return neighbor, similarity


@njit(cache=True, nogil=True)
def _pair_counts(items, offsets, num_items):  # type: ignore[no-untyped-def]
    """Return the (N + 1, N + 1) number of users who have both items."""
    counts = np.zeros((num_items + 1, num_items + 1), np.float32)
    for user in range(offsets.size - 1):
        for a in range(offsets[user], offsets[user + 1]):
            for b in range(offsets[user], offsets[user + 1]):
                counts[items[a], items[b]] += 1
    return counts
