"""The files of a log or a table of one's own: found by name, folder or pattern, and read by their kind.

JSON lines, plain or gzip: one object a line. Fields of objects inside are named with dots (`user.id`).

Every value becomes text, as in a delimited file; a list has a mark before each of its values. Lines need not have the
same fields, so the reader is told which columns are wanted: where a line lacks one, it is blank there.
"""

import codecs
import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from nestrec.base.errors import DataError, require
from nestrec.data.prepare.json_lines import JSON_LINES_SUFFIXES, JsonLinesReader, field_names, is_json
from nestrec.data.prepare.log_source import plain_name, require_input
from nestrec.data.prepare.raw_rows import (
    DelimitedFormat,
    RawBatch,
    first_line,
    header_names,
    read_delimited,
    read_parquet,
)

SUFFIXES = (".csv", ".tsv", ".txt", ".dat", ".inter", ".log", ".parquet", *JSON_LINES_SUFFIXES)


_WHAT_IS_READ = f"names end in {', '.join(SUFFIXES)}, also with .gz; folders are read if they are called column=value"
_SKIPPED_NAMED = 10


def find_files(path: Path) -> tuple[str, list[Path]]:
    """A name for people, and a file, all files of a folder, or those that a pattern fits, in order of name."""
    if path.is_file():
        return plain_name(path), [path]
    if path.is_dir():
        files = sorted(entry for entry in _in_folder(path) if is_log_file(entry))
        return path.resolve().name, _some(path, files, _remedy_of_folder(path))
    if not glob.has_magic(str(path)):
        require_input(path)
    files = sorted(Path(found) for found in glob.glob(str(path), recursive=True) if Path(found).is_file())
    fixed = [part for part in path.parts[:-1] if not glob.has_magic(part)]
    return (fixed[-1] if fixed else path.name), _some(path, files, "check the pattern; ** goes through folders")


def notes_on_skipped(path: Path) -> tuple[str, ...]:
    """Returns a note that lists what `find_files` leaves out of a folder or a pattern, if there is anything."""
    if path.is_file():
        return ()
    found = _in_folder(path) if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    skipped = sorted(entry for entry in found if path.is_dir() or not entry.exists())
    names = [skipped_name(entry, path) for entry in skipped if not (path.is_dir() and is_log_file(entry))]
    if not names:
        return ()
    more = f" and {len(names) - _SKIPPED_NAMED:,} more" if len(names) > _SKIPPED_NAMED else ""
    return (f"skipped in {path}: {', '.join(names[:_SKIPPED_NAMED])}{more}; {_WHAT_IS_READ}",)


def skipped_name(entry: Path, folder: Path) -> str:
    """Returns the name of an entry of a folder, with the reason if the name is not the reason."""
    name = str(entry.relative_to(folder)) if entry.is_relative_to(folder) else str(entry)
    if entry.is_dir():
        return f"{name}/"
    return name if entry.exists() else f"{name} (a link to a file that does not exist)"


def is_log_file(path: Path) -> bool:
    """Returns whether a file of a folder is read, by its name."""
    return path.is_file() and plain_name(path).endswith(SUFFIXES)


def _in_folder(folder: Path) -> Iterator[Path]:
    """Yields what is in a folder and its partitions: folders called `column=value`, as Spark writes them.

    Names that begin with a dot or an underscore are those of files that programs write about their own work.
    """
    for inner in folder.iterdir():
        if inner.is_dir() and "=" in inner.name:
            yield from _in_folder(inner)
        elif not inner.name.startswith((".", "_")):
            yield inner


def _remedy_of_folder(folder: Path) -> str:
    below = next((f for f in sorted(folder.rglob("*")) if f.is_file() and plain_name(f).endswith(SUFFIXES)), None)
    if below is None:
        return f"files end in {', '.join(SUFFIXES)}, also with .gz"
    return f"they lie in folders below it: name them with a pattern, such as '{folder}/**/*{below.suffix}'"


_SIGNATURES = {
    b"\x1f\x8b": "is compressed by gzip",
    b"BZh": "is compressed by bzip2",
    b"PK\x03\x04": "is a zip archive or a spreadsheet",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd",
    b"\xfd7zXZ": "is compressed by xz",
    b"PAR1": "is a Parquet file",
    b"\xff\xfe": "is text of 16 bits a character",
    b"\xfe\xff": "is text of 16 bits a character",
}
_REMEDIES = {
    b"\x1f\x8b": "give it a name that ends in .gz",
    b"PAR1": "give it a name that ends in .parquet",
    b"\xff\xfe": "say so: --log.encoding utf-16",
    b"\xfe\xff": "say so: --log.encoding utf-16",
}


def check_text(file: Path, encoding: str) -> None:
    """Refuse a file that its name calls text, plain or gzip, and its first bytes do not."""
    if file.suffix == ".gz" or codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
        return
    with require_input(file).open("rb") as stream:
        start = stream.read(8)
    for signature, what in _SIGNATURES.items():
        if start.startswith(signature):
            remedy = _REMEDIES.get(signature, "unpack it, or pack it with gzip")
            raise DataError(f"{what}, not a log as text", option="input", value=str(file), remedy=remedy)


class LogReader:
    """Reads files of any kind; JSON lines give the wanted columns, the others all that they have."""

    def __init__(self, how: DelimitedFormat, wanted: Sequence[str], *, signs_rows: bool = False):
        """signs_rows: whether duplicates are looked for, among files of all kinds."""
        self._how = how
        self._wanted = tuple(wanted)
        self._json = JsonLinesReader(wanted, how.encoding)
        self._signs_rows = signs_rows

    def read(self, file: Path) -> Iterator[RawBatch]:
        if file.suffix == ".parquet":
            return read_parquet(file, self._wanted, signs_rows=self._signs_rows)
        check_text(file, self._how.encoding)
        if is_json(file, self._how.encoding):
            return self._json.read(file)
        return read_delimited(file, delimited(file, self._how))

    def check(self) -> None:
        """After all files: raise for a wanted column that no JSON line had."""
        self._json.check()


def column_names(file: Path, how: DelimitedFormat) -> tuple[str, ...]:
    """Of a file of any kind."""
    if file.suffix == ".parquet":
        return tuple(next((batch.columns for batch in read_parquet(file)), {}))
    check_text(file, how.encoding)
    if is_json(file, how.encoding):
        return field_names(file, how.encoding)
    return how.names or header_names(first_line(file, how.encoding), delimited(file, how))


def delimited(file: Path, how: DelimitedFormat) -> DelimitedFormat:
    """`how`, with a tab for a .tsv file where nothing else was said."""
    if how.separator != "," or not plain_name(file).endswith(".tsv"):
        return how
    return DelimitedFormat("\t", how.names, how.has_quotes, how.encoding, how.skip_lines)


def _some(path: Path, files: list[Path], remedy: str) -> list[Path]:
    require(files, "holds no log files", option="input", value=str(path), remedy=remedy, error=DataError)
    return files
