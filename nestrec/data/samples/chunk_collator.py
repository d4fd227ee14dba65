"""Collates labeled rows, and chunks of long histories.

Samples of labelled rows: dense numbers, categories, one label (Criteo).

Samples that are slices of users' events: the scored ones at the end are learnt from, those before are history.
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
from nestrec.data.samples.negative_sampling import NegativeSampler, negatives_of
from nestrec.data.samples.ranking_collator import RankingInputs
from nestrec.data.samples.retrieval_collator import HistoryConfig, sequence_tensors, time_tensors
from nestrec.data.samples.retrieval_inputs import RetrievalInputs
from nestrec.data.samples.time_windows import TrainingChunks
from nestrec.jagged import Jagged


def assemble_rows(rows: DatasetRows) -> MicroBatch:
    """Keys `category` (B, C); tensors dense (B, N) with NaN where missing, and label (B,)."""
    dense, categories = (_columns(rows, name) for name in ("dense", "categories"))
    tensors = {"dense": torch.from_numpy(dense), "label": torch.from_numpy(rows.scalars["label"].astype(np.int64))}
    return MicroBatch(rows.indices, {"category": categories}, tensors, max_length=1, num_tokens=rows.num_rows)


def _columns(rows: DatasetRows, name: str) -> NDArray[Any]:
    """(B, N) values of a list column; (0, 0) without rows, which then have no width."""
    return rows.lists[name][0].reshape(rows.num_rows, -1 if rows.num_rows else 0)


class CTRCollator(Collator):
    """Training rows."""

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

    def assemble(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> MicroBatch:
        return assemble_rows(rows)


Ints = NDArray[np.int64]


class ChunkCollator(Collator):
    """Samples in the order in which they are trained on."""

    def __init__(self, slices: TrainingChunks, seed: int):
        self.window_bounds = slices.bounds
        self._seed = seed
        self._user, self._first, self._end, self._scored = slices.rows.T
        self.weights = (self._end - self._scored).astype(np.float64)

    @property
    def scored_users(self) -> Ints:
        """User of each event that is scored, in the order of the slices."""
        return np.repeat(self._user, self._end - self._scored)

    def token_keys_of(self, samples: Ints, epoch: int, offsets: Ints) -> NDArray[np.uint64]:
        """Of the counter-based generator; slices of one user differ by their ends."""
        key = fold_array(sample_keys(self._seed, epoch, self._user[samples]), self._end[samples])
        return token_keys(key, offsets)

    def events_of(self, samples: Ints, row_offsets: Ints) -> tuple[Ints, Ints]:
        """Index into the concatenated rows of every event of the slices, and the offsets of the slices."""
        return slice_index(row_offsets[:-1] + self._first[samples], row_offsets[:-1] + self._end[samples])

    def sample_keys(self, samples: Ints, rows: DatasetRows, epoch: int) -> KeysOfSamples:
        items, row_offsets = rows.lists["item_ids"]
        index, offsets = self.events_of(samples, row_offsets)
        return items[index], offsets

    def is_scored(self, samples: Ints) -> NDArray[np.bool_]:
        """Of every event of the slices."""
        place, offsets = slice_index(self._first[samples], self._end[samples])
        scored: NDArray[np.bool_] = place >= np.repeat(self._scored[samples], np.diff(offsets))
        return scored


class RankingChunkCollator(ChunkCollator):
    """Slices of multi-task ranking."""

    def __init__(self, inputs: RankingInputs, slices: TrainingChunks, seed: int):
        super().__init__(slices, seed)
        self._inputs = inputs
        self.tokens = 2 * (self._end - self._first)
        if slices.bounds is None:
            self.shuffle_block = inputs.shuffle_block(len(self.tokens))

    def read(self, samples: Ints) -> DatasetRows:
        return self._inputs.read(self._user[samples])

    def assemble(self, samples: Ints, rows: DatasetRows, epoch: int) -> MicroBatch:
        """As the inputs make them, and `scored` (E,): whether an event's labels are learnt from."""
        batch = self._inputs.slices(rows, self._first[samples], self._end[samples], epoch)
        offsets = 2 * offsets_of_lengths(self._end[samples] - self._first[samples])
        more = {
            "scored": torch.from_numpy(self.is_scored(samples)),
            "token_key": as_int64(self.token_keys_of(samples, epoch, offsets)),
        }
        return replace(batch, tensors={**batch.tensors, **more})


