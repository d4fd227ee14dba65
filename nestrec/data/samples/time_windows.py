"""Windows of time: events that are predicted first and trained on then, in the order in which they happened.

A window is a list of runs, consecutive events of one user; a run becomes slices, each with the history before the
events that it scores. What is trained on, and in which order, is a pure function of (events, options, seed).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count, NumberRange, Positive, moment_ms
from nestrec.base.errors import UserError
from nestrec.base.random import fold, fold_array
from nestrec.data.flat_arrays import history_start, offsets_of_lengths, slice_index
from nestrec.data.samples.split import Part, Split

HOUR_MS = 3_600_000
Ints = NDArray[np.int64]
_REPLAYED_USER, _REPLAYED_END = 0x71, 0x72
"""Tell apart the draws that are made for one replayed sample."""


ReplayShare = Annotated[float, NumberRange(0, 0.9)]


@config
class WindowsConfig:
    """What a window is, where batch.order is chronological."""

    hours: Positive | None = 24.0
    """event time of a window; give this or events"""
    events: Count | None = None
    """events of a window; give this or hours"""
    start: str | None = None
    """a date or moment in ISO form: earlier events are history alone, neither predicted nor trained on; none begins
    with the first event, or with the first after those that the run named by --from has seen"""
    replay_share: ReplayShare = 0.0
    """share of the samples of a window that are drawn from older events instead"""

    def __post_init__(self) -> None:
        if (self.hours is None) == (self.events is None):
            raise UserError(
                "one of the two sizes of a window is needed, and only one",
                option="windows",
                value={"hours": self.hours, "events": self.events},
                remedy="give one of them and set the other to none, such as --windows.hours none",
            )
        moment_ms(self.start, "windows.start")


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """Events that are predicted, then trained on."""

    number: int
    """from 0"""
    from_ms: int
    """time of its first event"""
    to_ms: int
    """time of its last event"""
    runs: Ints
    """(R, 3) rows (user, first, end): these events of the user are in it"""
    is_newest: bool = False
    """the dataset holds nothing that came after it, though events of it may be late: older than others that came"""

    @property
    def num_events(self) -> int:
        return int((self.runs[:, 2] - self.runs[:, 1]).sum())


@dataclass(frozen=True, slots=True)
class TrainingChunks:
    """What is trained on, in order: (S, 4) rows (user, first, end, scored from), and the bounds of the windows."""

    rows: Ints
    bounds: Ints | None
    """(W + 1,) window w has the samples from bounds[w] to bounds[w + 1]; none: they are shuffled"""


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """How far a sample of a task goes."""

    max_events: int
    """of a slice, its history included"""
    first_scored: int
    """the first event of a user that can be predicted: 1 where an event is predicted from those before it alone"""


def slices_of_runs(runs: Ints, max_events: int) -> Ints:
    """(S, 4) rows (user, first, end, scored from): slices that cover every event of the runs once as scored, in order.

    A slice holds at most `max_events` events and scores at most half of them, unless it begins with the user's first:
    each scored event has history.
    """
    user, start, stop = runs.T
    half = max(1, max_events // 2)
    first_end = np.minimum(stop, np.maximum(start + half, max_events))
    counts = np.where(stop > start, 1 + -(-(stop - first_end) // half), 0)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    of_run = np.repeat(np.arange(len(runs)), counts)
    end = np.minimum(first_end[of_run] + place * half, stop[of_run])
    scored = np.where(place == 0, start[of_run], first_end[of_run] + (place - 1) * half)
    return np.stack([user[of_run], np.maximum(0, end - max_events), end, scored], axis=1)


def held_out_slices(
    split: Split, part: Part, max_events: int, slide_events: int, cut_of: Callable[[Ints], Ints] | None = None
) -> Ints:
    """Returns slices that cover every held-out event of a part once as scored, in order of (user, event).

    Each event is scored with the history that a server has of the user at that moment (`history_start`). Events whose
    histories begin with the same event share a slice, because attention never looks ahead.

    Args:
        split: The events of each user that are held out.
        part: The part that is measured.
        max_events: The most events of a slice, the scored one included.
        slide_events: Number of events by which a full history slides.
        cut_of: Maps numbers of events, the scored one included, to the cut that the model makes in such a history
            (`AttentionSpanConfig`). Events share a slice only if their cuts are equal.
    """
    users = split.users_with(part)
    first, end = split.held_out(part)
    place, offsets = slice_index(first[users], end[users])
    user = np.repeat(users, np.diff(offsets))
    start = history_start(place, max_events - 1, slide_events)
    cut = np.zeros_like(place) if cut_of is None else cut_of(place - start + 1)
    is_same = np.ones(max(0, len(place) - 1), np.bool_)
    for column in (user, start, cut):
        is_same &= np.diff(column) == 0
    begins = np.flatnonzero(np.append(np.ones(min(1, len(place)), np.bool_), ~is_same))
    ends = np.append(begins[1:], len(place))[: len(begins)] - 1
    return np.stack([user[begins], start[begins], place[ends] + 1, place[begins]], axis=1)


def windows_by_time(
    times_ms: Ints, offsets: Ints, train_end: Ints, cfg: WindowsConfig, start_ms: int
) -> list[TimeWindow]:
    """The training events from `start_ms` on, cut by their times; windows without any event are left out.

    times_ms, offsets: of all events, sorted inside a user. Windows of hours begin with the earliest event.
    """
    user = np.repeat(np.arange(len(train_end)), np.diff(offsets))
    place = np.arange(len(times_ms)) - offsets[user]
    is_in = (place < train_end[user]) & (times_ms >= start_ms)
    chosen = np.flatnonzero(is_in)
    if not len(chosen):
        return []
    times = times_ms[chosen]
    if cfg.hours is not None:
        number = (times - times.min()) // max(1, round(cfg.hours * HOUR_MS))
    else:
        assert cfg.events is not None
        cuts = np.sort(times)[:: cfg.events]  # events of one time stay together
        number = np.searchsorted(cuts, times, side="right") - 1
    windows: list[TimeWindow] = []
    for value in np.unique(number):
        members = chosen[number == value]
        spans = times_ms[members]
        runs = _runs(user[members], place[members])
        windows.append(TimeWindow(len(windows), int(spans.min()), int(spans.max()), runs))
    return windows


def _runs(user: Ints, place: Ints) -> Ints:
    """(R, 3) maximal runs of consecutive places of one user; both are sorted by (user, place)."""
    begins = np.flatnonzero(np.concatenate([[True], (np.diff(user) != 0) | (np.diff(place) != 1)]))
    ends = np.append(begins[1:], len(user)) - 1
    return np.stack([user[begins], place[begins], place[ends] + 1], axis=1)


def window_of_events(number: int, user: Ints, place: Ints, times_ms: Ints) -> TimeWindow:
    """A window of the events that came last, given by user and place in the user's sequence."""
    order = np.lexsort((place, user))
    runs = _runs(user[order], place[order]) if len(user) else np.zeros((0, 3), np.int64)
    from_ms, to_ms = (int(times_ms.min()), int(times_ms.max())) if len(times_ms) else (0, 0)
    return TimeWindow(number, from_ms, to_ms, runs, is_newest=True)


