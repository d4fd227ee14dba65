"""`user item` on each line, in time order inside a user (SASRec)."""

from pathlib import Path

from nestrec.data.formats.format import log_format
from nestrec.data.prepare.events import EventColumns
from nestrec.data.prepare.options import LogColumns, PrepareOptions
from nestrec.data.prepare.raw import Delimited, first_line
from nestrec.data.prepare.source import LogSource, delimited_files, plain_name, require_input


def open_pairs(path: Path, options: PrepareOptions) -> LogSource:
    """Fields are separated by a space or a tab; events keep the order of the file."""
    separator = "\t" if "\t" in first_line(require_input(path)) else " "
    how = Delimited(separator=separator, names=("user", "item"), has_quotes=False)
    columns, batches = EventColumns.of(LogColumns()), delimited_files([path], how)
    return LogSource(plain_name(path), "sasrec_pairs", columns, batches, files=(path,))


FORMAT = log_format("SASRec's files: `user item` on each line, in order.", PrepareOptions, open_pairs)
