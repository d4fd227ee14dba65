"""Users of a dataset, as a model reads them.

Users of datasets and of files, as a model reads them: what requests would tell of each, for very many at once.

Many users one after the other, in the ids of a model, and each of them as a request would have told it.

Legend: U users, E events of all of them.

Features of a dataset's events and users in the ids of a model.

The dataset may be another than the one that the model has learned from, or have grown since: categories are matched by
their names. What was made of raw values when it was prepared must have been made in the model's way.

Legend: E events, U users, F fields of a column.
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
from nestrec.serving.model.request_inputs import LARGEST_NUMBER, History, number_bits, packed_ids
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import ColumnSpec

Ints = NDArray[np.int64]
NO_LIMITS = LimitsConfig(max_history=1 << 40, max_id_characters=1 << 20, max_text_characters=1 << 30)


class _IgnoredNotes(RequestNotes):
    """Of very many users: nobody is told what of theirs is unknown or a default."""

    def add_unknown(self, field: str, ids: Iterable[ItemId], done: Done) -> None: ...

    def add_default(self, field: str, value: Any) -> None: ...


def reader_of(servable: Servable) -> RequestResolver:
    """Reads what is told of users as a server does."""
    return RequestResolver(servable, NO_LIMITS, _IgnoredNotes())


@dataclass(frozen=True, slots=True)
class ResolvedUser:
    """What is asked of a model about a user."""

    key: str
    history: History
    """what the model reads: where it knows no event of the user, the events that its export names for such users"""
    seen: Ints
    """items that the user really has"""
    now_ms: int


@dataclass(frozen=True, kw_only=True)
class UserColumns:
    """Users with their events, as far as the model knows these."""

    servable: Servable
    keys: Sequence[str]
    items: Ints
    """(E,) known ones"""
    bounds: Ints
    """(U + 1,) where the events of each user begin, and where the last ones end"""
    times_ms: Ints
    """(E,) zeros where the model does not look at them"""
    actions: Ints
    """(E,) action bits, likewise"""
    now_ms: Ints
    """(U,) when each is asked for"""
    of_events: Mapping[str, Ints]
    """(E,) by `ColumnSpec.fields` of features of events"""
    of_users: Mapping[str, Ints]
    """(U,) likewise of users"""
    asked: Mapping[str, Ints]
    """(U,) of what histories read of the event that is asked for"""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> Ints:
        """(U,) events of each"""
        return np.diff(self.bounds)

    def users(self, first: int, end: int) -> list[ResolvedUser]:
        """Those from `first` on, before `end`."""
        return [self._user(place) for place in range(first, end)]

    def _user(self, place: int) -> ResolvedUser:
        now_ms = int(self.now_ms[place])
        of_user = {name: values[place] for name, values in self.of_users.items()}
        own = self._own(slice(self.bounds[place], self.bounds[place + 1]))
        history = own if len(own) else self._of_nobody(now_ms)
        of_events = {name: np.broadcast_to(value, len(history)) for name, value in of_user.items()}
        asked = {name: int(values[place]) for name, values in self.asked.items()}
        asked |= {name: int(value) for name, value in of_user.items()}
        history = replace(history, features={**history.features, **of_events}, asked=asked)
        return ResolvedUser(self.keys[place], history, own.items, now_ms)

    def _own(self, events: slice) -> History:
        features = {name: values[events] for name, values in self.of_events.items()}
        items, times_ms, actions = (column[events] for column in (self.items, self.times_ms, self.actions))
        return History(items=items, times_ms=times_ms, actions=actions, features=features)

    def _of_nobody(self, now_ms: int) -> History:
        default = self.servable.spec.defaults.history or ()
        return self._reader.events(HistoryFields(items=list(default)), now_ms)

    @cached_property
    def _reader(self) -> RequestResolver:
        return reader_of(self.servable)


def known_bounds(bounds: Ints, is_known: NDArray[np.bool_]) -> Ints:
    """Bounds of users once only the known events are left."""
    found: Ints = np.concatenate([[0], np.cumsum(is_known)]).astype(np.int64)[bounds]
    return found


def of_last_events(values: Ints, bounds: Ints) -> Ints:
    """(U,) of each user; 0 of one without events."""
    has_events = np.diff(bounds) > 0
    found = np.zeros(len(bounds) - 1, np.int64)
    found[has_events] = values[bounds[1:][has_events] - 1]
    return found


def spread(values: Mapping[str, Ints], count: int) -> dict[str, Ints]:
    """One value of each field, for so many places."""
    return {name: np.broadcast_to(one[0], count) for name, one in values.items()}


def told_context(
    reader: RequestResolver, context: Mapping[str, Any], count: int, *, but: Sequence[str] = ()
) -> dict[str, Ints]:
    """What an option or the export's default tells of the event that so many users are asked for, by the features that
    histories read of it; but those that are known otherwise. `BadRequestError` where neither tells one."""
    servable = reader.servable
    found = dict[str, Ints]()
    for name in (name for name in servable.context_features if name not in but):
        field = f"context.{name}"
        column = servable.event_features[name]
        given = context[name] if name in context else reader.default(name, servable.spec.defaults.features, field)
        found |= spread(reader.values(given, 1, column, field, is_each=False), count)
    return found


Values = dict[str, Ints]


class DatasetFeatures:
    """Of one dataset and one model."""

    def __init__(self, dataset: Dataset, reader: RequestResolver):
        self._dataset = dataset
        self._reader = reader
        servable = reader.servable
        self._known = {feature.column: feature for feature in dataset.card.features}
        self._ids: dict[str, Ints] = {}
        self._of_events = servable.event_features
        self._of_users = servable.user_features
        for column in (*self._of_events.values(), *self._of_users.values()):
            if column.name in self._known:
                self._check(column, self._known[column.name])

    @property
    def columns(self) -> list[str]:
        """Of the rows of users."""
        read = (*self._of_events.values(), *self._of_users.values())
        named = [feature for column in read if (feature := self._known.get(column.name)) and feature.kind != "vector"]
        counts = [feature.counts_column for feature in named if feature.is_list and feature.owner == "event"]
        return [*(feature.column for feature in named), *counts]

    def of_events(self, rows: DatasetRows, num_events: int) -> Values:
        """(E,) by field."""
        defaults = self._reader.servable.spec.defaults.features
        found: Values = {}
        for name, column in self._of_events.items():
            if column.name not in self._known:
                found |= self._default(name, column, defaults, f"features.{name}", num_events)
                continue
            counts = rows.lists.get(self._known[column.name].counts_column)
            offsets = None if counts is None else np.concatenate([[0], np.cumsum(counts[0], dtype=np.int64)])
            found |= self._values(column, rows.lists[column.name][0], offsets)
        return found

    def of_users(self, rows: DatasetRows) -> Values:
        """(U,) by field."""
        defaults = self._reader.servable.spec.defaults.user_features
        found: Values = {}
        for name, column in self._of_users.items():
            if column.name not in self._known:
                found |= self._default(name, column, defaults, f"user_features.{name}", rows.num_rows)
            elif column.kind == "vector":
                vectors = np.asarray(self._dataset.vectors(self._known[column.name])[rows.indices], np.float32)
                found |= _by_field(column, number_bits(_computable(vectors, 0.0)))
            elif column.has_several:
                found |= self._values(column, *rows.lists[column.name])
            else:
                found |= self._values(column, rows.scalars[column.name])
        return found

    def _values(self, column: ColumnSpec, values: NDArray[np.generic], offsets: Ints | None = None) -> Values:
        """offsets: where those of each place begin, of a column that has several."""
        if column.kind == "number":
            return {column.name: number_bits(_computable(column.transform.numbers(values), np.nan))}
        ids = values.astype(np.int64)
        if not column.has_several:
            return {column.name: self._model_ids(column, ids)}
        assert offsets is not None
        most = np.minimum(offsets[1:], offsets[:-1] + column.most_ids)  # as a server takes them of events that it keeps
        index, own_offsets = slice_index(offsets[:-1], most)
        taken = ids[index] if column.kind == "bag" else self._model_ids(column, ids[index])
        counts = np.diff(np.concatenate([[0], np.cumsum(taken > 0)])[own_offsets])
        return _by_field(column, packed_ids(taken[taken > 0], counts, column.most_ids))

    def _model_ids(self, column: ColumnSpec, ids: Ints) -> Ints:
        if column.keys is None or column.transform.kind == "quantiles":
            return np.where(ids < column.num_rows, ids, 0)
        if column.name not in self._ids:
            self._ids[column.name] = self._translation(column)
        return self._ids[column.name][ids]

    def _translation(self, column: ColumnSpec) -> Ints:
        """The model's id of each of the dataset's."""
        known = self._reader.servable.column_ids[column.name]
        vocabulary = self._dataset.vocabulary(column.name)
        ids, keys = vocabulary.column("id").to_numpy(), vocabulary.column("key").to_pylist()
        found = np.zeros(int(ids.max(initial=0)) + 1, np.int64)
        found[ids] = [known.get(key, 0) for key in keys]
        return found

    def _default(
        self, name: str, column: ColumnSpec, defaults: Mapping[str, str | None], field: str, count: int
    ) -> Values:
        """Of a feature that the dataset does not have."""
        require(
            name in defaults,
            "is read by the model, and the dataset does not have it",
            option=field,
            value=str(self._dataset.folder),
            remedy=f"name a dataset that has it, or export the model with defaults.{field}",
        )
        return spread(self._reader.values(defaults[name], 1, column, field, is_each=False), count)

    def _check(self, column: ColumnSpec, feature: Feature) -> None:
        is_made = column.kind == "bag" or column.transform.kind == "quantiles"
        is_same = feature.kind == column.kind and (not is_made or feature.transform == column.transform)
        is_named = column.keys is None or self._dataset.has_vocabulary(column.name)
        width = feature.width if column.kind == "vector" else column.width
        if is_same and is_named and width == column.width:
            return
        remedy = "name a dataset that was prepared as the one that the model was trained on, or a Parquet file of users"
        raise UserError(
            "is another kind of feature in the dataset than in the model, or was made otherwise of raw values",
            option=column.name,
            value=str(self._dataset.folder),
            remedy=remedy,
        )


def _by_field(column: ColumnSpec, values: Ints) -> Values:
    """values: (places, F)"""
    return dict(zip(column.fields, np.ascontiguousarray(values.T), strict=True))


def _computable(values: NDArray[np.float32], nothing: float) -> NDArray[np.float32]:
    """Numbers that a model cannot compute with are not known."""
    return np.where(np.abs(values) <= LARGEST_NUMBER, values, np.float32(nothing))


class DatasetUsers:
    """Users by their place in a dataset. Events of items that the model does not know are left out, as a request's."""

    def __init__(self, dataset: Dataset, servable: Servable, context: Mapping[str, Any] | None):
        """context: of the event that is asked for, by name of a feature; none: as at the user's last event."""
        self._reader = reader_of(servable)
        self._servable = servable
        self._context = context
        keys = dataset.items().column("item_key").to_pylist()
        self._ids = np.concatenate([[0], servable.ids_of(keys)]).astype(np.int64)
        self._features = DatasetFeatures(dataset, self._reader)
        if servable.reads_times and not dataset.card.has_timestamps:
            remedy = "name a dataset of events with times"
            raise UserError(
                "has no times, which the model reads", option="data", value=str(dataset.folder), remedy=remedy
            )
        wanted = (ITEM_IDS, TIMESTAMPS_MS, ACTIONS, *self._features.columns)
        self._dataset = dataset.only(wanted)

    def read(self, places: NDArray[np.int64]) -> UserColumns:
        """The users at these places, asked for at the moments of their last events."""
        rows = self._dataset.rows(places)
        of_items, offsets = rows.lists[ITEM_IDS]
        bounds = offsets.astype(np.int64)
        items = self._ids[of_items]
        times, actions = (
            rows.lists[name][0].astype(np.int64) if name in rows.lists else np.zeros(len(items), np.int64)
            for name in (TIMESTAMPS_MS, ACTIONS)
        )
        is_known = items > 0
        of_events = self._features.of_events(rows, len(items))
        return UserColumns(
            servable=self._servable,
            keys=self._dataset.user_keys(places),
            items=items[is_known],
            bounds=known_bounds(bounds, is_known),
            times_ms=times[is_known] * self._servable.reads_times,
            actions=actions[is_known] * self._servable.reads_actions,
            now_ms=of_last_events(times, bounds),
            of_events={name: values[is_known] for name, values in of_events.items()},
            of_users=self._features.of_users(rows),
            asked=self._asked(of_events, bounds),
        )

    def _asked(self, of_events: Values, bounds: Ints) -> Values:
        if self._context is not None:
            return told_context(self._reader, self._context, len(bounds) - 1)
        columns = [self._servable.event_features[name] for name in self._servable.context_features]
        return {field: of_last_events(of_events[field], bounds) for column in columns for field in column.fields}