@dataclass(frozen=True, slots=True)
class EventIndex:
    """What windows ask of the events around them."""

    time_of: Callable[[Ints, Ints], Ints]
    """(users, places) of events to their times"""
    older_than: Callable[[TimeWindow], Ints]
    """the number of events of each user before those of a window"""


def past_of(times_ms: Ints, offsets: Ints) -> EventIndex:
    """Of a dataset whose times are all in memory, sorted inside a user."""

    def older_than(window: TimeWindow) -> Ints:
        if window.is_newest:  # not by its times: one late event would leave hardly any that is older
            known: Ints = np.diff(offsets)
            np.minimum.at(known, window.runs[:, 0], window.runs[:, 1])
            return known
        before = np.concatenate([[0], np.cumsum(times_ms < window.from_ms)])
        counts: Ints = before[offsets[1:]] - before[offsets[:-1]]
        return counts

    return EventIndex(lambda user, place: times_ms[offsets[user] + place], older_than)


def training_slices(
    windows: Sequence[TimeWindow], reach: SampleLimits, past: EventIndex, *, seed: int, replay_share: float
) -> TrainingChunks:
    """Samples of all windows in order of time; replayed ones are spread evenly among those of their window."""
    rows, sizes = [], []
    for window in windows:
        runs = scored_runs(window.runs, reach)
        fresh = slices_of_runs(runs, reach.max_events)
        last_ms = past.time_of(fresh[:, 0], fresh[:, 2] - 1)
        fresh = fresh[np.lexsort((fresh[:, 0], last_ms))]
        num_old = round(len(fresh) * replay_share / (1 - replay_share))
        old = _replayed(window, num_old, reach, past.older_than(window), seed) if num_old else fresh[:0]
        at = np.concatenate([np.arange(len(fresh)) + 0.5, (np.arange(len(old)) + 0.5) * len(fresh) / max(1, len(old))])
        rows.append(np.concatenate([fresh, old])[np.argsort(at, kind="stable")])
        sizes.append(len(fresh) + len(old))
    return TrainingChunks(
        np.concatenate([np.zeros((0, 4), np.int64), *rows]), offsets_of_lengths(np.array(sizes, np.int64))
    )


def scored_runs(runs: Ints, reach: SampleLimits) -> Ints:
    """Without the events that nothing comes before, where those cannot be predicted."""
    first = np.maximum(runs[:, 1], reach.first_scored)
    return np.stack([runs[:, 0], first, runs[:, 2]], axis=1)[runs[:, 2] > first]


def _replayed(window: TimeWindow, number: int, reach: SampleLimits, older: Ints, seed: int) -> Ints:
    """Slices of older events: user and end by a hash, and as many scored events as a run of the window has."""
    users = np.flatnonzero(older > reach.first_scored)
    if not len(users):
        return np.zeros((0, 4), np.int64)
    key = fold(seed, window.number)
    draw = np.arange(number)
    user = users[fold_array(fold(key, _REPLAYED_USER), draw) % np.uint64(len(users))]
    choices = (older[user] - reach.first_scored).astype(np.uint64)
    end = (fold_array(fold(key, _REPLAYED_END), draw) % choices).astype(np.int64) + reach.first_scored + 1
    span = min(max(1, window.num_events // max(1, len(window.runs))), max(1, reach.max_events // 2))
    first = np.maximum(0, end - reach.max_events)
    scored = np.maximum(end - span, reach.first_scored)
    return np.stack([user, first, end, scored], axis=1)
