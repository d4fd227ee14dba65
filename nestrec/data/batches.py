"""Batches: samples assembled into arrays, on background threads, in the order of the steps."""

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.data.order import GlobalBatches, Position, contiguous_shares


@config
class BatchConfig:
    batch_samples: int | None = 128
    """samples of a global batch; give this or batch_tokens"""
    batch_tokens: int | None = None
    """tokens of a global batch"""
    micro_batches: int = 1
    """parts of a rank's batch, computed one after the other before the update"""
    workers: int = 2
    """threads that assemble batches ahead"""
    prefetch: int = 4
    """batches assembled ahead of the step"""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of a rank's batch: what to look up, and everything else that the computation needs."""

    sample_ids: NDArray[np.int64]
    keys: Mapping[str, NDArray[np.int64]]
    """feature name to the keys to look up, of any shape"""
    tensors: Mapping[str, torch.Tensor]
    """host tensors for the computation"""
    max_length: int
    """longest sequence, known on the host"""
    num_tokens: int
    """tokens that the model computes"""


@dataclass(frozen=True, slots=True)
class Batch:
    """A rank's part of the global batch of one step."""

    position: Position
    weight: float
    """weight of the *global* batch, by which the sum of losses is divided"""
    global_samples: NDArray[np.int64]
    """sample numbers of the global batch, the same on every rank"""
    micro_batches: tuple[MicroBatch, ...]


class Assembler(ABC):
    """Makes micro-batches out of sample numbers; one subclass a task. Pure: no state between calls."""

    weights: NDArray[np.float64]
    """loss weight of each sample, before any sampling of its length"""
    tokens: NDArray[np.int64]
    """tokens of each sample"""

    def weight(self, samples: NDArray[np.int64], epoch: int) -> float:
        """Weight of a global batch, known before anything is computed."""
        return float(self.weights[samples].sum())

    @abstractmethod
    def assemble(self, samples: NDArray[np.int64], epoch: int) -> MicroBatch:
        """The arrays of these samples."""


Partition = Callable[[NDArray[np.int64], int], list[NDArray[np.int64]]]
"""(tokens of each sample, number of shares) to the indices of each share; every sample exactly once."""


def contiguous(tokens: NDArray[np.int64], num_shares: int) -> list[NDArray[np.int64]]:
    """Near equal counts in order: the baseline that balancing is compared with."""
    bounds = contiguous_shares(len(tokens), num_shares)
    return [np.arange(a, b) for a, b in itertools.pairwise(bounds)]


class Batches:
    """The batches of one rank, assembled ahead by background threads, delivered in order."""

    def __init__(
        self,
        assembler: Assembler,
        cfg: BatchConfig,
        *,
        seed: int,
        rank: int,
        world: int,
        block_size: int | None = None,
        over_ranks: Partition = contiguous,
        over_micro_batches: Partition = contiguous,
    ):
        self._assembler, self._cfg, self._rank, self._world = assembler, cfg, rank, world
        self._over_ranks, self._over_micro_batches = over_ranks, over_micro_batches
        self.order = GlobalBatches(
            assembler.tokens, seed=seed, batch_samples=cfg.batch_samples, batch_tokens=cfg.batch_tokens,
            block_size=block_size,
        )  # fmt: skip

    def build(self, position: Position) -> Batch:
        """The slow twin of `starting_at`: one batch, made now."""
        samples = self.order.samples(position)
        mine = samples[self._over_ranks(self._assembler.tokens[samples], self._world)[self._rank]]
        parts = self._over_micro_batches(self._assembler.tokens[mine], self._cfg.micro_batches)
        return Batch(
            position=position,
            weight=self._assembler.weight(samples, position.epoch),
            global_samples=samples,
            micro_batches=tuple(self._assembler.assemble(mine[part], position.epoch) for part in parts),
        )

    def starting_at(
        self, position: Position, transform: Callable[[Batch], Batch] | None = None
    ) -> Generator[Batch, None, None]:
        """Endless batches from `position` on; at most `prefetch` are assembled ahead."""

        def make(at: Position) -> Batch:
            batch = self.build(at)
            return transform(batch) if transform else batch

        with ThreadPoolExecutor(self._cfg.workers, thread_name_prefix="batches") as pool:
            ahead: deque[Future[Batch]] = deque()
            try:
                while True:
                    while len(ahead) <= self._cfg.prefetch:
                        ahead.append(pool.submit(make, position))
                        position = self.order.after(position)
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()
