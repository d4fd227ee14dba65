"""A log of one's own: CSV, Parquet or JSON lines whose columns are named by options, with tables of items and users."""

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from nestrec.base.config import config
from nestrec.base.errors import UserError
from nestrec.data.formats.format import log_format
from nestrec.data.formats.tables import TableColumns, open_table
from nestrec.data.prepare.events import EventColumns
from nestrec.data.prepare.files import LogFiles, find_files
from nestrec.data.prepare.options import LogColumns, PrepareOptions
from nestrec.data.prepare.raw import Delimited, RawBatch
from nestrec.data.prepare.side import SideSource
from nestrec.data.prepare.source import Batches, LogSource, over_files


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
    """What its columns mean."""
    users: str | None = None
    """A table with a row a user, likewise."""
    user_columns: TableColumns = field(default_factory=TableColumns)
    """What its columns mean."""

    def __post_init__(self) -> None:
        for name in ("min_rating", "positive_rating"):
            if getattr(self, name) is not None and self.log.rating is None:
                raise UserError(
                    "needs a column of ratings",
                    field=name,
                    value=getattr(self, name),
                    remedy="name it with --log.rating COLUMN",
                )
        for table, columns in (("items", "item_columns"), ("users", "user_columns")):
            if getattr(self, table) is None and getattr(self, columns) != TableColumns():
                raise UserError(
                    "describes a table that is not given",
                    field=columns,
                    value="",
                    remedy=f"name its file with --{table} FILE",
                )


def open_log(path: Path, options: LogOptions) -> LogSource:
    """A file, all files of a folder, or those that a pattern fits, in order of name."""
    log = options.log
    how = Delimited(
        separator=log.separator.replace("\\t", "\t"),
        names=log.names,
        has_quotes=log.has_quotes,
        encoding=log.encoding,
    )
    columns = EventColumns.of(log, min_rating=options.min_rating, positive_rating=options.positive_rating)
    name, files = find_files(path)
    return LogSource(
        name,
        "log",
        columns,
        _batches(files, how, columns),
        users=_table(options.users, log.user, options.user_columns, how, "users"),
        items=_table(options.items, log.item, options.item_columns, how, "items"),
    )


def _batches(files: list[Path], how: Delimited, columns: EventColumns) -> Batches:
    def batches() -> Iterator[tuple[RawBatch, float]]:
        reader = LogFiles(how, columns.wanted())
        yield from over_files(files, reader.read)()
        reader.check()

    return batches


def _table(file: str | None, key: str, columns: TableColumns, how: Delimited, what: str) -> tuple[SideSource, ...]:
    if file is None:
        return ()
    # The log may have no header; a table has names of its own.
    plain = Delimited(separator=how.separator, has_quotes=how.has_quotes, encoding=how.encoding)
    return (open_table(Path(file), columns.key or key, columns, plain, what),)


FORMAT = log_format("Your own log: CSV, Parquet or JSON lines, with tables of items and users.", LogOptions, open_log)
