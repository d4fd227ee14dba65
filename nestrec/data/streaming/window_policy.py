"""When a window of a stream closes: after so many events, or when its time is over and late events had theirs.

A window of time closes when an event was seen that is later than its end by the lateness that is allowed for. Events of
later windows that were read by then wait; events that come when their window is closed belong to the one that is open.

Clocks that run ahead close no window: an event counts as no later than it came. What lies further ahead than times can
be right is set aside (`log.max_ahead_s`).
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
from nestrec.data.dataset_card import PENDING, DataFile, describe_file
from nestrec.data.prepare.parse import AHEAD, GOOD, parse_times_ms
from nestrec.data.prepare.prepare_options import LogColumns
from nestrec.data.prepare.raw_rows import BadRow, RawBatch, read_parquet
from nestrec.data.streaming.stream_source import StreamRows

HOUR_MS = 3_600_000


@config
class WindowRule:
    """When a window of a stream closes."""

    events: Count | None = 10_000
    """after so many events; give this or hours"""
    hours: Positive | None = None
    """when so much event time is over; give this or events"""
    lateness_s: NonNegative = 0.0
    """how late an event may come and still find its window open, in event time; more waits longer"""
    max_events: Count = 1_000_000
    """rows that are held for a window, bad ones included; it closes with these even where its time is not over"""

    def __post_init__(self) -> None:
        if (self.events is None) == (self.hours is None):
            raise UserError(
                "one of the two sizes of a window is needed, and only one",
                option="window",
                value={"events": self.events, "hours": self.hours},
                remedy="give one of them and set the other to none, such as --window.events none --window.hours 1",
            )


@dataclass(frozen=True, slots=True)
class ClosedWindow:
    """Rows that are to be appended, and what the next window depends on."""

    batches: tuple[RawBatch, ...]
    waiting: tuple[RawBatch, ...]
    """rows that were read and belong to later windows"""
    state: Mapping[str, Any]
    first_at_s: float
    """when its oldest rows came to the source"""
    mean_at_s: float
    """the mean over its rows"""
    newest_at_s: float
    """when its newest rows came to the source"""

    @property
    def num_rows(self) -> int:
        return sum(batch.num_rows for batch in self.batches)


@dataclass(slots=True)
class OpenWindow:
    """Takes rows until the rule closes it."""

    rule: WindowRule
    log: LogColumns
    from_ms: int | None = None
    """begin of a window of time; none before the first event"""
    latest_ms: int = -1
    """time of the latest event that was seen, or when that came where its clock ran ahead"""
    num_rows: int = 0
    num_bad: int = 0
    _held: list[tuple[RawBatch, NDArray[np.int64], float]] = field(default_factory=list)

    @staticmethod
    def of(rule: WindowRule, log: LogColumns, state: Mapping[str, Any], waiting: Sequence[RawBatch]) -> "OpenWindow":
        """As the window before left it."""
        window = OpenWindow(rule, log, state.get("from_ms"), int(state.get("latest_ms", -1)))
        for batch in waiting:
            window._hold(batch, window._times(batch), float(state.get("waits_since_s", 0.0)))
        return window

    @property
    def room(self) -> int:
        """Rows that may be added before it must close."""
        most = self.rule.max_events if self.rule.events is None else self.rule.events
        return most - self.num_rows

    @property
    def is_full(self) -> bool:
        """Whether the rule closes it now."""
        if self.room <= 0 or self.num_rows + self.num_bad >= max(self.rule.max_events, self.rule.events or 0):
            return True
        if self.rule.hours is None or self.from_ms is None:
            return False
        return self._over_ms >= self.from_ms + self._length_ms

    def add(self, rows: StreamRows) -> RawBatch:
        """Take rows; as they were taken, with those that were set aside."""
        times = self._times(rows.batch)
        came = _came_ms(rows)
        batch = rows.batch
        kept = np.ones(times.size, np.bool_)
        if self.log.max_ahead_s is not None:
            kept = times <= came + round(1000 * self.log.max_ahead_s)
            batch = _without(batch, ~kept, AHEAD)
        known = np.minimum(times, came)[kept & (times >= 0)]
        if known.size:
            self.latest_ms = max(self.latest_ms, int(known.max()))
            if self.from_ms is None and self.rule.hours is not None:
                self.from_ms = int(known.min()) // self._length_ms * self._length_ms
        self._hold(batch, times[kept], rows.arrived_s)
        return batch

    def close(self) -> ClosedWindow:
        """What is in it now; it may not be empty."""
        end_ms = None if self.rule.hours is None or self.from_ms is None else self.from_ms + self._length_ms
        batches, waiting, arrivals, weights = [], [], [], []
        for batch, times, arrived_s in self._held:
            is_in = np.ones(batch.num_rows, np.bool_) if end_ms is None else times < end_ms
            mine, others = _chosen(batch, is_in), _chosen(batch, ~is_in, bad=False)
            batches += [mine] if mine.num_rows or mine.bad else []
            waiting += [others] if others.num_rows else []
            arrivals.append(arrived_s)
            weights.append(max(1e-9, mine.num_rows))
        if not batches:  # all that was held belongs to later windows: it is theirs, and this one was empty
            batches, waiting = waiting, []
        state = {
            "from_ms": self._next_from(end_ms, waiting),
            "latest_ms": self.latest_ms,
            "waits_since_s": max(arrivals, default=0.0),
        }
        mean = float(np.average(arrivals, weights=weights))
        return ClosedWindow(tuple(batches), tuple(waiting), state, min(arrivals), mean, max(arrivals))

    def _hold(self, batch: RawBatch, times: NDArray[np.int64], arrived_s: float) -> None:
        self._held.append((batch, times, arrived_s))
        self.num_rows += batch.num_rows
        self.num_bad += len(batch.bad)

    def _times(self, batch: RawBatch) -> NDArray[np.int64]:
        """Of each row; -1 where there is none, which the append will set aside."""
        if not self.log.time or self.log.time not in batch.columns:
            if self.rule.hours is None:
                return np.full(batch.num_rows, -1, np.int64)
            remedy = "name it with --log.time, or close windows by --window.events"
            raise UserError(
                "windows of time need a column of times", option="log.time", value=self.log.time, remedy=remedy
            )
        times, states, is_out = parse_times_ms(batch.columns[self.log.time], self.log.time_unit)
        return np.where((states == GOOD) & ~is_out, times, -1)

    def _next_from(self, end_ms: int | None, waiting: list[RawBatch]) -> int | None:
        if end_ms is None:
            return None
        times = np.concatenate([np.zeros(0, np.int64), *(self._times(batch) for batch in waiting)])
        first = min(int(times.min()), self._over_ms) if times.size else end_ms
        return max(end_ms, first // self._length_ms * self._length_ms)

    @property
    def _over_ms(self) -> int:
        """Windows that end by then are over."""
        return self.latest_ms - round(1000 * self.rule.lateness_s)

    @property
    def _length_ms(self) -> int:
        assert self.rule.hours is not None
        return max(1, round(self.rule.hours * HOUR_MS))


def _chosen(batch: RawBatch, rows: NDArray[np.bool_], *, bad: bool = True) -> RawBatch:
    mask = pa.array(rows)
    columns = {name: column.filter(mask) for name, column in batch.columns.items()}
    return RawBatch(batch.file, batch.lines[rows], columns, batch.bad if bad else (), batch.done)


def _came_ms(rows: StreamRows) -> NDArray[np.int64]:
    """When each row came, by the source, and no later than now: whoever sent it may have had a wrong clock, too."""
    now_ms = round(1000 * time.time())
    came = np.full(rows.batch.num_rows, now_ms) if rows.came_ms is None else rows.came_ms
    return np.where(came > 0, np.minimum(came, now_ms), now_ms)


def _without(batch: RawBatch, rows: NDArray[np.bool_], reason: str) -> RawBatch:
    """Some rows are bad ones, for a reason."""
    if not rows.any():
        return batch
    bad = [BadRow(int(batch.lines[row]), reason, batch.text_of(int(row))) for row in np.flatnonzero(rows)]
    return _chosen(replace(batch, bad=(*batch.bad, *bad)), ~rows)


def write_waiting(folder: Path, waiting: Sequence[RawBatch]) -> list[DataFile]:
    """Rows that wait, as files that keep their types."""
    files = []
    for number, batch in enumerate(waiting):
        path = folder / f"{PENDING}{number:05d}.parquet"
        pq.write_table(pa.table(batch.columns), path, compression="zstd")
        files.append(describe_file(folder, path, batch.num_rows))
    return files


def read_waiting(folder: Path) -> list[RawBatch]:
    """What `write_waiting` wrote into a layer's folder."""
    return [batch for path in sorted(folder.glob(f"{PENDING}*.parquet")) for batch in read_parquet(path)]
