"""What next-item retrieval reads beside item ids, and what it is trained to find.

An item is its id and its features. Its id can be left out: at random in training, so that features learn to stand for
it, and always where an item has never been trained on. So each distinct item of a micro-batch has two vectors, with its
id and without, and every use of it takes one of them.

A token is the item of its event, the features of event and user, and the context in which the next event is asked for.
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
    chosen_features,
    column_of,
    columns_of,
    prefix_of,
    renamed,
)

CONTEXT_PREFIX = "context_"
AT = "at/"
"""before the name of a use of items: the tensor that says which vector of the micro-batch's each of them is"""
USES = {"history": 1, "positive": 2, "negative": 3, "catalogue": 4}
"""of items, with numbers that tell apart the draws made for them"""
Ints = NDArray[np.int64]


@config
class RetrievalInputConfig:
    item_features: tuple[str, ...] = ()
    """features of items, by their names on the dataset's card: items are then found by what they are, new ones too"""
    event_features: tuple[str, ...] = ()
    """features of the events of a history"""
    user_features: tuple[str, ...] = ()
    """features of the user"""
    user_tokens: UserTokens = "summed"
    """how they are read: `summed` into every token, or as a `prefix`: a token each before the history"""
    context: tuple[str, ...] = ()
    """features of the event that is asked for and known when it is, such as device, country or hour"""
    id_dropout: Decay = 0.1
    """of items with features: how often the id of one is left out in training"""
    actions: tuple[str, ...] = ()
    """only events with one of these actions are to be found; histories hold all. none: every event"""
    action_weights: Mapping[str, float] = field(default_factory=dict)
    """action to what an event with it counts in the loss, the most of those it has; 1 where nothing is said"""


class RetrievalInputs:
    """Adds what a config asks for to the micro-batches of retrieval."""

    def __init__(self, dataset: Dataset, cfg: RetrievalInputConfig, *, seed: int, is_trained: NDArray[np.bool_] | None):
        """is_trained: by item id, whether it has training events; only asked where items have features."""
        self._cfg = cfg
        self._card = dataset.card
        self._seed = seed
        features = features_of(dataset.card, cfg)
        self.item_columns = tuple(column_of(f) for f in features["item"])
        self.token_columns = tuple(column_of(f) for f in [*features["event"], *features["user"]])
        self.prefix = prefix_of(cfg.user_tokens, features["user"])
        """columns that are tokens before a history, and no part of its tokens"""
        self.context_columns = tuple(context_column(f) for f in features["context"])
        self._of_items = ItemFeatures(dataset, features["item"])
        self._of_events = EventFeatures(dataset, [*features["event"], *features["user"]])
        self._of_context = EventFeatures(dataset, features["context"])
        self._is_trained = is_trained
        self._weight_of_mask = _weights_of_masks(dataset.card, cfg)

    @property
    def columns(self) -> list[str]:
        """Of the rows of users that it reads."""
        of_actions = [ACTIONS] if self.weighs_targets else []
        return [*self._of_events.columns, *self._of_context.columns, *of_actions]

    @property
    def has_item_features(self) -> bool:
        return bool(self.item_columns)

    @property
    def has_token_features(self) -> bool:
        return bool(self.token_columns or self.context_columns)

    @property
    def weighs_targets(self) -> bool:
        """Whether targets do not all count 1."""
        return self._weight_of_mask is not None

    def weights_of_masks(self, masks: Ints) -> NDArray[np.float64]:
        """What events with these actions count as targets."""
        assert self._weight_of_mask is not None
        weights: NDArray[np.float64] = self._weight_of_mask[masks]
        return weights

    def is_to_be_found(self, dataset: Dataset, users: Ints, places: Ints) -> NDArray[np.bool_]:
        """Whether each of these events, in the order of users, has one of the actions that are to be found."""
        wanted = sum(self._card.action_bits[name] for name in self._cfg.actions)
        if not wanted:
            return np.ones(len(users), np.bool_)
        found = [np.zeros(0, np.bool_)]
        for first, group in dataset.scan([ACTIONS]):
            masks, offsets = group.lists[ACTIONS]
            start, end = np.searchsorted(users, [first, first + len(offsets) - 1])
            found.append((masks[offsets[users[start:end] - first] + places[start:end]] & wanted) > 0)
        return np.concatenate(found)

    def with_weights(self, batch: MicroBatch, rows: DatasetRows, targets: Ints) -> MicroBatch:
        """The micro-batch with what each target counts. targets: places in the concatenated rows."""
        if self._weight_of_mask is None:
            return batch
        weights = torch.from_numpy(self.weights_of_masks(rows.lists["actions"][0][targets].astype(np.int64)))
        return replace(batch, tensors={**batch.tensors, "target_weight": weights})

    def with_tokens(self, batch: MicroBatch, rows: DatasetRows, own: Ints, asked: Ints, events: Ints) -> MicroBatch:
        """The micro-batch with the features of its tokens. own, asked: the event of each token and the one that it asks
        for, as places in the concatenated rows; events: tokens of each row."""
        if not self.has_token_features:
            return batch
        found = self._of_events.of(rows, own, events)
        context = renamed(self._of_context.of(rows, asked, events), EVENT_PREFIX, CONTEXT_PREFIX)
        return _with(batch, found, context)

    def with_items(self, batch: MicroBatch, key_T: NDArray[np.uint64] | None, epoch: int) -> MicroBatch:
        """The micro-batch with its distinct items in the place of their uses. key_T: of the tokens that have a target,
        or, of a batch that is not trained on, none: no id is left out at random."""
        if not self.has_item_features:
            return batch
        uses = {name: batch.keys[name] for name in USES if name in batch.keys}
        flat = np.concatenate([ids.reshape(-1) for ids in uses.values()])
        items, place = np.unique(flat, return_inverse=True)
        bounds = np.cumsum([0, *(ids.size for ids in uses.values())])
        tensors = {}
        for (name, ids), start, end in zip(uses.items(), bounds[:-1], bounds[1:], strict=True):
            is_out = self._has_no_id(ids, self._draws(name, ids, batch, key_T, epoch))
            at = place[start:end].reshape(ids.shape) + len(items) * is_out
            tensors[AT + name] = torch.from_numpy(at)
        others = {name: ids for name, ids in batch.keys.items() if name not in uses}
        batch = replace(batch, keys={**others, "item": items}, tensors={**batch.tensors, **tensors})
        return _with(batch, self._of_items.of(items))

    def of_items(self, items: Ints) -> MicroBatch:
        """Items by themselves: `at/item` says whether with or without their ids."""
        at = np.arange(len(items)) + len(items) * self._has_no_id(items, None)
        batch = MicroBatch(items, {"item": items}, {AT + "item": torch.from_numpy(at)}, 1, len(items))
        return _with(batch, self._of_items.of(items))

    def _has_no_id(self, items: Ints, draws: NDArray[np.uint64] | None) -> NDArray[np.bool_]:
        assert self._is_trained is not None
        is_new: NDArray[np.bool_] = ~self._is_trained[items]
        if draws is None:
            return is_new
        return is_new | ((draws >> np.uint64(40)) < np.uint64(round(self._cfg.id_dropout * 2**24)))

    def _draws(
        self, name: str, ids: Ints, batch: MicroBatch, key_T: NDArray[np.uint64] | None, epoch: int
    ) -> NDArray[np.uint64] | None:
        """Functions of (seed, epoch, sample, token, use), wherever a sample runs; of the catalogue, which is no
        sample's own, of (seed, epoch, item)."""
        if key_T is None or self._cfg.id_dropout == 0:
            return None
        use = USES[name]
        if name == "catalogue":
            return fold_array(fold(self._seed, epoch, use), ids)
        keys = batch.tensors["token_key"].numpy().view(np.uint64) if name == "history" else key_T
        of_token = fold_array(keys, np.full(len(keys), use))
        return of_token if ids.ndim == 1 else fold_array(of_token[:, None], np.arange(ids.shape[1])[None, :])


