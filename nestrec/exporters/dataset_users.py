"""Reads users of a dataset as model inputs, for batch inference and for the checks of an export.

`DatasetUsers` reads histories and features of many users at once and translates them to the ids of the model.
`UserColumns` stores them as flat columns and returns each user in the form that a server would build from a request, so
offline and online inference see the same inputs.

The dataset may be a different one than the model was trained on, or a later generation of it: category values are
matched by name. Features that are derived from raw values at preparation (hashed texts, quantiles) must have been
prepared with the same settings as in the training data.

Legend: U users, E events of all users, F fields of a column.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import UserError, require
from nestrec.data.dataset import Dataset, DatasetRows
from nestrec.data.dataset_card import Feature
from nestrec.data.dataset_schema import ACTIONS, ITEM_IDS, TIMESTAMPS_MS
from nestrec.data.flat_arrays import slice_index
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver
from nestrec.serving.inputs.request_schema import HistoryFields, ItemId
from nestrec.serving.inputs.responses import Done
from nestrec.serving.model.request_inputs import LARGEST_NUMBER, History, number_bits, pad_ids
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec

Ints = NDArray[np.int64]
NO_LIMITS = LimitsConfig(max_history_events=1 << 40, max_item_id_length=1 << 20, max_text_length=1 << 30)


class _IgnoredNotes(RequestNotes):
    """Discards notes about unknown ids and default values, which offline inference does not report."""

    def add_unknown(self, field: str, ids: Iterable[ItemId], done: Done) -> None: ...

    def add_default(self, field: str, value: Any) -> None: ...


def make_request_resolver(servable: Servable) -> RequestResolver:
    """Return a resolver that reads user data exactly as a server reads requests, but without size limits."""
    return RequestResolver(servable, NO_LIMITS, _IgnoredNotes())


@dataclass(frozen=True, slots=True)
class ResolvedUser:
    """Model inputs of one user."""

    key: str
    history: History
    """Events that the model reads; the default history of the export if the model knows no event of the user."""
    seen: Ints
    """Items of the user's own history, without default events."""
    now_ms: int
    """Time of the query in Unix milliseconds."""


