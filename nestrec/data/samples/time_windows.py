"""Time windows for chronological training: each window is evaluated first and then trained on (test-then-train).

A window is a list of runs, which are consecutive events of one user. A run becomes chunks: training samples whose last
events are scored and whose first events are history. The samples and their order are a pure function of (events,
options, seed).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count, NumberRange, Positive, parse_time_ms
from nestrec.base.errors import UserError
from nestrec.base.random import fold, fold_array
from nestrec.data.flat_arrays import history_start, offsets_of_lengths, slice_index
from nestrec.data.samples.split import Part, Split

HOUR_MS = 3_600_000
Ints = NDArray[np.int64]
_REPLAYED_USER, _REPLAYED_END = 0x71, 0x72
"""Seeds that keep the random draws of a replayed sample apart."""


ReplayShare = Annotated[float, NumberRange(0, 0.9)]


@config
class WindowsConfig:
    """Options of the time windows, used if `batch.order` is chronological."""

    hours: Positive | None = 24.0
    """Duration of a window in hours of event time; set either this or `events`."""
    events: Count | None = None
    """Number of events in a window; set either this or `hours`."""
    start_time: str | None = None
    """Start of the first window, an ISO date or time; earlier events are history only. None starts at the first event,
    or at the first event after those of the run that `--warm-start` names."""
    replay_fraction: ReplayShare = 0.0
    """Fraction of a window's samples that are drawn from older events (experience replay)."""

    def __post_init__(self) -> None:
        if (self.hours is None) == (self.events is None):
            raise UserError(
                "exactly one of the two window sizes must be set",
                option="windows",
                value={"hours": self.hours, "events": self.events},
                remedy="set one of them and disable the other, for example with --windows.hours none",
            )
        parse_time_ms(self.start_time, "windows.start_time")


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """Events that are evaluated and then trained on."""

    number: int
    """Index of the window, from 0."""
    from_ms: int
    """Time of its first event in Unix milliseconds."""
    to_ms: int
    """Time of its last event in Unix milliseconds."""
    runs: Ints
    """(R, 3) rows (user, first, end): the user's events [first, end) are in the window."""
    is_newest: bool = False
    """Whether no later window exists. Its events arrived last, but late ones may be older than events of earlier
    windows."""

    @property
    def num_events(self) -> int:
        return int((self.runs[:, 2] - self.runs[:, 1]).sum())


@dataclass(frozen=True, slots=True)
class TrainingChunks:
    """Training samples in order."""

    rows: Ints
    """(S, 4) rows (user, first, end, scored from), in training order."""
    bounds: Ints | None
    """(W + 1,) bounds of the windows: window w has the samples from bounds[w] to bounds[w + 1]; None if samples are
    shuffled."""


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """Size limits of a task's samples."""

    max_events: int
    """Maximum number of events in a chunk, including its history."""
    first_scored: int
    """Position of the first event of a user that can be predicted; 1 if a prediction needs at least one earlier event.
    """


