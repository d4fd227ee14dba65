"""What `prepare` must give for a log, in plain Python: the definition that the streaming code is compared with."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class LogEvent(NamedTuple):
    """A good row of a log."""

    user: str
    item: str
    time: int
    rating: float


@dataclass(frozen=True)
class ExpectedDataset:
    """Users in order, each with events in order; item keys in order of their ids from 1; exact duplicates found."""

    users: list[tuple[str, list[LogEvent]]]
    items: list[str]
    num_duplicates: int


def expected_dataset(
    log: Sequence[LogEvent],
    *,
    drops_duplicates: bool = False,
    min_rating: float = 0.0,
    user_core: int = 0,
    item_core: int = 0,
    is_iterated: bool = True,
    min_user_events: int = 0,
) -> ExpectedDataset:
    """Filters in the order rating, duplicates, cores, shortest users."""
    rated = [event for event in log if event.rating >= min_rating]
    user_order, item_order = dict.fromkeys(e.user for e in rated), dict.fromkeys(e.item for e in rated)
    num_duplicates = len(rated) - len(set(rated))
    events = list(dict.fromkeys(rated)) if drops_duplicates else rated
    events = _core(events, user_core, item_core, is_iterated)
    lengths = Counter(e.user for e in events)
    events = [e for e in events if lengths[e.user] >= min_user_events]
    by_user: dict[str, list[LogEvent]] = {user: [] for user in user_order}
    for event in events:
        by_user[event.user].append(event)
    users = [(user, sorted(own, key=lambda e: e.time)) for user, own in by_user.items() if own]
    left = {e.item for e in events}
    return ExpectedDataset(users, [item for item in item_order if item in left], num_duplicates)


def _core(events: list[LogEvent], user_core: int, item_core: int, is_iterated: bool) -> list[LogEvent]:
    while True:
        users, items = Counter(e.user for e in events), Counter(e.item for e in events)
        left = [e for e in events if users[e.user] >= user_core and items[e.item] >= item_core]
        if len(left) == len(events) or not is_iterated:
            return left
        events = left
