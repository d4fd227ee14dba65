"""A stream that feeds a dataset: a window of it is a generation, with the position behind it on the same card.

What a window holds is on the disk before anybody trains on it, together with how far the source was read. So a kill at
any moment loses nothing and doubles nothing, whatever the source does meanwhile.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nestrec.base.config import to_plain
from nestrec.base.config_values import from_plain
from nestrec.base.errors import DataError, UserError, did_you_mean
from nestrec.base.failpoints import fail_point
from nestrec.data.dataset_card import DatasetCard, Owner
from nestrec.data.formats.format_spec import TableColumns, check_features, open_table
from nestrec.data.formats.log_format import LogOptions
from nestrec.data.incremental.append import append_source, kept_options
from nestrec.data.incremental.generations import DatasetLockedError
from nestrec.data.prepare.event_parser import EventColumns, is_missing
from nestrec.data.prepare.log_source import LogSource
from nestrec.data.prepare.prepare_options import LogColumns, TimeUnit
from nestrec.data.prepare.raw_rows import DelimitedFormat, RawBatch
from nestrec.data.prepare.side_tables import SideSource
from nestrec.data.streaming.stream_source import ChangedSource, StreamOffset, StreamSource, open_source
from nestrec.data.streaming.window_policy import ClosedWindow, OpenWindow, WindowRule, read_waiting, write_waiting

ROWS_AT_A_TIME = 1 << 14


@dataclass(frozen=True, slots=True)
class WindowTimes:
    """When the events of a window came, in seconds since 1970."""

    first_at_s: float
    mean_at_s: float
    newest_at_s: float
    closed_at_s: float


def options_of(card: DatasetCard, log: LogColumns | None, max_bad_share: float) -> LogOptions:
    """What the columns of a stream mean, and what is kept of it: as the data was prepared, but for a log that is named.

    Columns of the log that told of items and users tell of new ones here.
    """
    if log is None and "log" not in card.options:
        raise UserError(
            f"the data was prepared from {card.source_format!r}, which says nothing of the fields of a stream",
            option="log",
            value=None,
            remedy="name them: --log.user user --log.item item --log.time time ...",
        )
    kept = kept_options(card.options)
    if card.source_format != "log":
        kept = {name: kept[name] for name in ("duplicates", "min_rating", "positive_rating") if name in kept}
    options = from_plain(LogOptions, {**kept, **({} if log is None else {"log": to_plain(log)})})
    if options.log.time is not None and options.log.time_unit == "auto":
        options = replace(options, log=replace(options.log, time_unit=_time_unit_of(card)))
    return replace(options, max_bad_share=max_bad_share)


def _time_unit_of(card: DatasetCard) -> TimeUnit:
    """Returns the unit of the prepared data: windows of one stream must not be read in units inferred one by one."""
    unit: TimeUnit = card.options.get("log", {}).get("time_unit", "auto")
    if unit == "auto":
        raise UserError(
            f"cannot be inferred for a stream, and the data was prepared from {card.source_format!r} without one",
            option="log.time_unit",
            value=unit,
            remedy="set --log.time_unit s, ms, us, ns or iso",
        )
    return unit


def open_stream_source(address: str, options: LogOptions) -> StreamSource:
    """The source of an address, with all columns that a stream needs of it."""
    return open_source(address, options.log, _told_columns(options))


def _told_columns(options: LogOptions) -> list[str]:
    """Columns of the log that tell of items and users."""
    return [*options.item_columns.kinds(), *options.user_columns.kinds()]


def table_of(card: DatasetCard, options: LogOptions, owner: Owner, file: str) -> SideSource:
    """Open a table of features of new items or users, which may lack some of them.

    Args:
        card: Card of the dataset.
        options: What the columns of the stream mean.
        owner: Whose features they are.
        file: A file, a folder or a pattern, as for `prepare`. Its columns mean what those of the table meant that the
            dataset was prepared with.
    """
    had_table = card.options.get(f"{owner}s") is not None
    columns = from_plain(TableColumns, card.options[f"{owner}_columns"]) if had_table else TableColumns()
    key = columns.key or (options.log.item if owner == "item" else options.log.user)
    how = DelimitedFormat(
        separator=options.log.separator.replace("\\t", "\t"),
        has_quotes=options.log.has_quotes,
        encoding=options.log.encoding,
    )
    return replace(open_table(Path(file), key, columns, how, f"{owner}s"), must_match="")


class StreamConflictError(Exception):
    """Another run has read the stream into the same data meanwhile, or the data was put back: the window that was read
    is not the next one any more."""


class StreamIngester:
    """Reads a source into a dataset."""

    def __init__(
        self,
        source: StreamSource,
        address: str,
        folder: Path,
        rule: WindowRule,
        options: LogOptions,
        *,
        changed_source: ChangedSource = "refuse",
        tables: Mapping[Owner, str] | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ):
        """options: what the columns mean and others, as for `prepare`. changed_source: what to do where another source
        was read before. tables: files with features of new items and users, read again for each window. tell: takes
        texts for people."""
        self._source = source
        self._name = address
        self._folder = folder
        self._rule = rule
        self._options = options
        self._log = options.log
        self._tell = tell
        self._has_told = False
        self._blank = set[str]()
        self._tables = dict(tables or {})
        self.num_open = 0
        """Rows that were read into a window that has not closed; they are read again by the next start."""
        self._skipped = set[str]()
        self._identity = source.identity() or address
        self._changed = changed_source
        card = DatasetCard.load(folder)
        self._saved(card)  # raises before anything is read or trained on
        for owner, file in self._tables.items():  # likewise
            table_of(card, options, owner, file)
        self._columns = EventColumns.of(
            self._log, min_rating=options.min_rating, positive_rating=options.positive_rating
        )

    def next_window(self, wants_end: Callable[[], bool]) -> tuple[DatasetCard, WindowTimes] | None:
        """Wait until a window closes and append it; none where `wants_end` says so before that.

        `wants_end` is asked whenever there is nothing to read, or another process changes the data. An
        `StreamConflictError` where nothing was appended, and what the data holds now is to be looked at.
        """
        card = DatasetCard.load(self._folder)
        before = card.generations[-1].stream if card.generations else {}
        saved = self._saved(card)
        position = saved.position
        newest = self._folder / card.all_layers[-1].folder
        self._tell_of_skipped()
        window = OpenWindow.of(self._rule, self._log, before, read_waiting(newest) if before else [])
        while not window.is_full:
            self.num_open = window.num_rows
            rows = self._source.read(position, min(ROWS_AT_A_TIME, window.room))
            if rows is None:
                if wants_end():
                    return None
                continue
            self._tell_of_bad(window.add(rows))
            position = rows.position
            fail_point("stream.read")
        closed = window.close()
        self._tell_of_blank(closed.batches)
        times = WindowTimes(closed.first_at_s, closed.mean_at_s, closed.newest_at_s, time.time())
        while True:
            now = DatasetCard.load(self._folder)
            if (now.generations[-1].stream if now.generations else {}) != before:
                raise StreamConflictError
            try:
                after = self._append(closed, saved.at(position))
                self.num_open = 0
                return after, times
            except DatasetLockedError:
                if wants_end():
                    return None

    def lag(self, card: DatasetCard) -> dict[str, float]:
        """What the source has beyond a generation."""
        return self._source.lag(self._saved(card).position)

    def _saved(self, card: DatasetCard) -> StreamOffset:
        state = card.generations[-1].stream if card.generations else {}
        return StreamOffset.of(state).of_source(self._identity, self._name, self._changed)

    def _tell_of_bad(self, batch: RawBatch) -> None:
        """Of the first bad rows at once: where all are bad, no window may close for long."""
        if batch.bad and not self._has_told:
            self._has_told = True
            bad = batch.bad[-1]
            where = f"{batch.file}, line {bad.line}: {bad.reason}: {bad.text[:80]!r}"
            self._tell(f"rows are set aside as bad ones, such as {where}")

    def _tell_of_skipped(self) -> None:
        """Reports files that are never read, one of each kind, once."""
        for kind, text in self._source.skipped().items():
            if kind not in self._skipped:
                self._skipped.add(kind)
                self._tell(text)

    def _tell_of_blank(self, batches: Sequence[RawBatch]) -> None:
        """Of columns that no event of a window has anything in: nothing else would tell of a mistyped name, or of a
        field that is sent no longer."""
        wanted = [*self._columns.wanted(batches[0].columns), *_told_columns(self._options)] if batches else []
        for name in dict.fromkeys(wanted):
            cells = [batch.columns[name] for batch in batches if name in batch.columns and batch.num_rows]
            if cells and name not in self._blank and all(is_missing(column).all() for column in cells):
                self._blank.add(name)
                self._tell(f"no event of this window has anything in {name!r}: is the field still called so?")

    def _append(self, window: ClosedWindow, position: StreamOffset) -> DatasetCard:
        def batches() -> Iterator[tuple[RawBatch, float]]:
            for batch in window.batches:
                yield batch, 1.0

        items = self._sides(window, "item", self._log.item, self._options.item_columns)
        users = self._sides(window, "user", self._log.user, self._options.user_columns)
        return append_source(
            self._folder,
            LogSource(self._name, "log", self._columns, batches, users=users, items=items),
            self._options,
            inputs={},
            stream={**window.state, **position.to_plain()},
            beside=lambda folder: write_waiting(folder, window.waiting),
        )

    def _sides(self, window: ClosedWindow, owner: Owner, key: str, columns: TableColumns) -> tuple[SideSource, ...]:
        """Return the tables of features of new items or users: columns of the stream, and the file if one is named."""
        of_events = _sides(window.batches, key, columns)
        if owner not in self._tables:
            return of_events
        sides = (*of_events, table_of(DatasetCard.load(self._folder), self._options, owner, self._tables[owner]))
        check_features(owner, sides)
        return sides


def _sides(batches: Sequence[RawBatch], key: str, columns: TableColumns) -> tuple[SideSource, ...]:
    """What the events of a window tell of their items or users."""
    kinds = columns.kinds()

    def rows() -> Iterator[RawBatch]:
        for batch in batches:
            for name in (key, *kinds):
                if name not in batch.columns:
                    remedy = did_you_mean(name, batch.columns)
                    raise DataError(f"is no column of {batch.file}", option="column", value=name, remedy=remedy)
            yield replace(batch, bad=())  # they were set aside when the events were read

    return (SideSource(rows, key, columns.sides(kinds)),) if kinds else ()
