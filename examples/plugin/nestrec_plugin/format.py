"""Input format: one line per basket, `user: item item item`; the baskets of a user are ordered oldest to newest."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from nestrec import config
from nestrec.data.formats.format_spec import log_format
from nestrec.data.prepare.event_parser import EventColumns
from nestrec.data.prepare.log_source import LogSource, name_without_gz, over_files, require_input
from nestrec.data.prepare.prepare_options import LogColumns, PrepareOptions
from nestrec.data.prepare.raw_rows import BadRow, RawBatch, read_lines


@config
class BasketsOptions(PrepareOptions):
    """Options of the format."""

    after_user: str = ":"
    """Separator between the user and the items."""


def _open(path: Path, options: BasketsOptions) -> LogSource:
    columns = EventColumns.of(LogColumns())
    return LogSource(name_without_gz(path), "baskets", columns, over_files([require_input(path)], _reader(options)))


def _reader(options: BasketsOptions) -> Callable[[Path], Iterator[RawBatch]]:
    def read(path: Path) -> Iterator[RawBatch]:
        for lines, first_line, done in read_lines(path):
            rows, bad = [], []
            for number, line in enumerate(lines, first_line):
                user, separator, items = line.strip().partition(options.after_user)
                if line.strip() and not (separator and items.split()):
                    bad.append(BadRow(number, "no items", line.strip()))
                rows += [(number, user.strip(), item) for item in items.split()]
            columns = {
                "user": pa.array([r[1] for r in rows], pa.string()),
                "item": pa.array([r[2] for r in rows], pa.string()),
            }
            yield RawBatch(path.name, np.array([r[0] for r in rows], np.int64), columns, tuple(bad), done)

    return read


BASKETS = log_format("One line per basket: `user: item item item`.", BasketsOptions, _open)