def features_of(card: DatasetCard, cfg: RetrievalInputConfig) -> dict[str, list[Feature]]:
    """The features that the config asks for, by owner and `context`."""
    wanted = {"event": cfg.event_features, "user": cfg.user_features, "item": cfg.item_features}
    found = dict[str, list[Feature]]()
    mistakes = ErrorCollector()
    with mistakes.collecting():
        found |= columns_of(card, wanted, "task.inputs")
    with mistakes.collecting():
        found["context"] = chosen_features(card.event_features, cfg.context, "task.inputs.context")
    mistakes.raise_if_any()
    return found


def context_column(feature: Feature) -> Column:
    """A feature of the event that is asked for: it has its own name, and the table of the feature."""
    return replace(column_of(feature), name=CONTEXT_PREFIX + feature.name)


def _with(batch: MicroBatch, *found: Inputs) -> MicroBatch:
    keys = {name: ids for one in found for name, ids in one.keys.items()}
    tensors = {name: tensor for one in found for name, tensor in one.tensors.items()}
    return replace(batch, keys={**batch.keys, **keys}, tensors={**batch.tensors, **tensors})


def _weights_of_masks(card: DatasetCard, cfg: RetrievalInputConfig) -> NDArray[np.float64] | None:
    """By mask of actions, what an event counts; none where all count 1."""
    if not cfg.actions and not cfg.action_weights:
        return None
    mistakes = ErrorCollector()
    for name, where in [*((a, "actions") for a in cfg.actions), *((a, "action_weights") for a in cfg.action_weights)]:
        if name not in card.action_bits:
            remedy = did_you_mean(name, card.action_bits)
            mistakes.add("is no action of this dataset", option=f"task.inputs.{where}", value=name, remedy=remedy)
        elif cfg.action_weights.get(name, 1.0) < 0:
            field_name = f"task.inputs.action_weights.{name}"
            mistakes.add("is negative", option=field_name, value=cfg.action_weights[name], remedy="give 0 or more")
    mistakes.raise_if_any()
    masks = np.arange(1 << max(card.action_bits.values()).bit_length())
    most = np.full(len(masks), -1.0)
    for name in cfg.actions or cfg.action_weights:
        has = (masks & card.action_bits[name]) > 0
        most[has] = np.maximum(most[has], cfg.action_weights.get(name, 1.0))
    return np.where(most >= 0, most, 0.0 if cfg.actions else 1.0)
