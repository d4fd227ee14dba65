"""Data loader: reads, collates and prefetches micro-batches on background threads.

A thread pool reads and collates samples in any order. If ranks exchange samples (sample balancing), one more thread
runs the exchanges in step order:

    read (pool) -> exchange (one thread, in order) -> collate (pool)

An exchange is a collective operation, so exchanges are never reordered or interrupted, and none starts after one that
failed: the other ranks may still be waiting in it. Batches are delivered in step order.

With context parallelism, every rank of a context group collates the same complete samples and then keeps the inputs,
targets and negatives of its own tokens. Random draws therefore do not depend on which rank computes a token.
"""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural
from nestrec.base.errors import UserError
from nestrec.data.batch_order import BatchPosition, GlobalBatchSampler, RankSamples, SamplePartitioner
from nestrec.data.dataset import DatasetRows
from nestrec.ops.context_parallel.token_partition import TokenPartition

BatchT = TypeVar("BatchT")


@dataclass(frozen=True, slots=True)
class UnfinishedBatch:
    """A batch between reading and collating."""

    position: BatchPosition
    samples: NDArray[np.int64]
    """Sample numbers of the global batch."""
    tokens: NDArray[np.int64]
    """Number of tokens of each sample of the global batch."""
    assignment: RankSamples
    """Samples of the global batch that this rank holds at this stage."""
    rows: DatasetRows
    """Dataset rows of the samples of this rank."""


class BatchWorkers(Generic[BatchT]):
    """Background threads that produce batches; a context manager that stops them on exit.

    Args:
        num_workers: Number of threads that read and collate.
        read: Reads the rows of the batch at a position.
        exchange: Exchanges samples with other ranks (collective), or None if ranks do not exchange samples.
        finish: Collates a batch.
    """

    def __init__(
        self,
        num_workers: int,
        read: Callable[[BatchPosition], UnfinishedBatch],
        exchange: Callable[[UnfinishedBatch], UnfinishedBatch] | None,
        finish: Callable[[UnfinishedBatch], BatchT],
    ):
        self._read = read
        self._exchange = exchange
        self._finish = finish
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data")
        self._exchange_thread = ThreadPoolExecutor(1, thread_name_prefix="trade")
        self._exchange_error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Finish exchanges that have started: every rank has started the same ones and waits for its peers.
        self._exchange_thread.shutdown(wait=True)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, position: BatchPosition) -> Callable[[], BatchT]:
        """Start producing the batch at a position and return a function that waits for it."""
        if self._exchange is None:
            return self._pool.submit(lambda: self._finish(self._read(position))).result
        read = self._pool.submit(self._read, position)
        traded = self._exchange_thread.submit(self._exchange_and_collate, read)
        return lambda: traded.result().result()

    def _exchange_and_collate(self, read: Future[UnfinishedBatch]) -> Future[BatchT]:
        if self._exchange_error is not None:
            raise self._exchange_error
        assert self._exchange is not None
        try:
            stage = self._exchange(read.result())
        except BaseException as error:
            self._exchange_error = error
            raise
        return self._pool.submit(self._finish, stage)


OFFSETS, WEIGHT = "/offsets", "/weight"
"""Suffixes of tensor names of a feature with several keys per position: the offsets of each position's keys, and the
weight of each key if bags are weighted."""


