"""Reads users and their histories from Parquet files for batch inference.

A Parquet file of users, a row each: which columns it has, looked through before anything is read of it.

    user, items, times_ms, actions, features.NAME, user_features.NAME, context.NAME, now_ms

These are the names of the server's requests. `features`, `user_features` and `context` may be columns with named
fields, as requests have them, or columns whose names have dots.

What columns of Parquet hold, as JSON would have it.

Users of a Parquet file, as a model reads them. All of it is looked through before anything is computed.
"""

import hashlib
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestrec.base.errors import UserError, did_you_mean
from nestrec.data.prepare.id_encoder import text_of_id
from nestrec.exporters.dataset_users import (
    Ints,
    UserColumns,
    known_bounds,
    of_last_events,
    reader_of,
    spread,
    told_context,
)
from nestrec.serving.core.request_limits import BadRequestError, MissingInputError
from nestrec.serving.inputs.request_resolver import RequestResolver
from nestrec.serving.inputs.request_schema import LATEST_MS
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec

Int64Array = NDArray[np.int64]


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def flat(column: pa.ChunkedArray) -> tuple[pa.Array, Int64Array]:
    """What the lists of a column hold one after the other, and where each begins and ends; none is an empty list."""
    lists = column.combine_chunks()
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return lists.flatten(), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def milliseconds(told: pa.Array) -> Int64Array:
    """Of whole numbers, or of moments in any unit."""
    if told.null_count:
        raise pa.ArrowInvalid("a null")
    if pa.types.is_timestamp(told.type):
        told = told.cast(pa.timestamp("ms", told.type.tz), safe=False)
    found: Int64Array = told.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return found


def is_id(kind: pa.DataType) -> bool:
    """Ids are texts or numbers, as data has them; whole ones may have become floats where a table had gaps."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return bool(is_text(kind) or is_number)


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_whole(told: pa.Array) -> bool:
    """No null, and of floats none that is not a whole number."""
    if told.null_count or not pa.types.is_floating(told.type):
        return not told.null_count
    return bool(pc.all(pc.equal(pc.floor(told), told)).as_py() is not False)


def ids_of(told: pa.Array) -> list[Any]:
    """Texts or whole numbers; decimals as the texts that data makes of them."""
    if pa.types.is_decimal(told.type):
        return [text_of_id(key) for key in told.to_pylist()]
    return (told.cast(pa.int64()) if pa.types.is_floating(told.type) else told).to_pylist()  # type: ignore[no-any-return]


def is_value(kind: pa.DataType) -> bool:
    """What features have: a text, a number, true or false, or lists of them."""
    if is_list(kind) or pa.types.is_dictionary(kind):
        return is_value(kind.value_type)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(is_text(kind) or is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind))


def values_of(told: pa.Array, column: ColumnSpec) -> list[Any]:
    """Values of a feature; whole numbers of categories may have become floats where a table had gaps."""
    if pa.types.is_floating(told.type):
        told = pc.if_else(pc.is_nan(told), None, told)
        is_category = column.has_table and column.transform.kind != "quantiles"
        if is_category and is_whole(told.drop_null()):
            told = told.cast(pa.int64())
    return told.to_pylist()  # type: ignore[no-any-return]


_GROUPS = ("features", "user_features", "context")
_MILLISECONDS = "give lists of Unix milliseconds, oldest event first"
_VALUES = "give texts, numbers, true or false, or lists of them; of features of events a list with a value an event"


def opened(path: Path, servable: Servable) -> pa.Table:
    """The file's table, of which the columns that a model reads are as they should be."""
    return _UsersFile(path, servable).table


