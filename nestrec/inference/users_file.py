"""Reads users and their histories from Parquet files for batch inference.

A file has one row per user and these columns, named like the fields of a server request:

    user, items, times_ms, actions, features.NAME, user_features.NAME, context.NAME, now_ms

`features`, `user_features` and `context` are either struct columns, as in a request, or columns with dots in their
names. All rows are validated before the first result is computed.
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
    broadcast_values,
    filter_bounds,
    last_event_values,
    make_request_resolver,
    resolve_context_features,
)
from nestrec.serving.core.request_limits import BadRequestError, MissingInputError
from nestrec.serving.inputs.request_resolver import RequestResolver
from nestrec.serving.inputs.request_schema import LATEST_MS
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec

Int64Array = NDArray[np.int64]


def is_list_type(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def flatten_lists(column: pa.ChunkedArray) -> tuple[pa.Array, Int64Array]:
    """Return the concatenated values of a list column and the offsets of its lists; a null counts as an empty list."""
    lists = column.combine_chunks()
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return lists.flatten(), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def to_milliseconds(values: pa.Array) -> Int64Array:
    """Return Unix milliseconds of integers (already milliseconds) or of timestamps in any unit.

    Raises:
        pyarrow.ArrowInvalid: A value is null or cannot be converted.
    """
    if values.null_count:
        raise pa.ArrowInvalid("a null")
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("ms", values.type.tz), safe=False)
    result: Int64Array = values.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return result


def is_id_type(kind: pa.DataType) -> bool:
    """Return whether a type can hold ids: strings or numbers. Integers become floats in tables with missing values."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return bool(is_string_type(kind) or is_number)


def is_string_type(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_integral(values: pa.Array) -> bool:
    """Return whether an array has no nulls and, if it has floats, only integral ones."""
    if values.null_count or not pa.types.is_floating(values.type):
        return not values.null_count
    return bool(pc.all(pc.equal(pc.floor(values), values)).as_py() is not False)


def ids_of(values: pa.Array) -> list[Any]:
    """Return ids as strings or integers; decimals become the same strings as in data preparation."""
    if pa.types.is_decimal(values.type):
        return [text_of_id(key) for key in values.to_pylist()]
    return (values.cast(pa.int64()) if pa.types.is_floating(values.type) else values).to_pylist()  # type: ignore[no-any-return]


def is_feature_type(kind: pa.DataType) -> bool:
    """Return whether a type can hold feature values: strings, numbers, booleans, or lists of them."""
    if is_list_type(kind) or pa.types.is_dictionary(kind):
        return is_feature_type(kind.value_type)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(is_string_type(kind) or is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind))


def feature_values(values: pa.Array, column: ColumnSpec) -> list[Any]:
    """Return the values of a feature; integer categories that became floats in a table with nulls are restored."""
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), None, values)
        is_category = column.has_table and column.transform.kind != "quantiles"
        if is_category and is_integral(values.drop_null()):
            values = values.cast(pa.int64())
    return values.to_pylist()  # type: ignore[no-any-return]


_GROUPS = ("features", "user_features", "context")
_MILLISECONDS = "provide lists of Unix milliseconds, oldest event first"
_VALUES = "provide strings, numbers, booleans, or lists of them; for event features a list with one value per event"


def open_users_file(path: Path, servable: Servable) -> pa.Table:
    """Read a users file and validate the columns that the model reads.

    Raises:
        UserError: The file cannot be read, or a column is missing or invalid.
    """
    return _UsersFile(path, servable).table


