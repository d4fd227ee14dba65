"""Users of a Parquet file, as a model reads them. All of it is looked through before anything is computed."""

import hashlib
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nestrec.base.errors import UserError
from nestrec.serving.api.reading import Reader
from nestrec.serving.api.schema import BadRequestError, NotToldError
from nestrec.serving.model.servable import Servable
from nestrec.serving.users.columns import (
    Ints,
    UserColumns,
    known_bounds,
    of_last_events,
    reader_of,
    spread,
    told_context,
)
from nestrec.serving.users.parquet_values import flat, ids_of, milliseconds, values_of
from nestrec.serving.users.users_file import opened

_ROWS_AT_A_TIME = 4096


class FileUsers:
    """Users by their rows in a file; see `users_file`."""

    def __init__(self, path: Path, servable: Servable, context: Mapping[str, Any]):
        """context: of the event that is asked for, by name of a feature, where the file does not tell it."""
        self._path, self._context, self._reader = path, context, reader_of(servable)
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
        if isinstance(error, NotToldError):
            of = "user_features" if group == "user_features" else "features"
            for_all = f", set {field} for all users" if group == "context" else ""
            remedy = f"give a column {field}{for_all}, or export the model with defaults.{of}.{name}"
        who = f"user {self._table['user'][row]} of {self._path}"
        return UserError(error.message, field=field, value=who, remedy=remedy)


class _Rows:
    """Rows of a file. Values of all users are read at once: user by user that would take longer than their models."""

    def __init__(self, rows: pa.Table, reader: Reader, context: Mapping[str, Any]):
        self._rows, self._reader, self._context = rows, reader, context
        self._servable, self._names = reader.servable, rows.column_names
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
        found, defaults = dict[str, Ints](), self._servable.spec.defaults.features
        for name, column in self._servable.event_features.items():
            field = f"features.{name}"
            default = partial(self._reader.default, name, defaults, field)
            told = self._told(field, partial(values_of, column=column), default)
            found |= self._reader.values(told, len(told), column, field, is_each=True)
        return found

    def _told(self, field: str, read: Callable[[pa.Array], list[Any]], default: Callable[[], Any]) -> list[Any]:
        """A value of each known event; the default for all events of a user whose list is left out."""
        lengths, num_users = np.diff(self._bounds).tolist(), len(self._rows)
        values, bounds, is_told = list[Any](), np.zeros(num_users + 1, np.int64), np.zeros(num_users, np.bool_)
        if field in self._names and not pa.types.is_null(self._rows[field].type):
            listed, bounds = flat(self._rows[field])
            values, is_told = read(listed), self._rows[field].is_valid().to_numpy()
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
        found, defaults = dict[str, Ints](), self._servable.spec.defaults.user_features
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
            field, column = f"context.{name}", self._servable.event_features[name]
            values = values_of(self._rows[field].combine_chunks(), column)
            found |= self._reader.values(values, len(values), column, field, is_each=True)
        return found
