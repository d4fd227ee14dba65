"""RecBole's atomic files: tab separated, with types in the header (`user_id:token`)."""

from pathlib import Path

from nestrec.base.errors import DataError
from nestrec.data.events import EventColumns
from nestrec.data.options import LogColumns, PrepareOptions
from nestrec.data.raw import Delimited, first_line
from nestrec.data.side import SideColumn, SideKind, SideSource
from nestrec.data.source import LogSource, delimited_files, find_file, plain_name, side_files

KINDS: dict[str, SideKind] = {"token": "category", "token_seq": "categories", "float": "number"}
_TAB = Delimited(separator="\t", has_quotes=False)


def open_recbole(file: Path, options: PrepareOptions, *, format: str, positive_rating: float | None) -> LogSource:
    """An `.inter` file, with `.user` and `.item` of the same name beside it."""
    types = _types(file)
    user, item = (_required(file, types, f"{who}_id") for who in ("user", "item"))
    names = {name: f"{name}:{kind}" for name, kind in types.items()}
    known = {"user_id", "item_id", "rating", "timestamp"}
    log = LogColumns(
        user=user,
        item=item,
        rating=names.get("rating"),
        time=names.get("timestamp"),
        time_unit="s",
        numbers=tuple(names[n] for n, kind in types.items() if kind == "float" and n not in known),
        categories=tuple(names[n] for n, kind in types.items() if kind == "token" and n not in known),
    )
    columns = EventColumns.of(log, min_rating=options.min_rating, positive_rating=positive_rating)
    stem = plain_name(file).removesuffix(".inter")
    users, items = (_side(find_file(file.parent, f"{stem}.{who}"), f"{who}_id") for who in ("user", "item"))
    return LogSource(plain_name(file), format, columns, delimited_files([file], _TAB), users=users, items=items)


def _side(file: Path | None, key: str) -> tuple[SideSource, ...]:
    if file is None:
        return ()
    types = _types(file)
    columns = tuple(
        SideColumn(f"{name}:{kind}", "text" if "title" in name else KINDS[kind], name=name, separator=" ")
        for name, kind in types.items()
        if name != key and kind in KINDS
    )
    return (SideSource(side_files([file], _TAB), _required(file, types, key), columns),)


def _types(file: Path) -> dict[str, str]:
    """Column name to type, in order."""
    return dict(cell.rsplit(":", 1) for cell in first_line(file).split("\t") if ":" in cell)


def _required(file: Path, types: dict[str, str], name: str) -> str:
    if name not in types:
        raise DataError(
            f"has no column {name}", field="input", value=str(file), remedy="the header must name its columns"
        )
    return f"{name}:{types[name]}"