def split_runs_into_chunks(runs: Ints, max_events: int) -> Ints:
    """Return (S, 4) rows (user, first, end, scored from): chunks that score every event of the runs once, in order.

    A chunk contains at most `max_events` events and scores at most half of them, so that each scored event has history,
    unless the chunk starts with the user's first event.
    """
    user, start, stop = runs.T
    half = max(1, max_events // 2)
    first_end = np.minimum(stop, np.maximum(start + half, max_events))
    counts = np.where(stop > start, 1 + -(-(stop - first_end) // half), 0)
    chunk_in_run = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    of_run = np.repeat(np.arange(len(runs)), counts)
    end = np.minimum(first_end[of_run] + chunk_in_run * half, stop[of_run])
    scored = np.where(chunk_in_run == 0, start[of_run], first_end[of_run] + (chunk_in_run - 1) * half)
    return np.stack([user[of_run], np.maximum(0, end - max_events), end, scored], axis=1)


def held_out_chunks(
    split: Split, part: Part, max_events: int, slide_events: int, cut_of: Callable[[Ints], Ints] | None = None
) -> Ints:
    """Return chunks that score every held-out event of a part once, in order of (user, event).

    Each event is scored with the history that a server has of the user at that moment (`history_start`). Events whose
    histories start with the same event share a chunk, because attention is causal.

    Args:
        split: Held-out events of each user.
        part: Part to evaluate, validation or test.
        max_events: Maximum number of events in a chunk, including the scored ones.
        slide_events: Number of events by which a full history slides.
        cut_of: Maps numbers of events, including the scored one, to the truncation that the model applies to such a
            history (`AttentionSpanConfig`). Events share a chunk only if their truncations are equal.
    """
    users = split.users_with(part)
    first, end = split.held_out(part)
    position, offsets = slice_index(first[users], end[users])
    user = np.repeat(users, np.diff(offsets))
    start = history_start(position, max_events - 1, slide_events)
    cut = np.zeros_like(position) if cut_of is None else cut_of(position - start + 1)
    is_same = np.ones(max(0, len(position) - 1), np.bool_)
    for column in (user, start, cut):
        is_same &= np.diff(column) == 0
    first_of_chunk = np.flatnonzero(np.append(np.ones(min(1, len(position)), np.bool_), ~is_same))
    last_of_chunk = np.append(first_of_chunk[1:], len(position))[: len(first_of_chunk)] - 1
    return np.stack(
        [user[first_of_chunk], start[first_of_chunk], position[last_of_chunk] + 1, position[first_of_chunk]], axis=1
    )


def windows_by_time(
    times_ms: Ints, offsets: Ints, train_end: Ints, cfg: WindowsConfig, start_ms: int
) -> list[TimeWindow]:
    """Split the training events from `start_ms` on into windows by time; windows without events are omitted.

    Args:
        times_ms: Times of all events, sorted within each user. Windows of hours start with the earliest event.
        offsets: Offsets of the users in `times_ms`.
        train_end: Number of training events of each user.
        cfg: Window options.
        start_ms: Time of the earliest event to train on.
    """
    user = np.repeat(np.arange(len(train_end)), np.diff(offsets))
    position = np.arange(len(times_ms)) - offsets[user]
    is_in = (position < train_end[user]) & (times_ms >= start_ms)
    selected = np.flatnonzero(is_in)
    if not len(selected):
        return []
    times = times_ms[selected]
    if cfg.hours is not None:
        number = (times - times.min()) // max(1, round(cfg.hours * HOUR_MS))
    else:
        assert cfg.events is not None
        cuts = np.sort(times)[:: cfg.events]  # events with equal times stay in one window
        number = np.searchsorted(cuts, times, side="right") - 1
    windows: list[TimeWindow] = []
    for value in np.unique(number):
        members = selected[number == value]
        spans = times_ms[members]
        runs = _find_runs(user[members], position[members])
        windows.append(TimeWindow(len(windows), int(spans.min()), int(spans.max()), runs))
    return windows


def _find_runs(user: Ints, position: Ints) -> Ints:
    """Return (R, 3) maximal runs of consecutive positions of one user; the input is sorted by (user, position)."""
    begins = np.flatnonzero(np.concatenate([[True], (np.diff(user) != 0) | (np.diff(position) != 1)]))
    ends = np.append(begins[1:], len(user)) - 1
    return np.stack([user[begins], position[begins], position[ends] + 1], axis=1)


def window_of_events(number: int, user: Ints, position: Ints, times_ms: Ints) -> TimeWindow:
    """Return the window of the newest events, given their users and positions in the users' sequences."""
    order = np.lexsort((position, user))
    runs = _find_runs(user[order], position[order]) if len(user) else np.zeros((0, 3), np.int64)
    from_ms, to_ms = (int(times_ms.min()), int(times_ms.max())) if len(times_ms) else (0, 0)
    return TimeWindow(number, from_ms, to_ms, runs, is_newest=True)


@dataclass(frozen=True, slots=True)
class EventIndex:
    """Lookups of event times and counts that building the windows needs."""

    time_of: Callable[[Ints, Ints], Ints]
    """Maps (users, positions) of events to their times."""
    num_events_before: Callable[[TimeWindow], Ints]
    """Maps a window to the number of older events of each user."""


def build_event_index(times_ms: Ints, offsets: Ints) -> EventIndex:
    """Build the event index of a dataset whose times are all in memory, sorted within each user."""

    def num_events_before(window: TimeWindow) -> Ints:
        if window.is_newest:  # by position, not by time: one late event would exclude almost all older ones
            known: Ints = np.diff(offsets)
            np.minimum.at(known, window.runs[:, 0], window.runs[:, 1])
            return known
        before = np.concatenate([[0], np.cumsum(times_ms < window.from_ms)])
        counts: Ints = before[offsets[1:]] - before[offsets[:-1]]
        return counts

    return EventIndex(lambda user, position: times_ms[offsets[user] + position], num_events_before)


def training_chunks(
    windows: Sequence[TimeWindow], limits: SampleLimits, event_index: EventIndex, *, seed: int, replay_fraction: float
) -> TrainingChunks:
    """Return the samples of all windows in time order; replayed samples are distributed evenly over their window."""
    rows, sizes = [], []
    for window in windows:
        runs = scored_runs(window.runs, limits)
        new_chunks = split_runs_into_chunks(runs, limits.max_events)
        last_ms = event_index.time_of(new_chunks[:, 0], new_chunks[:, 2] - 1)
        new_chunks = new_chunks[np.lexsort((new_chunks[:, 0], last_ms))]
        num_replayed = round(len(new_chunks) * replay_fraction / (1 - replay_fraction))
        replayed = (
            _replay_chunks(window, num_replayed, limits, event_index.num_events_before(window), seed)
            if num_replayed
            else new_chunks[:0]
        )
        order_key = np.concatenate(
            [
                np.arange(len(new_chunks)) + 0.5,
                (np.arange(len(replayed)) + 0.5) * len(new_chunks) / max(1, len(replayed)),
            ]
        )
        rows.append(np.concatenate([new_chunks, replayed])[np.argsort(order_key, kind="stable")])
        sizes.append(len(new_chunks) + len(replayed))
    return TrainingChunks(
        np.concatenate([np.zeros((0, 4), np.int64), *rows]), offsets_of_lengths(np.array(sizes, np.int64))
    )


def scored_runs(runs: Ints, limits: SampleLimits) -> Ints:
    """Remove events from the runs that cannot be predicted because no events precede them."""
    first = np.maximum(runs[:, 1], limits.first_scored)
    return np.stack([runs[:, 0], first, runs[:, 2]], axis=1)[runs[:, 2] > first]


def _replay_chunks(window: TimeWindow, num_chunks: int, limits: SampleLimits, num_older: Ints, seed: int) -> Ints:
    """Draw chunks of older events by a hash; they score as many events as the average run of the window."""
    users = np.flatnonzero(num_older > limits.first_scored)
    if not len(users):
        return np.zeros((0, 4), np.int64)
    key = fold(seed, window.number)
    draw = np.arange(num_chunks)
    user = users[fold_array(fold(key, _REPLAYED_USER), draw) % np.uint64(len(users))]
    choices = (num_older[user] - limits.first_scored).astype(np.uint64)
    end = (fold_array(fold(key, _REPLAYED_END), draw) % choices).astype(np.int64) + limits.first_scored + 1
    span = min(max(1, window.num_events // max(1, len(window.runs))), max(1, limits.max_events // 2))
    first = np.maximum(0, end - limits.max_events)
    scored = np.maximum(end - span, limits.first_scored)
    return np.stack([user, first, end, scored], axis=1)
