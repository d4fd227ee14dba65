"""Users of a batch job: all of a dataset, those of a list, or those of a file with their histories."""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.data.dataset import Dataset
from nestrec.serving.api.requests import LATEST_MS
from nestrec.serving.model.dataset_users import DatasetUsers
from nestrec.serving.model.inputs import History
from nestrec.serving.model.servable import Servable

NamedUser = tuple[str, History, int]
"""key, events that the model knows, and the moment at which it is asked: that of the last event"""


class BatchUsers(Protocol):
    """Users in a fixed order."""

    @property
    def digest(self) -> str:
        """Of who they are and what they did."""
        ...

    def __len__(self) -> int: ...

    def part(self, first: int, end: int) -> list[NamedUser]: ...


def users_of(users: Path | str, servable: Servable, data: Path | None) -> BatchUsers:
    """users: `all`, a text file with a key a line, or a Parquet file with the columns user, items and perhaps times_ms.
    data: the dataset that keys are of."""
    users = str(users)
    if users != "all" and not Path(users).is_file():
        remedy = "write all, or a text file with a user a line, or a Parquet file with user, items and times_ms"
        raise UserError("is no file", field="--users", value=users, remedy=remedy)
    if users.endswith(".parquet"):
        return _UsersOfFile(Path(users), servable)
    if data is None:
        remedy = "name the dataset with --data, or a Parquet file of users with their histories"
        raise UserError("an exported model does not say who its users are", field="--users", value=users, remedy=remedy)
    return _UsersOfDataset(Dataset.open(data), servable, None if users == "all" else Path(users))


class _UsersOfDataset:
    def __init__(self, dataset: Dataset, servable: Servable, listed: Path | None):
        self._dataset, self._histories = dataset, DatasetUsers(dataset, servable)
        self._places = np.arange(dataset.num_samples)
        if listed is not None:
            keys = [line for line in _text_of(listed).split("\n") if line]
            known = {key: place for place, key in enumerate(dataset.user_keys(self._places))}
            unknown = [key for key in keys if key not in known]
            if unknown:
                remedy = "list users of the dataset"
                raise UserError("are no users of the dataset", field="--users", value=unknown[:10], remedy=remedy)
            self._places = np.array([known[key] for key in keys], np.int64)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._dataset.digest.encode() + self._places.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._places)

    def part(self, first: int, end: int) -> list[NamedUser]:
        return list(self._histories.histories(self._places[first:end]))