class RetrievalChunkCollator(ChunkCollator):
    """Slices of next-item retrieval: every scored event is the target of the token before it."""

    def __init__(
        self,
        dataset: Dataset,
        slices: TrainingChunks,
        history: HistoryConfig,
        *,
        seed: int,
        sampler: NegativeSampler | None,
        sharing: int = 1,
        use_times: bool,
        inputs: RetrievalInputs | None = None,
    ):
        """As of `RetrievalCollator`."""
        super().__init__(slices, seed)
        self._inputs = inputs
        self._dataset = dataset
        self._history = history
        self._sampler = sampler
        self._sharing = sharing
        self._use_times = use_times
        self.tokens = self._end - self._first - 1

    def read(self, samples: Ints) -> DatasetRows:
        return self._dataset.rows(self._user[samples])

    def assemble(self, samples: Ints, rows: DatasetRows, epoch: int) -> MicroBatch:
        """Tensors also hold `scored` (S,): the tokens that have a target, and `target` (S,) theirs."""
        batch, key_T = self.queries(samples, rows, epoch)
        key_S = key_T[batch.tensors["scored"].numpy()]
        target = batch.tensors["target"].numpy()
        keys = {**batch.keys, "positive": target}
        tensors = dict(batch.tensors)
        num_items = self._dataset.card.counts.items
        drawn = negatives_of(self._sampler, key_S, target, num_items=num_items, sharing=self._sharing)
        keys, tensors = {**keys, **drawn.keys}, {**tensors, **drawn.tensors}
        batch = replace(batch, keys=keys, tensors=tensors)
        return batch if self._inputs is None else self._inputs.with_items(batch, key_S, epoch)

    def queries(self, samples: Ints, rows: DatasetRows, epoch: int = 0) -> tuple[MicroBatch, NDArray[np.uint64]]:
        """The same without negatives, and the keys of all tokens."""
        items, row_offsets = rows.lists["item_ids"]
        index, offsets = self.events_of(samples, row_offsets)
        is_input, is_target = np.ones(len(index), dtype=bool), np.ones(len(index), dtype=bool)
        is_input[offsets[1:] - 1] = False
        is_target[offsets[:-1]] = False
        scored = np.flatnonzero(self.is_scored(samples)[is_target])
        target_at = index[is_target][scored]
        offsets = offsets - np.arange(len(offsets))
        key_T = self.token_keys_of(samples, epoch, offsets)
        tensors = sequence_tensors(offsets, key_T) | {
            "scored": torch.from_numpy(scored),
            "target": torch.from_numpy(items[target_at]),
        }
        if self._use_times:
            times = rows.lists["timestamps_ms"][0][index]
            tensors |= time_tensors(times[is_input], times[is_target], self._history)
        longest = int(np.diff(offsets).max(initial=0))
        history = {"history": items[index[is_input]]}
        batch = MicroBatch(self._user[samples], history, tensors, longest, int(offsets[-1]))
        if self._inputs is not None:
            batch = self._inputs.with_tokens(batch, rows, index[is_input], index[is_target], np.diff(offsets))
        return batch, key_T

    def before_targets(self, samples: Ints, rows: DatasetRows, *, of_input: bool) -> Jagged:
        """Items of the user before each target: those of the model's input alone, or all of them."""
        items, row_offsets = rows.lists["item_ids"]
        place, offsets = slice_index(self._scored[samples], self._end[samples])
        of_slice = np.repeat(np.arange(len(samples)), np.diff(offsets))
        start = row_offsets[:-1][of_slice]
        first = self._first[samples][of_slice] if of_input else np.zeros(len(place), np.int64)
        index, offsets = slice_index(start + first, start + place)
        return Jagged(torch.from_numpy(items[index]), torch.from_numpy(offsets))
