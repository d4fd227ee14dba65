"""Reads custom event logs: CSV, Parquet or JSON lines with columns set by options, and tables of items and users."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path

from nestrec.base.config import config
from nestrec.base.errors import DataError, UserError, did_you_mean
from nestrec.data.dataset_card import Owner
from nestrec.data.formats.format_spec import TableColumns, check_features, log_format, open_table, open_vectors
from nestrec.data.prepare.event_parser import EventColumns
from nestrec.data.prepare.input_files import LogReader, find_files, skipped_files_notes
from nestrec.data.prepare.log_source import Batches, LogSource, over_files
from nestrec.data.prepare.prepare_options import LogColumns, PrepareOptions
from nestrec.data.prepare.raw_rows import DelimitedFormat, RawBatch
from nestrec.data.prepare.side_tables import SideSource


@config
class LogOptions(PrepareOptions):
    """Options for custom event logs: the columns of the log, and the side tables of items and users."""

    log: LogColumns = field(default_factory=LogColumns)
    """Columns and file format of the log."""
    min_rating: float | None = None
    """Minimum rating of an event; events with a lower rating are removed. None keeps all events."""
    positive_rating: float | None = None
    """Minimum rating at which an event gets the action `positive`; none does not derive this action."""
    items: str | None = None
    """Table with one row per item (CSV, Parquet or JSON lines): a file, a folder, or a glob pattern in quotes."""
    item_columns: TableColumns = field(default_factory=TableColumns)
    """Columns of the item table; without a table, columns of the log that describe the item (its first row is used)."""
    item_vectors: Mapping[str, str] = field(default_factory=dict)
    """Feature name to an .npy file with one vector per row: picture=p.npy in the order of the rows of `items`, or
    picture=p.npy:ids.txt with a file of item ids (text with one id per line, or .npy)."""
    users: str | None = None
    """Table with one row per user (CSV, Parquet or JSON lines): a file, a folder, or a glob pattern in quotes."""
    user_columns: TableColumns = field(default_factory=TableColumns)
    """Columns of the user table; without a table, columns of the log that describe the user (its first row is used)."""
    user_vectors: Mapping[str, str] = field(default_factory=dict)
    """Feature name to an .npy file with one vector per row, in the order of the rows of `users` or with a file of user
    ids, in the same form as `item_vectors`."""

    def __post_init__(self) -> None:
        for name in ("min_rating", "positive_rating"):
            if getattr(self, name) is not None and self.log.rating is None:
                raise UserError(
                    "this option requires a column of ratings",
                    option=name,
                    value=getattr(self, name),
                    remedy="set --log.rating to a column",
                )
        for table, name in (("items", "item_columns"), ("users", "user_columns")):
            columns = getattr(self, name)
            if getattr(self, table) is None and columns != TableColumns() and (columns.key or not columns.kinds()):
                raise UserError(
                    "these options describe a table, but no table is set",
                    option=name,
                    value="",
                    remedy=f"set --{table} FILE, or name columns of the log",
                )


def open_log(path: Path, options: LogOptions) -> LogSource:
    """Open a custom event log.

    Args:
        path: A file, a folder, or a glob pattern; files are read in order of name.
        options: Options of the format.
    """
    log = options.log
    text_format = DelimitedFormat(
        separator=log.separator.replace("\\t", "\t"),
        names=log.column_names,
        has_quotes=log.has_quotes,
        encoding=log.encoding,
    )
    columns = EventColumns.of(log, min_rating=options.min_rating, positive_rating=options.positive_rating)
    name, files = find_files(path)
    sides: dict[str, tuple[SideSource, ...]] = {}
    side_specs: tuple[tuple[Owner, str, str | None, TableColumns, Mapping[str, str]], ...] = (
        ("user", log.user, options.users, options.user_columns, options.user_vectors),
        ("item", log.item, options.items, options.item_columns, options.item_vectors),
    )
    for owner, key, file, table, vectors in side_specs:
        tables = [_side_of_log(files, key, table, text_format)] if file is None and table.kinds() else []
        if file is not None:
            tables = [open_table(Path(file), table.key or key, table, _with_header(text_format), f"{owner}s")]
        table_of_rows = tables[0] if file is not None else None
        tables += [open_vectors(n, text, table_of_rows, f"{owner}_vectors") for n, text in vectors.items()]
        check_features(owner, tables)
        sides[owner] = tuple(tables)
    batches = _batches(files, text_format, columns)
    return LogSource(
        name,
        "log",
        columns,
        batches,
        users=sides["user"],
        items=sides["item"],
        files=tuple(files),
        notes=skipped_files_notes(path),
    )


def _batches(files: list[Path], text_format: DelimitedFormat, columns: EventColumns) -> Batches:
    def batches() -> Iterator[tuple[RawBatch, float]]:
        reader = LogReader(text_format, columns.columns_to_read(), has_signatures=True)
        yield from over_files(files, reader.read)()
        reader.check_columns()

    return batches


def _side_of_log(files: list[Path], key: str, columns: TableColumns, text_format: DelimitedFormat) -> SideSource:
    """Return a side table made of those columns of the log that describe the item or user of each event."""

    def batches() -> Iterator[RawBatch]:
        reader = LogReader(text_format, [key, *columns.kinds()])
        for file in files:
            for batch in reader.read(file):
                for name in columns.kinds():
                    if name not in batch.columns:
                        remedy = did_you_mean(name, batch.columns)
                        raise DataError(f"no such column in {batch.file}", option="column", value=name, remedy=remedy)
                # Bad rows are already in the quarantine from reading the events.
                yield RawBatch(batch.file, batch.lines, batch.columns, (), batch.fraction_read)
        reader.check_columns()

    return SideSource(batches, key, columns.side_columns(columns.kinds()))


def _with_header(text_format: DelimitedFormat) -> DelimitedFormat:
    """Return the format of a table: the log may have no header line, but a table has one."""
    return DelimitedFormat(
        separator=text_format.separator, has_quotes=text_format.has_quotes, encoding=text_format.encoding
    )


FORMAT = log_format(
    "Custom event log: CSV, Parquet or JSON lines, with tables of items and users.", LogOptions, open_log
)