class _UsersFile:
    def __init__(self, path: Path, servable: Servable):
        self._path = path
        self._servable = servable
        self.table = self._flatten_structs(self._read())
        self._check_names()
        self._check_keys()
        if "times_ms" in self.table.column_names:
            self._check_times()
        if "now_ms" in self.table.column_names:
            self._check_now()
        self._check_features()

    def _read(self) -> pa.Table:
        try:
            return pq.read_table(self._path)
        except (pa.ArrowInvalid, OSError) as error:
            remedy = "write a Parquet file with the columns user, items and times_ms, each once"
            reason = f"the file cannot be read as Parquet ({str(error).splitlines()[0]})"
            raise UserError(reason, option="users", value=str(self._path), remedy=remedy) from None

    def _flatten_structs(self, table: pa.Table) -> pa.Table:
        """Replace struct columns by one column per field, with dots in the names."""
        result: dict[str, pa.ChunkedArray] = {}
        for field, column in zip(table.schema, table.columns, strict=True):
            inner = {field.name: column}
            if field.name in _GROUPS:
                if pa.types.is_null(field.type):  # null for all users
                    continue
                if not pa.types.is_struct(field.type):
                    remedy = f"write a struct column, or columns {field.name}.NAME"
                    raise self._error(field.name, str(field.type), remedy)
                inner = {
                    f"{field.name}.{own.name}": part for own, part in zip(field.type, column.flatten(), strict=True)
                }
            if twice := result.keys() & inner.keys():
                raise self._error(min(twice), "twice", "write each column once")
            result |= inner
        return pa.table(result)

    def _check_names(self) -> None:
        servable = self._servable
        names = self.table.column_names
        has_times = servable.spec.defaults.times == "now" and "now_ms" in names
        needed = ["user", "items", *(["times_ms"] if servable.reads_times and not has_times else [])]
        if missing := [name for name in needed if name not in names]:
            remedy = "add columns user, items (lists of item ids) and times_ms (lists, if the model reads times)"
            raise UserError(
                f"missing column {', '.join(missing)}", option="users", value=str(self._path), remedy=remedy
            )
        of_event = servable.event_features
        of_user = servable.user_features
        known: dict[str, Mapping[str, Any]] = {"features": of_event, "user_features": of_user, "context": of_event}
        for name in names:
            group, dot, feature = name.partition(".")
            if dot and group in known and feature not in known[group]:
                remedy = did_you_mean(feature, known[group]) if known[group] else "remove it: the model reads none"
                raise self._error(name, feature, remedy, "unknown feature")

    def _check_keys(self) -> None:
        """Check user and item ids per chunk, because all strings of a file can exceed the capacity of one array."""
        if not len(self.table):  # columns of an empty table can have any type
            return
        for chunk in self.table["user"].chunks:
            if not is_id_type(chunk.type) or not is_integral(chunk):
                raise self._error(
                    "user", None if chunk.null_count else str(chunk.type), "use a string or an integer as user id"
                )
        for chunk in self.table["items"].chunks:
            keys = chunk.flatten() if is_list_type(chunk.type) else pa.nulls(1)
            if len(keys) and not (is_id_type(keys.type) and is_integral(keys)):
                raise self._error("items", str(chunk.type), "provide lists of item ids: strings or integers, no nulls")

    def _check_times(self) -> None:
        first = 0
        for rows in self.table.select(["items", "times_ms"]).to_batches():
            try:
                values, bounds = flatten_lists(pa.chunked_array([rows["times_ms"]]))
                times = to_milliseconds(values)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise self._error("times_ms", str(rows["times_ms"].type), _MILLISECONDS) from None
            is_decreasing = np.append(False, times[1:] < times[:-1])[: len(times)]
            is_decreasing[bounds[:-1][bounds[:-1] < len(times)]] = False  # the first event of each user
            invalid = np.flatnonzero(is_decreasing | (times < 0) | (times > LATEST_MS))
            if len(invalid):
                user = first + int(np.searchsorted(bounds, invalid[0], side="right")) - 1
                raise self._error("times_ms", f"{times[invalid[0]]} of user {self.table['user'][user]}", _MILLISECONDS)
            self._check_counts(rows, np.diff(bounds), first)
            first += len(rows)

    def _check_counts(self, rows: pa.RecordBatch, counts: Ints, first: int) -> None:
        """Check that there is one time per item; the list can be null if the model does not read times."""
        num_items = np.diff(flatten_lists(pa.chunked_array([rows["items"]]))[1])
        is_present = rows["times_ms"].is_valid().to_numpy(zero_copy_only=False) | self._servable.reads_times
        if len(invalid := np.flatnonzero(is_present & (counts != num_items))):
            user = f"{counts[invalid[0]]} times for {num_items[invalid[0]]} items of user"
            raise self._error(
                "times_ms", f"{user} {self.table['user'][first + int(invalid[0])]}", "provide one time per item"
            )

    def _check_now(self) -> None:
        for chunk in self.table["now_ms"].chunks:
            try:
                moments = to_milliseconds(chunk)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise self._error("now_ms", str(chunk.type), "provide Unix milliseconds for each user") from None
            if len(invalid := moments[(moments < 0) | (moments > LATEST_MS)]):
                raise self._error("now_ms", int(invalid[0]), "provide Unix milliseconds")

    def _check_features(self) -> None:
        for field in self.table.schema:
            group, dot, _ = field.name.partition(".")
            is_of_events = field.name == "actions" or (group == "features" and bool(dot))
            if not is_of_events and not (dot and group in _GROUPS):
                continue
            element_type = field.type
            if is_of_events and not pa.types.is_null(element_type):
                element_type = field.type.value_type if is_list_type(field.type) else None
            if element_type is None or not is_feature_type(element_type):
                raise self._error(field.name, str(field.type), _VALUES)

    def _error(self, column: str, value: Any, remedy: str, problem: str = "invalid value") -> UserError:
        return UserError(f"{problem} in {self._path}", option=column, value=value, remedy=remedy)


