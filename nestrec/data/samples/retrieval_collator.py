"""Samples of next-item retrieval: each user's history, every position predicting the next item."""

from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count, NumberRange
from nestrec.base.random import as_int64
from nestrec.data.batch_loader import Collator, KeysOfSamples, MicroBatch
from nestrec.data.dataset import Dataset, DatasetRows
from nestrec.data.flat_arrays import (
    check_slide,
    history_start,
    positions,
    sample_keys,
    slice_index,
    slide_of,
    token_keys,
)
from nestrec.data.samples.negative_sampling import NegativeSampler, negatives_of
from nestrec.data.samples.retrieval_inputs import RetrievalInputs
from nestrec.data.samples.split import Part, Split, kept_events, kept_length, target_weights


@config
class HistoryConfig:
    max_length: Count = 200
    """longest sequence; the most recent events are kept"""
    query_time: Literal["next", "own"] = "next"
    """the time a token asks for: "next" is that of the event it predicts (as published), "own" that of its own event"""
    slide_events: Count | None = None
    """events by which a history of more than max_length events slides, in evaluation and serving alike; none: an eighth
    of max_length, so that cached prefixes live longer; 1: exactly the newest events"""
    stochastic_length_alpha: Annotated[float, NumberRange(1, 2, above=True)] | None = None
    """cost exponent of stochastic length in (1, 2]; none keeps every event"""

    def __post_init__(self) -> None:
        check_slide(self.slide_events, self.max_length, "task.history.slide_events", "task.history.max_length")


