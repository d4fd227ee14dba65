"""Ingestion of a stream into a dataset: each window becomes a generation, and the stream offset is committed with it.

The rows of a window are on disk before they are trained on, together with the offset in the source, on the same card. A
process killed at any point therefore neither loses nor duplicates rows (exactly once), whatever the source does.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nestrec.base.config import to_plain
from nestrec.base.config_values import from_plain
from nestrec.base.errors import DataError, UserError, did_you_mean
from nestrec.base.failpoints import fail_point
from nestrec.base.renamed_fields import with_present_names
from nestrec.data.dataset_card import DatasetCard, Owner
from nestrec.data.formats.format_spec import TableColumns, check_features, open_table
from nestrec.data.formats.log_format import LogOptions
from nestrec.data.incremental.append import append_source, inherited_options
from nestrec.data.incremental.generations import DatasetLockedError
from nestrec.data.prepare.event_parser import EventColumns, is_missing
from nestrec.data.prepare.log_source import LogSource
from nestrec.data.prepare.prepare_options import LogColumns, TimeUnit
from nestrec.data.prepare.raw_rows import DelimitedFormat, RawBatch
from nestrec.data.prepare.side_tables import SideSource
from nestrec.data.streaming.stream_source import OnSourceChange, StreamOffset, StreamSource, open_source
from nestrec.data.streaming.window_policy import (
    ClosedWindow,
    OpenWindow,
    WindowRule,
    read_pending_rows,
    write_pending_rows,
)

ROWS_PER_READ = 1 << 14


@dataclass(frozen=True, slots=True)
class WindowTimes:
    """Arrival and closing times of a window, in seconds since 1970."""

    first_at_s: float
    mean_at_s: float
    newest_at_s: float
    closed_at_s: float


def stream_log_options(card: DatasetCard, log: LogColumns | None, max_bad_fraction: float) -> LogOptions:
    """Return the options for reading a stream: those of the prepared dataset, or the given log columns.

    Columns of the prepared log that describe items and users also describe new items and users of the stream.

    Args:
        card: Card of the dataset.
        log: Columns of the stream; None uses those of the prepared log.
        max_bad_fraction: Maximum fraction of bad rows.
    """
    if log is None and "log" not in card.options:
        raise UserError(
            f"the dataset was prepared from {card.source_format!r}, which does not define the fields of a stream",
            option="log",
            value=None,
            remedy="set them, for example --log.user user --log.item item --log.time time",
        )
    inherited = inherited_options(with_present_names(LogOptions, card.options))
    if card.source_format != "log":
        inherited = {
            name: inherited[name] for name in ("duplicates", "min_rating", "positive_rating") if name in inherited
        }
    options = from_plain(LogOptions, {**inherited, **({} if log is None else {"log": to_plain(log)})})
    if options.log.time is not None and options.log.time_unit == "auto":
        options = replace(options, log=replace(options.log, time_unit=_prepared_time_unit(card)))
    return replace(options, max_bad_fraction=max_bad_fraction)


def _prepared_time_unit(card: DatasetCard) -> TimeUnit:
    """Return the time unit of the prepared data: windows of a stream must not infer it one by one."""
    unit: TimeUnit = card.options.get("log", {}).get("time_unit", "auto")
    if unit == "auto":
        raise UserError(
            f"cannot be inferred for a stream, and the dataset was prepared from {card.source_format!r} without a unit",
            option="log.time_unit",
            value=unit,
            remedy="set --log.time_unit s, ms, us, ns or iso",
        )
    return unit


def open_stream_source(address: str, options: LogOptions) -> StreamSource:
    """Open the source of an address with all columns that the stream needs."""
    return open_source(address, options.log, _feature_columns(options))


def _feature_columns(options: LogOptions) -> list[str]:
    """Return the columns of the log that describe items and users."""
    return [*options.item_columns.kinds(), *options.user_columns.kinds()]


def open_side_table(card: DatasetCard, options: LogOptions, owner: Owner, file: str) -> SideSource:
    """Open a table with features of new items or users; it may lack some of them.

    Args:
        card: Card of the dataset.
        options: Options for reading the stream.
        owner: Entity that the features describe.
        file: A file, folder or pattern, as for `nestrec prepare`. Its columns have the meaning of those in the table
            that the dataset was prepared with.
    """
    has_table = card.options.get(f"{owner}s") is not None
    columns = from_plain(TableColumns, card.options[f"{owner}_columns"]) if has_table else TableColumns()
    key = columns.key or (options.log.item if owner == "item" else options.log.user)
    format_options = DelimitedFormat(
        separator=options.log.separator.replace("\\t", "\t"),
        has_quotes=options.log.has_quotes,
        encoding=options.log.encoding,
    )
    return replace(open_table(Path(file), key, columns, format_options, f"{owner}s"), must_match="")


class StreamConflictError(Exception):
    """The window is no longer the next one: another run has appended to the dataset, or it was restored."""


class StreamIngester:
    """Reads a stream source into a dataset, window by window.

    Args:
        source: Open stream source.
        address: Address of the source, for messages.
        folder: Folder of the dataset.
        rule: When a window closes.
        options: Options for reading the stream, as for `nestrec prepare`.
        on_source_change: What to do if a different source was read before.
        tables: Files with features of new items and users; they are read again for each window.
        report: Receives messages for the user.
    """

    def __init__(
        self,
        source: StreamSource,
        address: str,
        folder: Path,
        rule: WindowRule,
        options: LogOptions,
        *,
        on_source_change: OnSourceChange = "error",
        tables: Mapping[Owner, str] | None = None,
        report: Callable[[str], None] = lambda _: None,
    ):
        self._source = source
        self._name = address
        self._folder = folder
        self._rule = rule
        self._options = options
        self._log = options.log
        self._report = report
        self._has_reported_bad = False
        self._blank_columns = set[str]()
        self._tables = dict(tables or {})
        self.num_pending_rows = 0
        """Number of rows in the open window; after a restart they are read again."""
        self._reported_suffixes = set[str]()
        self._identity = source.identity() or address
        self._on_source_change = on_source_change
        card = DatasetCard.load(folder)
        self._saved_offset(card)  # raises errors before anything is read or trained on
        for owner, file in self._tables.items():  # raises errors early, too
            open_side_table(card, options, owner, file)
        self._columns = EventColumns.of(
            self._log, min_rating=options.min_rating, positive_rating=options.positive_rating
        )

    def next_window(self, should_stop: Callable[[], bool]) -> tuple[DatasetCard, WindowTimes] | None:
        """Wait until a window closes and append it to the dataset.

        Args:
            should_stop: Called whenever no rows are available or another process holds the lock of the dataset.

        Returns:
            The new card and the times of the window, or None if `should_stop` returned True first.

        Raises:
            StreamConflictError: If another process has changed the data. Nothing was appended; reload the dataset.
        """
        card = DatasetCard.load(self._folder)
        before = card.generations[-1].stream if card.generations else {}
        saved = self._saved_offset(card)
        position = saved.position
        newest_folder = self._folder / card.all_layers[-1].folder
        self._report_skipped()
        window = OpenWindow.resume(self._rule, self._log, before, read_pending_rows(newest_folder) if before else [])
        while not window.is_full:
            self.num_pending_rows = window.num_rows
            rows = self._source.read(position, min(ROWS_PER_READ, window.remaining_rows))
            if rows is None:
                if should_stop():
                    return None
                continue
            self._report_bad_rows(window.add(rows))
            position = rows.position
            fail_point("stream.read")
        closed = window.close()
        self._report_blank_columns(closed.batches)
        times = WindowTimes(closed.first_at_s, closed.mean_at_s, closed.newest_at_s, time.time())
        while True:
            current = DatasetCard.load(self._folder)
            if (current.generations[-1].stream if current.generations else {}) != before:
                raise StreamConflictError
            try:
                new_card = self._append(closed, saved.with_position(position))
                self.num_pending_rows = 0
                return new_card, times
            except DatasetLockedError:
                if should_stop():
                    return None

    def lag(self, card: DatasetCard) -> dict[str, float]:
        """Return the consumer lag of a generation: the unread data in the source, by name of the unit."""
        return self._source.lag(self._saved_offset(card).position)

    def _saved_offset(self, card: DatasetCard) -> StreamOffset:
        state = card.generations[-1].stream if card.generations else {}
        return StreamOffset.from_state(state).resolve_source(self._identity, self._name, self._on_source_change)

    def _report_bad_rows(self, batch: RawBatch) -> None:
        """Report the first bad rows immediately: if all rows are bad, no window may close for a long time."""
        if batch.bad and not self._has_reported_bad:
            self._has_reported_bad = True
            bad = batch.bad[-1]
            where = f"{batch.file}, line {bad.line}: {bad.reason}: {bad.text[:80]!r}"
            self._report(f"bad rows were rejected, for example {where}")

    def _report_skipped(self) -> None:
        """Report files that are never read, once per kind."""
        for kind, text in self._source.skipped().items():
            if kind not in self._reported_suffixes:
                self._reported_suffixes.add(kind)
                self._report(text)

    def _report_blank_columns(self, batches: Sequence[RawBatch]) -> None:
        """Report columns that are blank in a complete window, because a field is mistyped or no longer sent."""
        names = (
            [*self._columns.columns_to_read(batches[0].columns), *_feature_columns(self._options)] if batches else []
        )
        for name in dict.fromkeys(names):
            cells = [batch.columns[name] for batch in batches if name in batch.columns and batch.num_rows]
            if cells and name not in self._blank_columns and all(is_missing(column).all() for column in cells):
                self._blank_columns.add(name)
                self._report(f"column {name!r} is blank in all events of this window; check the name of the field")

    def _append(self, window: ClosedWindow, position: StreamOffset) -> DatasetCard:
        def batches() -> Iterator[tuple[RawBatch, float]]:
            for batch in window.batches:
                yield batch, 1.0

        items = self._side_sources(window, "item", self._log.item, self._options.item_columns)
        users = self._side_sources(window, "user", self._log.user, self._options.user_columns)
        return append_source(
            self._folder,
            LogSource(self._name, "log", self._columns, batches, users=users, items=items),
            self._options,
            inputs={},
            stream={**window.state, **position.to_plain()},
            write_extra_files=lambda folder: write_pending_rows(folder, window.pending),
        )

    def _side_sources(
        self, window: ClosedWindow, owner: Owner, key: str, columns: TableColumns
    ) -> tuple[SideSource, ...]:
        """Return the feature tables of new items or users: columns of the stream, and the file if one is set."""
        event_sources = _event_side_sources(window.batches, key, columns)
        if owner not in self._tables:
            return event_sources
        sides = (
            *event_sources,
            open_side_table(DatasetCard.load(self._folder), self._options, owner, self._tables[owner]),
        )
        check_features(owner, sides)
        return sides


def _event_side_sources(batches: Sequence[RawBatch], key: str, columns: TableColumns) -> tuple[SideSource, ...]:
    """Return the features of items or users that the events of a window contain."""
    kinds = columns.kinds()

    def rows() -> Iterator[RawBatch]:
        for batch in batches:
            for name in (key, *kinds):
                if name not in batch.columns:
                    remedy = did_you_mean(name, batch.columns)
                    raise DataError(f"no such column in {batch.file}", option="column", value=name, remedy=remedy)
            yield replace(batch, bad=())  # bad rows were rejected when the events were read

    return (SideSource(rows, key, columns.side_columns(kinds)),) if kinds else ()
