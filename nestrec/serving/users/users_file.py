"""A Parquet file of users, a row each: which columns it has, looked through before anything is read of it.

    user, items, times_ms, actions, features.NAME, user_features.NAME, context.NAME, now_ms

These are the names of the server's requests. `features`, `user_features` and `context` may be columns with named
fields, as requests have them, or columns whose names have dots.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nestrec.base.errors import UserError, did_you_mean
from nestrec.serving.api.requests import LATEST_MS
from nestrec.serving.model.servable import Servable
from nestrec.serving.users.columns import Ints
from nestrec.serving.users.parquet_values import flat, is_id, is_list, is_value, is_whole, milliseconds

_GROUPS = ("features", "user_features", "context")
_MILLISECONDS = "give lists of Unix milliseconds, oldest event first"
_VALUES = "give texts, numbers, true or false, or lists of them; of features of events a list with a value an event"


def opened(path: Path, servable: Servable) -> pa.Table:
    """The file's table, of which the columns that a model reads are as they should be."""
    return _UsersFile(path, servable).table


class _UsersFile:
    def __init__(self, path: Path, servable: Servable):
        self._path, self._servable = path, servable
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
            raise UserError(reason, field="users", value=str(self._path), remedy=remedy) from None

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
        servable, names = self._servable, self.table.column_names
        has_times = servable.spec.defaults.times == "now" and "now_ms" in names
        needed = ["user", "items", *(["times_ms"] if servable.reads_times and not has_times else [])]
        if missing := [name for name in needed if name not in names]:
            remedy = "give columns user, items (lists of item ids) and times_ms (lists, where the model reads times)"
            raise UserError(f"has no column {', '.join(missing)}", field="users", value=str(self._path), remedy=remedy)
        of_event, of_user = servable.event_features, servable.user_features
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
        return UserError(f"{problem} in {self._path}", field=column, value=value, remedy=remedy)
