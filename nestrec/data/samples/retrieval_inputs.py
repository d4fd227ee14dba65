"""Feature inputs and training targets of next-item retrieval.

An item is represented by its id and its features. The id can be dropped: randomly in training (id dropout), so that
features learn to replace it, and always for cold-start items, which have no training events. Each unique item of a
micro-batch therefore has two embeddings, with and without its id, and every use of the item selects one of them.

A token is the sum of the item of its event, the features of event and user, and the context of the next event.
"""

from collections.abc import Mapping
from dataclasses import field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Decay
from nestrec.base.errors import ErrorCollector, did_you_mean
from nestrec.base.random import fold, fold_array
from nestrec.data.batch_loader import MicroBatch
from nestrec.data.dataset import Dataset, DatasetRows
from nestrec.data.dataset_card import DatasetCard, Feature
from nestrec.data.dataset_schema import ACTIONS, EVENT_PREFIX
from nestrec.data.samples.feature_inputs import (
    Column,
    EventFeatures,
    Inputs,
    ItemFeatures,
    UserTokens,
    feature_column,
    prefix_columns,
    rename_columns,
    select_features,
    select_features_by_owner,
)

CONTEXT_PREFIX = "context_"
AT = "at/"
"""Prefix of tensor names, before the name of a use of items: indices of the selected item embeddings in the
micro-batch."""
USES = {"history": 1, "positive": 2, "negative": 3, "catalog": 4}
"""Uses of items, with numbers that keep their random draws apart."""
Ints = NDArray[np.int64]


@config
class RetrievalInputConfig:
    item_features: tuple[str, ...] = ()
    """Names of item features on the dataset card to use as inputs, so that items without training events can be
    retrieved."""
    event_features: tuple[str, ...] = ()
    """Names of event features to use as inputs for the events of a history."""
    user_features: tuple[str, ...] = ()
    """Names of user features to use as inputs."""
    user_feature_mode: UserTokens = "summed"
    """How user features enter the model: `summed` into every token, or as a `prefix` of one token per feature before
    the history."""
    context_features: tuple[str, ...] = ()
    """Names of event features that are known when a request is made, such as device or country."""
    id_dropout: Decay = 0.1
    """Probability of dropping the id of an item with features in training."""
    target_actions: tuple[str, ...] = ()
    """Actions that make an event a target; histories contain all events. Empty makes every event a target."""
    action_weights: Mapping[str, float] = field(default_factory=dict)
    """Loss weight of a target by action; the largest weight among its actions applies. The default weight is 1."""


