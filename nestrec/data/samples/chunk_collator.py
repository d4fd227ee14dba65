"""Collators of labeled rows (CTR) and of chunks of user sequences.

`CTRCollator` collates labeled rows: dense numbers, categories and one label (Criteo). The chunk collators split long
user sequences: the scored events at the end of a chunk are training targets, the events before them are history.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.random import as_int64, fold_array
from nestrec.data.batch_loader import Collator, KeysOfSamples, MicroBatch
from nestrec.data.dataset import Dataset, DatasetRows
from nestrec.data.flat_arrays import offsets_of_lengths, sample_keys, slice_index, token_keys
from nestrec.data.samples.negative_sampling import NegativeSampler, sample_negatives
from nestrec.data.samples.ranking_collator import RankingInputs
from nestrec.data.samples.retrieval_collator import HistoryConfig, sequence_tensors, time_tensors
from nestrec.data.samples.retrieval_inputs import RetrievalInputs
from nestrec.data.samples.time_windows import TrainingChunks
from nestrec.jagged import Jagged


def collate_rows(rows: DatasetRows) -> MicroBatch:
    """Collate labeled rows: keys `category` (B, C), tensors `dense` (B, N) with NaN if missing, and `label` (B,)."""
    dense, categories = (_columns(rows, name) for name in ("dense", "categories"))
    tensors = {"dense": torch.from_numpy(dense), "label": torch.from_numpy(rows.scalars["label"].astype(np.int64))}
    return MicroBatch(rows.indices, {"category": categories}, tensors, max_length=1, num_tokens=rows.num_rows)


def _columns(rows: DatasetRows, name: str) -> NDArray[Any]:
    """Return (B, N) values of a list column; (0, 0) if there are no rows."""
    return rows.lists[name][0].reshape(rows.num_rows, -1 if rows.num_rows else 0)


class CTRCollator(Collator):
    """Collates labeled training rows."""

    def __init__(self, dataset: Dataset, indices: NDArray[np.int64]):
        self._dataset = dataset
        self._indices = indices
        self.weights = np.ones(len(indices))
        self.tokens = np.ones(len(indices), dtype=np.int64)
        self.shuffle_block = dataset.shuffle_block(len(indices))

    def read(self, samples: NDArray[np.int64]) -> DatasetRows:
        return self._dataset.rows(self._indices[samples])

    def sample_keys(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> KeysOfSamples:
        values, offsets = rows.lists["categories"]
        return values.astype(np.int64), offsets

    def collate(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> MicroBatch:
        return collate_rows(rows)


Ints = NDArray[np.int64]


class ChunkCollator(Collator):
    """Base class of the chunk collators; chunks are in training order."""

    def __init__(self, chunks: TrainingChunks, seed: int):
        self.window_bounds = chunks.bounds
        self._seed = seed
        self._user, self._first, self._end, self._scored = chunks.rows.T
        self.weights = (self._end - self._scored).astype(np.float64)

    @property
    def scored_users(self) -> Ints:
        """User of each scored event, in chunk order."""
        return np.repeat(self._user, self._end - self._scored)

    def token_keys(self, samples: Ints, epoch: int, offsets: Ints) -> NDArray[np.uint64]:
        """Return the random generator keys of all tokens; chunks of one user differ by their ends."""
        key = fold_array(sample_keys(self._seed, epoch, self._user[samples]), self._end[samples])
        return token_keys(key, offsets)

    def event_index(self, samples: Ints, row_offsets: Ints) -> tuple[Ints, Ints]:
        """Return the indices of the chunks' events in the concatenated rows, and the offsets of the chunks."""
        return slice_index(row_offsets[:-1] + self._first[samples], row_offsets[:-1] + self._end[samples])

    def sample_keys(self, samples: Ints, rows: DatasetRows, epoch: int) -> KeysOfSamples:
        items, row_offsets = rows.lists["item_ids"]
        index, offsets = self.event_index(samples, row_offsets)
        return items[index], offsets

    def is_scored(self, samples: Ints) -> NDArray[np.bool_]:
        """Return whether each event of the chunks is scored."""
        position, offsets = slice_index(self._first[samples], self._end[samples])
        scored: NDArray[np.bool_] = position >= np.repeat(self._scored[samples], np.diff(offsets))
        return scored


