"""Reads MovieLens 100K (`u.data`), 1M (`ratings.dat`), 20M (`ratings.csv`) and RecBole files, with user and item files.

RecBole's atomic files (`.inter`, `.user`, `.item`) are tab-separated, with types in the header (`user_id:token`).
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from nestrec.base.config import config
from nestrec.base.errors import DataError
from nestrec.data.formats.format_spec import log_format
from nestrec.data.prepare.event_parser import EventColumns
from nestrec.data.prepare.log_source import (
    LogSource,
    delimited_files,
    find_file,
    name_without_gz,
    require_input,
    side_files,
)
from nestrec.data.prepare.prepare_options import LogColumns, PrepareOptions
from nestrec.data.prepare.raw_rows import DelimitedFormat, RawBatch, first_line, read_delimited
from nestrec.data.prepare.side_tables import SideColumn, SideKind, SideSource

KINDS: dict[str, SideKind] = {"token": "category", "token_seq": "categories", "float": "number"}


def open_recbole(file: Path, *, format: str, min_rating: float | None, positive_rating: float | None) -> LogSource:
    """Open a RecBole `.inter` file, with the `.user` and `.item` files of the same name in its folder."""
    types = _types(file, "user_id", "item_id")
    others = {name: kind for name, kind in types.items() if name not in ("user_id", "item_id", "rating", "timestamp")}
    log = LogColumns(
        user="user_id",
        item="item_id",
        rating="rating" if "rating" in types else None,
        time="timestamp" if "timestamp" in types else None,
        time_unit="s",
        categories=tuple(name for name, kind in others.items() if kind == "token"),
        outcome_features={name: name for name, kind in others.items() if kind == "float"},
    )
    columns = EventColumns.of(log, min_rating=min_rating, positive_rating=positive_rating)
    stem = name_without_gz(file).removesuffix(".inter")
    users, items = (_side(find_file(file.parent, f"{stem}.{entity}"), f"{entity}_id") for entity in ("user", "item"))
    batches = delimited_files([file], _how(types))
    return LogSource(name_without_gz(file), format, columns, batches, users=users, items=items, files=(file,))


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


def _how(types: dict[str, str]) -> DelimitedFormat:
    return DelimitedFormat(separator="\t", names=tuple(types), has_quotes=False, skip_lines=1)


def _types(file: Path, *required: str) -> dict[str, str]:
    """Return the type of each column, in order of the columns."""
    types = {name: kind for name, _, kind in (cell.partition(":") for cell in first_line(file).split("\t"))}
    for name in required:
        if name not in types:
            remedy = "write the column names and types into the first line"
            raise DataError(f"the file has no column {name}", option="input", value=str(file), remedy=remedy)
    return types


NAMES = ("user", "item", "rating", "timestamp")
GENRES_100K = ("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
               "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War",
               "Western")  # fmt: skip


@config
class MovieLensOptions(PrepareOptions):
    """Options for MovieLens."""

    min_rating: float | None = None
    """Minimum rating of an event; events with a lower rating are removed. None keeps all events."""
    positive_rating: float | None = 4.0
    """Minimum rating at which an event gets the action `positive`; none does not derive this action."""


def open_movielens(path: Path, options: MovieLensOptions) -> LogSource:
    """Open the folder of an edition, or its ratings file; user and movie files are read from the same folder."""
    file = _ratings_file(require_input(path))
    first = first_line(file)
    if ":token" in first:
        return open_recbole(
            file, format="movielens", min_rating=options.min_rating, positive_rating=options.positive_rating
        )
    if first.count("::") == 3:
        return _source(
            file, options, DelimitedFormat(separator="::", names=NAMES, has_quotes=False), _users_1m, _movies_1m
        )
    if first.count("\t") == 3:
        return _source(
            file, options, DelimitedFormat(separator="\t", names=NAMES, has_quotes=False), _users_100k, _movies_100k
        )
    if first.startswith("userId,movieId,rating,timestamp"):
        return _source(file, options, DelimitedFormat(), _no_users, _movies_20m, user="userId", item="movieId")
    remedy = "name u.data, ratings.dat, ratings.csv or a .inter file; use the format `log` for other files"
    raise DataError("the file does not contain MovieLens ratings", option="input", value=str(file), remedy=remedy)


def _ratings_file(path: Path) -> Path:
    if path.is_file():
        return path
    inter = sorted(p.name.removesuffix(".gz") for p in path.iterdir() if name_without_gz(p).endswith(".inter"))
    found = find_file(path, "ratings.dat", "u.data", "ratings.csv", *inter)
    if found is None:
        remedy = "name a folder with ratings.dat, u.data, ratings.csv or a .inter file, or name the file itself"
        raise DataError("no MovieLens ratings found", option="input", value=str(path), remedy=remedy)
    return found


def _source(
    file: Path,
    options: MovieLensOptions,
    text_format: DelimitedFormat,
    users: Callable[[Path], SideSource | None],
    movies: Callable[[Path], SideSource | None],
    *,
    user: str = "user",
    item: str = "item",
) -> LogSource:
    log = LogColumns(user=user, item=item, rating="rating", time="timestamp", time_unit="s")
    columns = EventColumns.of(log, min_rating=options.min_rating, positive_rating=options.positive_rating)
    user_side = users(file.parent)
    item_side = movies(file.parent)
    return LogSource(
        name_without_gz(file),
        "movielens",
        columns,
        delimited_files([file], text_format),
        users=(user_side,) if user_side else (),
        items=(item_side,) if item_side else (),
        files=(file,),
    )


def _no_users(folder: Path) -> SideSource | None:
    return None


def _users_1m(folder: Path) -> SideSource | None:
    file = find_file(folder, "users.dat")
    names = ("user", "gender", "age", "occupation", "zip")
    columns = tuple(SideColumn(name, "category") for name in names[1:])
    return (
        None
        if file is None
        else SideSource(
            side_files([file], DelimitedFormat(separator="::", names=names, has_quotes=False)), "user", columns
        )
    )


def _users_100k(folder: Path) -> SideSource | None:
    file = find_file(folder, "u.user")
    names = ("user", "age", "gender", "occupation", "zip")
    columns = tuple(SideColumn(name, "category") for name in names[1:])
    return (
        None
        if file is None
        else SideSource(
            side_files([file], DelimitedFormat(separator="|", names=names, has_quotes=False)), "user", columns
        )
    )


def _movies_1m(folder: Path) -> SideSource | None:
    file = find_file(folder, "movies.dat")
    text_format = DelimitedFormat(
        separator="::", names=("item", "title", "genres"), has_quotes=False, encoding="latin-1"
    )
    columns = (SideColumn("title", "text"), SideColumn("genres", "categories", separator="|"))
    return None if file is None else SideSource(side_files([file], text_format), "item", columns)


def _movies_20m(folder: Path) -> SideSource | None:
    file = find_file(folder, "movies.csv")
    columns = (SideColumn("title", "text"), SideColumn("genres", "categories", separator="|"))
    return None if file is None else SideSource(side_files([file], DelimitedFormat()), "movieId", columns)


def _movies_100k(folder: Path) -> SideSource | None:
    file = find_file(folder, "u.item")
    columns = (SideColumn("title", "text"), SideColumn("genres", "categories", separator="|"))
    return None if file is None else SideSource(lambda: _read_u_item(file), "item", columns)


def _read_u_item(file: Path) -> Iterator[RawBatch]:
    """Yield the rows of `u.item` with the genre flags converted to a list of genres."""
    names = ("item", "title", "released", "released_video", "url", *GENRES_100K)
    text_format = DelimitedFormat(separator="|", names=names, has_quotes=False, encoding="latin-1")
    for batch in read_delimited(file, text_format):
        flags = zip(*(batch.columns[genre].to_pylist() for genre in GENRES_100K), strict=True)
        genres = ["|".join(g for g, flag in zip(GENRES_100K, row, strict=True) if flag == "1") for row in flags]
        columns = {
            "item": batch.columns["item"],
            "title": batch.columns["title"],
            "genres": pa.array(genres, pa.string()),
        }
        yield RawBatch(batch.file, batch.lines, columns, batch.bad, batch.fraction_read)


FORMAT = log_format("MovieLens 100K, 1M, 20M, or RecBole's .inter: folder or file.", MovieLensOptions, open_movielens)
