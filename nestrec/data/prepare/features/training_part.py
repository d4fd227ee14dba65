"""The events from which transforms are learnt: those that train whether a run splits by time or by last events."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import DataError
from nestrec.data.card import Fit
from nestrec.data.gather import offsets_of_lengths
from nestrec.data.prepare.core_filter import FilterResult
from nestrec.data.prepare.events import EventParser
from nestrec.data.prepare.features.fitting import ValueSample
from nestrec.data.prepare.options import PrepareOptions
from nestrec.data.prepare.spill import Partitions

HELD_OUT = 2
"""Last events of a user that leave-one-out holds out, where there are three or more."""


@dataclass(frozen=True, slots=True)
class TrainingPart:
    """Flags by code of the users and items that have events there."""

    users: NDArray[np.bool_]
    items: NDArray[np.bool_]
    fit: Fit


def find_training_part(
    parser: EventParser, partitions: Partitions, kept: FilterResult, options: PrepareOptions, *, is_asked: bool
) -> TrainingPart:
    """Learn the transforms of the events' numbers, and find whose features may be learnt from: a pass or two.

    is_asked: whether side tables have something to learn, too; no pass is made where there is nothing.
    """
    if not is_asked and not parser.columns.log.numbers:
        return TrainingPart(kept.users, kept.items, Fit())
    until_ms = _until_ms(parser, partitions, kept, options)
    users, items = np.zeros(kept.users.size, np.bool_), np.zeros(kept.items.size, np.bool_)
    fittings, num_events = parser.fittings(), 0
    for rows in _kept_rows(partitions, kept):
        is_fit = _is_early(rows["user"])
        if until_ms is not None:
            is_fit &= rows["time"] < until_ms
        chosen = rows.take(np.flatnonzero(is_fit))
        users[chosen["user"]], items[chosen["item"]] = True, True
        num_events += chosen.size
        for name, fitting in fittings.items():
            fitting.add(chosen[f"event_{name}"])
    if not num_events:
        if options.fit_until is None:
            raise DataError(
                "leaves no event to learn from: so many of the events have the earliest time",
                field="fit_share",
                value=options.fit_share,
                remedy="--fit_share 1 learns from all times (but not from the last two events of a user)",
            )
        remedy = "give a later date, or leave it out"
        raise DataError("leaves no event to learn from", field="fit_until", value=options.fit_until, remedy=remedy)
    parser.transforms = {name: fitting.result() for name, fitting in fittings.items()}
    return TrainingPart(users, items, Fit(until_ms=until_ms or 0, events=num_events))


def _until_ms(parser: EventParser, partitions: Partitions, kept: FilterResult, options: PrepareOptions) -> int | None:
    """The moment before which the share of events lies; none where the log has no times."""
    if "time" not in parser.field_names:
        return None
    if (given := options.fit_until_ms()) is not None:
        return given
    sample = ValueSample()
    for rows in _kept_rows(partitions, kept):
        sample.add(rows["time"])
    ordered = np.sort(sample.values())
    place = round(options.fit_share * ordered.size)
    return int(ordered[place]) if place < ordered.size else int(ordered[-1]) + 1


def _kept_rows(partitions: Partitions, kept: FilterResult) -> Iterator[NDArray[Any]]:
    """Records of the events that stay, all of a user together, users and their events in order."""
    for p in range(len(partitions)):
        rows = partitions[p].load_rows()
        stays = kept.users[rows["user"]] & kept.items[rows["item"]]
        yield rows if stays.all() else rows.take(np.flatnonzero(stays))


def _is_early(users: NDArray[Any]) -> NDArray[np.bool_]:
    """All but the last two events of each user that has three or more."""
    _, counts = np.unique(users, return_counts=True)
    length = np.repeat(counts, counts)
    place = np.arange(users.size) - np.repeat(offsets_of_lengths(counts)[:-1], counts)
    early: NDArray[np.bool_] = (length <= HELD_OUT) | (place < length - HELD_OUT)
    return early