@config
class BatchConfig:
    batch_size: Count | None = 128
    """Number of samples in a global batch; set either this or `batch_tokens`."""
    batch_tokens: Count | None = None
    """Number of tokens in a global batch, useful if sample lengths vary widely; set either this or `batch_size`."""
    shuffle_block_size: Count | None = None
    """Number of consecutive samples in a shuffle block. Blocks are shuffled first, then the samples inside each block,
    so that few files of a large dataset are read at a time. None shuffles all samples if the columns that are read fit
    in 1 GiB, and otherwise uses blocks of 256 MiB."""
    order: Literal["shuffled", "chronological"] = "shuffled"
    """Order of the samples. `chronological` trains on events in time order, window by window (see `windows`), and
    evaluates each window before training on it."""
    num_micro_batches: Count | Literal["auto"] = 1
    """Number of micro-batches of a rank's batch, computed sequentially with gradient accumulation. `auto` chooses it
    from measured times. Micro-batches are empty if a rank has fewer samples; more than 32 are rejected if a global
    batch has fewer samples."""
    num_workers: Count = 2
    """Number of threads that collate batches in the background."""
    prefetch_batches: Natural = 4
    """Number of batches that are prefetched; each one occupies memory."""

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.batch_tokens is None):
            sizes = {"batch_size": self.batch_size, "batch_tokens": self.batch_tokens}
            raise UserError(
                "exactly one of the two batch sizes must be set",
                option="batch",
                value=sizes,
                remedy="set one of them and disable the other, for example with --batch.batch_size none",
            )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Model inputs of one micro-batch: keys for the embedding lookup and host tensors for the computation."""

    sample_ids: NDArray[np.int64]
    keys: Mapping[str, NDArray[np.int64]]
    """Keys to look up per feature, arrays of any shape."""
    tensors: Mapping[str, torch.Tensor]
    """Host tensors for the computation."""
    max_length: int
    """Length of the longest sequence in tokens, known without a device synchronization."""
    num_tokens: int
    """Number of tokens that the model computes."""
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    """Batch fields that are passed unchanged to a custom model."""
    token_partition: TokenPartition | None = None
    """Partition of the tokens over the ranks of a context group; None without context parallelism."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The share of one rank in the global batch of one step."""

    position: BatchPosition
    weight: float
    """Weight of the *global* batch, the divisor of the loss sum."""
    global_samples: NDArray[np.int64]
    """Sample numbers of the global batch, the same on every rank."""
    micro_batches: tuple[MicroBatch, ...]
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Number of tokens of each sample of this rank."""
    balance_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the sample balancing, the same on every rank."""


