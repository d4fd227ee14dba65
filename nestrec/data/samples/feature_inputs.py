"""Features of events, items and users as micro-batches hold them: keys of tables, and numbers as tensors.

| kind | in a micro-batch, for each place (an event, or an item) |
| --- | --- |
| category | one key |
| categories, bag | any number of keys, and where those of each place begin (`NAME/offsets`) |
| number | a tensor of two columns: the number by its transform, 0 where it is not known, and whether it is not |
| vector | a tensor of its width, read out of the mapped array |
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
    """A feature that is looked up, or read as numbers, for each place."""

    name: str
    """feature and table name, such as `event_tab`"""
    vocabulary_size: int = 0
    """rows of its table; 0: it has none, its numbers are read as they are"""
    is_bag: bool = False
    """a place has several of them"""
    width: int = 0
    """of its numbers, where it has no table"""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is read at some places."""

    keys: dict[str, Ints] = field(default_factory=dict)
    """to look up, by column"""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """offsets of lists, and columns that are numbers"""

    def add_list(self, name: str, values: Ints, offsets: Ints) -> None:
        self.keys[name] = values
        self.tensors[name + OFFSETS] = torch.from_numpy(offsets)

    def add_numbers(self, name: str, values: NDArray[np.float32]) -> None:
        is_missing = np.isnan(values)
        columns = [np.where(is_missing, np.float32(0), values), is_missing.astype(np.float32)]
        self.tensors[name] = torch.from_numpy(np.stack(columns, axis=-1))


def column_of(feature: Feature) -> Column:
    width = {"number": NUMBER_WIDTH, "vector": feature.width}.get(feature.kind, 0)
    return Column(feature.column, feature.vocabulary_size, feature.is_list, width)


def chosen_features(known: Sequence[Feature], wanted: Iterable[str], field_name: str) -> list[Feature]:
    """The features of these names that a model can read, or an error that tells which there are."""
    usable = {feature.name: feature for feature in known if feature.kind in _READ and feature.known == "before"}
    mistakes = ErrorCollector()
    found = []
    for name in wanted:
        if name in usable:
            found.append(usable[name])
        else:
            mistakes.add(
                "is no feature of this dataset that is known before the user reacts, and that models read",
                option=field_name,
                value=name,
                remedy=f"{did_you_mean(name, usable)}; '' takes none",
            )
    mistakes.raise_if_any()
    return found


class ItemFeatures:
    """Features by item id. Categories and numbers of the catalogue are in memory, vectors stay in their file."""

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

    def of(self, items: Ints) -> Inputs:
        """Of these items."""
        found = Inputs({name: ids[items] for name, ids in self._ids.items()})
        for name, (values, offsets) in self._lists.items():
            index, own_offsets = slice_index(offsets[items], offsets[items + 1])
            found.add_list(name, values[index], own_offsets)
        for name, numbers in self._numbers.items():
            found.add_numbers(name, numbers[items])
        for name, vectors in self._vectors.items():
            found.tensors[name] = torch.from_numpy(np.asarray(vectors[items], np.float32))
        return found


class EventFeatures:
    """Features of events and of their users, out of the rows of users; at every event."""

    def __init__(self, dataset: Dataset, features: Sequence[Feature]):
        self._features = features
        self._vectors = {f.column: dataset.vectors(f) for f in features if f.kind == "vector"}

    @property
    def columns(self) -> list[str]:
        """Of the rows of users."""
        named = [f for f in self._features if f.kind != "vector"]
        counts = [f.counts_column for f in named if f.is_list and f.owner == "event"]
        return [*(f.column for f in named), *counts]

    def of(self, rows: DatasetRows, index: Ints, events: Ints) -> Inputs:
        """index: of events in the concatenated rows; events: how many of them are of each row."""
        found = Inputs()
        for feature in self._features:
            if feature.owner == "event":
                _of_event(feature, rows, index, found)
            else:
                self._of_user(feature, rows, events, found)
        return found

    def _of_user(self, feature: Feature, rows: DatasetRows, events: Ints, found: Inputs) -> None:
        name = feature.column
        if feature.kind == "vector":
            vectors = np.asarray(self._vectors[name][rows.indices], np.float32)
            found.tensors[name] = torch.from_numpy(np.repeat(vectors, events, axis=0))
        elif feature.is_list:
            values, offsets = rows.lists[name]
            of_event = np.repeat(np.arange(len(events)), events)
            taken, own_offsets = slice_index(offsets[of_event], offsets[of_event + 1])
            found.add_list(name, values[taken].astype(np.int64), own_offsets)
        elif feature.kind == "number":
            found.add_numbers(name, np.repeat(feature.transform.numbers(rows.scalars[name]), events))
        else:
            found.keys[name] = np.repeat(rows.scalars[name].astype(np.int64), events)


def _of_event(feature: Feature, rows: DatasetRows, index: Ints, found: Inputs) -> None:
    name = feature.column
    if feature.is_list:
        counts = rows.lists[feature.counts_column][0].astype(np.int64)
        starts = offsets_of_lengths(counts)
        taken, offsets = slice_index(starts[index], starts[index + 1])
        found.add_list(name, rows.lists[name][0][taken].astype(np.int64), offsets)
    elif feature.kind == "number":
        found.add_numbers(name, feature.transform.numbers(rows.lists[name][0][index]))
    else:
        found.keys[name] = rows.lists[name][0][index].astype(np.int64)


def renamed(found: Inputs, old: str, new: str) -> Inputs:
    """The same with another prefix of the columns' names."""

    def of(name: str) -> str:
        return new + name.removeprefix(old)

    return Inputs({of(n): v for n, v in found.keys.items()}, {of(n): v for n, v in found.tensors.items()})


def item_column(items: pa.Table, name: str) -> Ints:
    """Category of each item id; row 0 (unknown item) is 0."""
    values = items.column(name).to_numpy().astype(np.int64)
    return np.concatenate([[0], values])


def columns_of(card: DatasetCard, wanted: dict[str, tuple[str, ...]], section: str) -> dict[str, list[Feature]]:
    """Of each owner the features that a config asks for; an error that names all that the dataset does not have."""
    known = {"event": card.event_features, "user": card.user_features, "item": card.item_features}
    mistakes = ErrorCollector()
    found = dict[str, list[Feature]]()
    for owner, names in wanted.items():
        with mistakes.collecting():
            found[owner] = chosen_features(known[owner], names, f"{section}.{owner}_features")
    mistakes.raise_if_any()
    return found


def prefix_of(user_tokens: UserTokens, of_users: Sequence[Feature]) -> tuple[str, ...]:
    """Columns that are tokens of their own before a history."""
    if user_tokens == "prefix" and not of_users:
        raise UserError(
            "has no feature of the user to put before a history",
            option="task.inputs.user_tokens",
            value=user_tokens,
            remedy="name some with --task.inputs.user_features, or leave it at summed",
        )
    return tuple(feature.column for feature in of_users)[: num_prefix(user_tokens, len(of_users))]


def num_prefix(user_tokens: UserTokens, num_features: int) -> int:
    """Of so many features of users, those that are tokens of their own before a history: all of them or none."""
    return num_features if user_tokens == "prefix" else 0
