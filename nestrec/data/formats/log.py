"""Any log: CSV or Parquet files whose columns are named by options."""

from collections.abc import Iterator
from pathlib import Path

from nestrec.base.errors import DataError
from nestrec.data.prepare.events import EventColumns
from nestrec.data.prepare.options import PrepareOptions
from nestrec.data.prepare.raw import Delimited, RawBatch, read_delimited, read_parquet
from nestrec.data.prepare.source import LogSource, over_files, plain_name, require_input

SUFFIXES = (".csv", ".tsv", ".txt", ".dat", ".inter", ".parquet")


def open_log(path: Path, options: PrepareOptions) -> LogSource:
    """A file, or all files of a folder in order of name."""
    log = options.log
    separator = log.separator.replace("\\t", "\t")
    how = Delimited(separator=separator, names=log.names, has_quotes=log.has_quotes, encoding=log.encoding)

    def read(file: Path) -> Iterator[RawBatch]:
        return read_parquet(file) if file.suffix == ".parquet" else read_delimited(file, how)

    columns = EventColumns.of(log, min_rating=options.min_rating, positive_rating=options.positive_rating)
    return LogSource(plain_name(path), "log", columns, over_files(_files(path), read))


def _files(path: Path) -> list[Path]:
    if require_input(path).is_file():
        return [path]
    files = sorted(f for f in path.iterdir() if f.is_file() and plain_name(f).endswith(SUFFIXES))
    if not files:
        raise DataError(
            "holds no log files", field="input", value=str(path), remedy=f"files end in {', '.join(SUFFIXES)}"
        )
    return files
