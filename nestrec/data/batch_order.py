"""Sample order: which samples form each global batch, and which rank computes them.

The global batch of a step is a pure function of (seed, epoch, step) and does not depend on the number of ranks or
loader threads, so every configuration trains on the same global batches. Two integers, the epoch and the step within
it, are enough to resume. Samples are shuffled, or in time order, window by window.

`SamplePartitioner` assigns the samples of a global batch to ranks. It is the extension point for sample balancing,
whose implementations are in `nestrec.balance`.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nestrec.base.random import fold, fold_array
from nestrec.data.dataset import DatasetRows


@dataclass(frozen=True, slots=True, order=True)
class BatchPosition:
    """Position of a batch in training: epoch and step within the epoch. Positions compare in training order."""

    epoch: int = 0
    step: int = 0


def epoch_order(num_samples: int, seed: int, epoch: int, *, block_size: int | None = None) -> NDArray[np.int64]:
    """Return a permutation of 0..num_samples-1: samples sorted by a hash of (seed, epoch, sample).

    With `block_size`, blocks of consecutive samples are shuffled first, then the samples inside each block, so that a
    reader that caches one block can follow the order.
    """
    samples = np.arange(num_samples)
    by_sample = fold_array(fold(seed, epoch, 1), samples)
    if block_size is None:
        return np.argsort(by_sample, kind="stable")
    block = samples // block_size
    by_block = fold_array(fold(seed, epoch, 2), block)
    order: NDArray[np.int64] = np.lexsort((by_sample, block, by_block))
    return order


class GlobalBatchSampler:
    """Batch sampler: cuts the sample order of each epoch into global batches, by number of samples or of tokens.

    Args:
        tokens: (N,) number of tokens of each sample; determines the cuts if `batch_tokens` is set.
        seed: Seed of the shuffle.
        batch_samples: Number of samples in a global batch; set either this or `batch_tokens`.
        batch_tokens: Maximum number of tokens in a global batch.
        block_size: Number of samples in a shuffle block; None shuffles all samples together.
        window_bounds: Bounds of time windows. Samples are then in time order already, and no batch spans two windows.
    """

    def __init__(
        self,
        tokens: NDArray[np.int64],
        *,
        seed: int,
        batch_samples: int | None = None,
        batch_tokens: int | None = None,
        block_size: int | None = None,
        window_bounds: NDArray[np.int64] | None = None,
    ):
        assert (batch_samples is None) != (batch_tokens is None)
        self._tokens = tokens
        self._seed = seed
        self._block_size = block_size
        self._batch_samples = batch_samples
        self._batch_tokens = batch_tokens
        self._window_bounds = window_bounds
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def steps_in_epoch(self, epoch: int) -> int:
        return len(self._epoch(epoch)[1]) - 1

    def samples(self, position: BatchPosition) -> NDArray[np.int64]:
        """Return the sample numbers of the global batch, in the order of the epoch."""
        order, cuts = self._epoch(position.epoch)
        return order[cuts[position.step] : cuts[position.step + 1]]

    def next_position(self, position: BatchPosition) -> BatchPosition:
        """Return the next position. The last batch of an epoch may be short but is never dropped."""
        if position.step + 1 < self.steps_in_epoch(position.epoch):
            return BatchPosition(position.epoch, position.step + 1)
        return BatchPosition(position.epoch + 1, 0)

    def window_of(self, position: BatchPosition) -> int:
        """Return the index of the time window of a batch, from 0 in every epoch. Empty windows have no batch."""
        assert self._window_bounds is not None
        first = self._epoch(position.epoch)[1][position.step]
        return int(np.searchsorted(self._window_bounds, first, side="right")) - 1

    def is_last_of_window(self, position: BatchPosition) -> bool:
        """Return whether the batch is the last one of its time window; False without windows."""
        if self._window_bounds is None:
            return False
        following = self.next_position(position)
        return following.epoch > position.epoch or self.window_of(following) > self.window_of(position)

    def _make_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self._window_bounds is not None:
            order = np.arange(len(self._tokens))
            starts = itertools.pairwise(self._window_bounds.tolist())
            parts = [start + self._cuts(order[start:end])[:-1] for start, end in starts]
            return order, np.append(np.concatenate([order[:0], *parts]), len(order))
        order = epoch_order(len(self._tokens), self._seed, epoch, block_size=self._block_size)
        return order, self._cuts(order)

    def _cuts(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._batch_samples is not None:
            return np.append(np.arange(0, len(order), self._batch_samples), len(order))
        assert self._batch_tokens is not None
        return cuts_by_tokens(self._tokens[order], self._batch_tokens)


def cuts_by_tokens(tokens: NDArray[np.int64], batch_tokens: int) -> NDArray[np.int64]:
    """Return greedy cuts: each batch takes samples up to `batch_tokens` tokens, but at least one sample."""
    total = np.concatenate([[0], np.cumsum(tokens)])
    cuts = [0]
    while cuts[-1] < len(tokens):
        end = int(np.searchsorted(total, total[cuts[-1]] + batch_tokens, side="right")) - 1
        cuts.append(max(end, cuts[-1] + 1))
    return np.array(cuts)


def contiguous_bounds(num_samples: int, num_parts: int) -> NDArray[np.int64]:
    """Return (num_parts + 1,) bounds of contiguous ranges of nearly equal size; the first ranges are longer."""
    base, extra = divmod(num_samples, num_parts)
    sizes = np.full(num_parts, base, dtype=np.int64)
    sizes[:extra] += 1
    return np.concatenate([[0], np.cumsum(sizes)])


@dataclass(frozen=True, slots=True)
class RankSamples:
    """Samples of a global batch that are assigned to one rank."""

    indices: NDArray[np.int64]
    """Indices of the samples in the global batch."""
    balance_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of this assignment, which training records."""


class SamplePartitioner:
    """Assigns contiguous ranges of nearly equal size to the ranks: the baseline for sample balancing.

    A rank reads the samples assigned to it, may exchange them for samples that other ranks have read, and splits the
    result into micro-batches. Every decision is a function of (position, tokens), so that all ranks agree.
    """

    exchanges_samples: bool = False
    """Whether `exchange_samples` is collective. If so, one thread calls it for every batch in order."""

    def __init__(self, rank: int, world: int):
        self._rank = rank
        self._world = world

    def assign_samples(self, position: BatchPosition, tokens: NDArray[np.int64]) -> RankSamples:
        """Return the samples that this rank reads, given the token counts of the global batch."""
        return RankSamples(split_contiguous(len(tokens), self._world)[self._rank])

    def exchange_samples(
        self, position: BatchPosition, share: RankSamples, rows: DatasetRows, tokens: NDArray[np.int64]
    ) -> tuple[RankSamples, DatasetRows]:
        """Return the samples that this rank computes, and their rows, in exchange for those it has read."""
        return share, rows

    def costs(self, position: BatchPosition, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the estimated computation cost of each sample."""
        return tokens.astype(np.float64)

    def micro_batches(
        self, position: BatchPosition, tokens: NDArray[np.int64], num_micro_batches: int
    ) -> list[NDArray[np.int64]]:
        """Split the samples of this rank into micro-batches, given their token counts."""
        return split_contiguous(len(tokens), num_micro_batches)


def split_contiguous(num_samples: int, num_parts: int) -> list[NDArray[np.int64]]:
    """Return the indices of contiguous ranges of nearly equal size."""
    bounds = contiguous_bounds(num_samples, num_parts)
    return [np.arange(a, b) for a, b in itertools.pairwise(bounds)]
