"""Samples of multi-task ranking: interleaved item and action tokens, an event's labels predicted before its action.

An event gives two tokens, content then action. The labels are bits of the event's own action; they enter the input only
behind the content token that predicts them. Columns that tell how the user reacted to the event (such as the play time)
are refused as features of its content.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from nestrec.base.bounds import Count
from nestrec.base.config import config
from nestrec.base.errors import Mistakes, UserError, did_you_mean
from nestrec.data.batches import OFFSETS, Assembler, KeysOfSamples, MicroBatch
from nestrec.data.card import Card, Feature
from nestrec.data.dataset import Dataset, Rows
from nestrec.data.samples.retrieval import sequence_tensors
from nestrec.data.samples.slices import sample_keys, slice_index, token_keys
from nestrec.data.samples.split import Split
from nestrec.data.schema import ITEM_PREFIX


@config
class RankingInputConfig:
    labels: tuple[str, ...] = ("click",)
    """action bits that are predicted, one task each"""
    event_features: tuple[str, ...] = ()
    """categories of the event that are known before the user reacts"""
    user_features: tuple[str, ...] = ()
    """categories of the user that the model reads, by their names on the dataset's card"""
    item_features: tuple[str, ...] = ()
    """categories of the item that the model reads, single ones and lists, by their names on the dataset's card"""
    max_events: Count = 100
    """longest history; each event gives two tokens"""


@dataclass(frozen=True, slots=True)
class Column:
    """A category that is looked up for each event."""

    name: str
    """feature and table name, such as `event_tab`"""
    vocabulary_size: int
    """rows of its table"""
    is_bag: bool = False
    """an event has several of them"""


class RankingInputs:
    """Turns slices of users' events into arrays; shared by training and evaluation."""

    def __init__(self, dataset: Dataset, cfg: RankingInputConfig, *, seed: int):
        self._dataset, self._cfg, self._seed = dataset, cfg, seed
        self.columns = checked_columns(dataset.card, cfg)
        self._label_bit = label_bits(dataset.card, cfg)
        of_items = [column for column in self.columns if column.name.startswith(ITEM_PREFIX)]
        self._item_columns = {c.name: item_column(dataset.items(), c.name) for c in of_items if not c.is_bag}
        self._item_bags = {c.name: item_bags(dataset.items(), c.name) for c in of_items if c.is_bag}

    def read(self, users: NDArray[np.int64]) -> Rows:
        return self._dataset.rows(users)

    def slices(self, rows: Rows, first: NDArray[np.int64], end: NDArray[np.int64], epoch: int) -> MicroBatch:
        """Events [first, end) of each user. Tensors: action (E,), label (E, K), and the layout of the 2E tokens."""
        users = rows.indices
        items, row_offsets = rows.lists["item_ids"]
        index, offsets = slice_index(row_offsets[:-1] + first, row_offsets[:-1] + end)
        token_offsets = 2 * offsets
        key_T = token_keys(sample_keys(self._seed, epoch, users), token_offsets)
        action = rows.lists["actions"][0][index].astype(np.int64)
        label = np.stack([(action >> bit) & 1 for bit in self._label_bit], axis=1)
        time_s = np.repeat(rows.lists["timestamps_ms"][0][index] / 1000.0, 2)
        tensors = sequence_tensors(token_offsets, key_T) | {
            "action": torch.from_numpy(action),
            "label": torch.from_numpy(label),
            "time": torch.from_numpy(time_s),
            "query_time": torch.from_numpy(time_s),
        }
        of_items = self.of_items(items[index])
        keys = {**of_items.keys, **self._feature_keys(rows, index, np.diff(offsets))}
        tensors |= of_items.tensors
        longest = int(np.diff(token_offsets).max(initial=0))
        return MicroBatch(users, keys, tensors, max_length=longest, num_tokens=int(token_offsets[-1]))

    def of_items(self, items: NDArray[np.int64]) -> MicroBatch:
        """What is looked up of these items."""
        keys = {"item": items} | {name: categories[items] for name, categories in self._item_columns.items()}
        tensors: dict[str, torch.Tensor] = {}
        for name, bags in self._item_bags.items():
            keys[name], offsets = bags.of(items)
            tensors[name + OFFSETS] = torch.from_numpy(offsets)
        return MicroBatch(items, keys, tensors, max_length=1, num_tokens=len(items))

    def _feature_keys(
        self, rows: Rows, index: NDArray[np.int64], events: NDArray[np.int64]
    ) -> dict[str, NDArray[np.int64]]:
        """Of the events and their users."""
        keys: dict[str, NDArray[np.int64]] = {}
        for column in self.columns:
            if column.name in rows.lists:
                keys[column.name] = rows.lists[column.name][0][index].astype(np.int64)
            elif column.name in rows.scalars:
                keys[column.name] = np.repeat(rows.scalars[column.name].astype(np.int64), events)
        return keys


