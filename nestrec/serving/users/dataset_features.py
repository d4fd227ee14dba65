"""Features of a dataset's events and users in the ids of a model.

The dataset may be another than the one that the model has learned from, or have grown since: categories are matched by
their names. What was made of raw values when it was prepared must have been made in the model's way.

Legend: E events, U users, F fields of a column.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.data.card import Feature
from nestrec.data.dataset import Dataset, Rows
from nestrec.data.samples.slices import slice_index
from nestrec.serving.api.reading import Reader
from nestrec.serving.model.inputs import LARGEST_NUMBER, number_bits, packed_ids
from nestrec.serving.model.spec import ColumnSpec
from nestrec.serving.users.columns import spread

Ints = NDArray[np.int64]
Values = dict[str, Ints]


class DatasetFeatures:
    """Of one dataset and one model."""

    def __init__(self, dataset: Dataset, reader: Reader):
        self._dataset, self._reader, servable = dataset, reader, reader.servable
        self._known = {feature.column: feature for feature in dataset.card.features}
        self._ids: dict[str, Ints] = {}
        self._of_events, self._of_users = servable.event_features, servable.user_features
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

    def of_events(self, rows: Rows, num_events: int) -> Values:
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

    def of_users(self, rows: Rows) -> Values:
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
        known, vocabulary = self._reader.servable.column_ids[column.name], self._dataset.vocabulary(column.name)
        ids, keys = vocabulary.column("id").to_numpy(), vocabulary.column("key").to_pylist()
        found = np.zeros(int(ids.max(initial=0)) + 1, np.int64)
        found[ids] = [known.get(key, 0) for key in keys]
        return found

    def _default(
        self, name: str, column: ColumnSpec, defaults: Mapping[str, str | None], field: str, count: int
    ) -> Values:
        """Of a feature that the dataset does not have."""
        if name not in defaults:
            remedy = f"name a dataset that has it, or export the model with defaults.{field}"
            raise UserError(
                "is read by the model, and the dataset does not have it",
                field=field,
                value=str(self._dataset.folder),
                remedy=remedy,
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
            field=column.name,
            value=str(self._dataset.folder),
            remedy=remedy,
        )


def _by_field(column: ColumnSpec, values: Ints) -> Values:
    """values: (places, F)"""
    return dict(zip(column.fields, np.ascontiguousarray(values.T), strict=True))


def _computable(values: NDArray[np.float32], nothing: float) -> NDArray[np.float32]:
    """Numbers that a model cannot compute with are not known."""
    return np.where(np.abs(values) <= LARGEST_NUMBER, values, np.float32(nothing))