class _UsersOfFile:
    def __init__(self, path: Path, servable: Servable):
        self._servable, self._path = servable, path
        if servable.event_features or servable.user_features:
            names = ", ".join([*servable.event_features, *servable.user_features])
            remedy = "ask a server, whose requests tell them"
            raise UserError(f"the model also reads {names}", field="--users", value=str(path), remedy=remedy)
        self._table = self._opened()
        needed = ["user", "items", *(["times_ms"] if servable.reads_times else [])]
        missing = [name for name in needed if name not in self._table.column_names]
        if missing:
            remedy = "give columns user, items (lists of item ids) and times_ms (lists, where the model reads times)"
            raise UserError(f"has no column {', '.join(missing)}", field="--users", value=str(path), remedy=remedy)
        self._check()

    def _opened(self) -> pa.Table:
        try:
            return pq.read_table(self._path)
        except (pa.ArrowInvalid, OSError) as error:
            remedy = "write it anew, with columns user, items and times_ms, each once"
            reason = f"cannot be read as Parquet ({str(error).splitlines()[0]})"
            raise UserError(reason, field="--users", value=str(self._path), remedy=remedy) from None

    def _check(self) -> None:
        """All of it before the first part is computed, as a server looks at a request. In chunks: lists of texts of a
        whole file may be more than one array can hold."""
        if self._table["user"].null_count:
            raise self._wrong("user", None, "name each user")
        for chunk in self._table["items"].chunks:
            kind = getattr(chunk.type, "value_type", None)
            keys = pa.nulls(1) if kind is None else chunk.flatten()
            is_whole = keys.null_count == 0
            if is_whole and pa.types.is_floating(keys.type):
                is_whole = bool(pc.all(pc.equal(pc.floor(keys), keys)).as_py() is not False)
            if not is_whole:
                raise self._wrong("items", str(chunk.type), "give lists of item ids: texts or whole numbers, no nulls")
        if "times_ms" in self._table.column_names:
            self._check_times()

    def _check_times(self) -> None:
        first = 0
        for chunk in self._table["times_ms"].chunks:
            remedy = "give lists of Unix milliseconds, oldest event first"
            try:
                told, bounds = _flat(pa.chunked_array([chunk]))
                times = _milliseconds(told)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                raise self._wrong("times_ms", str(chunk.type), remedy) from None
            goes_back = np.append(False, times[1:] < times[:-1])
            goes_back[bounds[:-1][bounds[:-1] < len(times)]] = False  # from one user to the next
            wrong = np.flatnonzero(goes_back | (times < 0) | (times > LATEST_MS))
            if len(wrong):
                user = first + int(np.searchsorted(bounds, wrong[0], side="right")) - 1
                raise self._wrong("times_ms", f"{times[wrong[0]]} of user {self._table['user'][user]}", remedy)
            first += len(chunk)

    def _wrong(self, column: str, value: Any, remedy: str) -> UserError:
        return UserError(f"is wrong in {self._path}", field=column, value=value, remedy=remedy)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._path.read_bytes()).hexdigest()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def part(self, first: int, end: int) -> list[NamedUser]:
        """Ids of all users are looked up at once: user by user that would take longer than their models."""
        rows = self._table.slice(first, end - first)
        keys, bounds = _flat(rows["items"])
        is_plain = pa.types.is_integer(keys.type) or pa.types.is_string(keys.type)
        named = keys.to_pylist()
        items = self._servable.ids_of(named if is_plain else [k if isinstance(k, str) else int(k) for k in named])
        times, time_bounds = np.zeros(0, np.int64), np.zeros_like(bounds)
        if "times_ms" in rows.column_names:
            told, time_bounds = _flat(rows["times_ms"])
            times = _milliseconds(told)
        users = list[NamedUser]()
        for place, user in enumerate(rows["user"].to_pylist()):
            own = items[bounds[place] : bounds[place + 1]]
            users.append((str(user), *self._history(user, own, times[time_bounds[place] : time_bounds[place + 1]])))
        return users

    def _history(self, user: Any, items: NDArray[np.int64], told: NDArray[np.int64]) -> tuple[History, int]:
        times = told if self._servable.reads_times else np.zeros(len(items), np.int64)
        if len(times) != len(items):
            remedy = "give a time for each item"
            raise UserError("has other numbers of items and times", field="times_ms", value=user, remedy=remedy)
        is_known, none = items > 0, np.zeros(len(items), np.int64)
        history = History(items=items[is_known], times_ms=times[is_known], actions=none[is_known])
        return history, int(told.max(initial=0))


def _flat(column: pa.ChunkedArray) -> tuple[pa.Array, NDArray[np.int64]]:
    """What the lists of a column hold one after the other, and where each begins and ends; none is an empty list."""
    lists = column.combine_chunks()
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return lists.flatten(), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _milliseconds(told: pa.Array) -> NDArray[np.int64]:
    """Of whole numbers, or of moments in any unit."""
    if told.null_count:
        raise pa.ArrowInvalid("a null")
    if pa.types.is_timestamp(told.type):
        told = told.cast(pa.timestamp("ms", told.type.tz), safe=False)
    found: NDArray[np.int64] = told.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return found


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        remedy = "write a text file in UTF-8 with a user a line, or name a file that ends with .parquet"
        raise UserError("is no text in UTF-8", field="--users", value=str(path), remedy=remedy) from None


def strings(values: list[str]) -> pa.Array:
    return pa.array(values, pa.string())
