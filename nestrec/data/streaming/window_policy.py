"""Windowing policy of a stream: tumbling windows that close after N events, or by event time and watermark.

A time window closes when the watermark, the latest event time minus the allowed lateness, passes its end. Events of
later windows that have already been read are kept pending; events that arrive after their window has closed go to the
window that is open.

Clocks that are ahead do not close a window: an event counts as no later than its arrival. Events too far in the future
are rejected (`log.max_future_s`).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count, NonNegative, Positive
from nestrec.base.errors import UserError
from nestrec.data.dataset_card import PENDING_PREFIX, DataFile, describe_file
from nestrec.data.prepare.parse import AHEAD, GOOD, parse_times_ms
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.prepare.raw_rows import BadRow, RawBatch, read_parquet
from nestrec.data.streaming.stream_source import StreamRows

HOUR_MS = 3_600_000


@config
class WindowRule:
    """When a stream window closes."""

    events: Count | None = 10_000
    """Number of events after which a window closes; set either this or `hours`."""
    hours: Positive | None = None
    """Duration of a window in hours of event time; set either this or `events`."""
    allowed_lateness_s: NonNegative = 0.0
    """Allowed lateness in seconds of event time: how late an event may arrive and still be added to its window. Larger
    values close windows later."""
    max_rows: Count = 1_000_000
    """Maximum number of buffered rows per window, including bad ones; the window closes at this size even before its
    end."""

    def __post_init__(self) -> None:
        if (self.events is None) == (self.hours is None):
            raise UserError(
                "exactly one of the two window sizes must be set",
                option="window",
                value={"events": self.events, "hours": self.hours},
                remedy="set one of them and disable the other, for example with --window.events none --window.hours 1",
            )


@dataclass(frozen=True, slots=True)
class ClosedWindow:
    """Rows to append to the dataset, and the state that the next window depends on."""

    batches: tuple[RawBatch, ...]
    pending: tuple[RawBatch, ...]
    """Rows that were read and belong to later windows."""
    state: Mapping[str, Any]
    first_at_s: float
    """Arrival time of its oldest rows at the source, in seconds since 1970."""
    mean_at_s: float
    """Mean arrival time of its rows, in seconds since 1970."""
    newest_at_s: float
    """Arrival time of its newest rows at the source, in seconds since 1970."""

    @property
    def num_rows(self) -> int:
        return sum(batch.num_rows for batch in self.batches)


@dataclass(slots=True)
class OpenWindow:
    """A window that accepts rows until the rule closes it."""

    rule: WindowRule
    log: LogColumns
    from_ms: int | None = None
    """Start of a time window in Unix milliseconds; None before the first event."""
    latest_ms: int = -1
    """Latest event time in Unix milliseconds; the arrival time instead if the event's clock was ahead."""
    num_rows: int = 0
    num_bad: int = 0
    _buffered: list[tuple[RawBatch, NDArray[np.int64], float]] = field(default_factory=list)

    @staticmethod
    def resume(
        rule: WindowRule, log: LogColumns, state: Mapping[str, Any], pending: Sequence[RawBatch]
    ) -> "OpenWindow":
        """Create the window that follows the one with this state and these pending rows."""
        window = OpenWindow(rule, log, state.get("from_ms"), int(state.get("latest_ms", -1)))
        for batch in pending:
            window._buffer(batch, window._event_times_ms(batch), float(state.get("waits_since_s", 0.0)))
        return window

    @property
    def remaining_rows(self) -> int:
        """Number of rows that can be added before the window must close."""
        limit = self.rule.max_rows if self.rule.events is None else self.rule.events
        return limit - self.num_rows

    @property
    def is_full(self) -> bool:
        """Whether the rule closes the window now."""
        if self.remaining_rows <= 0 or self.num_rows + self.num_bad >= max(self.rule.max_rows, self.rule.events or 0):
            return True
        if self.rule.hours is None or self.from_ms is None:
            return False
        return self._watermark_ms >= self.from_ms + self._length_ms

    def add(self, rows: StreamRows) -> RawBatch:
        """Add rows, and return them with rejected ones marked as bad."""
        times = self._event_times_ms(rows.batch)
        arrived_ms = _arrival_times_ms(rows)
        batch = rows.batch
        is_accepted = np.ones(times.size, np.bool_)
        if self.log.max_future_s is not None:
            is_accepted = times <= arrived_ms + round(1000 * self.log.max_future_s)
            batch = _reject_rows(batch, ~is_accepted, AHEAD)
        clamped_ms = np.minimum(times, arrived_ms)[is_accepted & (times >= 0)]
        if clamped_ms.size:
            self.latest_ms = max(self.latest_ms, int(clamped_ms.max()))
            if self.from_ms is None and self.rule.hours is not None:
                self.from_ms = int(clamped_ms.min()) // self._length_ms * self._length_ms
        self._buffer(batch, times[is_accepted], rows.arrived_s)
        return batch

    def close(self) -> ClosedWindow:
        """Close the window and return its rows; at least one row must have been added."""
        end_ms = None if self.rule.hours is None or self.from_ms is None else self.from_ms + self._length_ms
        batches, pending, arrivals, weights = [], [], [], []
        for batch, times, arrived_s in self._buffered:
            is_inside = np.ones(batch.num_rows, np.bool_) if end_ms is None else times < end_ms
            inside, outside = _select_rows(batch, is_inside), _select_rows(batch, ~is_inside, keep_bad=False)
            batches += [inside] if inside.num_rows or inside.bad else []
            pending += [outside] if outside.num_rows else []
            arrivals.append(arrived_s)
            weights.append(max(1e-9, inside.num_rows))
        if not batches:  # all buffered rows belong to later windows: skip this empty window
            batches, pending = pending, []
        state = {
            "from_ms": self._next_start_ms(end_ms, pending),
            "latest_ms": self.latest_ms,
            "waits_since_s": max(arrivals, default=0.0),
        }
        mean = float(np.average(arrivals, weights=weights))
        return ClosedWindow(tuple(batches), tuple(pending), state, min(arrivals), mean, max(arrivals))

    def _buffer(self, batch: RawBatch, times: NDArray[np.int64], arrived_s: float) -> None:
        self._buffered.append((batch, times, arrived_s))
        self.num_rows += batch.num_rows
        self.num_bad += len(batch.bad)

    def _event_times_ms(self, batch: RawBatch) -> NDArray[np.int64]:
        """Return the time of each row; -1 if it has none, in which case the append rejects the row."""
        if not self.log.time or self.log.time not in batch.columns:
            if self.rule.hours is None:
                return np.full(batch.num_rows, -1, np.int64)
            remedy = "set --log.time, or close windows by --window.events"
            raise UserError(
                "time windows need a column with event times", option="log.time", value=self.log.time, remedy=remedy
            )
        times, states, is_out = parse_times_ms(batch.columns[self.log.time], self.log.time_unit)
        return np.where((states == GOOD) & ~is_out, times, -1)

    def _next_start_ms(self, end_ms: int | None, pending: list[RawBatch]) -> int | None:
        if end_ms is None:
            return None
        times = np.concatenate([np.zeros(0, np.int64), *(self._event_times_ms(batch) for batch in pending)])
        first = min(int(times.min()), self._watermark_ms) if times.size else end_ms
        return max(end_ms, first // self._length_ms * self._length_ms)

    @property
    def _watermark_ms(self) -> int:
        """Watermark in Unix milliseconds: windows that end by then are complete."""
        return self.latest_ms - round(1000 * self.rule.allowed_lateness_s)

    @property
    def _length_ms(self) -> int:
        assert self.rule.hours is not None
        return max(1, round(self.rule.hours * HOUR_MS))


def _select_rows(batch: RawBatch, rows: NDArray[np.bool_], *, keep_bad: bool = True) -> RawBatch:
    mask = pa.array(rows)
    columns = {name: column.filter(mask) for name, column in batch.columns.items()}
    return RawBatch(batch.file, batch.lines[rows], columns, batch.bad if keep_bad else (), batch.fraction_read)


def _arrival_times_ms(rows: StreamRows) -> NDArray[np.int64]:
    """Return the arrival time of each row according to the source, at most now: the source's clock may be wrong."""
    now_ms = round(1000 * time.time())
    arrived_ms = np.full(rows.batch.num_rows, now_ms) if rows.arrived_ms is None else rows.arrived_ms
    return np.where(arrived_ms > 0, np.minimum(arrived_ms, now_ms), now_ms)


def _reject_rows(batch: RawBatch, rows: NDArray[np.bool_], reason: str) -> RawBatch:
    """Mark some rows as bad, with a reason."""
    if not rows.any():
        return batch
    bad = [BadRow(int(batch.lines[row]), reason, batch.row_text(int(row))) for row in np.flatnonzero(rows)]
    return _select_rows(replace(batch, bad=(*batch.bad, *bad)), ~rows)


def write_pending_rows(folder: Path, pending: Sequence[RawBatch]) -> list[DataFile]:
    """Write pending rows to Parquet files, which preserve their types."""
    files = []
    for number, batch in enumerate(pending):
        path = folder / f"{PENDING_PREFIX}{number:05d}.parquet"
        pq.write_table(pa.table(batch.columns), path, compression="zstd")
        files.append(describe_file(folder, path, batch.num_rows))
    return files


def read_pending_rows(folder: Path) -> list[RawBatch]:
    """Read the rows that `write_pending_rows` wrote to a layer's folder."""
    return [batch for path in sorted(folder.glob(f"{PENDING_PREFIX}*.parquet")) for batch in read_parquet(path)]