class RankingAssembler(Assembler):
    """Training samples: the last events of each user's training part, all of them predicted."""

    def __init__(self, inputs: RankingInputs, split: Split, max_events: int):
        self._inputs = inputs
        self._users = np.flatnonzero(split.train_end >= 1)
        self._end = split.train_end[self._users]
        self._first = np.maximum(0, self._end - max_events)
        self.weights = (self._end - self._first).astype(np.float64)
        self.tokens = 2 * (self._end - self._first)

    def read(self, samples: NDArray[np.int64]) -> Rows:
        return self._inputs.read(self._users[samples])

    def sample_keys(self, samples: NDArray[np.int64], rows: Rows, epoch: int) -> KeysOfSamples:
        items, row_offsets = rows.lists["item_ids"]
        index, offsets = slice_index(row_offsets[:-1] + self._first[samples], row_offsets[:-1] + self._end[samples])
        return items[index], offsets

    def assemble(self, samples: NDArray[np.int64], rows: Rows, epoch: int) -> MicroBatch:
        return self._inputs.slices(rows, self._first[samples], self._end[samples], epoch)


def checked_columns(card: Card, cfg: RankingInputConfig) -> tuple[Column, ...]:
    """The category columns that the config asks for, or an error that names what the dataset has."""
    groups: Mapping[str, tuple[tuple[str, ...], tuple[Feature, ...]]] = {
        "event": (cfg.event_features, card.event_features),
        "user": (cfg.user_features, card.user_features),
        "item": (cfg.item_features, card.item_features),
    }
    columns, mistakes = [], Mistakes()
    for prefix, (wanted, known) in groups.items():
        kinds = ("category", "categories") if prefix == "item" else ("category",)
        usable = {f.name: f for f in known if f.kind in kinds and f.known == "before"}
        for name in wanted:
            with mistakes.noted():
                if name not in usable:
                    raise UserError(
                        "is not a category of this dataset that is known before the user reacts",
                        field=f"task.inputs.{prefix}_features",
                        value=name,
                        remedy=f"{did_you_mean(name, usable)}; '' takes none",
                    )
                feature = usable[name]
                columns.append(Column(f"{prefix}_{name}", feature.vocabulary_size, feature.kind == "categories"))
    mistakes.raise_all()
    return tuple(columns)


def label_bits(card: Card, cfg: RankingInputConfig) -> list[int]:
    """The place in the mask of actions of each label, or an error that names those that the dataset has."""
    mistakes, bits = Mistakes(), []
    for label in cfg.labels:
        with mistakes.noted():
            bits.append(_bit(card, label))
    mistakes.raise_all()
    return bits


def item_column(items: pa.Table, name: str) -> NDArray[np.int64]:
    """Category of each item id; row 0 (unknown item) is 0."""
    values = items.column(name).to_numpy().astype(np.int64)
    return np.concatenate([[0], values])


@dataclass(frozen=True, slots=True)
class ItemBags:
    """Several ids of each item: those of item i are values[offsets[i]:offsets[i + 1]]."""

    values: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def of(self, items: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Those of these items, one after the other, and where each item's begin."""
        index, offsets = slice_index(self.offsets[items], self.offsets[items + 1])
        return self.values[index], offsets


def item_bags(items: pa.Table, name: str) -> ItemBags:
    """Ids of each item id; item 0, which nobody knows, has none."""
    column = items.column(name).combine_chunks()
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    return ItemBags(values, np.concatenate([[0, 0], np.cumsum(lengths)]))


def _bit(card: Card, label: str) -> int:
    if label not in card.action_bits:
        remedy = did_you_mean(label, card.action_bits)
        raise UserError("is no action of this dataset", field="task.inputs.labels", value=label, remedy=remedy)
    return int(card.action_bits[label]).bit_length() - 1
