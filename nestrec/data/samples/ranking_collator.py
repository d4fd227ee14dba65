"""Samples of multi-task ranking: interleaved item and action tokens, an event's labels predicted before its action.

An event gives two tokens, content then action. The labels are bits of the event's own action; they enter the input only
behind the content token that predicts them. Columns that tell how the user reacted to the event (such as the play time)
are refused as features of its content.
"""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count
from nestrec.base.errors import ErrorCollector, UserError, did_you_mean
from nestrec.data.batch_loader import Collator, KeysOfSamples, MicroBatch
from nestrec.data.dataset import Dataset, DatasetRows
from nestrec.data.dataset_card import DatasetCard, Feature
from nestrec.data.dataset_schema import ACTIONS, ITEM_IDS, TIMESTAMPS_MS
from nestrec.data.flat_arrays import check_slide, sample_keys, slice_index, token_keys
from nestrec.data.samples.feature_inputs import (
    Column,
    EventFeatures,
    ItemFeatures,
    UserTokens,
    column_of,
    columns_of,
    prefix_of,
)
from nestrec.data.samples.retrieval_collator import sequence_tensors
from nestrec.data.samples.split import Split

Ints = NDArray[np.int64]


@config
class RankingInputConfig:
    labels: tuple[str, ...] = ("click",)
    """action bits that are predicted, one task each"""
    event_features: tuple[str, ...] = ()
    """features of the event that are known before the user reacts, by their names on the dataset's card"""
    user_features: tuple[str, ...] = ()
    """features of the user that the model reads"""
    user_tokens: UserTokens = "summed"
    """how they are read: `summed` into every token, or as a `prefix`: a token each before the history"""
    item_features: tuple[str, ...] = ()
    """features of the item that the model reads: categories, lists, numbers, texts as bags, vectors"""
    max_events: Count = 100
    """longest history; each event gives two tokens"""
    slide_events: Count | None = None
    """events by which a longer history slides, in evaluation and serving alike; none: an eighth of max_events, so that
    cached prefixes live longer; 1: exactly the newest events, which costs a pass over a whole history per event"""
    train_on: Literal["last", "all"] = "last"
    """of users with more training events: the last ones, a sample a user, or all of them, in slices that have what came
    before as their history"""

    def __post_init__(self) -> None:
        check_slide(self.slide_events, self.max_events - 1, "task.inputs.slide_events", "task.inputs.max_events")


class RankingInputs:
    """Turns slices of users' events into arrays; shared by training and evaluation."""

    def __init__(self, dataset: Dataset, cfg: RankingInputConfig, *, seed: int):
        self._cfg = cfg
        self._seed = seed
        self.columns = checked_columns(dataset.card, cfg)
        self._label_bit = label_bits(dataset.card, cfg)
        features = features_of(dataset.card, cfg)
        self.prefix = prefix_of(cfg.user_tokens, features["user"])
        """columns that are tokens before a history, and no part of its tokens"""
        self._of_items = ItemFeatures(dataset, features["item"])
        self._of_events = EventFeatures(dataset, [*features["event"], *features["user"]])
        self._dataset = dataset.only([ITEM_IDS, ACTIONS, TIMESTAMPS_MS, *self._of_events.columns])

    def shuffle_block(self, num_samples: int) -> int | None:
        """See `Dataset.shuffle_block`."""
        return self._dataset.shuffle_block(num_samples)

    def read(self, users: NDArray[np.int64]) -> DatasetRows:
        return self._dataset.rows(users)

    def slices(self, rows: DatasetRows, first: NDArray[np.int64], end: NDArray[np.int64], epoch: int) -> MicroBatch:
        """Events [first, end) of each user. Tensors: action (E,), label (E, K), and the layout of the 2E tokens."""
        start = rows.lists["item_ids"][1][:-1]
        return self._of_events_at(rows, *slice_index(start + first, start + end), epoch)

    def asked(self, rows: DatasetRows, first: Ints, end: Ints, at: Ints) -> MicroBatch:
        """Events [first, end) of each user, and the event `at` behind them, whatever came in between."""
        start = rows.lists["item_ids"][1][:-1]
        before, offsets = slice_index(start + first, start + end)
        return self._of_events_at(
            rows, np.insert(before, offsets[1:], start + at), offsets + np.arange(len(offsets)), 0
        )

    def _of_events_at(self, rows: DatasetRows, index: Ints, offsets: Ints, epoch: int) -> MicroBatch:
        """index: places in the concatenated rows; offsets: of the users among them."""
        users = rows.indices
        items = rows.lists["item_ids"][0]
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
        of_events = self._of_events.of(rows, index, np.diff(offsets))
        keys = {**of_items.keys, **of_events.keys}
        tensors |= {**of_items.tensors, **of_events.tensors}
        longest = int(np.diff(token_offsets).max(initial=0))
        return MicroBatch(users, keys, tensors, max_length=longest, num_tokens=int(token_offsets[-1]))

    def of_items(self, items: NDArray[np.int64]) -> MicroBatch:
        """What is read of these items."""
        found = self._of_items.of(items)
        return MicroBatch(items, {"item": items, **found.keys}, found.tensors, max_length=1, num_tokens=len(items))


class RankingCollator(Collator):
    """Training samples: the last events of each user's training part, all of them predicted."""

    def __init__(self, inputs: RankingInputs, split: Split, max_events: int):
        self._inputs = inputs
        self._users = np.flatnonzero(split.train_end >= 1)
        self._end = split.train_end[self._users]
        self._first = np.maximum(0, self._end - max_events)
        self.weights = (self._end - self._first).astype(np.float64)
        self.tokens = 2 * (self._end - self._first)
        self.shuffle_block = inputs.shuffle_block(len(self._users))

    def read(self, samples: NDArray[np.int64]) -> DatasetRows:
        return self._inputs.read(self._users[samples])

    def sample_keys(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> KeysOfSamples:
        items, row_offsets = rows.lists["item_ids"]
        index, offsets = slice_index(row_offsets[:-1] + self._first[samples], row_offsets[:-1] + self._end[samples])
        return items[index], offsets

    def assemble(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> MicroBatch:
        return self._inputs.slices(rows, self._first[samples], self._end[samples], epoch)


def features_of(card: DatasetCard, cfg: RankingInputConfig) -> dict[str, list[Feature]]:
    """The features that the config asks for, by owner, or an error that names what the dataset has."""
    wanted = {"event": cfg.event_features, "user": cfg.user_features, "item": cfg.item_features}
    return columns_of(card, wanted, "task.inputs")


def checked_columns(card: DatasetCard, cfg: RankingInputConfig) -> tuple[Column, ...]:
    """The same as columns, in the order in which their vectors are summed."""
    return tuple(column_of(feature) for features in features_of(card, cfg).values() for feature in features)


def label_bits(card: DatasetCard, cfg: RankingInputConfig) -> list[int]:
    """The place in the mask of actions of each label, or an error that names those that the dataset has."""
    mistakes = ErrorCollector()
    bits = []
    for label in cfg.labels:
        with mistakes.collecting():
            bits.append(_bit(card, label))
    mistakes.raise_if_any()
    return bits


def _bit(card: DatasetCard, label: str) -> int:
    if label not in card.action_bits:
        remedy = did_you_mean(label, card.action_bits)
        raise UserError("is no action of this dataset", option="task.inputs.labels", value=label, remedy=remedy)
    return int(card.action_bits[label]).bit_length() - 1
