"""Train, validation and test splits; stochastic length; statistics of the training events.

Splits are temporal (two cut times for all users), leave-last-out, or none.

Stochastic length (HSTU) trains long histories mostly on a subsequence: a history of n events longer than m = N **
(alpha / 2), with N the maximum length, is cut to m events with probability 1 - N ** alpha / n ** 2, and is used
completely otherwise. The subsequence favors recent events. The choice is a pure function of the sample's key, so every
rank, loader thread and schedule makes the same one.

Statistics of the training events are computed row group by row group, so that no rank loads all events into memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Fraction, format_iso_time, parse_time_ms
from nestrec.base.errors import ErrorCollector, UserError
from nestrec.base.random import fold, fold_array
from nestrec.data.dataset import Dataset
from nestrec.data.dataset_schema import ACTIONS, ITEM_IDS, TIMESTAMPS_MS
from nestrec.data.flat_arrays import add_counts, slice_index
from nestrec.data.prepare.transform_fitting import ValueSample

Part = Literal["valid", "test"]


SplitKind = Literal["leave_one_out", "time", "none"]
EXACT_TIMES = 1 << 22
"""Sample size for split fractions: they are exact for fewer events, and computed from a sample of about this size
beyond about twice as many."""


@config
class SplitConfig:
    """Split options: which events train, validate and test.

    The split uses two points in time that are the same for all users, or the last events of each user; or all events
    train.
    """

    kind: SplitKind = "time"
    """Kind of the split. `time`: events before `valid_from` train, those from `test_from` on test, those in between
    validate. `leave_one_out`: the last event of each user tests, the one before it validates. `none`: all events train,
    and nothing is evaluated."""
    valid_from: str | None = None
    """Start of the validation period, such as 2026-10-25 or 2026-10-25T12:00+02:00 (UTC without a time zone). None
    derives it from `valid_fraction`."""
    test_from: str | None = None
    """Start of the test period. None derives it from `test_fraction`."""
    valid_fraction: Fraction = 0.1
    """Fraction of all events that validate: the last ones before `test_from`."""
    test_fraction: Fraction = 0.1
    """Fraction of all events that test: the last ones."""

    def __post_init__(self) -> None:
        errors = ErrorCollector()
        for name in ("valid_from", "test_from"):
            with errors.collecting():
                parse_time_ms(getattr(self, name), f"task.split.{name}")
                if self.kind == "leave_one_out" and getattr(self, name) is not None:
                    raise UserError(
                        "not used with task.split.kind=leave_one_out",
                        option=f"task.split.{name}",
                        value=getattr(self, name),
                        remedy="remove it, or set --task.split.kind time",
                    )
        errors.raise_if_any()

    def cuts_ms(self, times_ms: NDArray[np.int64]) -> tuple[int, int]:
        """Return (validation start, test start) in Unix milliseconds for events at these times."""
        ordered = np.sort(times_ms)
        test_from = parse_time_ms(self.test_from, "task.split.test_from")
        if test_from is None:
            test_from = _cut(ordered, self.test_fraction * ordered.size)
        valid_from = parse_time_ms(self.valid_from, "task.split.valid_from")
        if valid_from is None:
            valid_from = _cut(ordered[ordered < test_from], self.valid_fraction * ordered.size)
        if valid_from > test_from:
            reason = "" if self.test_from else f" (the last test_fraction = {self.test_fraction:g} of the events)"
            raise UserError(
                f"is later than test_from = {format_iso_time(test_from)}{reason}",
                option="task.split.valid_from",
                value=self.valid_from,
                remedy="set an earlier date, or also set task.split.test_from",
            )
        return valid_from, test_from


def _cut(ordered_ms: NDArray[np.int64], num_last: float) -> int:
    """Return the time from which about the last `num_last` events occur; after all events if `num_last` is 0."""
    if not ordered_ms.size:
        return 0
    if not num_last:
        return int(ordered_ms[-1]) + 1
    index = min(max(0, ordered_ms.size - round(num_last)), ordered_ms.size - 1)
    return int(ordered_ms[index])


@dataclass(frozen=True, slots=True)
class Split:
    """Split by user: events [0, train_end) train, [train_end, valid_end) validate, [valid_end, test_end) test."""

    train_end: NDArray[np.int64]
    valid_end: NDArray[np.int64]
    test_end: NDArray[np.int64]

    def held_out(self, part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (first, end) of the held-out events of each user."""
        if part == "valid":
            return self.train_end, self.valid_end
        return self.valid_end, self.test_end

    def users_with(self, part: Part) -> NDArray[np.int64]:
        first, end = self.held_out(part)
        return np.flatnonzero(end > first)


