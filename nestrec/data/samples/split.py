"""Which events of a user train the model and which are held out."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nestrec.base.bounds import Share
from nestrec.base.config import config
from nestrec.base.errors import Mistakes, UserError
from nestrec.base.moments import iso_moment, moment_ms
from nestrec.data.dataset import Dataset
from nestrec.data.prepare.features.fitting import ValueSample
from nestrec.data.schema import TIMESTAMPS_MS

Part = Literal["valid", "test"]


SplitKind = Literal["leave_one_out", "time", "none"]
EXACT_TIMES = 1 << 22
"""Of about twice as many events and more, shares are taken of a sample of about so many."""


@config
class SplitConfig:
    """Which events train, validate and test: by two points in time that are the same for all users, or by the last
    events of each user; or all of them train."""

    kind: SplitKind = "time"
    """`time`: events before `valid_from` train, those from `test_from` on test, those between validate.
    `leave_one_out`: the last event of each user tests, the one before validates.
    `none`: all events train and nothing is measured"""
    valid_from: str | None = None
    """events from this date on validate, such as 2026-10-25 or 2026-10-25T12:00+02:00 (UTC where no zone is named);
    none takes `valid_share`"""
    test_from: str | None = None
    """events from this date on test; none takes `test_share`"""
    valid_share: Share = 0.1
    """share of all events, the last ones before `test_from`"""
    test_share: Share = 0.1
    """share of all events, the last ones"""

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        for name in ("valid_from", "test_from"):
            with mistakes.noted():
                moment_ms(getattr(self, name), f"task.split.{name}")
                if self.kind == "leave_one_out" and getattr(self, name) is not None:
                    raise UserError(
                        "means nothing to task.split.kind = 'leave_one_out'",
                        field=f"task.split.{name}",
                        value=getattr(self, name),
                        remedy="leave it out, or give --task.split.kind time",
                    )
        mistakes.raise_all()

    def cuts_ms(self, times_ms: NDArray[np.int64]) -> tuple[int, int]:
        """(valid from, test from) in Unix milliseconds for events at these times."""
        ordered = np.sort(times_ms)
        test_from = moment_ms(self.test_from, "task.split.test_from")
        if test_from is None:
            test_from = _cut(ordered, self.test_share * ordered.size)
        valid_from = moment_ms(self.valid_from, "task.split.valid_from")
        if valid_from is None:
            valid_from = _cut(ordered[ordered < test_from], self.valid_share * ordered.size)
        if valid_from > test_from:
            by = "" if self.test_from else f" (the last test_share = {self.test_share:g} of the events)"
            raise UserError(
                f"is later than test_from = {iso_moment(test_from)}{by}",
                field="task.split.valid_from",
                value=self.valid_from,
                remedy="validation comes before the test: give an earlier date, or task.split.test_from too",
            )
        return valid_from, test_from


def _cut(ordered_ms: NDArray[np.int64], num_last: float) -> int:
    """The time from which about so many of the events are the last ones; after all of them where that is none."""
    if not ordered_ms.size:
        return 0
    if not num_last:
        return int(ordered_ms[-1]) + 1
    place = min(max(0, ordered_ms.size - round(num_last)), ordered_ms.size - 1)
    return int(ordered_ms[place])


@dataclass(frozen=True, slots=True)
class Split:
    """For each user: events [0, train_end) train, [train_end, valid_end) validate, [valid_end, test_end) test."""

    train_end: NDArray[np.int64]
    valid_end: NDArray[np.int64]
    test_end: NDArray[np.int64]

    def held_out(self, part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(first, end) of the held-out events of each user."""
        if part == "valid":
            return self.train_end, self.valid_end
        return self.valid_end, self.test_end

    def users_with(self, part: Part) -> NDArray[np.int64]:
        first, end = self.held_out(part)
        return np.flatnonzero(end > first)


def split_of(cfg: SplitConfig, dataset: Dataset) -> Split:
    """The split of a dataset; times are read by row groups, so that not all of them need lie in memory."""
    if cfg.kind == "leave_one_out":
        return leave_one_out(dataset.lengths)
    if cfg.kind == "none":
        length = dataset.lengths.astype(np.int64)
        return Split(length, length, length)
    if not dataset.card.has_timestamps:
        raise UserError(
            "needs times, and the dataset has none",
            field="task.split.kind",
            value=cfg.kind,
            remedy="give --task.split.kind leave_one_out, or prepare the data from a log with times (--log.time)",
        )
    sample = ValueSample(EXACT_TIMES)
    if cfg.valid_from is None or cfg.test_from is None:
        for times, _ in _times_by_group(dataset):
            sample.add(times)
    valid_from_ms, test_from_ms = cfg.cuts_ms(sample.values().astype(np.int64))
    parts = [
        by_time(times, offsets, valid_from_ms=valid_from_ms, test_from_ms=test_from_ms)
        for times, offsets in _times_by_group(dataset)
    ]
    ends = (np.concatenate([getattr(p, name) for p in parts]) for name in ("train_end", "valid_end", "test_end"))
    return Split(*ends)


def _times_by_group(dataset: Dataset) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    for _, group in dataset.scan([TIMESTAMPS_MS]):
        yield group.lists[TIMESTAMPS_MS]


def leave_one_out(lengths: NDArray[np.int32]) -> Split:
    """The last event tests, the one before validates; users with fewer than three events only train."""
    length = lengths.astype(np.int64)
    held = np.where(length >= 3, 1, 0)
    return Split(length - 2 * held, length - held, length)


def by_time(times_ms: NDArray[np.int64], offsets: NDArray[np.int64], *, valid_from_ms: int, test_from_ms: int) -> Split:
    """Events before `valid_from_ms` train, those from `test_from_ms` on test. Times are sorted inside a user."""
    return Split(
        _events_before(times_ms, offsets, valid_from_ms),
        _events_before(times_ms, offsets, test_from_ms),
        np.diff(offsets),
    )


def _events_before(times_ms: NDArray[np.int64], offsets: NDArray[np.int64], cut_ms: int) -> NDArray[np.int64]:
    before = np.concatenate([[0], np.cumsum(times_ms < cut_ms)])
    counts: NDArray[np.int64] = before[offsets[1:]] - before[offsets[:-1]]
    return counts