_ROWS_AT_A_TIME = 4096


class FileUsers:
    """Users of a Parquet file, addressed by row. Opening the file validates all rows.

    Args:
        path: The file.
        servable: Model that reads the users.
        context: Values of context features of the event to predict, by name, for features without a column.

    Raises:
        UserError: A column or a value is missing or invalid.
    """

    def __init__(self, path: Path, servable: Servable, context: Mapping[str, Any]):
        self._path = path
        self._context = context
        self._reader = make_request_resolver(servable)
        self._table = open_users_file(path, servable)
        if servable.request_fields or servable.reads_actions:
            for first in range(0, len(self), _ROWS_AT_A_TIME):
                self._validate(first, min(first + _ROWS_AT_A_TIME, len(self)))

    @property
    def digest(self) -> str:
        """SHA-256 digest of the file."""
        with self._path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read(self, first: int, end: int) -> UserColumns:
        """Return the users of the rows `first` to `end - 1`."""
        return _UserRows(self._table.slice(first, end - first), self._reader, self._context).columns()

    def _validate(self, first: int, end: int) -> None:
        """Read rows and, if that fails, find the first invalid row by bisection to name its user."""
        try:
            self.read(first, end)
        except BadRequestError as error:
            if end - first == 1:
                raise self._to_user_error(error, first) from None
            middle = (first + end) // 2
            self._validate(first, middle)
            self._validate(middle, end)

    def _to_user_error(self, error: BadRequestError, row: int) -> UserError:
        field = error.field.removeprefix("history.")
        group, _, name = field.partition(".")
        remedy = "correct the value"
        if isinstance(error, MissingInputError):
            section = "user_features" if group == "user_features" else "features"
            for_all = f", set {field} for all users" if group == "context" else ""
            remedy = f"add a column {field}{for_all}, or export the model with --defaults.{section}.{name}"
        user = f"user {self._table['user'][row]} of {self._path}"
        return UserError(error.message, option=field, value=user, remedy=remedy)