KeysOfSamples = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Keys of samples as (values, offsets of the samples)."""
Cluster = Callable[[KeysOfSamples, NDArray[np.float64], int], list[NDArray[np.int64]]]
"""Maps (keys, cost of each sample, number of micro-batches) to the samples of each micro-batch; every sample occurs
exactly once."""


class Collator(ABC):
    """Collates samples into micro-batches; each task has its own subclass. Stateless."""

    weights: NDArray[np.float64]
    """Loss weight of each sample, before stochastic length is applied."""
    tokens: NDArray[np.int64]
    """Number of tokens of each sample, before stochastic length is applied."""
    shuffle_block: int | None = None
    """Number of samples in a shuffle block, or None if all samples are shuffled together."""
    window_bounds: NDArray[np.int64] | None = None
    """Bounds of the time windows if samples are in time order: window w contains the samples from `window_bounds[w]` to
    `window_bounds[w + 1]`."""

    def tokens_in(self, samples: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Return the number of tokens of each sample that are computed in this epoch."""
        return self.tokens[samples]

    def weight(self, samples: NDArray[np.int64], epoch: int) -> float:
        """Return the loss weight of a global batch; it is known before the batch is computed."""
        return float(self.weights[samples].sum())

    @abstractmethod
    def read(self, samples: NDArray[np.int64]) -> DatasetRows:
        """Read the dataset rows of these samples."""

    def sample_keys(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> KeysOfSamples | None:
        """Return the embedding keys of these samples for clustering, or None if the task does not support it."""
        return None

    @abstractmethod
    def collate(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> MicroBatch:
        """Build the micro-batch of these samples from their rows.

        Args:
            samples: (B,) sample numbers.
            rows: Dataset rows of the samples, in the same order; another rank may have read them.
            epoch: Epoch number, which seeds random draws.
        """


class LoaderStats:
    """Throughput counters of the loader threads. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples = 0
        self._seconds = 0.0

    @contextlib.contextmanager
    def measure(self, count_samples: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """Add the duration of the block and, when it ends, the number of samples that `count_samples` returns."""
        start_s = time.perf_counter()
        yield
        with self._lock:
            self._seconds += time.perf_counter() - start_s
            self._samples += count_samples()

    def pop_counts(self) -> tuple[int, float]:
        """Return (samples produced, thread time in seconds) of this rank since the last call, and reset both."""
        with self._lock:
            counts, self._samples, self._seconds = (self._samples, self._seconds), 0, 0.0
        return counts


class BatchLoader:
    """Data loader of one rank: prefetches batches on background threads and yields them in step order.

    Args:
        collator: Reads and collates samples.
        cfg: Batch options.
        seed: Seed of the sample order.
        rank: Data-parallel rank.
        world: Number of data-parallel ranks.
        partitioner: Assigns samples to ranks; by default each rank gets a contiguous range of nearly equal size.
        cluster: Groups samples into micro-batches by their keys instead of the partitioner.
        num_micro_batches_at: Returns the number of micro-batches for a position; by default the configured number.
    """

    def __init__(
        self,
        collator: Collator,
        cfg: BatchConfig,
        *,
        seed: int,
        rank: int = 0,
        world: int = 1,
        partitioner: SamplePartitioner | None = None,
        cluster: Cluster | None = None,
        num_micro_batches_at: Callable[[BatchPosition], int] | None = None,
    ):
        self._collator = collator
        self._cfg = cfg
        self._cluster = cluster
        fixed = 1 if cfg.num_micro_batches == "auto" else cfg.num_micro_batches
        self._num_micro_batches_at = num_micro_batches_at or (lambda position: fixed)
        self._partitioner = partitioner or SamplePartitioner(rank, world)
        self.stats = LoaderStats()
        self.order = GlobalBatchSampler(
            collator.tokens,
            seed=seed,
            batch_samples=cfg.batch_size,
            batch_tokens=cfg.batch_tokens,
            block_size=cfg.shuffle_block_size or collator.shuffle_block,
            window_bounds=collator.window_bounds,
        )

    def load_one(self, position: BatchPosition) -> Batch:
        """Load one batch synchronously: the reference implementation of `iterate_from`.

        Collective if ranks exchange samples.
        """
        return self._collate(self._exchange(self._read(position)))

    def iterate_from(
        self, position: BatchPosition, transform: Callable[[Batch], Batch] | None = None
    ) -> Generator[Batch, None, None]:
        """Yield batches from `position` on, endlessly, with at most `prefetch_batches` prefetched.

        If ranks exchange samples, all ranks must take the same number of batches before they close the generator.
        """

        def finish(stage: UnfinishedBatch) -> Batch:
            batch = self._collate(stage)
            return transform(batch) if transform else batch

        with BatchWorkers(
            self._cfg.num_workers, self._read, self._exchange if self._partitioner.exchanges_samples else None, finish
        ) as workers:
            prefetched: deque[Callable[[], Batch]] = deque()
            while True:
                while len(prefetched) <= self._cfg.prefetch_batches:
                    prefetched.append(workers.submit(position))
                    position = self.order.next_position(position)
                yield prefetched.popleft()()

    def _read(self, position: BatchPosition) -> UnfinishedBatch:
        with self.stats.measure():
            samples = self.order.samples(position)
            tokens = self._collator.tokens_in(samples, position.epoch)
            assignment = self._partitioner.assign_samples(position, tokens)
            return UnfinishedBatch(
                position, samples, tokens, assignment, self._collator.read(samples[assignment.indices])
            )

    def _exchange(self, stage: UnfinishedBatch) -> UnfinishedBatch:
        assignment, rows = self._partitioner.exchange_samples(
            stage.position, stage.assignment, stage.rows, stage.tokens
        )
        return replace(stage, assignment=assignment, rows=rows)

    def _collate(self, stage: UnfinishedBatch) -> Batch:
        with self.stats.measure(lambda: len(stage.assignment.indices)):
            return self._build_batch(stage)

    def _build_batch(self, stage: UnfinishedBatch) -> Batch:
        own_samples = stage.samples[stage.assignment.indices]
        tokens = stage.tokens[stage.assignment.indices]
        epoch = stage.position.epoch
        num_micro_batches = self._num_micro_batches_at(stage.position)
        groups = self._split_into_micro_batches(stage, own_samples, tokens, num_micro_batches)
        rows = [stage.rows] if num_micro_batches == 1 else [stage.rows.take(group) for group in groups]
        micro_batches = [self._collator.collate(own_samples[g], r, epoch) for g, r in zip(groups, rows, strict=True)]
        return Batch(
            position=stage.position,
            weight=self._collator.weight(stage.samples, epoch),
            global_samples=stage.samples,
            micro_batches=tuple(micro_batches),
            tokens=tokens,
            balance_metrics=stage.assignment.balance_metrics,
        )

    def _split_into_micro_batches(
        self, stage: UnfinishedBatch, own_samples: NDArray[np.int64], tokens: NDArray[np.int64], num_micro_batches: int
    ) -> list[NDArray[np.int64]]:
        """Return the samples of each micro-batch; clustering applies within a rank, after balancing over ranks."""
        if self._cluster is not None and num_micro_batches > 1:
            keys = self._collator.sample_keys(own_samples, stage.rows, stage.position.epoch)
            if keys is not None:
                return self._cluster(keys, self._partitioner.costs(stage.position, tokens), num_micro_batches)
        return self._partitioner.micro_batches(stage.position, tokens, num_micro_batches)


SHARED_KEYS = frozenset({"catalog"})
"""Names of keys that all tokens share."""
_OFFSETS = "offsets"


def take_token_part(
    batch: MicroBatch, part: int, num_parts: int, *, shared: Collection[str] = SHARED_KEYS
) -> MicroBatch:
    """Return the part of a micro-batch that one rank of a context group computes.

    Args:
        batch: Complete micro-batch. Keys and tensors have one row per token, except the sequence offsets and shared
            ones.
        part: Index of the part.
        num_parts: Number of ranks in the context group.
        shared: Names of keys and tensors that all tokens share.
    """
    partition = TokenPartition(np.diff(batch.tensors[_OFFSETS].numpy()), num_parts)
    indices = partition.global_indices(part)
    index_tensor = torch.from_numpy(indices)
    counts = {name: len(x) for name, x in batch.keys.items()} | {name: len(x) for name, x in batch.tensors.items()}
    for name, count in counts.items():
        assert name in shared or name == _OFFSETS or count == batch.num_tokens, name
    tensors = {
        name: tensor if name in shared else tensor[index_tensor]
        for name, tensor in batch.tensors.items()
        if name != _OFFSETS
    }
    return replace(
        batch,
        keys={name: keys if name in shared else keys[indices] for name, keys in batch.keys.items()},
        tensors={**tensors, _OFFSETS: torch.from_numpy(partition.offsets(part))},
        num_tokens=len(indices),
        token_partition=partition,
    )


class ContextParallelCollator(Collator):
    """Collator for context parallelism: keeps one part of the tokens of each micro-batch.

    Token counts and weights are those of the complete samples.
    """

    def __init__(self, collator: Collator, part: int, num_parts: int) -> None:
        self._collator = collator
        self._part = part
        self._num_parts = num_parts
        self.weights = collator.weights
        self.tokens = collator.tokens
        self.shuffle_block = collator.shuffle_block
        self.window_bounds = collator.window_bounds

    def tokens_in(self, samples: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return self._collator.tokens_in(samples, epoch)

    def weight(self, samples: NDArray[np.int64], epoch: int) -> float:
        return self._collator.weight(samples, epoch)

    def read(self, samples: NDArray[np.int64]) -> DatasetRows:
        return self._collator.read(samples)

    def sample_keys(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> KeysOfSamples | None:
        return self._collator.sample_keys(samples, rows, epoch)

    def collate(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> MicroBatch:
        return take_token_part(self._collator.collate(samples, rows, epoch), self._part, self._num_parts)