def split_dataset(cfg: SplitConfig, dataset: Dataset) -> Split:
    """Compute the split of a dataset. Times are read by row groups, so that they need not all fit in memory."""
    if cfg.kind == "leave_one_out":
        return split_leave_one_out(dataset.lengths)
    if cfg.kind == "none":
        length = dataset.lengths.astype(np.int64)
        return Split(length, length, length)
    if not dataset.card.has_timestamps:
        raise UserError(
            "a temporal split needs event times, but the dataset has none",
            option="task.split.kind",
            value=cfg.kind,
            remedy="set --task.split.kind leave_one_out, or prepare the data from a log with times (--log.time)",
        )
    sample = ValueSample(EXACT_TIMES)
    if cfg.valid_from is None or cfg.test_from is None:
        for times, _ in _times_by_group(dataset):
            sample.add(times)
    valid_from_ms, test_from_ms = cfg.cuts_ms(sample.values().astype(np.int64))
    parts = [
        split_by_time(times, offsets, valid_from_ms=valid_from_ms, test_from_ms=test_from_ms)
        for times, offsets in _times_by_group(dataset)
    ]
    ends = (np.concatenate([getattr(p, name) for p in parts]) for name in ("train_end", "valid_end", "test_end"))
    return Split(*ends)


def _times_by_group(dataset: Dataset) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    for _, group in dataset.scan([TIMESTAMPS_MS]):
        yield group.lists[TIMESTAMPS_MS]


def split_leave_one_out(lengths: NDArray[np.int32]) -> Split:
    """Return the leave-last-out split: the last event tests, the one before it validates.

    All events of users with fewer than three events train.
    """
    length = lengths.astype(np.int64)
    num_held_out = np.where(length >= 3, 1, 0)
    return Split(length - 2 * num_held_out, length - num_held_out, length)


def split_by_time(
    times_ms: NDArray[np.int64], offsets: NDArray[np.int64], *, valid_from_ms: int, test_from_ms: int
) -> Split:
    """Return the temporal split; times must be sorted within each user.

    Events before `valid_from_ms` train, those from `test_from_ms` on test, and those in between validate.
    """
    return Split(
        _events_before(times_ms, offsets, valid_from_ms),
        _events_before(times_ms, offsets, test_from_ms),
        np.diff(offsets),
    )


def _events_before(times_ms: NDArray[np.int64], offsets: NDArray[np.int64], cut_ms: int) -> NDArray[np.int64]:
    before = np.concatenate([[0], np.cumsum(times_ms < cut_ms)])
    counts: NDArray[np.int64] = before[offsets[1:]] - before[offsets[:-1]]
    return counts


def stochastic_length(
    num_events: NDArray[np.int64], key: NDArray[np.uint64], *, alpha: float, longest: int
) -> NDArray[np.int64]:
    """Return the number of events to train on for each sample."""
    short = max(2, int(longest ** (alpha / 2)))
    draw = fold_array(fold(0x51), key.view(np.int64)) >> np.uint64(11)
    keep_all = draw.astype(np.float64) * 2.0**-53 < (float(longest) ** alpha) / np.maximum(num_events, 1) ** 2.0
    return np.where((num_events <= short) | keep_all, num_events, short)


def sample_events(num_events: int, num_sampled: int, key: int) -> NDArray[np.int64]:
    """Return the sorted indices of the sampled events of one sample, without replacement and with recency weights.

    The last two events are always included: the last is the newest target, the one before it its context.
    """
    if num_sampled >= num_events:
        return np.arange(num_events)
    index = np.arange(num_events)
    uniform = (fold_array(fold(key, 0x52), index) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54
    # Exponential race: taking the smallest -ln(u) / weight is weighted sampling without replacement.
    race = -np.log(uniform) / (index + 1.0)
    race[-2:] = -1.0
    return np.sort(np.argpartition(race, num_sampled - 1)[:num_sampled])


Ints = NDArray[np.int64]


def training_items(dataset: Dataset, train_end: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield (users, items of their training events, offsets of the users), one row group of users at a time."""
    for first, group in dataset.scan([ITEM_IDS]):
        items, offsets = group.lists[ITEM_IDS]
        users = np.arange(first, first + len(offsets) - 1)
        index, own_offsets = slice_index(offsets[:-1], offsets[:-1] + train_end[users])
        yield users, items[index], own_offsets


def item_counts(dataset: Dataset, train_end: Ints) -> Ints:
    """Return (items + 1,) number of training events of each item id."""
    counts = np.zeros(dataset.num_items + 1, np.int64)
    for _, items, _ in training_items(dataset, train_end):
        add_counts(items, counts)
    return counts


def sum_target_weights(
    dataset: Dataset, train_end: Ints, max_targets: int, event_weights: Callable[[Ints], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return (users,) sums of the target weights of each user's training events.

    The sum is over the last `max_targets` training events, without the user's first event.
    """
    sums = np.zeros(dataset.num_samples)
    for first, group in dataset.scan([ACTIONS]):
        masks, offsets = group.lists[ACTIONS]
        users = np.arange(first, first + len(offsets) - 1)
        end = offsets[:-1] + train_end[users]
        start = np.maximum(np.minimum(offsets[:-1] + 1, end), end - max_targets)
        index, own_offsets = slice_index(start, end)
        total = np.concatenate([[0.0], np.cumsum(event_weights(masks[index].astype(np.int64)))])
        sums[users] = total[own_offsets[1:]] - total[own_offsets[:-1]]
    return sums
