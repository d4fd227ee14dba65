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


def users_of(users: str, servable: Servable, data: Path | None) -> BatchUsers:
    """users: `all`, a text file with a key a line, or a Parquet file with the columns user, items and perhaps times_ms.
    data: the dataset that keys are of."""
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
            keys = [line for line in listed.read_text().split("\n") if line]
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
        self._table = pq.read_table(path)
        needed = ["user", "items", *(["times_ms"] if servable.reads_times else [])]
        missing = [name for name in needed if name not in self._table.column_names]
        if missing:
            remedy = "give columns user, items (lists of item ids) and times_ms (lists, where the model reads times)"
            raise UserError(f"has no column {', '.join(missing)}", field="--users", value=str(path), remedy=remedy)

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
            times = told.cast(pa.int64()).to_numpy(zero_copy_only=False)
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


def strings(values: list[str]) -> pa.Array:
    return pa.array(values, pa.string())
