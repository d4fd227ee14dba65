"""A log of one's own: CSV, Parquet or JSON lines whose columns are named by options, with tables of items and users."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path

from nestrec.base.config import config
from nestrec.base.errors import DataError, UserError, did_you_mean
from nestrec.data.dataset_card import Owner
from nestrec.data.formats.format_spec import TableColumns, check_features, log_format, open_table, open_vectors
from nestrec.data.prepare.event_parser import EventColumns
from nestrec.data.prepare.input_files import LogReader, find_files, notes_on_skipped
from nestrec.data.prepare.log_source import Batches, LogSource, over_files
from nestrec.data.prepare.prepare_options import LogColumns, PrepareOptions
from nestrec.data.prepare.raw_rows import DelimitedFormat, RawBatch
from nestrec.data.prepare.side_tables import SideSource


@config
class LogOptions(PrepareOptions):
    """The files of a log, and what their columns mean."""

    log: LogColumns = field(default_factory=LogColumns)
    """Columns of the log."""
    min_rating: float | None = None
    """Events with a lower rating are left out, as if they were not in the input."""
    positive_rating: float | None = None
    """Give events an action bit `positive` where the rating is at least this."""
    items: str | None = None
    """A table with a row an item (CSV, Parquet or JSON lines; a file, a folder, or a pattern in quotes)."""
    item_columns: TableColumns = field(default_factory=TableColumns)
    """What its columns mean; without a table, columns of the log that tell of the item (the first row of it counts)."""
    item_vectors: Mapping[str, str] = field(default_factory=dict)
    """Feature name to an .npy file with a vector a row: picture=p.npy, in the order of the rows of `items`, or
    picture=p.npy:ids.txt with a file of ids (text, one a line, or .npy)."""
    users: str | None = None
    """A table with a row a user, likewise."""
    user_columns: TableColumns = field(default_factory=TableColumns)
    """What its columns mean; without a table, columns of the log that tell of the user."""
    user_vectors: Mapping[str, str] = field(default_factory=dict)
    """Vectors of users, likewise."""

    def __post_init__(self) -> None:
        for name in ("min_rating", "positive_rating"):
            if getattr(self, name) is not None and self.log.rating is None:
                raise UserError(
                    "needs a column of ratings",
                    option=name,
                    value=getattr(self, name),
                    remedy="name it with --log.rating COLUMN",
                )
        for table, name in (("items", "item_columns"), ("users", "user_columns")):
            columns = getattr(self, name)
            if getattr(self, table) is None and columns != TableColumns() and (columns.key or not columns.kinds()):
                raise UserError(
                    "describes a table that is not given",
                    option=name,
                    value="",
                    remedy=f"name its file with --{table} FILE, or name columns of the log",
                )


def open_log(path: Path, options: LogOptions) -> LogSource:
    """A file, all files of a folder, or those that a pattern fits, in order of name."""
    log = options.log
    how = DelimitedFormat(
        separator=log.separator.replace("\\t", "\t"),
        names=log.names,
        has_quotes=log.has_quotes,
        encoding=log.encoding,
    )
    columns = EventColumns.of(log, min_rating=options.min_rating, positive_rating=options.positive_rating)
    name, files = find_files(path)
    sides: dict[str, tuple[SideSource, ...]] = {}
    given_tables: tuple[tuple[Owner, str, str | None, TableColumns, Mapping[str, str]], ...] = (
        ("user", log.user, options.users, options.user_columns, options.user_vectors),
        ("item", log.item, options.items, options.item_columns, options.item_vectors),
    )
    for owner, key, file, table, vectors in given_tables:
        tables = [_of_log(files, key, table, how)] if file is None and table.kinds() else []
        if file is not None:
            tables = [open_table(Path(file), table.key or key, table, _with_header(how), f"{owner}s")]
        given = tables[0] if file is not None else None
        tables += [open_vectors(n, text, given, f"{owner}_vectors") for n, text in vectors.items()]
        check_features(owner, tables)
        sides[owner] = tuple(tables)
    batches = _batches(files, how, columns)
    return LogSource(
        name,
        "log",
        columns,
        batches,
        users=sides["user"],
        items=sides["item"],
        files=tuple(files),
        notes=notes_on_skipped(path),
    )


def _batches(files: list[Path], how: DelimitedFormat, columns: EventColumns) -> Batches:
    def batches() -> Iterator[tuple[RawBatch, float]]:
        reader = LogReader(how, columns.wanted(), signs_rows=True)
        yield from over_files(files, reader.read)()
        reader.check()

    return batches


def _of_log(files: list[Path], key: str, columns: TableColumns, how: DelimitedFormat) -> SideSource:
    """Columns of the log itself that tell of the item or user of each event."""

    def batches() -> Iterator[RawBatch]:
        reader = LogReader(how, [key, *columns.kinds()])
        for file in files:
            for batch in reader.read(file):
                for name in columns.kinds():
                    if name not in batch.columns:
                        remedy = did_you_mean(name, batch.columns)
                        raise DataError(f"is no column of {batch.file}", option="column", value=name, remedy=remedy)
                # Its bad rows were set aside when the events were read.
                yield RawBatch(batch.file, batch.lines, batch.columns, (), batch.done)
        reader.check()

    return SideSource(batches, key, columns.sides(columns.kinds()))


def _with_header(how: DelimitedFormat) -> DelimitedFormat:
    """The log may have no header; a table has names of its own."""
    return DelimitedFormat(separator=how.separator, has_quotes=how.has_quotes, encoding=how.encoding)


FORMAT = log_format("Your own log: CSV, Parquet or JSON lines, with tables of items and users.", LogOptions, open_log)
