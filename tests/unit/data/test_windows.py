"""Time windows contain each event once and in order, for any window size."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.data.batch_order import BatchPosition, GlobalBatchSampler
from nestrec.data.samples.time_windows import (
    HOUR_MS,
    SampleLimits,
    TimeWindow,
    WindowsConfig,
    _replay_chunks,
    build_event_index,
    split_runs_into_chunks,
    training_chunks,
    window_of_events,
    windows_by_time,
)

Ints = NDArray[np.int64]


def events_of(rows: Ints) -> list[tuple[int, int]]:
    return [(user, position) for user, _, end, scored in rows.tolist() for position in range(scored, end)]


def reference_chunks(runs: Ints, max_events: int) -> list[tuple[int, int, int, int]]:
    """Reference implementation of `split_runs_into_chunks`."""
    chunks = []
    for user, start, stop in runs.tolist():
        scored = start
        while scored < stop:
            end = min(stop, max(scored + max(1, max_events // 2), min(stop, max_events)))
            chunks.append((user, max(0, end - max_events), end, scored))
            scored = end
    return chunks


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(0, 30)), max_size=6),
    st.integers(1, 13),
)
def test_chunks_equal_reference_implementation(runs: list[tuple[int, int, int]], max_events: int) -> None:
    run_rows = np.array(runs, np.int64).reshape(-1, 3)
    assert split_runs_into_chunks(run_rows, max_events).tolist() == [
        list(chunk) for chunk in reference_chunks(run_rows, max_events)
    ]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Ints, Ints, Ints]:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    times = [sorted(draw(st.lists(st.integers(0, 100), min_size=n, max_size=n))) for n in lengths]
    train_end = np.array([draw(st.integers(0, n)) for n in lengths], np.int64)
    flat = np.array([t for row in times for t in row], np.int64) * HOUR_MS
    return flat, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), train_end


@settings(max_examples=150, deadline=None)
@given(histories(), st.sampled_from([{"hours": 7.0}, {"hours": None, "events": 4}]), st.integers(0, 1))
def test_time_windows_hold_each_training_event_once_in_order(
    data: tuple[Ints, Ints, Ints], sizes: dict[str, object], first_scored: int
) -> None:
    times, offsets, train_end = data
    windows = windows_by_time(times, offsets, train_end, WindowsConfig(**sizes), 20 * HOUR_MS)  # type: ignore[arg-type]
    expected = {(u, p) for u, n in enumerate(train_end) for p in range(n) if times[offsets[u] + p] >= 20 * HOUR_MS}
    events = [event for window in windows for event in events_of(split_runs_into_chunks(window.runs, 5))]
    assert sorted(events) == sorted(expected)
    for before, after in itertools.pairwise(windows):
        assert before.to_ms < after.from_ms
    chunks = training_chunks(
        windows, SampleLimits(6, first_scored), build_event_index(times, offsets), seed=1, replay_fraction=0.0
    )
    trained = events_of(chunks.rows)
    assert sorted(trained) == sorted((u, p) for u, p in expected if p >= first_scored)
    last = np.array([times[offsets[u] + end - 1] for u, _, end, _ in chunks.rows.tolist()])
    for start, end in zip(chunks.bounds, chunks.bounds[1:], strict=False):
        assert np.all(np.diff(last[start:end]) >= 0)


def test_replay_samples_precede_the_window_in_given_fraction() -> None:
    times = np.tile(np.arange(40) * HOUR_MS, 3)
    offsets = np.arange(4) * 40
    windows = windows_by_time(times, offsets, np.full(3, 40), WindowsConfig(hours=10), 0)
    past = build_event_index(times, offsets)
    limits = SampleLimits(8, 1)
    plain = training_chunks(windows, limits, past, seed=3, replay_fraction=0.0)
    mixed = training_chunks(windows, limits, past, seed=3, replay_fraction=0.5)
    fresh = {tuple(row) for row in plain.rows.tolist()}
    for number, window in enumerate(windows):
        rows = mixed.rows[mixed.bounds[number] : mixed.bounds[number + 1]]
        own = plain.rows[plain.bounds[number] : plain.bounds[number + 1]]
        is_old = times[offsets[rows[:, 0]] + rows[:, 2] - 1] < window.from_ms
        assert rows[~is_old].tolist() == own.tolist()
        assert is_old.sum() == (len(own) if number else 0)  # no event is older than the first window
    assert len({tuple(row) for row in mixed.rows.tolist()} - fresh) > 3
    again = training_chunks(windows, limits, past, seed=3, replay_fraction=0.5)
    other = training_chunks(windows, limits, past, seed=4, replay_fraction=0.5)
    assert np.array_equal(mixed.rows, again.rows)
    assert not np.array_equal(mixed.rows, other.rows)


def test_replay_of_stream_windows_includes_late_events() -> None:
    """Two users have forty events each; the newest five of one arrive last, with a very late event of the other."""
    times = np.tile(np.arange(1, 41) * HOUR_MS, 2)
    offsets = np.arange(3) * 40
    user, positions = np.array([0, 0, 0, 0, 0, 1]), np.array([35, 36, 37, 38, 39, 3])
    window = window_of_events(7, user, positions, times[offsets[user] + positions])
    assert (window.from_ms, window.to_ms) == (4 * HOUR_MS, 40 * HOUR_MS)
    own, mixed = (
        training_chunks(
            [window], SampleLimits(8, 1), build_event_index(times, offsets), seed=3, replay_fraction=fraction
        ).rows.tolist()
        for fraction in (0.0, 0.9)
    )
    old = [row for row in mixed if row not in own]
    assert len(mixed) == 10 * len(own)
    assert len(old) == 9 * len(own)
    assert {(user, end <= (35, 3)[user]) for user, _, end, _ in old} == {(0, True), (1, True)}


@pytest.mark.parametrize("size", [{"batch_samples": 3}, {"batch_tokens": 5}])
def test_time_window_batches_are_ordered_and_never_mixed(size: dict[str, int]) -> None:
    bounds = np.array([0, 4, 4, 9, 10])
    order = GlobalBatchSampler(np.array([1, 2, 3, 1, 1, 1, 2, 2, 1, 5]), seed=1, window_bounds=bounds, **size)
    position = BatchPosition()
    seen = []
    ends = []
    while position.epoch == 0:
        samples = order.samples(position).tolist()
        assert (
            len({int(np.searchsorted(bounds, s, side="right")) - 1 for s in samples} - {order.window_of(position)}) == 0
        )
        seen += samples
        if order.is_last_of_window(position):
            ends.append(seen[-1] + 1)
        position = order.next_position(position)
    assert seen == list(range(10))
    assert ends == [4, 9, 10]


def test_windows_config_requires_exactly_one_size() -> None:
    with pytest.raises(UserError, match="exactly one of the two window sizes"):
        WindowsConfig(hours=1, events=5)


def test_replay_users_and_ends_are_drawn_independently() -> None:
    window = TimeWindow(3, 0, 0, np.array([[0, 40, 46], [1, 40, 42]]))
    older = np.array([41, 41, 1])

    def drawn(number: int, seed: int) -> Ints:
        return _replay_chunks(replace(window, number=number), 800, SampleLimits(10, first_scored=1), older, seed)

    rows = drawn(3, 5)
    user, first, end, scored = rows.T
    assert (first == np.maximum(0, end - 10)).all()
    assert (scored == np.maximum(end - 4, 1)).all(), "a run of the window has four events on average"
    assert set(user.tolist()) == {0, 1}, "the third user has no event that can be scored"
    assert (end.min(), end.max()) == (2, 41)
    counts = np.bincount(2 * user + end % 2, minlength=4)
    assert (abs(counts - 200) < 50).all(), counts
    for other in (drawn(3, 6), drawn(4, 5)):
        assert 0.4 < (other[:, 0] == user).mean() < 0.6
        assert (other[:, 2] == end).mean() < 0.1


def test_time_window_without_events_has_no_runs() -> None:
    none = np.zeros(0, np.int64)
    window = window_of_events(2, none, none, none)
    assert (window.number, window.from_ms, window.to_ms, window.is_newest) == (2, 0, 0, True)
    assert (window.runs.shape, window.runs.dtype) == ((0, 3), np.int64)


def test_windows_start_time_error_names_the_option():
    with pytest.raises(UserError, match="soon") as raised:
        WindowsConfig(hours=1, start_time="soon")
    assert raised.value.option == "windows.start_time"
