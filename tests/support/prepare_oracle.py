"""Reference implementation of `prepare` in plain Python, with which the streaming code is compared."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class LogEvent(NamedTuple):
    """A valid row of a log."""

    user: str
    item: str
    time: int
    rating: float


@dataclass(frozen=True)
class ExpectedDataset:
    """Expected contents of a prepared dataset."""

    users: list[tuple[str, list[LogEvent]]]
    """Users in order, each with its events in order."""
    items: list[str]
    """Keys of the items in the order of their ids, which start at 1."""
    num_duplicates: int
    """Number of exact duplicates among the events."""


def expected_dataset(
    log: Sequence[LogEvent],
    *,
    drops_duplicates: bool = False,
    min_rating: float = 0.0,
    min_events_per_user: int = 0,
    min_events_per_item: int = 0,
    is_iterated: bool = True,
    final_min_events_per_user: int = 0,
) -> ExpectedDataset:
    """Apply the filters in this order: rating, duplicates, k-core, shortest users."""
    rated = [event for event in log if event.rating >= min_rating]
    user_order, item_order = dict.fromkeys(e.user for e in rated), dict.fromkeys(e.item for e in rated)
    num_duplicates = len(rated) - len(set(rated))
    events = list(dict.fromkeys(rated)) if drops_duplicates else rated
    events = _core(events, min_events_per_user, min_events_per_item, is_iterated)
    lengths = Counter(e.user for e in events)
    events = [e for e in events if lengths[e.user] >= final_min_events_per_user]
    by_user: dict[str, list[LogEvent]] = {user: [] for user in user_order}
    for event in events:
        by_user[event.user].append(event)
    users = [(user, sorted(history, key=lambda e: e.time)) for user, history in by_user.items() if history]
    remaining = {e.item for e in events}
    return ExpectedDataset(users, [item for item in item_order if item in remaining], num_duplicates)


def _core(
    events: list[LogEvent], min_events_per_user: int, min_events_per_item: int, is_iterated: bool
) -> list[LogEvent]:
    while True:
        users, items = Counter(e.user for e in events), Counter(e.item for e in events)
        remaining = [e for e in events if users[e.user] >= min_events_per_user and items[e.item] >= min_events_per_item]
        if len(remaining) == len(events) or not is_iterated:
            return remaining
        events = remaining