class RetrievalCollator(Collator):
    """Training samples. Sample numbers count the users that have something to predict."""

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        history: HistoryConfig,
        *,
        seed: int,
        sampler: NegativeSampler | None,
        sharing: int = 1,
        use_times: bool,
        inputs: RetrievalInputs | None = None,
    ):
        """sampler: of negatives; none compares with the whole catalogue. sharing: tokens whose negatives one meets.
        inputs: what is read beside ids."""
        self._dataset = dataset
        self._split = split
        self._history = history
        self._seed = seed
        self._inputs = inputs
        self._sampler = sampler
        self._sharing = sharing
        self._use_times = use_times
        self._users = np.flatnonzero(split.train_end >= 2)
        if inputs is not None and inputs.weighs_targets:
            weights = target_weights(dataset, split.train_end, history.max_length, inputs.weights_of_masks)
            self._users = self._users[weights[self._users] > 0]
            self.weights = weights[self._users]
        self.tokens = np.minimum(split.train_end[self._users] - 1, history.max_length)
        if inputs is None or not inputs.weighs_targets:
            self.weights = self.tokens.astype(np.float64)
        self.shuffle_block = dataset.shuffle_block(len(self._users))

    def tokens_in(self, samples: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return self._kept(self._users[samples], epoch) - 1

    def weight(self, samples: NDArray[np.int64], epoch: int) -> float:
        if self._inputs is not None and self._inputs.weighs_targets:
            return float(self.weights[samples].sum())
        return float(self.tokens_in(samples, epoch).sum())

    def read(self, samples: NDArray[np.int64]) -> DatasetRows:
        return self._dataset.rows(self._users[samples])

    def sample_keys(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> KeysOfSamples:
        items, row_offsets = rows.lists["item_ids"]
        index, offsets = self._event_index(rows.indices, row_offsets, epoch)
        return items[index], offsets

    def assemble(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> MicroBatch:
        users = rows.indices
        items, row_offsets = rows.lists["item_ids"]
        index, offsets = self._event_index(users, row_offsets, epoch)
        is_input = np.ones(len(index), dtype=bool)
        is_input[offsets[1:] - 1] = False
        is_target = np.ones(len(index), dtype=bool)
        is_target[offsets[:-1]] = False
        offsets = offsets - np.arange(len(offsets))
        key_T = token_keys(sample_keys(self._seed, epoch, users), offsets)
        target = items[index[is_target]]
        times = rows.lists["timestamps_ms"][0][index] if self._use_times else None
        tensors = sequence_tensors(offsets, key_T) | {"target": torch.from_numpy(target)}
        if times is not None:
            tensors |= time_tensors(times[is_input], times[is_target], self._history)
        keys = {"history": items[index[is_input]], "positive": target}
        num_items = self._dataset.card.counts.items
        drawn = negatives_of(self._sampler, key_T, target, num_items=num_items, sharing=self._sharing)
        keys, tensors = {**keys, **drawn.keys}, {**tensors, **drawn.tensors}
        batch = MicroBatch(users, keys, tensors, max_length=_longest(offsets), num_tokens=int(offsets[-1]))
        if self._inputs is None:
            return batch
        own, asked = index[is_input], index[is_target]
        batch = self._inputs.with_tokens(batch, rows, own, asked, np.diff(offsets))
        return self._inputs.with_items(self._inputs.with_weights(batch, rows, asked), key_T, epoch)

    def _kept(self, users: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Events of each user that take part in this epoch."""
        end = self._split.train_end[users]
        if self._history.stochastic_length_alpha is not None:
            key = sample_keys(self._seed, epoch, users)
            longest = self._history.max_length
            end = kept_length(end, key, alpha=self._history.stochastic_length_alpha, longest=longest)
        return np.minimum(end, self._history.max_length + 1)

    def _event_index(
        self, users: NDArray[np.int64], row_offsets: NDArray[np.int64], epoch: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Index into the concatenated rows of every event that takes part, and the offsets of the users."""
        start, end = row_offsets[:-1], row_offsets[:-1] + self._split.train_end[users]
        kept = self._kept(users, epoch)
        if self._history.stochastic_length_alpha is None:
            return slice_index(end - kept, end)
        key = sample_keys(self._seed, epoch, users)
        picked = [s + kept_events(int(e - s), int(n), int(k)) for s, e, n, k in zip(start, end, kept, key, strict=True)]
        return np.concatenate(picked) if picked else np.empty(0, np.int64), np.concatenate([[0], np.cumsum(kept)])


class RetrievalQueries:
    """Evaluation: the history of a user up to a held-out event, and that event as the target.

    Queries are numbered from 0 in the order of users and events. Every held-out event that has one before it is asked
    for, up to `max_targets` of a user; where `inputs` names actions that are to be found, those with one of them.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        history: HistoryConfig,
        part: Part,
        *,
        use_times: bool,
        max_targets: int = 1,
        inputs: RetrievalInputs | None = None,
    ):
        self._dataset = dataset
        self._history = history
        self._use_times = use_times
        self._inputs = inputs
        users, places, is_early = held_out_events(dataset, split, part, inputs, max_targets)
        self.users = users[is_early]
        self.target_at = places[is_early]
        """(Q,) user of each query, and (Q,) place of the target in the user's row, which is also the number of events
        before it"""
        self.num_left_out = len(users) - len(self.users)
        """events beyond `max_targets` of a user, which are not asked for"""

    @property
    def ids(self) -> NDArray[np.int64]:
        """All queries."""
        return np.arange(len(self.users))

    def assemble(self, queries: NDArray[np.int64]) -> MicroBatch:
        """Tensors also hold `target` (B,) item ids, and `seen`/`seen_offsets`, all items before the target."""
        users = self.users[queries]
        rows = self._dataset.rows(users)
        items, row_offsets = rows.lists["item_ids"]
        target_at = row_offsets[:-1] + self.target_at[queries]
        longest = self._history.max_length
        slide = slide_of(longest, self._history.slide_events)
        first = row_offsets[:-1] + history_start(self.target_at[queries], longest, slide)
        index, offsets = slice_index(first, target_at)
        seen, seen_offsets = slice_index(row_offsets[:-1], target_at)
        key_T = token_keys(sample_keys(0, 0, users), offsets)
        tensors = sequence_tensors(offsets, key_T) | {
            "target": torch.from_numpy(items[target_at]),
            "seen": torch.from_numpy(items[seen]),
            "seen_offsets": torch.from_numpy(seen_offsets),
        }
        if self._use_times:
            times = rows.lists["timestamps_ms"][0]
            tensors |= time_tensors(times[index], times[index + 1], self._history)
        batch = MicroBatch(users, {"history": items[index]}, tensors, _longest(offsets), int(offsets[-1]))
        if self._inputs is None:
            return batch
        return self._inputs.with_tokens(batch, rows, index, index + 1, np.diff(offsets))


def held_out_events(
    dataset: Dataset, split: Split, part: Part, inputs: RetrievalInputs | None, most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Users and places of the events that could be asked for, and which are: so many of the first of a user."""
    first, end = split.held_out(part)
    first = np.maximum(first, 1)
    places, offsets = slice_index(first, np.maximum(first, end))
    users = np.repeat(np.arange(len(first)), np.diff(offsets))
    if inputs is not None:
        is_asked = inputs.is_to_be_found(dataset, users, places)
        users, places = users[is_asked], places[is_asked]
    counts = np.bincount(users, minlength=len(first))
    return users, places, positions(np.concatenate([[0], np.cumsum(counts)])) < most


def sequence_tensors(offsets: NDArray[np.int64], key_T: NDArray[np.uint64]) -> dict[str, torch.Tensor]:
    return {
        "offsets": torch.from_numpy(offsets),
        "position": torch.from_numpy(positions(offsets)),
        "token_key": as_int64(key_T),
    }


def time_tensors(
    own_ms: NDArray[np.int64], next_ms: NDArray[np.int64], history: HistoryConfig
) -> dict[str, torch.Tensor]:
    """Seconds of the events and of the questions; the target's time is an input, as published."""
    asked = next_ms if history.query_time == "next" else own_ms
    return {"time": torch.from_numpy(own_ms / 1000.0), "query_time": torch.from_numpy(asked / 1000.0)}


def _longest(offsets: NDArray[np.int64]) -> int:
    return int(np.diff(offsets).max(initial=0))
