"""Model inputs from features of events, items and users: keys of embedding tables, and numbers as tensors.

A position is an event or an item.

| kind | in a micro-batch, per position |
| --- | --- |
| category | one key |
| categories, bag | any number of keys, with the offsets of each position's keys in `NAME/offsets` |
| number | two columns of a tensor: the transformed number (0 if missing), and whether it is missing |
| vector | a row of a tensor, read from the memory-mapped array |
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from nestrec.base.errors import ErrorCollector, UserError, did_you_mean
from nestrec.data.batch_loader import OFFSETS
from nestrec.data.dataset import Dataset, DatasetRows
from nestrec.data.dataset_card import DatasetCard, Feature
from nestrec.data.flat_arrays import offsets_of_lengths, slice_index

NUMBER_WIDTH = 2
Ints = NDArray[np.int64]
UserTokens = Literal["summed", "prefix"]
_READ = ("category", "categories", "bag", "number", "vector")


@dataclass(frozen=True, slots=True)
class Column:
    """An input column: a feature that is looked up in a table, or read as numbers, at each position."""

    name: str
    """Name of the feature and of its table, such as `event_tab`."""
    vocabulary_size: int = 0
    """Number of rows of its table; 0 if it has no table because its numbers are read directly."""
    is_bag: bool = False
    """Whether a position has several values."""
    width: int = 0
    """Number of elements per position, if it has no table."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Model inputs of some positions."""

    keys: dict[str, Ints] = field(default_factory=dict)
    """Keys to look up, by column."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Offsets of lists, and number columns."""

    def add_list(self, name: str, values: Ints, offsets: Ints) -> None:
        self.keys[name] = values
        self.tensors[name + OFFSETS] = torch.from_numpy(offsets)

    def add_numbers(self, name: str, values: NDArray[np.float32]) -> None:
        is_missing = np.isnan(values)
        columns = [np.where(is_missing, np.float32(0), values), is_missing.astype(np.float32)]
        self.tensors[name] = torch.from_numpy(np.stack(columns, axis=-1))


def feature_column(feature: Feature) -> Column:
    width = {"number": NUMBER_WIDTH, "vector": feature.width}.get(feature.kind, 0)
    return Column(feature.column, feature.vocabulary_size, feature.is_list, width)


def select_features(known: Sequence[Feature], names: Iterable[str], option: str) -> list[Feature]:
    """Return the features with these names that a model can read.

    Raises:
        UserErrorGroup: If a name is unknown or not usable as an input; the errors suggest available names.
    """
    usable = {feature.name: feature for feature in known if feature.kind in _READ and feature.known == "before"}
    errors = ErrorCollector()
    selected = []
    for name in names:
        if name in usable:
            selected.append(usable[name])
        else:
            errors.add(
                "the dataset does not have an input feature of this name that is known before the user reacts",
                option=option,
                value=name,
                remedy=f"{did_you_mean(name, usable)}; use '' to select no feature",
            )
    errors.raise_if_any()
    return selected


class ItemFeatures:
    """Features by item id. Categories and numbers of the catalog are in memory; vectors are memory-mapped."""

    def __init__(self, dataset: Dataset, features: Sequence[Feature]):
        self._ids, self._lists = dict[str, Ints](), dict[str, tuple[Ints, Ints]]()
        self._numbers, self._vectors = dict[str, NDArray[np.float32]](), dict[str, NDArray[np.float32]]()
        for feature in features:
            name = feature.column
            if feature.is_list:
                self._lists[name] = dataset.item_lists(feature)
            elif feature.kind == "vector":
                self._vectors[name] = dataset.vectors(feature)
            elif feature.kind == "number":
                raw = dataset.items().column(name).to_numpy()
                self._numbers[name] = np.concatenate([[np.float32(np.nan)], feature.transform.numbers(raw)])
            else:
                self._ids[name] = item_column(dataset.items(), name)

    def lookup(self, items: Ints) -> Inputs:
        """Return the inputs of these items."""
        inputs = Inputs({name: ids[items] for name, ids in self._ids.items()})
        for name, (values, offsets) in self._lists.items():
            index, own_offsets = slice_index(offsets[items], offsets[items + 1])
            inputs.add_list(name, values[index], own_offsets)
        for name, numbers in self._numbers.items():
            inputs.add_numbers(name, numbers[items])
        for name, vectors in self._vectors.items():
            inputs.tensors[name] = torch.from_numpy(np.asarray(vectors[items], np.float32))
        return inputs


