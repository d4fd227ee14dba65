"""The files of a log or a table of one's own: found by name, folder or pattern, and read by their kind."""

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from nestrec.base.errors import DataError
from nestrec.data.prepare import json_lines
from nestrec.data.prepare.json_lines import JsonLines
from nestrec.data.prepare.raw import Delimited, RawBatch, first_line, header_names, read_delimited, read_parquet
from nestrec.data.prepare.source import plain_name, require_input

SUFFIXES = (".csv", ".tsv", ".txt", ".dat", ".inter", ".log", ".parquet", *json_lines.SUFFIXES)


def find_files(path: Path) -> tuple[str, list[Path]]:
    """A name for people, and a file, all files of a folder, or those that a pattern fits, in order of name."""
    if path.is_file():
        return plain_name(path), [path]
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.is_file() and plain_name(f).endswith(SUFFIXES))
        return path.resolve().name, _some(path, files, f"files end in {', '.join(SUFFIXES)}, also with .gz")
    if not glob.has_magic(str(path)):
        require_input(path)
    files = sorted(Path(found) for found in glob.glob(str(path), recursive=True) if Path(found).is_file())
    fixed = [part for part in path.parts[:-1] if not glob.has_magic(part)]
    return (fixed[-1] if fixed else path.name), _some(path, files, "check the pattern; ** goes through folders")


class LogFiles:
    """Reads files of any kind; JSON lines give the wanted columns, the others all that they have."""

    def __init__(self, how: Delimited, wanted: Sequence[str]):
        self._how, self._json = how, JsonLines(wanted, how.encoding)

    def read(self, file: Path) -> Iterator[RawBatch]:
        if file.suffix == ".parquet":
            return read_parquet(file)
        if json_lines.is_json(file, self._how.encoding):
            return self._json.read(file)
        return read_delimited(file, delimited(file, self._how))

    def check(self) -> None:
        """After all files: raise for a wanted column that no JSON line had."""
        self._json.check()


def column_names(file: Path, how: Delimited) -> tuple[str, ...]:
    """Of a file of any kind."""
    if file.suffix == ".parquet":
        return tuple(next((batch.columns for batch in read_parquet(file)), {}))
    if json_lines.is_json(file, how.encoding):
        return json_lines.field_names(file, how.encoding)
    return how.names or header_names(first_line(file, how.encoding), delimited(file, how))


def delimited(file: Path, how: Delimited) -> Delimited:
    """`how`, with a tab for a .tsv file where nothing else was said."""
    if how.separator != "," or not plain_name(file).endswith(".tsv"):
        return how
    return Delimited("\t", how.names, how.has_quotes, how.encoding, how.skip_lines)


def _some(path: Path, files: list[Path], remedy: str) -> list[Path]:
    if not files:
        raise DataError("holds no log files", field="input", value=str(path), remedy=remedy)
    return files