class RankingChunkCollator(ChunkCollator):
    """Collates chunks for multi-task ranking."""

    def __init__(self, inputs: RankingInputs, chunks: TrainingChunks, seed: int):
        super().__init__(chunks, seed)
        self._inputs = inputs
        self.tokens = 2 * (self._end - self._first)
        if chunks.bounds is None:
            self.shuffle_block = inputs.shuffle_block(len(self.tokens))

    def read(self, samples: Ints) -> DatasetRows:
        return self._inputs.read(self._user[samples])

    def collate(self, samples: Ints, rows: DatasetRows, epoch: int) -> MicroBatch:
        """Collate chunks. Adds the tensor `scored` (E,): whether the labels of an event are training targets."""
        batch = self._inputs.collate_chunks(rows, self._first[samples], self._end[samples], epoch)
        offsets = 2 * offsets_of_lengths(self._end[samples] - self._first[samples])
        extra_tensors = {
            "scored": torch.from_numpy(self.is_scored(samples)),
            "token_key": as_int64(self.token_keys(samples, epoch, offsets)),
        }
        return replace(batch, tensors={**batch.tensors, **extra_tensors})


class RetrievalChunkCollator(ChunkCollator):
    """Collates chunks for next-item retrieval: every scored event is the target of the token before it."""

    def __init__(
        self,
        dataset: Dataset,
        chunks: TrainingChunks,
        history: HistoryConfig,
        *,
        seed: int,
        sampler: NegativeSampler | None,
        logit_sharing: int = 1,
        use_times: bool,
        inputs: RetrievalInputs | None = None,
    ):
        """Take the same arguments as `RetrievalCollator`, with chunks instead of a split."""
        super().__init__(chunks, seed)
        self._inputs = inputs
        self._dataset = dataset
        self._history = history
        self._sampler = sampler
        self._logit_sharing = logit_sharing
        self._use_times = use_times
        self.tokens = self._end - self._first - 1

    def read(self, samples: Ints) -> DatasetRows:
        return self._dataset.rows(self._user[samples])

    def collate(self, samples: Ints, rows: DatasetRows, epoch: int) -> MicroBatch:
        """Collate chunks. Adds `scored` (S,), indices of the tokens with a target, and `target` (S,), their targets."""
        batch, key_T = self.collate_queries(samples, rows, epoch)
        key_S = key_T[batch.tensors["scored"].numpy()]
        target = batch.tensors["target"].numpy()
        keys = {**batch.keys, "positive": target}
        tensors = dict(batch.tensors)
        num_items = self._dataset.card.counts.items
        negatives = sample_negatives(
            self._sampler, key_S, target, num_items=num_items, logit_sharing=self._logit_sharing
        )
        keys, tensors = {**keys, **negatives.keys}, {**tensors, **negatives.tensors}
        batch = replace(batch, keys=keys, tensors=tensors)
        return batch if self._inputs is None else self._inputs.add_item_features(batch, key_S, epoch)

    def collate_queries(
        self, samples: Ints, rows: DatasetRows, epoch: int = 0
    ) -> tuple[MicroBatch, NDArray[np.uint64]]:
        """Collate chunks without negatives; also return the random generator keys of all tokens."""
        items, row_offsets = rows.lists["item_ids"]
        index, offsets = self.event_index(samples, row_offsets)
        is_input, is_target = np.ones(len(index), dtype=bool), np.ones(len(index), dtype=bool)
        is_input[offsets[1:] - 1] = False
        is_target[offsets[:-1]] = False
        scored = np.flatnonzero(self.is_scored(samples)[is_target])
        target_index = index[is_target][scored]
        offsets = offsets - np.arange(len(offsets))
        key_T = self.token_keys(samples, epoch, offsets)
        tensors = sequence_tensors(offsets, key_T) | {
            "scored": torch.from_numpy(scored),
            "target": torch.from_numpy(items[target_index]),
        }
        if self._use_times:
            times = rows.lists["timestamps_ms"][0][index]
            tensors |= time_tensors(times[is_input], times[is_target], self._history)
        longest = int(np.diff(offsets).max(initial=0))
        history = {"history": items[index[is_input]]}
        batch = MicroBatch(self._user[samples], history, tensors, longest, int(offsets[-1]))
        if self._inputs is not None:
            batch = self._inputs.add_token_features(batch, rows, index[is_input], index[is_target], np.diff(offsets))
        return batch, key_T

    def items_before_targets(self, samples: Ints, rows: DatasetRows, *, of_input: bool) -> Jagged:
        """Return the user's items before each target: only those in the model input, or all of them."""
        items, row_offsets = rows.lists["item_ids"]
        position, offsets = slice_index(self._scored[samples], self._end[samples])
        chunk_of_target = np.repeat(np.arange(len(samples)), np.diff(offsets))
        start = row_offsets[:-1][chunk_of_target]
        first = self._first[samples][chunk_of_target] if of_input else np.zeros(len(position), np.int64)
        index, offsets = slice_index(start + first, start + position)
        return Jagged(torch.from_numpy(items[index]), torch.from_numpy(offsets))
