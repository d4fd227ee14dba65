"""When windows of a stream close, whatever clocks say."""

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


def rows(*hours: float, came: float | None = None) -> StreamRows:
    """Events at these hours after the start, which came then, or all at one hour."""
    lines = [json.dumps({"t": START_MS + round(hour * HOUR_MS)}) for hour in hours]
    batch = JsonLinesReader(["t"]).rows("events", lines, np.arange(len(lines)))
    arrivals = np.array([hour if came is None else came for hour in hours])
    return StreamRows(batch, {}, 0.0, came_ms=START_MS + (arrivals * HOUR_MS).astype(np.int64))


def hours_of(closed: ClosedWindow) -> list[float]:
    return [(int(t) - START_MS) / HOUR_MS for batch in closed.batches for t in batch.columns["t"].to_pylist()]


def test_an_event_ahead_of_the_clock_waits_for_its_window_and_closes_none_before() -> None:
    window = OpenWindow.of(HOURLY, LOG, {}, [])
    window.add(rows(0.2))
    window.add(rows(20.5, came=0.3))  # a clock that is twenty hours ahead
    assert not window.is_full
    window.add(rows(0.5, 0.8, 1.1))
    assert window.is_full
    first = window.close()
    assert hours_of(first) == [0.2, 0.5, 0.8]
    window = OpenWindow.of(HOURLY, LOG, first.state, first.waiting)
    assert not window.is_full, "the window after it is that of the event that closed it"
    window.add(rows(1.9, 2.0))
    assert hours_of(window.close()) == [1.1, 1.9]


def test_an_event_further_ahead_than_times_can_be_right_is_a_bad_row_whatever_its_sender_says() -> None:
    window = OpenWindow.of(HOURLY, LOG, {}, [])
    years = 100.0 * 365 * 24
    taken = window.add(rows(0.1, years, 0.2))  # its message has the time of the same wrong clock
    assert [bad.reason for bad in taken.bad] == [AHEAD]
    assert window.add(rows(24.4, 24.6, came=0.5)).num_rows == 1, "a day ahead may be another zone"
    assert not window.is_full
    kept = OpenWindow.of(HOURLY, LogColumns(time="t", time_unit="ms", max_ahead_s=None), {}, [])
    assert not kept.add(rows(years)).bad


def test_a_source_that_does_not_say_when_rows_came_is_measured_by_the_clock() -> None:
    now_h = (1000 * time.time() - START_MS) / HOUR_MS
    window = OpenWindow.of(WindowRule(), LOG, {}, [])
    given = rows(now_h, now_h + 23, now_h + 25)
    for came_ms in (None, np.full(3, -1)):
        assert len(window.add(StreamRows(given.batch, {}, 0.0, came_ms=came_ms)).bad) == 1


@pytest.mark.parametrize("rule", [HOURLY, WindowRule(events=3)])
def test_a_window_of_nothing_but_bad_rows_closes_before_it_fills_the_memory(rule: WindowRule) -> None:
    bounded = WindowRule(events=rule.events, hours=rule.hours, max_events=5)
    window = OpenWindow.of(bounded, LOG, {}, [])
    batch = JsonLinesReader(["t"]).rows("events", ["no object"] * 5, np.arange(5))
    window.add(StreamRows(batch, {}, 0.0))
    assert window.is_full
    assert sum(len(part.bad) for part in window.close().batches) == 5
