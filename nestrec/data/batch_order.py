"""Sample order: which samples form each global batch, and which rank computes them.

Who computes which samples of a global batch: a hook for balancing, which lives above this folder.

The order of samples: the global batch of a step is a pure function of (seed, epoch, step).

Nothing here knows of ranks or workers, so every number of them trains on the same global batches. The state needed to
resume is two integers: epoch and step in the epoch. Beside the shuffle there is the order of time, window by window.
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
    """Where a run stands: the next step to take. Later positions are greater."""

    epoch: int = 0
    step: int = 0


def epoch_order(num_samples: int, seed: int, epoch: int, *, block_size: int | None = None) -> NDArray[np.int64]:
    """A permutation of 0..num_samples-1: samples sorted by a hash of (seed, epoch, sample).

    With `block_size` the blocks of consecutive samples are shuffled, then the samples inside each: a reader that keeps
    one block in memory can follow it.
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
    """Cuts each epoch's order into global batches, by number of samples or by number of tokens."""

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
        """tokens: the tokens of each sample, which decide the cuts where `batch_tokens` is given.

        window_bounds: samples are in the order of time already, and no batch has samples of two of these windows.
        """
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
        """Sample numbers of the global batch, in the order of the epoch."""
        order, cuts = self._epoch(position.epoch)
        return order[cuts[position.step] : cuts[position.step + 1]]

    def after(self, position: BatchPosition) -> BatchPosition:
        """The position that follows; an epoch's last batch may be short but is never dropped."""
        if position.step + 1 < self.steps_in_epoch(position.epoch):
            return BatchPosition(position.epoch, position.step + 1)
        return BatchPosition(position.epoch + 1, 0)

    def window_of(self, position: BatchPosition) -> int:
        """The window of a batch, from 0 in every epoch; windows without samples have no batch."""
        assert self._window_bounds is not None
        first = self._epoch(position.epoch)[1][position.step]
        return int(np.searchsorted(self._window_bounds, first, side="right")) - 1

    def ends_window(self, position: BatchPosition) -> bool:
        """Whether the batch is the last of its window; never where there are none."""
        if self._window_bounds is None:
            return False
        following = self.after(position)
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
    """Greedy cuts: each batch takes samples while it stays within `batch_tokens`, and at least one."""
    total = np.concatenate([[0], np.cumsum(tokens)])
    cuts = [0]
    while cuts[-1] < len(tokens):
        end = int(np.searchsorted(total, total[cuts[-1]] + batch_tokens, side="right")) - 1
        cuts.append(max(end, cuts[-1] + 1))
    return np.array(cuts)


def contiguous_shares(num_samples: int, num_shares: int) -> NDArray[np.int64]:
    """Bounds (num_shares + 1) of near equal consecutive runs; the first ones are the longer."""
    base, extra = divmod(num_samples, num_shares)
    sizes = np.full(num_shares, base, dtype=np.int64)
    sizes[:extra] += 1
    return np.concatenate([[0], np.cumsum(sizes)])


@dataclass(frozen=True, slots=True)
class RankSamples:
    """Some samples of a global batch."""

    places: NDArray[np.int64]
    """their indices in the global batch"""
    figures: Mapping[str, float] = field(default_factory=dict)
    """what is to be recorded of this dealing"""


class SamplePartitioner:
    """Near equal counts in the order of the global batch: the baseline that balancing is compared with.

    A rank reads its share, may trade it against samples that other ranks have read, and cuts what it then has into
    micro-batches. Every choice is a function of (position, tokens), the same on every rank.
    """

    trades: bool = False
    """Whether `trade` is collective; it is then called for every batch, in order, by one thread."""

    def __init__(self, rank: int, world: int):
        self._rank = rank
        self._world = world

    def share(self, position: BatchPosition, tokens: NDArray[np.int64]) -> RankSamples:
        """What this rank reads, from the tokens of the samples of the global batch."""
        return RankSamples(contiguous(len(tokens), self._world)[self._rank])

    def trade(
        self, position: BatchPosition, share: RankSamples, rows: DatasetRows, tokens: NDArray[np.int64]
    ) -> tuple[RankSamples, DatasetRows]:
        """What this rank computes, for what it has read."""
        return share, rows

    def costs(self, position: BatchPosition, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """What the samples cost to compute."""
        return tokens.astype(np.float64)

    def micro_batches(
        self, position: BatchPosition, tokens: NDArray[np.int64], num_micro_batches: int
    ) -> list[NDArray[np.int64]]:
        """Parts of what this rank computes, from the tokens of its samples."""
        return contiguous(len(tokens), num_micro_batches)


def contiguous(num_samples: int, num_shares: int) -> list[NDArray[np.int64]]:
    """Near equal counts in order."""
    bounds = contiguous_shares(num_samples, num_shares)
    return [np.arange(a, b) for a, b in itertools.pairwise(bounds)]
