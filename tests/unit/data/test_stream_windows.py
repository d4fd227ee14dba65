"""Closing of stream windows, also if the clocks of senders are wrong."""

import json
import time

import numpy as np
import pytest

from nestrec.data.prepare.json_lines import JsonLinesReader
from nestrec.data.prepare.parse import AHEAD
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.streaming.stream_source import StreamRows
from nestrec.data.streaming.window_policy import ClosedWindow, OpenWindow, WindowRule

HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000 // HOUR_MS * HOUR_MS
LOG = LogColumns(time="t", time_unit="ms")
HOURLY = WindowRule(events=None, hours=1)


def rows(*hours: float, arrived_at: float | None = None) -> StreamRows:
    """Returns events at these hours after the start; they arrive at their own times, or all at `arrived_at`."""
    lines = [json.dumps({"t": START_MS + round(hour * HOUR_MS)}) for hour in hours]
    batch = JsonLinesReader(["t"]).parse_lines("events", lines, np.arange(len(lines)))
    arrivals = np.array([hour if arrived_at is None else arrived_at for hour in hours])
    return StreamRows(batch, {}, 0.0, arrived_ms=START_MS + (arrivals * HOUR_MS).astype(np.int64))


def hours_of(closed: ClosedWindow) -> list[float]:
    return [(int(t) - START_MS) / HOUR_MS for batch in closed.batches for t in batch.columns["t"].to_pylist()]


def test_stream_window_ignores_event_ahead_of_clock() -> None:
    window = OpenWindow.resume(HOURLY, LOG, {}, [])
    window.add(rows(0.2))
    window.add(rows(20.5, arrived_at=0.3))  # the sender's clock is twenty hours ahead
    assert not window.is_full
    window.add(rows(0.5, 0.8, 1.1))
    assert window.is_full
    first = window.close()
    assert hours_of(first) == [0.2, 0.5, 0.8]
    window = OpenWindow.resume(HOURLY, LOG, first.state, first.pending)
    assert not window.is_full, "the next window is the one of the event that closed the first"
    window.add(rows(1.9, 2.0))
    assert hours_of(window.close()) == [1.1, 1.9]


def test_stream_window_event_far_in_the_future_is_a_bad_row() -> None:
    window = OpenWindow.resume(HOURLY, LOG, {}, [])
    years = 100.0 * 365 * 24
    accepted = window.add(rows(0.1, years, 0.2))  # the arrival time is of the same wrong clock
    assert [bad.reason for bad in accepted.bad] == [AHEAD]
    assert window.add(rows(24.4, 24.6, arrived_at=0.5)).num_rows == 1, (
        "an event up to a day ahead may have another time zone"
    )
    assert not window.is_full
    unlimited = OpenWindow.resume(HOURLY, LogColumns(time="t", time_unit="ms", max_future_s=None), {}, [])
    assert not unlimited.add(rows(years)).bad


def test_stream_window_without_arrival_times_uses_the_clock() -> None:
    now_h = (1000 * time.time() - START_MS) / HOUR_MS
    window = OpenWindow.resume(WindowRule(), LOG, {}, [])
    events = rows(now_h, now_h + 23, now_h + 25)
    for arrived_ms in (None, np.full(3, -1)):
        assert len(window.add(StreamRows(events.batch, {}, 0.0, arrived_ms=arrived_ms)).bad) == 1


@pytest.mark.parametrize("rule", [HOURLY, WindowRule(events=3)])
def test_stream_window_of_bad_rows_only_is_bounded(rule: WindowRule) -> None:
    bounded = WindowRule(events=rule.events, hours=rule.hours, max_rows=5)
    window = OpenWindow.resume(bounded, LOG, {}, [])
    batch = JsonLinesReader(["t"]).parse_lines("events", ["no object"] * 5, np.arange(5))
    window.add(StreamRows(batch, {}, 0.0))
    assert window.is_full
    assert sum(len(part.bad) for part in window.close().batches) == 5
