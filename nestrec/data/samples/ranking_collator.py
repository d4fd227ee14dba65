"""Collator of multi-task ranking: interleaved content and action tokens; labels are predicted before the action token.

Each event becomes two tokens, content then action. Labels are bits of the event's own action, so they enter the input
only after the content token that predicts them. Columns that are known only after the event (such as the play time) are
rejected as content features.
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
    feature_column,
    prefix_columns,
    select_features_by_owner,
)
from nestrec.data.samples.retrieval_collator import sequence_tensors
from nestrec.data.samples.split import Split

Ints = NDArray[np.int64]


@config
class RankingHistoryConfig:
    """Part of a user's history that a ranking model reads."""

    max_events: Count = 100
    """Maximum number of events in a history; each event becomes two tokens."""
    slide_events: Count | None = None
    """Number of events by which a longer history slides, in evaluation and serving alike. None uses an eighth of
    `max_events`, which keeps cached prefixes valid for longer; 1 always uses exactly the newest events, at the cost of
    a full prefill per event."""

    def __post_init__(self) -> None:
        check_slide(self.slide_events, self.max_events - 1, "task.history.slide_events", "task.history.max_events")


@config
class RankingInputConfig:
    labels: tuple[str, ...] = ("click",)
    """Actions to predict; each is a separate task."""
    event_features: tuple[str, ...] = ()
    """Names of event features on the dataset card to use as inputs; they must be known before the user reacts."""
    user_features: tuple[str, ...] = ()
    """Names of user features on the dataset card to use as inputs."""
    user_feature_mode: UserTokens = "summed"
    """How user features enter the model: `summed` into every token, or as a `prefix` of one token per feature before
    the history."""
    item_features: tuple[str, ...] = ()
    """Names of item features on the dataset card to use as inputs: categories, lists, numbers, texts as bags, vectors.
    """
    train_events: Literal["last", "all"] = "last"
    """Training events of users with longer sequences: the `last` ones, as one sample per user, or `all` of them, in
    chunks that include the preceding events as history."""


class RankingInputs:
    """Builds model inputs from chunks of user sequences; shared by training and evaluation."""

    def __init__(self, dataset: Dataset, cfg: RankingInputConfig, *, seed: int):
        self._cfg = cfg
        self._seed = seed
        self.columns = feature_columns(dataset.card, cfg)
        self._label_bit = label_bits(dataset.card, cfg)
        features = ranking_features(dataset.card, cfg)
        self.prefix = prefix_columns(cfg.user_feature_mode, features["user"])
        """Columns that become separate tokens before the history."""
        self._item_features = ItemFeatures(dataset, features["item"])
        self._event_features = EventFeatures(dataset, [*features["event"], *features["user"]])
        self._dataset = dataset.select_columns([ITEM_IDS, ACTIONS, TIMESTAMPS_MS, *self._event_features.columns])

    def shuffle_block(self, num_samples: int) -> int | None:
        """Return the size of a shuffle block, see `Dataset.shuffle_block`."""
        return self._dataset.shuffle_block(num_samples)

    def read(self, users: NDArray[np.int64]) -> DatasetRows:
        return self._dataset.rows(users)

    def collate_chunks(
        self, rows: DatasetRows, first: NDArray[np.int64], end: NDArray[np.int64], epoch: int
    ) -> MicroBatch:
        """Collate the events [first, end) of each user.

        Returns:
            A micro-batch with the tensors `action` (E,), `label` (E, K) and the layout of the 2E tokens.
        """
        start = rows.lists["item_ids"][1][:-1]
        return self._collate_events(rows, *slice_index(start + first, start + end), epoch)

    def collate_queries(self, rows: DatasetRows, first: Ints, end: Ints, at: Ints) -> MicroBatch:
        """Collate the events [first, end) of each user, followed directly by the event `at`, the target."""
        start = rows.lists["item_ids"][1][:-1]
        before, offsets = slice_index(start + first, start + end)
        return self._collate_events(
            rows, np.insert(before, offsets[1:], start + at), offsets + np.arange(len(offsets)), 0
        )

    def _collate_events(self, rows: DatasetRows, index: Ints, offsets: Ints, epoch: int) -> MicroBatch:
        """Collate events, given their indices in the concatenated rows and the offsets of the users."""
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
        item_inputs = self.collate_items(items[index])
        event_inputs = self._event_features.lookup(rows, index, np.diff(offsets))
        keys = {**item_inputs.keys, **event_inputs.keys}
        tensors |= {**item_inputs.tensors, **event_inputs.tensors}
        longest = int(np.diff(token_offsets).max(initial=0))
        return MicroBatch(users, keys, tensors, max_length=longest, num_tokens=int(token_offsets[-1]))

    def collate_items(self, items: NDArray[np.int64]) -> MicroBatch:
        """Build the inputs of these items."""
        inputs = self._item_features.lookup(items)
        return MicroBatch(items, {"item": items, **inputs.keys}, inputs.tensors, max_length=1, num_tokens=len(items))


class RankingCollator(Collator):
    """Collates the last events of each user's training events; all of them are predicted."""

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

    def collate(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> MicroBatch:
        return self._inputs.collate_chunks(rows, self._first[samples], self._end[samples], epoch)


def ranking_features(card: DatasetCard, cfg: RankingInputConfig) -> dict[str, list[Feature]]:
    """Return the features that the config names, by owner, or raise an error with the available ones."""
    names_of_owner = {"event": cfg.event_features, "user": cfg.user_features, "item": cfg.item_features}
    return select_features_by_owner(card, names_of_owner, "task.inputs")


def feature_columns(card: DatasetCard, cfg: RankingInputConfig) -> tuple[Column, ...]:
    """Return the selected features as columns, in the order in which their embeddings are summed."""
    return tuple(feature_column(feature) for features in ranking_features(card, cfg).values() for feature in features)


def label_bits(card: DatasetCard, cfg: RankingInputConfig) -> list[int]:
    """Return the bit index of each label in the action mask, or raise an error with the available actions."""
    errors = ErrorCollector()
    bits = []
    for label in cfg.labels:
        with errors.collecting():
            bits.append(_label_bit(card, label))
    errors.raise_if_any()
    return bits


def _label_bit(card: DatasetCard, label: str) -> int:
    if label not in card.action_bits:
        remedy = did_you_mean(label, card.action_bits)
        raise UserError("the dataset has no such action", option="task.inputs.labels", value=label, remedy=remedy)
    return int(card.action_bits[label]).bit_length() - 1