@dataclass(frozen=True, kw_only=True)
class UserColumns:
    """Histories and features of many users as flat columns, without events of items that the model does not know."""

    servable: Servable
    keys: Sequence[str]
    """Ids of the users."""
    items: Ints
    """(E,) item ids of the model."""
    bounds: Ints
    """(U + 1,) offsets: events of user `i` are `bounds[i]:bounds[i + 1]`."""
    times_ms: Ints
    """(E,) event times in Unix milliseconds; zeros if the model does not read times."""
    actions: Ints
    """(E,) action bits; zeros if the model does not read actions."""
    now_ms: Ints
    """(U,) time of the query of each user in Unix milliseconds."""
    event_features: Mapping[str, Ints]
    """(E,) values of each field (`ColumnSpec.fields`) of the event features."""
    user_features: Mapping[str, Ints]
    """(U,) values of each field of the user features."""
    query_features: Mapping[str, Ints]
    """(U,) values of each field of the context features, which describe the event to predict."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> Ints:
        """(U,) number of events of each user."""
        return np.diff(self.bounds)

    def users(self, first: int, end: int) -> list[ResolvedUser]:
        """Return the users `first` to `end - 1`."""
        return [self._user(index) for index in range(first, end)]

    def _user(self, index: int) -> ResolvedUser:
        now_ms = int(self.now_ms[index])
        user_values = {name: values[index] for name, values in self.user_features.items()}
        own = self._own_history(slice(self.bounds[index], self.bounds[index + 1]))
        history = own if len(own) else self._default_history(now_ms)
        repeated = {name: np.broadcast_to(value, len(history)) for name, value in user_values.items()}
        query_features = {name: int(values[index]) for name, values in self.query_features.items()}
        query_features |= {name: int(value) for name, value in user_values.items()}
        history = replace(history, features={**history.features, **repeated}, query_features=query_features)
        return ResolvedUser(self.keys[index], history, own.items, now_ms)

    def _own_history(self, events: slice) -> History:
        features = {name: values[events] for name, values in self.event_features.items()}
        items, times_ms, actions = (column[events] for column in (self.items, self.times_ms, self.actions))
        return History(items=items, times_ms=times_ms, actions=actions, features=features)

    def _default_history(self, now_ms: int) -> History:
        default = self.servable.spec.defaults.history or ()
        return self._reader.events(HistoryFields(items=list(default)), now_ms)

    @cached_property
    def _reader(self) -> RequestResolver:
        return make_request_resolver(self.servable)


def filter_bounds(bounds: Ints, is_known: NDArray[np.bool_]) -> Ints:
    """Return the offsets of users after all events that are not `is_known` have been removed."""
    result: Ints = np.concatenate([[0], np.cumsum(is_known)]).astype(np.int64)[bounds]
    return result


def last_event_values(values: Ints, bounds: Ints) -> Ints:
    """Return the (U,) value of the last event of each user; 0 for a user without events."""
    has_events = np.diff(bounds) > 0
    result = np.zeros(len(bounds) - 1, np.int64)
    result[has_events] = values[bounds[1:][has_events] - 1]
    return result


def broadcast_values(values: Mapping[str, Ints], count: int) -> dict[str, Ints]:
    """Repeat the single value of each field `count` times."""
    return {name: np.broadcast_to(one[0], count) for name, one in values.items()}


def resolve_context_features(
    reader: RequestResolver, context: Mapping[str, Any], count: int, *, exclude: Sequence[str] = ()
) -> dict[str, Ints]:
    """Return the context features that are the same for all users, from the options or the defaults of the export.

    Args:
        reader: Resolver of the model.
        context: Values by feature name.
        count: Number of users.
        exclude: Names of features that are known per user and are left out here.

    Returns:
        (count,) values by field.

    Raises:
        BadRequestError: A feature has neither a value nor a default.
    """
    servable = reader.servable
    result = dict[str, Ints]()
    for name in (name for name in servable.context_features if name not in exclude):
        field = f"context.{name}"
        column = servable.event_features[name]
        value = context[name] if name in context else reader.default(name, servable.spec.defaults.features, field)
        result |= broadcast_values(reader.values(value, 1, column, field, is_each=False), count)
    return result


Values = dict[str, Ints]


class DatasetFeatures:
    """Translates features of a dataset's events and users to the ids of a model.

    Raises:
        UserError: A feature has a different kind or was prepared with different settings than in the model.
    """

    def __init__(self, dataset: Dataset, reader: RequestResolver):
        self._dataset = dataset
        self._reader = reader
        servable = reader.servable
        self._known = {feature.column: feature for feature in dataset.card.features}
        self._ids: dict[str, Ints] = {}
        self._event_columns = servable.event_features
        self._user_columns = servable.user_features
        for column in (*self._event_columns.values(), *self._user_columns.values()):
            if column.name in self._known:
                self._check(column, self._known[column.name])

    @property
    def columns(self) -> list[str]:
        """Columns of the dataset that must be read."""
        read = (*self._event_columns.values(), *self._user_columns.values())
        named = [feature for column in read if (feature := self._known.get(column.name)) and feature.kind != "vector"]
        counts = [feature.counts_column for feature in named if feature.is_list and feature.owner == "event"]
        return [*(feature.column for feature in named), *counts]

    def event_features(self, rows: DatasetRows, num_events: int) -> Values:
        """Return the (E,) values of each field of the event features; missing features get their default."""
        defaults = self._reader.servable.spec.defaults.features
        result: Values = {}
        for name, column in self._event_columns.items():
            if column.name not in self._known:
                result |= self._default(name, column, defaults, f"features.{name}", num_events)
                continue
            counts = rows.lists.get(self._known[column.name].counts_column)
            offsets = None if counts is None else np.concatenate([[0], np.cumsum(counts[0], dtype=np.int64)])
            result |= self._values(column, rows.lists[column.name][0], offsets)
        return result

    def user_features(self, rows: DatasetRows) -> Values:
        """Return the (U,) values of each field of the user features; missing features get their default."""
        defaults = self._reader.servable.spec.defaults.user_features
        result: Values = {}
        for name, column in self._user_columns.items():
            if column.name not in self._known:
                result |= self._default(name, column, defaults, f"user_features.{name}", rows.num_rows)
            elif column.kind == "vector":
                vectors = np.asarray(self._dataset.vectors(self._known[column.name])[rows.indices], np.float32)
                result |= _by_field(column, number_bits(_replace_invalid(vectors, 0.0)))
            elif column.has_several:
                result |= self._values(column, *rows.lists[column.name])
            else:
                result |= self._values(column, rows.scalars[column.name])
        return result

    def _values(self, column: ColumnSpec, values: NDArray[np.generic], offsets: Ints | None = None) -> Values:
        """Return values by field. `offsets` are the bounds of each list if the column has several values per row."""
        if column.kind == "number":
            return {column.name: number_bits(_replace_invalid(column.transform.numbers(values), np.nan))}
        ids = values.astype(np.int64)
        if not column.has_several:
            return {column.name: self._model_ids(column, ids)}
        assert offsets is not None
        # A server truncates the lists of stored events in the same way.
        ends = np.minimum(offsets[1:], offsets[:-1] + column.most_ids)
        index, own_offsets = slice_index(offsets[:-1], ends)
        taken = ids[index] if column.kind == "bag" else self._model_ids(column, ids[index])
        counts = np.diff(np.concatenate([[0], np.cumsum(taken > 0)])[own_offsets])
        return _by_field(column, pad_ids(taken[taken > 0], counts, column.most_ids))

    def _model_ids(self, column: ColumnSpec, ids: Ints) -> Ints:
        if column.keys is None or column.transform.kind == "quantiles":
            return np.where(ids < column.num_rows, ids, 0)
        if column.name not in self._ids:
            self._ids[column.name] = self._translation(column)
        return self._ids[column.name][ids]

    def _translation(self, column: ColumnSpec) -> Ints:
        """Return the model's id of each category id of the dataset; 0 if the model does not know the value."""
        known = self._reader.servable.column_ids[column.name]
        vocabulary = self._dataset.vocabulary(column.name)
        ids, keys = vocabulary.column("id").to_numpy(), vocabulary.column("key").to_pylist()
        result = np.zeros(int(ids.max(initial=0)) + 1, np.int64)
        result[ids] = [known.get(key, 0) for key in keys]
        return result

    def _default(
        self, name: str, column: ColumnSpec, defaults: Mapping[str, str | None], field: str, count: int
    ) -> Values:
        """Return the default of a feature that the dataset does not have."""
        require(
            name in defaults,
            "the model reads this feature, but the dataset does not have it",
            option=field,
            value=str(self._dataset.folder),
            remedy=f"use a dataset that has it, or export the model with --defaults.{field}",
        )
        return broadcast_values(self._reader.values(defaults[name], 1, column, field, is_each=False), count)

    def _check(self, column: ColumnSpec, feature: Feature) -> None:
        is_made = column.kind == "bag" or column.transform.kind == "quantiles"
        is_same = feature.kind == column.kind and (not is_made or feature.transform == column.transform)
        is_named = column.keys is None or self._dataset.has_vocabulary(column.name)
        width = feature.width if column.kind == "vector" else column.width
        if is_same and is_named and width == column.width:
            return
        remedy = "prepare the dataset with the options of the training data, or use a Parquet file of users"
        raise UserError(
            "the feature has a different kind in the dataset than in the model, or was prepared with other options",
            option=column.name,
            value=str(self._dataset.folder),
            remedy=remedy,
        )


