"""RecBole's atomic files: tab separated, with types in the header (`user_id:token`)."""

from pathlib import Path

from nestrec.base.errors import DataError
from nestrec.data.prepare.events import EventColumns
from nestrec.data.prepare.options import LogColumns
from nestrec.data.prepare.raw import Delimited, first_line
from nestrec.data.prepare.side import SideColumn, SideKind, SideSource
from nestrec.data.prepare.source import LogSource, delimited_files, find_file, plain_name, side_files

KINDS: dict[str, SideKind] = {"token": "category", "token_seq": "categories", "float": "number"}


def open_recbole(file: Path, *, format: str, min_rating: float | None, positive_rating: float | None) -> LogSource:
    """An `.inter` file, with `.user` and `.item` of the same name beside it."""
    types = _types(file, "user_id", "item_id")
    others = {name: kind for name, kind in types.items() if name not in ("user_id", "item_id", "rating", "timestamp")}
    log = LogColumns(
        user="user_id",
        item="item_id",
        rating="rating" if "rating" in types else None,
        time="timestamp" if "timestamp" in types else None,
        time_unit="s",
        categories=tuple(name for name, kind in others.items() if kind == "token"),
        values={name: name for name, kind in others.items() if kind == "float"},
    )
    columns = EventColumns.of(log, min_rating=min_rating, positive_rating=positive_rating)
    stem = plain_name(file).removesuffix(".inter")
    users, items = (_side(find_file(file.parent, f"{stem}.{who}"), f"{who}_id") for who in ("user", "item"))
    batches = delimited_files([file], _how(types))
    return LogSource(plain_name(file), format, columns, batches, users=users, items=items, files=(file,))


def _side(file: Path | None, key: str) -> tuple[SideSource, ...]:
    if file is None:
        return ()
    types = _types(file, key)
    columns = tuple(
        SideColumn(name, "text" if "title" in name else KINDS[kind], separator=" ")
        for name, kind in types.items()
        if name != key and kind in KINDS
    )
    return (SideSource(side_files([file], _how(types)), key, columns),)


def _how(types: dict[str, str]) -> Delimited:
    return Delimited(separator="\t", names=tuple(types), has_quotes=False, skip_lines=1)


def _types(file: Path, *required: str) -> dict[str, str]:
    """Column name to type, in order."""
    types = {name: kind for name, _, kind in (cell.partition(":") for cell in first_line(file).split("\t"))}
    for name in required:
        if name not in types:
            remedy = "its first line must name the columns"
            raise DataError(f"has no column {name}", field="input", value=str(file), remedy=remedy)
    return types