class _UsersFile:
    def __init__(self, path: Path, servable: Servable):
        self._path = path
        self._servable = servable
        self.table = self._with_names(self._opened())
        self._check_names()
        self._check_keys()
        if "times_ms" in self.table.column_names:
            self._check_times()
        if "now_ms" in self.table.column_names:
            self._check_now()
        self._check_features()

    def _opened(self) -> pa.Table:
        try:
            return pq.read_table(self._path)
        except (pa.ArrowInvalid, OSError) as error:
            remedy = "write it anew, with columns user, items and times_ms, each once"
            reason = f"cannot be read as Parquet ({str(error).splitlines()[0]})"
            raise UserError(reason, option="users", value=str(self._path), remedy=remedy) from None

    def _with_names(self, table: pa.Table) -> pa.Table:
        """Columns with named fields as columns whose names have dots."""
        found: dict[str, pa.ChunkedArray] = {}
        for field, column in zip(table.schema, table.columns, strict=True):
            inner = {field.name: column}
            if field.name in _GROUPS:
                if pa.types.is_null(field.type):  # told of nobody
                    continue
                if not pa.types.is_struct(field.type):
                    remedy = f"give named fields, or columns {field.name}.NAME"
                    raise self._wrong(field.name, str(field.type), remedy)
                inner = {
                    f"{field.name}.{own.name}": part for own, part in zip(field.type, column.flatten(), strict=True)
                }
            if twice := found.keys() & inner.keys():
                raise self._wrong(min(twice), "twice", "give each column once")
            found |= inner
        return pa.table(found)

    def _check_names(self) -> None:
        servable = self._servable
        names = self.table.column_names
        has_times = servable.spec.defaults.times == "now" and "now_ms" in names
        needed = ["user", "items", *(["times_ms"] if servable.reads_times and not has_times else [])]
        if missing := [name for name in needed if name not in names]:
            remedy = "give columns user, items (lists of item ids) and times_ms (lists, where the model reads times)"
            raise UserError(f"has no column {', '.join(missing)}", option="users", value=str(self._path), remedy=remedy)
        of_event = servable.event_features
        of_user = servable.user_features
        known: dict[str, Mapping[str, Any]] = {"features": of_event, "user_features": of_user, "context": of_event}
        for name in names:
            group, dot, feature = name.partition(".")
            if dot and group in known and feature not in known[group]:
                remedy = did_you_mean(feature, known[group]) if known[group] else "leave it out: the model reads none"
                raise self._wrong(name, feature, remedy, "is no feature that the model reads")

    def _check_keys(self) -> None:
        """In chunks: lists of texts of a whole file may be more than one array can hold."""
        if not len(self.table):  # nobody's columns may be of any type
            return
        for chunk in self.table["user"].chunks:
            if not is_id(chunk.type) or not is_whole(chunk):
                raise self._wrong(
                    "user", None if chunk.null_count else str(chunk.type), "name each user by a text or a whole number"
                )
        for chunk in self.table["items"].chunks:
            keys = chunk.flatten() if is_list(chunk.type) else pa.nulls(1)
            if len(keys) and not (is_id(keys.type) and is_whole(keys)):
                raise self._wrong("items", str(chunk.type), "give lists of item ids: texts or whole numbers, no nulls")

    def _check_times(self) -> None:
        first = 0
        for rows in self.table.select(["items", "times_ms"]).to_batches():
            try:
                told, bounds = flat(pa.chunked_array([rows["times_ms"]]))
                times = milliseconds(told)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise self._wrong("times_ms", str(rows["times_ms"].type), _MILLISECONDS) from None
            goes_back = np.append(False, times[1:] < times[:-1])[: len(times)]
            goes_back[bounds[:-1][bounds[:-1] < len(times)]] = False  # from one user to the next
            wrong = np.flatnonzero(goes_back | (times < 0) | (times > LATEST_MS))
            if len(wrong):
                user = first + int(np.searchsorted(bounds, wrong[0], side="right")) - 1
                raise self._wrong("times_ms", f"{times[wrong[0]]} of user {self.table['user'][user]}", _MILLISECONDS)
            self._check_counts(rows, np.diff(bounds), first)
            first += len(rows)

    def _check_counts(self, rows: pa.RecordBatch, counts: Ints, first: int) -> None:
        """A time for each item; none at all where the model does not look at them."""
        num_items = np.diff(flat(pa.chunked_array([rows["items"]]))[1])
        is_told = rows["times_ms"].is_valid().to_numpy(zero_copy_only=False) | self._servable.reads_times
        if len(wrong := np.flatnonzero(is_told & (counts != num_items))):
            user = f"{counts[wrong[0]]} times for {num_items[wrong[0]]} items of user"
            raise self._wrong(
                "times_ms", f"{user} {self.table['user'][first + int(wrong[0])]}", "give one for each item"
            )

    def _check_now(self) -> None:
        for chunk in self.table["now_ms"].chunks:
            try:
                moments = milliseconds(chunk)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise self._wrong("now_ms", str(chunk.type), "give Unix milliseconds for each user") from None
            if len(wrong := moments[(moments < 0) | (moments > LATEST_MS)]):
                raise self._wrong("now_ms", int(wrong[0]), "give Unix milliseconds")

    def _check_features(self) -> None:
        for field in self.table.schema:
            group, dot, _ = field.name.partition(".")
            is_of_events = field.name == "actions" or (group == "features" and bool(dot))
            if not is_of_events and not (dot and group in _GROUPS):
                continue
            of_one = field.type
            if is_of_events and not pa.types.is_null(of_one):
                of_one = field.type.value_type if is_list(field.type) else None
            if of_one is None or not is_value(of_one):
                raise self._wrong(field.name, str(field.type), _VALUES)

    def _wrong(self, column: str, value: Any, remedy: str, problem: str = "is wrong") -> UserError:
        return UserError(f"{problem} in {self._path}", option=column, value=value, remedy=remedy)


