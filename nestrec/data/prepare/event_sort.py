"""Stable order of events inside a partition: by user, then by the sort keys, then as they came."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nestrec.data.gather import offsets_of_lengths


def order_events(users: NDArray[Any], num_users: int, sort_keys: list[NDArray[Any]]) -> NDArray[np.int64]:
    """Positions of the events in sorted order; `users` from 0, the first sort key is the most significant."""
    offsets = offsets_of_lengths(np.bincount(users, minlength=num_users))
    order = _group(users, offsets)
    for key in reversed(sort_keys):
        _sort_groups(np.ascontiguousarray(key), offsets, order)
    return order


def is_duplicate(users: NDArray[Any], num_users: int, signatures: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether an earlier event (in the given order) has the same user and signature; `users` from 0."""
    order = order_events(users, num_users, [signatures.view(np.int64)])  # of equal rows the earliest comes first
    same = (np.diff(users[order]) == 0) & (np.diff(signatures[order]) == 0)
    marked = np.zeros(users.size, dtype=np.bool_)
    marked[order[1:][same]] = True
    return marked


@njit(cache=True, nogil=True)
def _group(users: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Counting sort by user, stable."""
    next_place = offsets[:-1].copy()
    order = np.empty(users.size, dtype=np.int64)
    for i in range(users.size):
        order[next_place[users[i]]] = i
        next_place[users[i]] += 1
    return order


@njit(cache=True, nogil=True)
def _sort_groups(key: NDArray[Any], offsets: NDArray[np.int64], order: NDArray[np.int64]) -> None:
    """Stable sort of each group by the key; groups already in order, the common case, are only looked at."""
    for group in range(offsets.size - 1):
        start, end = offsets[group], offsets[group + 1]
        for i in range(start + 1, end):
            if key[order[i]] < key[order[i - 1]]:
                part = order[start:end].copy()
                order[start:end] = part[np.argsort(key[part], kind="mergesort")]
                break