def _by_field(column: ColumnSpec, values: Ints) -> Values:
    """Split the (rows, F) values into one column per field."""
    return dict(zip(column.fields, np.ascontiguousarray(values.T), strict=True))


def _replace_invalid(values: NDArray[np.float32], nothing: float) -> NDArray[np.float32]:
    """Replace numbers that are NaN, infinite or too large for the model by `nothing`."""
    return np.where(np.abs(values) <= LARGEST_NUMBER, values, np.float32(nothing))


class DatasetUsers:
    """Users of a dataset, addressed by index. Events of items that the model does not know are skipped, as in requests.

    Args:
        dataset: Dataset of the users.
        servable: Model that reads them.
        context: Values of context features of the event to predict, by name. None takes those of each user's last
            event.

    Raises:
        UserError: The dataset lacks something that the model reads.
    """

    def __init__(self, dataset: Dataset, servable: Servable, context: Mapping[str, Any] | None):

        self._reader = make_request_resolver(servable)
        self._servable = servable
        self._context = context
        keys = dataset.items().column("item_key").to_pylist()
        self._ids = np.concatenate([[0], servable.ids_of(keys)]).astype(np.int64)
        self._features = DatasetFeatures(dataset, self._reader)
        if servable.reads_times and not dataset.card.has_timestamps:
            remedy = "use a dataset whose events have times"
            raise UserError(
                "the model reads event times, but the dataset has none",
                option="data",
                value=str(dataset.folder),
                remedy=remedy,
            )
        columns = (ITEM_IDS, TIMESTAMPS_MS, ACTIONS, *self._features.columns)
        self._dataset = dataset.select_columns(columns)

    def read(self, indices: NDArray[np.int64]) -> UserColumns:
        """Return the users at these indices; the time of each query is that of the user's last event."""
        rows = self._dataset.rows(indices)
        codes, offsets = rows.lists[ITEM_IDS]
        bounds = offsets.astype(np.int64)
        items = self._ids[codes]
        times, actions = (
            rows.lists[name][0].astype(np.int64) if name in rows.lists else np.zeros(len(items), np.int64)
            for name in (TIMESTAMPS_MS, ACTIONS)
        )
        is_known = items > 0
        event_features = self._features.event_features(rows, len(items))
        return UserColumns(
            servable=self._servable,
            keys=self._dataset.user_keys(indices),
            items=items[is_known],
            bounds=filter_bounds(bounds, is_known),
            times_ms=times[is_known] * self._servable.reads_times,
            actions=actions[is_known] * self._servable.reads_actions,
            now_ms=last_event_values(times, bounds),
            event_features={name: values[is_known] for name, values in event_features.items()},
            user_features=self._features.user_features(rows),
            query_features=self._query_features(event_features, bounds),
        )

    def _query_features(self, event_features: Values, bounds: Ints) -> Values:
        if self._context is not None:
            return resolve_context_features(self._reader, self._context, len(bounds) - 1)
        columns = [self._servable.event_features[name] for name in self._servable.context_features]
        return {
            field: last_event_values(event_features[field], bounds) for column in columns for field in column.fields
        }