_ROWS_AT_A_TIME = 4096


class FileUsers:
    """Users by their rows in a file; see `users_file`."""

    def __init__(self, path: Path, servable: Servable, context: Mapping[str, Any]):
        """context: of the event that is asked for, by name of a feature, where the file does not tell it."""
        self._path = path
        self._context = context
        self._reader = reader_of(servable)
        self._table = opened(path, servable)
        if servable.given_fields or servable.reads_actions:
            for first in range(0, len(self), _ROWS_AT_A_TIME):
                self._look_through(first, min(first + _ROWS_AT_A_TIME, len(self)))

    @property
    def digest(self) -> str:
        with self._path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read(self, first: int, end: int) -> UserColumns:
        """Those from `first` on, before `end`."""
        return _Rows(self._table.slice(first, end - first), self._reader, self._context).columns()

    def _look_through(self, first: int, end: int) -> None:
        try:
            self.read(first, end)
        except BadRequestError as error:
            if end - first == 1:
                raise self._explained(error, first) from None
            middle = (first + end) // 2
            self._look_through(first, middle)
            self._look_through(middle, end)

    def _explained(self, error: BadRequestError, row: int) -> UserError:
        field = error.field.removeprefix("history.")
        group, _, name = field.partition(".")
        remedy = "mend it"
        if isinstance(error, MissingInputError):
            of = "user_features" if group == "user_features" else "features"
            for_all = f", set {field} for all users" if group == "context" else ""
            remedy = f"give a column {field}{for_all}, or export the model with defaults.{of}.{name}"
        who = f"user {self._table['user'][row]} of {self._path}"
        return UserError(error.message, option=field, value=who, remedy=remedy)


