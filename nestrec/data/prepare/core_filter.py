"""Which users and items stay when rare ones are removed (k-core, minimum lengths), in passes over events on disk."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.data.gather import add_counts

Pairs = Callable[[], Iterator[tuple[NDArray[Any], NDArray[Any]]]]
"""A fresh pass over (user codes, item codes) of all events, in pieces."""


@config
class CoreFilter:
    """Removal of rare users and items."""

    user_core: int = 0
    """Users with fewer events are removed."""
    item_core: int = 0
    """Items with fewer events are removed."""
    is_iterated: bool = True
    """Repeat until every user and item left has enough events (a true k-core); otherwise both counts are taken once."""
    min_user_events: int = 0
    """At last, users with fewer events left are removed, whatever this does to the items."""


@dataclass(frozen=True, slots=True)
class FilterResult:
    """What stays: flags by code, and counts of the events that stay."""

    users: NDArray[np.bool_]
    items: NDArray[np.bool_]
    user_counts: NDArray[np.int64]
    item_counts: NDArray[np.int64]


def apply_filter(rule: CoreFilter, pairs: Pairs, num_users: int, num_items: int) -> FilterResult:
    """Memory is a few bytes a user and an item; each round reads the events once."""
    kept = _count(pairs, np.ones(num_users, np.bool_), np.ones(num_items, np.bool_))
    while True:
        users = kept.users & (kept.user_counts >= rule.user_core)
        items = kept.items & (kept.item_counts >= rule.item_core)
        is_stable = np.array_equal(users, kept.users) and np.array_equal(items, kept.items)
        if not is_stable:
            kept = _count(pairs, users, items)
        if is_stable or not rule.is_iterated:
            break
    users = kept.users & (kept.user_counts >= max(1, rule.min_user_events))
    if not np.array_equal(users, kept.users):
        kept = _count(pairs, users, kept.items)
    return FilterResult(kept.users, kept.items & (kept.item_counts > 0), kept.user_counts, kept.item_counts)


def _count(pairs: Pairs, users: NDArray[np.bool_], items: NDArray[np.bool_]) -> FilterResult:
    user_counts, item_counts = np.zeros(users.size, np.int64), np.zeros(items.size, np.int64)
    for event_users, event_items in pairs():
        is_kept = users[event_users] & items[event_items]
        add_counts(event_users[is_kept], user_counts)
        add_counts(event_items[is_kept], item_counts)
    return FilterResult(users, items, user_counts, item_counts)
