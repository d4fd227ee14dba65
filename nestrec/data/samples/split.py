"""Train, validation and test splits, and the training events of a user.

Which events of a user train the model and which are held out.

Stochastic length of HSTU: long histories are mostly trained on a subsequence.

A history of n events longer than m = N ** (alpha / 2), N the longest length, is cut to m events with probability
1 - N ** alpha / n ** 2, and kept whole otherwise. The subsequence favours recent events. The choice is a pure function
of the sample's key, so every rank, worker and schedule makes the same one.

What is asked of all training events: read by row groups, so that no rank ever holds them all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Share, iso_moment, moment_ms
from nestrec.base.errors import ErrorCollector, UserError
from nestrec.base.random import fold, fold_array
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_schema import ACTIONS, ITEM_IDS, TIMESTAMPS_MS
from nestrec.data.flat_arrays import add_counts, slice_index
from nestrec.data.prepare.transform_fitting import ValueSample

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
        mistakes = ErrorCollector()
        for name in ("valid_from", "test_from"):
            with mistakes.collecting():
                moment_ms(getattr(self, name), f"task.split.{name}")
                if self.kind == "leave_one_out" and getattr(self, name) is not None:
                    raise UserError(
                        "means nothing to task.split.kind = 'leave_one_out'",
                        option=f"task.split.{name}",
                        value=getattr(self, name),
                        remedy="leave it out, or give --task.split.kind time",
                    )
        mistakes.raise_if_any()

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
                option="task.split.valid_from",
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
            option="task.split.kind",
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


def kept_length(
    num_events: NDArray[np.int64], key: NDArray[np.uint64], *, alpha: float, longest: int
) -> NDArray[np.int64]:
    """Number of events kept of each sample."""
    short = max(2, int(longest ** (alpha / 2)))
    draw = fold_array(fold(0x51), key.view(np.int64)) >> np.uint64(11)
    keep_all = draw.astype(np.float64) * 2.0**-53 < (float(longest) ** alpha) / np.maximum(num_events, 1) ** 2.0
    return np.where((num_events <= short) | keep_all, num_events, short)


def kept_events(num_events: int, num_kept: int, key: int) -> NDArray[np.int64]:
    """Sorted indices of the kept events of one sample, drawn without replacement with weight growing with recency.

    The last two events are always kept: the last is the newest target, the one before it its context.
    """
    if num_kept >= num_events:
        return np.arange(num_events)
    index = np.arange(num_events)
    uniform = (fold_array(fold(key, 0x52), index) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54
    # Exponential race: the smallest -ln(u) / weight win, which is weighted sampling without replacement.
    race = -np.log(uniform) / (index + 1.0)
    race[-2:] = -1.0
    return np.sort(np.argpartition(race, num_kept - 1)[:num_kept])


Ints = NDArray[np.int64]


def training_items(dataset: Dataset, train_end: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Of some users at a time: (users, items of their training events, offsets of the users)."""
    for first, group in dataset.scan([ITEM_IDS]):
        items, offsets = group.lists[ITEM_IDS]
        users = np.arange(first, first + len(offsets) - 1)
        index, own_offsets = slice_index(offsets[:-1], offsets[:-1] + train_end[users])
        yield users, items[index], own_offsets


def item_counts(dataset: Dataset, train_end: Ints) -> Ints:
    """(items + 1,) training events of each item id."""
    counts = np.zeros(dataset.num_items + 1, np.int64)
    for _, items, _ in training_items(dataset, train_end):
        add_counts(items, counts)
    return counts


def target_weights(
    dataset: Dataset, train_end: Ints, max_targets: int, weight_of: Callable[[Ints], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """(users,) sums over the last training events of each user, without its first, of what a mask of actions counts."""
    sums = np.zeros(dataset.num_samples)
    for first, group in dataset.scan([ACTIONS]):
        masks, offsets = group.lists[ACTIONS]
        users = np.arange(first, first + len(offsets) - 1)
        end = offsets[:-1] + train_end[users]
        start = np.maximum(np.minimum(offsets[:-1] + 1, end), end - max_targets)
        index, own_offsets = slice_index(start, end)
        total = np.concatenate([[0.0], np.cumsum(weight_of(masks[index].astype(np.int64)))])
        sums[users] = total[own_offsets[1:]] - total[own_offsets[:-1]]
    return sums
