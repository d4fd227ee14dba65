"""Users of a batch job: all of a dataset, those of a list, or those of a file with their histories."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nestrec.base.errors import UserError, did_you_mean
from nestrec.data.dataset import Dataset
from nestrec.serving.api.notes import Notes
from nestrec.serving.api.reading import Reader
from nestrec.serving.api.schema import BadRequestError, NotToldError
from nestrec.serving.model.servable import Servable
from nestrec.serving.users.columns import NO_LIMITS, UserColumns
from nestrec.serving.users.dataset_users import DatasetUsers
from nestrec.serving.users.file_users import FileUsers

_MOST_NAMED = 1000
"""values of a category among which a similar one is looked for"""


class BatchUsers(Protocol):
    """Users in a fixed order."""

    @property
    def digest(self) -> str:
        """Of who they are and what they did."""
        ...

    def __len__(self) -> int: ...

    def read(self, first: int, end: int) -> UserColumns:
        """Those from `first` on, before `end`."""
        ...


def users_of(users: Path | str, servable: Servable, data: Path | str | None, context: Mapping[str, Any]) -> BatchUsers:
    """users: `all`, a text file with a key a line, or a Parquet file with the columns user, items and perhaps others of
    `nestrec.serving.users.users_file`. data: the dataset that keys are of. context: of the event that is asked for, by
    name of a feature, where a file does not tell it of each user."""
    given: Any = users
    if not isinstance(given, str | Path):
        remedy = 'give "all", or the path of a text file with a user a line or of a Parquet file with histories'
        raise UserError("is no path", field="users", value=given, remedy=remedy)
    users = str(users)
    if users != "all" and not Path(users).is_file():
        remedy = "write all, or a text file with a user a line, or a Parquet file with user, items and times_ms"
        raise UserError("is no file", field="users", value=users, remedy=remedy)
    _check_context(context, servable)
    if users.endswith(".parquet"):
        return FileUsers(Path(users), servable, context)
    if data is None:
        remedy = "name the dataset of the users (data), or a Parquet file of users with their histories"
        raise UserError("needs a dataset, which this model does not name", field="users", value=users, remedy=remedy)
    if not isinstance(data, str | Path):
        raise UserError("is no path", field="data", value=data, remedy="give the folder of a dataset")
    return _UsersOfDataset(Dataset.open(data), servable, None if users == "all" else Path(users), context)


class _UsersOfDataset:
    def __init__(self, dataset: Dataset, servable: Servable, listed: Path | None, context: Mapping[str, Any]):
        self._dataset, self._users = dataset, DatasetUsers(dataset, servable, context)
        self._places = np.arange(dataset.num_samples)
        if listed is not None:
            keys = [line for line in _text_of(listed).split("\n") if line]
            known = {key: place for place, key in enumerate(dataset.user_keys(self._places))}
            unknown = [key for key in keys if key not in known]
            if unknown:
                remedy = "list users of the dataset, one a line; histories stand in a file that ends with .parquet"
                raise UserError("are no users of the dataset", field="users", value=unknown[:10], remedy=remedy)
            self._places = np.array([known[key] for key in keys], np.int64)
        try:
            self.read(0, 0)
        except NotToldError as error:  # of the context: a dataset does not say what will be
            name = error.field.partition(".")[2]
            remedy = f"set {error.field}, or export the model with defaults.features.{name}"
            raise UserError(error.message, field=error.field, value=None, remedy=remedy) from None

    @property
    def digest(self) -> str:
        return hashlib.sha256(self._dataset.digest.encode() + self._places.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._places)

    def read(self, first: int, end: int) -> UserColumns:
        return self._users.read(self._places[first:end])


def _check_context(context: Mapping[str, Any], servable: Servable) -> None:
    """A mistake in it would be one in what everybody gets."""
    for name, value in context.items():
        field, known = f"context.{name}", servable.context_features
        if name not in known:
            remedy = did_you_mean(name, known) if known else "leave it out: the model reads none"
            raise UserError("is not read by the model", field=field, value=value, remedy=remedy)
        reader, column = Reader(servable, NO_LIMITS, Notes()), servable.event_features[name]
        try:
            reader.values(value, 1, column, field, is_each=False)
        except BadRequestError as error:
            raise UserError(error.message, field=field, value=value, remedy="give it as requests do") from None
        for said in reader.notes.said()["unknown"]:
            is_short = column.keys is not None and len(column.keys) < _MOST_NAMED
            remedy = did_you_mean(str(said["ids"][0]), column.keys or ()) if is_short else "give one of the log"
            remedy += "; none stands for one that nobody knows"
            raise UserError("is no value that the model knows", field=field, value=value, remedy=remedy)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        remedy = "write a text file in UTF-8 with a user a line, or name a file that ends with .parquet"
        raise UserError("is no text in UTF-8", field="users", value=str(path), remedy=remedy) from None