class RetrievalInputs:
    """Adds the configured features, target weights and item embeddings to the micro-batches of retrieval.

    Args:
        dataset: Source of the features.
        cfg: Names of the features.
        seed: Seed of id dropout.
        is_trained: (items + 1,) whether an item has training events; required if items have features.
    """

    def __init__(self, dataset: Dataset, cfg: RetrievalInputConfig, *, seed: int, is_trained: NDArray[np.bool_] | None):
        self._cfg = cfg
        self._card = dataset.card
        self._seed = seed
        features = retrieval_features(dataset.card, cfg)
        self.item_columns = tuple(feature_column(f) for f in features["item"])
        self.token_columns = tuple(feature_column(f) for f in [*features["event"], *features["user"]])
        self.prefix = prefix_columns(cfg.user_feature_mode, features["user"])
        """Columns that become separate tokens before the history."""
        self.context_columns = tuple(context_column(f) for f in features["context"])
        self._item_features = ItemFeatures(dataset, features["item"])
        self._event_features = EventFeatures(dataset, [*features["event"], *features["user"]])
        self._context_features = EventFeatures(dataset, features["context"])
        self._is_trained = is_trained
        self._mask_weights = _target_weight_table(dataset.card, cfg)

    @property
    def columns(self) -> list[str]:
        """Columns of user rows that are read."""
        action_columns = [ACTIONS] if self.has_target_weights else []
        return [*self._event_features.columns, *self._context_features.columns, *action_columns]

    @property
    def has_item_features(self) -> bool:
        return bool(self.item_columns)

    @property
    def has_token_features(self) -> bool:
        return bool(self.token_columns or self.context_columns)

    @property
    def has_target_weights(self) -> bool:
        """Whether targets have different weights."""
        return self._mask_weights is not None

    def target_weights(self, masks: Ints) -> NDArray[np.float64]:
        """Return the loss weight of targets with these action masks."""
        assert self._mask_weights is not None
        weights: NDArray[np.float64] = self._mask_weights[masks]
        return weights

    def has_target_action(self, dataset: Dataset, users: Ints, positions: Ints) -> NDArray[np.bool_]:
        """Return whether each event, sorted by user, has one of the target actions."""
        target_mask = sum(self._card.action_bits[name] for name in self._cfg.target_actions)
        if not target_mask:
            return np.ones(len(users), np.bool_)
        is_target = [np.zeros(0, np.bool_)]
        for first, group in dataset.scan([ACTIONS]):
            masks, offsets = group.lists[ACTIONS]
            start, end = np.searchsorted(users, [first, first + len(offsets) - 1])
            is_target.append((masks[offsets[users[start:end] - first] + positions[start:end]] & target_mask) > 0)
        return np.concatenate(is_target)

    def add_target_weights(self, batch: MicroBatch, rows: DatasetRows, targets: Ints) -> MicroBatch:
        """Return the micro-batch with the weights of its targets, given as indices into the concatenated rows."""
        if self._mask_weights is None:
            return batch
        weights = torch.from_numpy(self.target_weights(rows.lists["actions"][0][targets].astype(np.int64)))
        return replace(batch, tensors={**batch.tensors, "target_weight": weights})

    def add_token_features(
        self, batch: MicroBatch, rows: DatasetRows, events: Ints, targets: Ints, lengths: Ints
    ) -> MicroBatch:
        """Return the micro-batch with the features of its tokens.

        Args:
            batch: Micro-batch of token inputs.
            rows: Rows of users.
            events: (T,) indices of each token's own event in the concatenated rows.
            targets: (T,) indices of the event that each token predicts.
            lengths: Number of tokens per row.
        """
        if not self.has_token_features:
            return batch
        features = self._event_features.lookup(rows, events, lengths)
        context = rename_columns(self._context_features.lookup(rows, targets, lengths), EVENT_PREFIX, CONTEXT_PREFIX)
        return _add_inputs(batch, features, context)

    def add_item_features(self, batch: MicroBatch, key_T: NDArray[np.uint64] | None, epoch: int) -> MicroBatch:
        """Return the micro-batch with unique items in place of their uses.

        Args:
            batch: Micro-batch with item ids under the names in `USES`.
            key_T: Random generator keys of tokens with a target; None disables id dropout (evaluation).
            epoch: Epoch number, which seeds id dropout.
        """
        if not self.has_item_features:
            return batch
        uses = {name: batch.keys[name] for name in USES if name in batch.keys}
        flat = np.concatenate([ids.reshape(-1) for ids in uses.values()])
        items, inverse = np.unique(flat, return_inverse=True)
        bounds = np.cumsum([0, *(ids.size for ids in uses.values())])
        tensors = {}
        for (name, ids), start, end in zip(uses.items(), bounds[:-1], bounds[1:], strict=True):
            is_dropped = self._is_id_dropped(ids, self._random_draws(name, ids, batch, key_T, epoch))
            embedding_index = inverse[start:end].reshape(ids.shape) + len(items) * is_dropped
            tensors[AT + name] = torch.from_numpy(embedding_index)
        others = {name: ids for name, ids in batch.keys.items() if name not in uses}
        batch = replace(batch, keys={**others, "item": items}, tensors={**batch.tensors, **tensors})
        return _add_inputs(batch, self._item_features.lookup(items))

    def collate_items(self, items: Ints) -> MicroBatch:
        """Build the inputs of items; `at/item` selects the embedding with or without the id."""
        embedding_index = np.arange(len(items)) + len(items) * self._is_id_dropped(items, None)
        batch = MicroBatch(items, {"item": items}, {AT + "item": torch.from_numpy(embedding_index)}, 1, len(items))
        return _add_inputs(batch, self._item_features.lookup(items))

    def _is_id_dropped(self, items: Ints, draws: NDArray[np.uint64] | None) -> NDArray[np.bool_]:
        assert self._is_trained is not None
        is_new: NDArray[np.bool_] = ~self._is_trained[items]
        if draws is None:
            return is_new
        return is_new | ((draws >> np.uint64(40)) < np.uint64(round(self._cfg.id_dropout * 2**24)))

    def _random_draws(
        self, name: str, ids: Ints, batch: MicroBatch, key_T: NDArray[np.uint64] | None, epoch: int
    ) -> NDArray[np.uint64] | None:
        """Return draws that depend on (seed, epoch, sample, token, use); for the catalog, on (seed, epoch, item)."""
        if key_T is None or self._cfg.id_dropout == 0:
            return None
        use = USES[name]
        if name == "catalog":
            return fold_array(fold(self._seed, epoch, use), ids)
        keys = batch.tensors["token_key"].numpy().view(np.uint64) if name == "history" else key_T
        token_draws = fold_array(keys, np.full(len(keys), use))
        return token_draws if ids.ndim == 1 else fold_array(token_draws[:, None], np.arange(ids.shape[1])[None, :])