class _UserRows:
    """Rows of a file as model inputs. Columns are read for all users at once; per user, it would take longer than
    the model."""

    def __init__(self, rows: pa.Table, reader: RequestResolver, context: Mapping[str, Any]):
        self._rows = rows
        self._reader = reader
        self._context = context
        self._servable = reader.servable
        self._names = rows.column_names
        keys, self._bounds = flatten_lists(rows["items"])
        self._items = self._servable.ids_of(ids_of(keys))
        self._is_known = self._items > 0

    def columns(self) -> UserColumns:
        now_ms = self._now_ms()
        return UserColumns(
            servable=self._servable,
            keys=[str(key) for key in ids_of(self._rows["user"].combine_chunks())],
            items=self._items[self._is_known],
            bounds=filter_bounds(self._bounds, self._is_known),
            times_ms=self._times_ms(now_ms)[self._is_known],
            actions=self._actions(),
            now_ms=now_ms,
            event_features=self._event_features(),
            user_features=self._user_features(),
            query_features=self._query_features(),
        )

    def _now_ms(self) -> Ints:
        if "now_ms" in self._names:
            return to_milliseconds(self._rows["now_ms"].combine_chunks())
        if "times_ms" not in self._names:
            return np.zeros(len(self._rows), np.int64)
        values, bounds = flatten_lists(self._rows["times_ms"])
        return last_event_values(to_milliseconds(values), bounds)

    def _times_ms(self, now_ms: Ints) -> Ints:
        """Return event times; if the file has none, all events get the time of the user's query."""
        if not self._servable.reads_times:
            return np.zeros(len(self._items), np.int64)
        is_present = "times_ms" in self._names
        return (
            to_milliseconds(flatten_lists(self._rows["times_ms"])[0])
            if is_present
            else np.repeat(now_ms, np.diff(self._bounds))
        )

    def _actions(self) -> Ints:
        if not self._servable.reads_actions:
            return np.zeros(int(self._is_known.sum()), np.int64)
        values = self._event_values("actions", pa.Array.to_pylist, lambda: None)
        return self._reader.actions(values, len(values))

    def _event_features(self) -> dict[str, Ints]:
        result = dict[str, Ints]()
        defaults = self._servable.spec.defaults.features
        for name, column in self._servable.event_features.items():
            field = f"features.{name}"
            default = partial(self._reader.default, name, defaults, field)
            values = self._event_values(field, partial(feature_values, column=column), default)
            result |= self._reader.values(values, len(values), column, field, is_each=True)
        return result

    def _event_values(self, field: str, read: Callable[[pa.Array], list[Any]], default: Callable[[], Any]) -> list[Any]:
        """Return the value of each known event; events of a user without a list get the default."""
        lengths = np.diff(self._bounds).tolist()
        num_users = len(self._rows)
        values = list[Any]()
        bounds = np.zeros(num_users + 1, np.int64)
        is_present = np.zeros(num_users, np.bool_)
        if field in self._names and not pa.types.is_null(self._rows[field].type):
            listed, bounds = flatten_lists(self._rows[field])
            values = read(listed)
            is_present = self._rows[field].is_valid().to_numpy()
        invalid = np.flatnonzero(is_present & (np.diff(bounds) != lengths))
        if len(invalid):
            raise BadRequestError(f"must have {lengths[invalid[0]]} values, one per event", field)
        if not is_present.all():
            needs_default = ~is_present & (np.diff(filter_bounds(self._bounds, self._is_known)) > 0)
            own = [default() if needs_default.any() else None]
            spans = zip(is_present, bounds[:-1], bounds[1:], lengths, strict=True)
            values = [v for is_own, a, b, n in spans for v in (values[a:b] if is_own else own * n)]
        return [*itertools.compress(values, self._is_known)]

    def _user_features(self) -> dict[str, Ints]:
        result = dict[str, Ints]()
        defaults = self._servable.spec.defaults.user_features
        for name, column in self._servable.user_features.items():
            field = f"user_features.{name}"
            if field in self._names:
                values = feature_values(self._rows[field].combine_chunks(), column)
                result |= self._reader.values(values, len(values), column, field, is_each=True)
            else:
                default = self._reader.default(name, defaults, field)
                result |= broadcast_values(
                    self._reader.values(default, 1, column, field, is_each=False), len(self._rows)
                )
        return result

    def _query_features(self) -> dict[str, Ints]:
        names = [name for name in self._servable.context_features if f"context.{name}" in self._names]
        result = resolve_context_features(self._reader, self._context, len(self._rows), exclude=names)
        for name in names:
            field = f"context.{name}"
            column = self._servable.event_features[name]
            values = feature_values(self._rows[field].combine_chunks(), column)
            result |= self._reader.values(values, len(values), column, field, is_each=True)
        return result