class EventFeatures:
    """Features of events and their users, read from user rows, for each event."""

    def __init__(self, dataset: Dataset, features: Sequence[Feature]):
        self._features = features
        self._vectors = {f.column: dataset.vectors(f) for f in features if f.kind == "vector"}

    @property
    def columns(self) -> list[str]:
        """Columns of user rows that are read."""
        named = [f for f in self._features if f.kind != "vector"]
        counts = [f.counts_column for f in named if f.is_list and f.owner == "event"]
        return [*(f.column for f in named), *counts]

    def lookup(self, rows: DatasetRows, index: Ints, counts: Ints) -> Inputs:
        """Return the inputs of some events.

        Args:
            rows: Rows of users.
            index: (E,) indices of the events in the concatenated rows.
            counts: Number of these events per row.
        """
        inputs = Inputs()
        for feature in self._features:
            if feature.owner == "event":
                _add_event_feature(feature, rows, index, inputs)
            else:
                self._add_user_feature(feature, rows, counts, inputs)
        return inputs

    def _add_user_feature(self, feature: Feature, rows: DatasetRows, counts: Ints, inputs: Inputs) -> None:
        name = feature.column
        if feature.kind == "vector":
            vectors = np.asarray(self._vectors[name][rows.indices], np.float32)
            inputs.tensors[name] = torch.from_numpy(np.repeat(vectors, counts, axis=0))
        elif feature.is_list:
            values, offsets = rows.lists[name]
            of_event = np.repeat(np.arange(len(counts)), counts)
            value_index, own_offsets = slice_index(offsets[of_event], offsets[of_event + 1])
            inputs.add_list(name, values[value_index].astype(np.int64), own_offsets)
        elif feature.kind == "number":
            inputs.add_numbers(name, np.repeat(feature.transform.numbers(rows.scalars[name]), counts))
        else:
            inputs.keys[name] = np.repeat(rows.scalars[name].astype(np.int64), counts)


def _add_event_feature(feature: Feature, rows: DatasetRows, index: Ints, inputs: Inputs) -> None:
    name = feature.column
    if feature.is_list:
        counts = rows.lists[feature.counts_column][0].astype(np.int64)
        starts = offsets_of_lengths(counts)
        value_index, offsets = slice_index(starts[index], starts[index + 1])
        inputs.add_list(name, rows.lists[name][0][value_index].astype(np.int64), offsets)
    elif feature.kind == "number":
        inputs.add_numbers(name, feature.transform.numbers(rows.lists[name][0][index]))
    else:
        inputs.keys[name] = rows.lists[name][0][index].astype(np.int64)


def rename_columns(inputs: Inputs, old: str, new: str) -> Inputs:
    """Return the same inputs with another prefix of the column names."""

    def of(name: str) -> str:
        return new + name.removeprefix(old)

    return Inputs({of(n): v for n, v in inputs.keys.items()}, {of(n): v for n, v in inputs.tensors.items()})


def item_column(items: pa.Table, name: str) -> Ints:
    """Return the category of each item id; row 0 (unknown item) is 0."""
    values = items.column(name).to_numpy().astype(np.int64)
    return np.concatenate([[0], values])


def select_features_by_owner(
    card: DatasetCard, names_of_owner: dict[str, tuple[str, ...]], section: str
) -> dict[str, list[Feature]]:
    """Return the features that a config names, by owner.

    Raises:
        UserErrorGroup: If the dataset lacks some of them; all missing names are reported.
    """
    known = {"event": card.event_features, "user": card.user_features, "item": card.item_features}
    errors = ErrorCollector()
    selected = dict[str, list[Feature]]()
    for owner, names in names_of_owner.items():
        with errors.collecting():
            selected[owner] = select_features(known[owner], names, f"{section}.{owner}_features")
    errors.raise_if_any()
    return selected


def prefix_columns(mode: UserTokens, user_features: Sequence[Feature]) -> tuple[str, ...]:
    """Return the columns that become separate tokens before the history."""
    if mode == "prefix" and not user_features:
        raise UserError(
            "a prefix needs at least one user feature",
            option="task.inputs.user_feature_mode",
            value=mode,
            remedy="set --task.inputs.user_features, or use summed",
        )
    return tuple(feature.column for feature in user_features)[: num_prefix_tokens(mode, len(user_features))]


def num_prefix_tokens(mode: UserTokens, num_features: int) -> int:
    """Return how many user features become separate tokens before the history: all of them or none."""
    return num_features if mode == "prefix" else 0