def retrieval_features(card: DatasetCard, cfg: RetrievalInputConfig) -> dict[str, list[Feature]]:
    """Return the features that the config names, by owner and `context`."""
    names_of_owner = {"event": cfg.event_features, "user": cfg.user_features, "item": cfg.item_features}
    features = dict[str, list[Feature]]()
    errors = ErrorCollector()
    with errors.collecting():
        features |= select_features_by_owner(card, names_of_owner, "task.inputs")
    with errors.collecting():
        features["context"] = select_features(card.event_features, cfg.context_features, "task.inputs.context_features")
    errors.raise_if_any()
    return features


def context_column(feature: Feature) -> Column:
    """Return the column of a context feature: it has a separate name, and shares the table of the event feature."""
    return replace(feature_column(feature), name=CONTEXT_PREFIX + feature.name)


def _add_inputs(batch: MicroBatch, *inputs: Inputs) -> MicroBatch:
    keys = {name: ids for one in inputs for name, ids in one.keys.items()}
    tensors = {name: tensor for one in inputs for name, tensor in one.tensors.items()}
    return replace(batch, keys={**batch.keys, **keys}, tensors={**batch.tensors, **tensors})


def _target_weight_table(card: DatasetCard, cfg: RetrievalInputConfig) -> NDArray[np.float64] | None:
    """Return the loss weight of an event by action mask; None if all weights are 1."""
    if not cfg.target_actions and not cfg.action_weights:
        return None
    errors = ErrorCollector()
    for name, option in [
        *((a, "target_actions") for a in cfg.target_actions),
        *((a, "action_weights") for a in cfg.action_weights),
    ]:
        if name not in card.action_bits:
            remedy = did_you_mean(name, card.action_bits)
            errors.add("the dataset has no such action", option=f"task.inputs.{option}", value=name, remedy=remedy)
        elif cfg.action_weights.get(name, 1.0) < 0:
            weight_option = f"task.inputs.action_weights.{name}"
            errors.add(
                "must not be negative", option=weight_option, value=cfg.action_weights[name], remedy="set 0 or more"
            )
    errors.raise_if_any()
    masks = np.arange(1 << max(card.action_bits.values()).bit_length())
    weight_of_mask = np.full(len(masks), -1.0)
    for name in cfg.target_actions or cfg.action_weights:
        has_action = (masks & card.action_bits[name]) > 0
        weight_of_mask[has_action] = np.maximum(weight_of_mask[has_action], cfg.action_weights.get(name, 1.0))
    return np.where(weight_of_mask >= 0, weight_of_mask, 0.0 if cfg.target_actions else 1.0)
