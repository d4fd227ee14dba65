"""Finds the input files of an event log or side table (file, folder or glob pattern), and reads them by file type.

CSV and other delimited text, Parquet and JSON lines are supported, text also with gzip. JSON lines need not have the
same fields, so the columns to read are passed to the reader; fields that a line does not have are read as blank.
"""

import codecs
import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from nestrec.base.errors import DataError, require
from nestrec.data.prepare.json_lines import JSON_LINES_SUFFIXES, JsonLinesReader, field_names, is_json
from nestrec.data.prepare.log_source import name_without_gz, require_input
from nestrec.data.prepare.raw_rows import (
    DelimitedFormat,
    RawBatch,
    first_line,
    header_names,
    read_delimited,
    read_parquet,
)

SUFFIXES = (".csv", ".tsv", ".txt", ".dat", ".inter", ".log", ".parquet", *JSON_LINES_SUFFIXES)


_SUPPORTED_FILES = (
    f"supported file names end in {', '.join(SUFFIXES)}, also with .gz; subfolders are read if named column=value"
)
_MAX_SKIPPED_NAMES = 10


def find_files(path: Path) -> tuple[str, list[Path]]:
    """Return a display name and the input files in order of name.

    Args:
        path: A file, a folder (all supported files in it), or a glob pattern.

    Raises:
        DataError: No file was found.
    """
    if path.is_file():
        return name_without_gz(path), [path]
    if path.is_dir():
        files = sorted(entry for entry in _walk_folder(path) if is_log_file(entry))
        return path.resolve().name, _require_files(path, files, _remedy_of_folder(path))
    if not glob.has_magic(str(path)):
        require_input(path)
    files = sorted(Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
    fixed = [part for part in path.parts[:-1] if not glob.has_magic(part)]
    return (fixed[-1] if fixed else path.name), _require_files(path, files, "check the pattern; ** matches subfolders")


def skipped_files_notes(path: Path) -> tuple[str, ...]:
    """Return a note that lists the entries of a folder or pattern that `find_files` skips; empty if there are none."""
    if path.is_file():
        return ()
    entries = _walk_folder(path) if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    skipped = sorted(entry for entry in entries if path.is_dir() or not entry.exists())
    names = [skipped_name(entry, path) for entry in skipped if not (path.is_dir() and is_log_file(entry))]
    if not names:
        return ()
    more = f" and {len(names) - _MAX_SKIPPED_NAMES:,} more" if len(names) > _MAX_SKIPPED_NAMES else ""
    return (f"skipped in {path}: {', '.join(names[:_MAX_SKIPPED_NAMES])}{more}; {_SUPPORTED_FILES}",)


def skipped_name(entry: Path, folder: Path) -> str:
    """Return the name of a skipped entry of a folder, with the reason if it is not obvious from the name."""
    name = str(entry.relative_to(folder)) if entry.is_relative_to(folder) else str(entry)
    if entry.is_dir():
        return f"{name}/"
    return name if entry.exists() else f"{name} (a broken symbolic link)"


def is_log_file(path: Path) -> bool:
    """Return whether a file of a folder is an input file, by its name."""
    return path.is_file() and name_without_gz(path).endswith(SUFFIXES)


def _walk_folder(folder: Path) -> Iterator[Path]:
    """Yield the entries of a folder and of its partitions (Hive-style subfolders named `column=value`).

    Names that start with a dot or an underscore are skipped: programs use them for metadata, such as `_SUCCESS`.
    """
    for inner in folder.iterdir():
        if inner.is_dir() and "=" in inner.name:
            yield from _walk_folder(inner)
        elif not inner.name.startswith((".", "_")):
            yield inner


def _remedy_of_folder(folder: Path) -> str:
    below = next((f for f in sorted(folder.rglob("*")) if f.is_file() and name_without_gz(f).endswith(SUFFIXES)), None)
    if below is None:
        return f"name a folder with files that end in {', '.join(SUFFIXES)}, also with .gz"
    return f"to read the files in its subfolders, use a pattern such as '{folder}/**/*{below.suffix}'"


_SIGNATURES = {
    b"\x1f\x8b": "the file is compressed with gzip",
    b"BZh": "the file is compressed with bzip2",
    b"PK\x03\x04": "the file is a zip archive or a spreadsheet",
    b"\x28\xb5\x2f\xfd": "the file is compressed with zstd",
    b"\xfd7zXZ": "the file is compressed with xz",
    b"PAR1": "the file is a Parquet file",
    b"\xff\xfe": "the file is UTF-16 text",
    b"\xfe\xff": "the file is UTF-16 text",
}
_REMEDIES = {
    b"\x1f\x8b": "rename it so that it ends in .gz",
    b"PAR1": "rename it so that it ends in .parquet",
    b"\xff\xfe": "set --log.encoding utf-16",
    b"\xfe\xff": "set --log.encoding utf-16",
}


def check_text(file: Path, encoding: str) -> None:
    """Raise if a file has the name of a text file but the first bytes of another file type."""
    if file.suffix == ".gz" or codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        return
    with require_input(file).open("rb") as stream:
        start = stream.read(8)
    for signature, what in _SIGNATURES.items():
        if start.startswith(signature):
            remedy = _REMEDIES.get(signature, "unpack it, or compress it with gzip")
            raise DataError(f"{what}, not plain text", option="input", value=str(file), remedy=remedy)


class LogReader:
    """Reader of input files of any supported type.

    Batches of JSON lines contain only the requested columns; batches of other files contain all columns.
    """

    def __init__(self, text_format: DelimitedFormat, columns: Sequence[str], *, has_signatures: bool = False):
        """Create a reader.

        Args:
            text_format: Format of delimited text files.
            columns: Columns to read.
            has_signatures: Whether batches get row hashes for the detection of duplicates across file types.
        """
        self._how = text_format
        self._columns = tuple(columns)
        self._json = JsonLinesReader(columns, text_format.encoding)
        self._has_signatures = has_signatures

    def read(self, file: Path) -> Iterator[RawBatch]:
        if file.suffix == ".parquet":
            return read_parquet(file, self._columns, has_signatures=self._has_signatures)
        check_text(file, self._how.encoding)
        if is_json(file, self._how.encoding):
            return self._json.read(file)
        return read_delimited(file, with_default_separator(file, self._how))

    def check_columns(self) -> None:
        """Raise for a requested column that no JSON line had; call this after the last file."""
        self._json.check_columns()


def column_names(file: Path, text_format: DelimitedFormat) -> tuple[str, ...]:
    """Return the column names of a file of any supported type."""
    if file.suffix == ".parquet":
        return tuple(next((batch.columns for batch in read_parquet(file)), {}))
    check_text(file, text_format.encoding)
    if is_json(file, text_format.encoding):
        return field_names(file, text_format.encoding)
    return text_format.names or header_names(
        first_line(file, text_format.encoding), with_default_separator(file, text_format)
    )


def with_default_separator(file: Path, text_format: DelimitedFormat) -> DelimitedFormat:
    """Return the format with a tab as the separator if the file is a .tsv file and no other separator is set."""
    if text_format.separator != "," or not name_without_gz(file).endswith(".tsv"):
        return text_format
    return DelimitedFormat(
        "\t", text_format.names, text_format.has_quotes, text_format.encoding, text_format.skip_lines
    )


def _require_files(path: Path, files: list[Path], remedy: str) -> list[Path]:
    require(files, "no log files found", option="input", value=str(path), remedy=remedy, error=DataError)
    return files
