"""Collators of next-item retrieval: the history of each user; every position predicts the next item."""

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
    resolve_slide_events,
    sample_keys,
    slice_index,
    token_keys,
)
from nestrec.data.samples.negative_sampling import NegativeSampler, sample_negatives
from nestrec.data.samples.retrieval_inputs import RetrievalInputs
from nestrec.data.samples.split import Part, Split, sample_events, stochastic_length, sum_target_weights


@config
class HistoryConfig:
    max_events: Count = 200
    """Maximum number of events in a history; the most recent events are used."""
    query_time: Literal["next", "own"] = "next"
    """Query time of a token: `next` is the time of the event that it predicts (as published), `own` that of its own
    event."""
    slide_events: Count | None = None
    """Number of events by which a history longer than `max_events` slides, in evaluation and serving alike. None uses
    an eighth of `max_events`, which keeps cached prefixes valid for longer; 1 always uses exactly the newest events."""
    stochastic_length_alpha: Annotated[float, NumberRange(1, 2, above=True)] | None = None
    """Cost exponent of stochastic length (HSTU), in (1, 2]; None trains on complete histories."""

    def __post_init__(self) -> None:
        check_slide(self.slide_events, self.max_events, "task.history.slide_events", "task.history.max_events")


class RetrievalCollator(Collator):
    """Collates training samples; there is one sample per user with at least two training events.

    Args:
        dataset: Source of the user rows.
        split: Training, validation and test events of each user.
        history: History options.
        seed: Seed of stochastic length and negative sampling.
        sampler: Negative sampler; None compares with the full catalog.
        logit_sharing: Number of tokens whose negatives a token uses, including its own.
        use_times: Whether the model reads event times.
        inputs: Feature inputs in addition to item ids.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        history: HistoryConfig,
        *,
        seed: int,
        sampler: NegativeSampler | None,
        logit_sharing: int = 1,
        use_times: bool,
        inputs: RetrievalInputs | None = None,
    ):
        self._dataset = dataset
        self._split = split
        self._history = history
        self._seed = seed
        self._inputs = inputs
        self._sampler = sampler
        self._logit_sharing = logit_sharing
        self._use_times = use_times
        self._users = np.flatnonzero(split.train_end >= 2)
        if inputs is not None and inputs.has_target_weights:
            weights = sum_target_weights(dataset, split.train_end, history.max_events, inputs.target_weights)
            self._users = self._users[weights[self._users] > 0]
            self.weights = weights[self._users]
        self.tokens = np.minimum(split.train_end[self._users] - 1, history.max_events)
        if inputs is None or not inputs.has_target_weights:
            self.weights = self.tokens.astype(np.float64)
        self.shuffle_block = dataset.shuffle_block(len(self._users))

    def tokens_in(self, samples: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return self._num_sampled_events(self._users[samples], epoch) - 1

    def weight(self, samples: NDArray[np.int64], epoch: int) -> float:
        if self._inputs is not None and self._inputs.has_target_weights:
            return float(self.weights[samples].sum())
        return float(self.tokens_in(samples, epoch).sum())

    def read(self, samples: NDArray[np.int64]) -> DatasetRows:
        return self._dataset.rows(self._users[samples])

    def sample_keys(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> KeysOfSamples:
        items, row_offsets = rows.lists["item_ids"]
        index, offsets = self._event_index(rows.indices, row_offsets, epoch)
        return items[index], offsets

    def collate(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> MicroBatch:
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
        negatives = sample_negatives(
            self._sampler, key_T, target, num_items=num_items, logit_sharing=self._logit_sharing
        )
        keys, tensors = {**keys, **negatives.keys}, {**tensors, **negatives.tensors}
        batch = MicroBatch(users, keys, tensors, max_length=_max_length(offsets), num_tokens=int(offsets[-1]))
        if self._inputs is None:
            return batch
        input_index, target_index = index[is_input], index[is_target]
        batch = self._inputs.add_token_features(batch, rows, input_index, target_index, np.diff(offsets))
        return self._inputs.add_item_features(self._inputs.add_target_weights(batch, rows, target_index), key_T, epoch)

    def _num_sampled_events(self, users: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Return the number of events of each user that are trained on in this epoch."""
        end = self._split.train_end[users]
        if self._history.stochastic_length_alpha is not None:
            key = sample_keys(self._seed, epoch, users)
            longest = self._history.max_events
            end = stochastic_length(end, key, alpha=self._history.stochastic_length_alpha, longest=longest)
        return np.minimum(end, self._history.max_events + 1)

    def _event_index(
        self, users: NDArray[np.int64], row_offsets: NDArray[np.int64], epoch: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the indices of the sampled events in the concatenated rows, and the offsets of the users."""
        start, end = row_offsets[:-1], row_offsets[:-1] + self._split.train_end[users]
        num_sampled = self._num_sampled_events(users, epoch)
        if self._history.stochastic_length_alpha is None:
            return slice_index(end - num_sampled, end)
        key = sample_keys(self._seed, epoch, users)
        indices = [
            s + sample_events(int(e - s), int(n), int(k))
            for s, e, n, k in zip(start, end, num_sampled, key, strict=True)
        ]
        return np.concatenate(indices) if indices else np.empty(0, np.int64), np.concatenate(
            [[0], np.cumsum(num_sampled)]
        )


class RetrievalQueries:
    """Evaluation queries: the history of a user before a held-out event, with that event as the target.

    Queries are numbered from 0 in the order of users and events. Every held-out event with at least one earlier event
    is a query, up to `max_targets` per user. If `inputs` restricts targets to some actions, only events with such an
    action are queries.
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
        users, positions_in_row, is_selected = held_out_events(dataset, split, part, inputs, max_targets)
        self.users = users[is_selected]
        self.target_at = positions_in_row[is_selected]
        """(Q,) position of each query's target in the user's row, equal to the number of events before it; `users` (Q,)
        has the user of each query."""
        self.num_skipped = len(users) - len(self.users)
        """Number of held-out events beyond `max_targets` per user, which are not evaluated."""

    @property
    def ids(self) -> NDArray[np.int64]:
        """Numbers of all queries."""
        return np.arange(len(self.users))

    def collate(self, queries: NDArray[np.int64]) -> MicroBatch:
        """Collate queries. Adds `target` (B,) item ids, and items before the target as `seen` and `seen_offsets`."""
        users = self.users[queries]
        rows = self._dataset.rows(users)
        items, row_offsets = rows.lists["item_ids"]
        target_index = row_offsets[:-1] + self.target_at[queries]
        longest = self._history.max_events
        slide = resolve_slide_events(longest, self._history.slide_events)
        first = row_offsets[:-1] + history_start(self.target_at[queries], longest, slide)
        index, offsets = slice_index(first, target_index)
        seen, seen_offsets = slice_index(row_offsets[:-1], target_index)
        key_T = token_keys(sample_keys(0, 0, users), offsets)
        tensors = sequence_tensors(offsets, key_T) | {
            "target": torch.from_numpy(items[target_index]),
            "seen": torch.from_numpy(items[seen]),
            "seen_offsets": torch.from_numpy(seen_offsets),
        }
        if self._use_times:
            times = rows.lists["timestamps_ms"][0]
            tensors |= time_tensors(times[index], times[index + 1], self._history)
        batch = MicroBatch(users, {"history": items[index]}, tensors, _max_length(offsets), int(offsets[-1]))
        if self._inputs is None:
            return batch
        return self._inputs.add_token_features(batch, rows, index, index + 1, np.diff(offsets))


def held_out_events(
    dataset: Dataset, split: Split, part: Part, inputs: RetrievalInputs | None, max_targets: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return (users, positions) of the events to evaluate, and which are among a user's first `max_targets`."""
    first, end = split.held_out(part)
    first = np.maximum(first, 1)
    positions_in_row, offsets = slice_index(first, np.maximum(first, end))
    users = np.repeat(np.arange(len(first)), np.diff(offsets))
    if inputs is not None:
        is_target = inputs.has_target_action(dataset, users, positions_in_row)
        users, positions_in_row = users[is_target], positions_in_row[is_target]
    counts = np.bincount(users, minlength=len(first))
    return users, positions_in_row, positions(np.concatenate([[0], np.cumsum(counts)])) < max_targets


def sequence_tensors(offsets: NDArray[np.int64], key_T: NDArray[np.uint64]) -> dict[str, torch.Tensor]:
    return {
        "offsets": torch.from_numpy(offsets),
        "position": torch.from_numpy(positions(offsets)),
        "token_key": as_int64(key_T),
    }


def time_tensors(
    event_ms: NDArray[np.int64], next_ms: NDArray[np.int64], history: HistoryConfig
) -> dict[str, torch.Tensor]:
    """Return event times and query times in seconds. If `query_time` is `next`, the target's time is an input."""
    query_ms = next_ms if history.query_time == "next" else event_ms
    return {"time": torch.from_numpy(event_ms / 1000.0), "query_time": torch.from_numpy(query_ms / 1000.0)}


def _max_length(offsets: NDArray[np.int64]) -> int:
    return int(np.diff(offsets).max(initial=0))