class _Rows:
    """Rows of a file. Values of all users are read at once: user by user that would take longer than their models."""

    def __init__(self, rows: pa.Table, reader: RequestResolver, context: Mapping[str, Any]):
        self._rows = rows
        self._reader = reader
        self._context = context
        self._servable = reader.servable
        self._names = rows.column_names
        keys, self._bounds = flat(rows["items"])
        self._items = self._servable.ids_of(ids_of(keys))
        self._is_known = self._items > 0

    def columns(self) -> UserColumns:
        now_ms = self._now_ms()
        return UserColumns(
            servable=self._servable,
            keys=[str(key) for key in ids_of(self._rows["user"].combine_chunks())],
            items=self._items[self._is_known],
            bounds=known_bounds(self._bounds, self._is_known),
            times_ms=self._times_ms(now_ms)[self._is_known],
            actions=self._actions(),
            now_ms=now_ms,
            of_events=self._of_events(),
            of_users=self._of_users(),
            asked=self._asked(),
        )

    def _now_ms(self) -> Ints:
        if "now_ms" in self._names:
            return milliseconds(self._rows["now_ms"].combine_chunks())
        if "times_ms" not in self._names:
            return np.zeros(len(self._rows), np.int64)
        told, bounds = flat(self._rows["times_ms"])
        return of_last_events(milliseconds(told), bounds)

    def _times_ms(self, now_ms: Ints) -> Ints:
        """Where only the export's default tells when events happened: when the user is asked for."""
        if not self._servable.reads_times:
            return np.zeros(len(self._items), np.int64)
        is_told = "times_ms" in self._names
        return milliseconds(flat(self._rows["times_ms"])[0]) if is_told else np.repeat(now_ms, np.diff(self._bounds))

    def _actions(self) -> Ints:
        if not self._servable.reads_actions:
            return np.zeros(int(self._is_known.sum()), np.int64)
        told = self._told("actions", pa.Array.to_pylist, lambda: None)
        return self._reader.actions(told, len(told))

    def _of_events(self) -> dict[str, Ints]:
        found = dict[str, Ints]()
        defaults = self._servable.spec.defaults.features
        for name, column in self._servable.event_features.items():
            field = f"features.{name}"
            default = partial(self._reader.default, name, defaults, field)
            told = self._told(field, partial(values_of, column=column), default)
            found |= self._reader.values(told, len(told), column, field, is_each=True)
        return found

    def _told(self, field: str, read: Callable[[pa.Array], list[Any]], default: Callable[[], Any]) -> list[Any]:
        """A value of each known event; the default for all events of a user whose list is left out."""
        lengths = np.diff(self._bounds).tolist()
        num_users = len(self._rows)
        values = list[Any]()
        bounds = np.zeros(num_users + 1, np.int64)
        is_told = np.zeros(num_users, np.bool_)
        if field in self._names and not pa.types.is_null(self._rows[field].type):
            listed, bounds = flat(self._rows[field])
            values = read(listed)
            is_told = self._rows[field].is_valid().to_numpy()
        wrong = np.flatnonzero(is_told & (np.diff(bounds) != lengths))
        if len(wrong):
            raise BadRequestError(f"must have {lengths[wrong[0]]} values, one for each", field)
        if not is_told.all():
            is_wanted = ~is_told & (np.diff(known_bounds(self._bounds, self._is_known)) > 0)
            own = [default() if is_wanted.any() else None]
            spans = zip(is_told, bounds[:-1], bounds[1:], lengths, strict=True)
            values = [v for told, a, b, n in spans for v in (values[a:b] if told else own * n)]
        return [*itertools.compress(values, self._is_known)]

    def _of_users(self) -> dict[str, Ints]:
        found = dict[str, Ints]()
        defaults = self._servable.spec.defaults.user_features
        for name, column in self._servable.user_features.items():
            field = f"user_features.{name}"
            if field in self._names:
                values = values_of(self._rows[field].combine_chunks(), column)
                found |= self._reader.values(values, len(values), column, field, is_each=True)
            else:
                default = self._reader.default(name, defaults, field)
                found |= spread(self._reader.values(default, 1, column, field, is_each=False), len(self._rows))
        return found

    def _asked(self) -> dict[str, Ints]:
        told = [name for name in self._servable.context_features if f"context.{name}" in self._names]
        found = told_context(self._reader, self._context, len(self._rows), but=told)
        for name in told:
            field = f"context.{name}"
            column = self._servable.event_features[name]
            values = values_of(self._rows[field].combine_chunks(), column)
            found |= self._reader.values(values, len(values), column, field, is_each=True)
        return found
