"""Data loader: reads, collates and prefetches micro-batches on background threads.

The threads behind `BatchLoader`: several read and assemble, in any order; one trades samples, in the order of the
steps.

    read (pool) -> trade (one thread, in order) -> assemble (pool)

Ranks must enter the same trade at the same time, so trades are never reordered, never dropped half way, and none
follows one that failed: the peers may still be in it.

Batches: samples assembled into arrays, on background threads, in the order of the steps.

A part of the tokens of a micro-batch, for a rank that computes it together with the others of its context group.

Whole samples are assembled, the same on every rank of a group, and each keeps what belongs to its tokens: inputs,
targets and negatives. So what is drawn for a token does not depend on who computes it.
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
    """A batch that is being made."""

    position: BatchPosition
    samples: NDArray[np.int64]
    """of the global batch"""
    tokens: NDArray[np.int64]
    """of these samples"""
    share: RankSamples
    """what this rank holds of it now"""
    rows: DatasetRows
    """the stored rows of the share"""


class BatchWorkers(Generic[BatchT]):
    """Makes batches in the background while its block lasts."""

    def __init__(
        self,
        workers: int,
        read: Callable[[BatchPosition], UnfinishedBatch],
        trade: Callable[[UnfinishedBatch], UnfinishedBatch] | None,
        finish: Callable[[UnfinishedBatch], BatchT],
    ):
        """trade: none where ranks do not trade."""
        self._read = read
        self._trade = trade
        self._finish = finish
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="data")
        self._trader = ThreadPoolExecutor(1, thread_name_prefix="trade")
        self._failed: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Trades that were begun are finished: every rank has begun the same ones.
        self._trader.shutdown(wait=True)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, position: BatchPosition) -> Callable[[], BatchT]:
        """Start to make a batch; the function returned waits for it."""
        if self._trade is None:
            return self._pool.submit(lambda: self._finish(self._read(position))).result
        read = self._pool.submit(self._read, position)
        traded = self._trader.submit(self._traded, read)
        return lambda: traded.result().result()

    def _traded(self, read: Future[UnfinishedBatch]) -> Future[BatchT]:
        if self._failed is not None:
            raise self._failed
        assert self._trade is not None
        try:
            stage = self._trade(read.result())
        except BaseException as error:
            self._failed = error
            raise
        return self._pool.submit(self._finish, stage)


OFFSETS, WEIGHT = "/offsets", "/weight"
"""behind the name of a feature with several keys at a place: the tensors that say where the keys of each place begin,
and, where bags are weighted, what each counts"""


@config
class BatchConfig:
    batch_samples: Count | None = 128
    """samples of a global batch; give this or batch_tokens"""
    batch_tokens: Count | None = None
    """tokens of a global batch, where samples differ much in length; give this or batch_samples"""
    shuffle_block: Count | None = None
    """samples of a block: blocks of consecutive samples are shuffled, then the samples inside each, so that few of a
    large dataset's files are read at a time; none shuffles all samples where what is read of them fits in 1 GiB, else
    blocks of 256 MiB"""
    order: Literal["shuffled", "chronological"] = "shuffled"
    """chronological: events in the order in which they happened, window by window (see `windows`); each window is
    predicted before it is trained on"""
    micro_batches: Count | Literal["auto"] = 1
    """parts of a rank's batch, computed one after the other before the update; auto: chosen from measured times. A rank
    with fewer samples has empty ones; more than 32 are refused where a global batch has fewer samples"""
    workers: Count = 2
    """threads that assemble batches ahead"""
    prefetch: Natural = 4
    """batches made ahead of the step that needs them; each takes its memory"""

    def __post_init__(self) -> None:
        if (self.batch_samples is None) == (self.batch_tokens is None):
            given = {"batch_samples": self.batch_samples, "batch_tokens": self.batch_tokens}
            raise UserError(
                "one of the two sizes of a batch is needed, and only one",
                option="batch",
                value=given,
                remedy="give one of them and set the other to none, such as --batch.batch_samples none",
            )


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
    others: Mapping[str, Any] = field(default_factory=dict)
    """what a model of a user's own is given as it is"""
    parts: TokenPartition | None = None
    """where it holds a part of the tokens of its samples: how they are divided (nestrec.data.batch_loader)"""


@dataclass(frozen=True, slots=True)
class Batch:
    """A rank's part of the global batch of one step."""

    position: BatchPosition
    weight: float
    """weight of the *global* batch, by which the sum of losses is divided"""
    global_samples: NDArray[np.int64]
    """sample numbers of the global batch, the same on every rank"""
    micro_batches: tuple[MicroBatch, ...]
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """of each of this rank's samples"""
    figures: Mapping[str, float] = field(default_factory=dict)
    """what is to be recorded of how the samples were dealt to the ranks; the same on every rank"""


KeysOfSamples = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Values, and offsets of the samples."""
Cluster = Callable[[KeysOfSamples, NDArray[np.float64], int], list[NDArray[np.int64]]]
"""(keys, cost of each sample, number of micro-batches) to the samples of each; every sample exactly once."""


class Collator(ABC):
    """Makes micro-batches out of sample numbers; one subclass a task. Pure: no state between calls."""

    weights: NDArray[np.float64]
    """loss weight of each sample, before any sampling of its length"""
    tokens: NDArray[np.int64]
    """tokens of each sample, before any sampling of its length"""
    shuffle_block: int | None = None
    """samples of a block, where a shuffle of all would not find their rows in memory"""
    window_bounds: NDArray[np.int64] | None = None
    """where samples are in the order of time: window w has the samples from window_bounds[w] to window_bounds[w + 1]"""

    def tokens_in(self, samples: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Tokens of these samples that are computed in this epoch."""
        return self.tokens[samples]

    def weight(self, samples: NDArray[np.int64], epoch: int) -> float:
        """Weight of a global batch, known before anything is computed."""
        return float(self.weights[samples].sum())

    @abstractmethod
    def read(self, samples: NDArray[np.int64]) -> DatasetRows:
        """The stored rows of these samples."""

    def sample_keys(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> KeysOfSamples | None:
        """Keys that these samples look up, as far as they could share them; none where a task does not tell."""
        return None

    @abstractmethod
    def assemble(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> MicroBatch:
        """The arrays of these samples, out of their rows, wherever those were read."""


class LoaderStats:
    """How long the threads that make batches have worked on them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples = 0
        self._seconds = 0.0

    @contextlib.contextmanager
    def of(self, count_of: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """count_of: asked at the end, the samples that were finished."""
        start_s = time.perf_counter()
        yield
        with self._lock:
            self._seconds += time.perf_counter() - start_s
            self._samples += count_of()

    def take(self) -> tuple[int, float]:
        """Samples of this rank that were made since the last call, and the seconds of threads that they took."""
        with self._lock:
            found, self._samples, self._seconds = (self._samples, self._seconds), 0, 0.0
        return found


class BatchLoader:
    """The batches of one rank, made ahead by background threads, delivered in order."""

    def __init__(
        self,
        assembler: Collator,
        cfg: BatchConfig,
        *,
        seed: int,
        rank: int = 0,
        world: int = 1,
        dealer: SamplePartitioner | None = None,
        cluster: Cluster | None = None,
        num_micro_batches_at: Callable[[BatchPosition], int] | None = None,
    ):
        """dealer: which rank computes what; by default near equal counts in the order of the batch.

        cluster: micro-batches by the keys of the samples, instead of the dealer's. num_micro_batches_at: how many
        micro-batches the batch of a position has; by default as configured.
        """
        self._assembler = assembler
        self._cfg = cfg
        self._cluster = cluster
        fixed = 1 if cfg.micro_batches == "auto" else cfg.micro_batches
        self._num_micro_batches_at = num_micro_batches_at or (lambda position: fixed)
        self._dealer = dealer or SamplePartitioner(rank, world)
        self.making = LoaderStats()
        self.order = GlobalBatchSampler(
            assembler.tokens,
            seed=seed,
            batch_samples=cfg.batch_samples,
            batch_tokens=cfg.batch_tokens,
            block_size=cfg.shuffle_block or assembler.shuffle_block,
            window_bounds=assembler.window_bounds,
        )

    def build(self, position: BatchPosition) -> Batch:
        """The slow twin of `starting_at`: one batch, made now. Collective where the dealer trades."""
        return self._assemble(self._trade(self._read(position)))

    def starting_at(
        self, position: BatchPosition, transform: Callable[[Batch], Batch] | None = None
    ) -> Generator[Batch, None, None]:
        """Endless batches from `position` on; at most `prefetch` are made ahead.

        Where ranks trade samples, all of them must take the same number of batches before they close this.
        """

        def finish(stage: UnfinishedBatch) -> Batch:
            batch = self._assemble(stage)
            return transform(batch) if transform else batch

        with BatchWorkers(self._cfg.workers, self._read, self._trade if self._dealer.trades else None, finish) as made:
            ahead: deque[Callable[[], Batch]] = deque()
            while True:
                while len(ahead) <= self._cfg.prefetch:
                    ahead.append(made.submit(position))
                    position = self.order.after(position)
                yield ahead.popleft()()

    def _read(self, position: BatchPosition) -> UnfinishedBatch:
        with self.making.of():
            samples = self.order.samples(position)
            tokens = self._assembler.tokens_in(samples, position.epoch)
            share = self._dealer.share(position, tokens)
            return UnfinishedBatch(position, samples, tokens, share, self._assembler.read(samples[share.places]))

    def _trade(self, stage: UnfinishedBatch) -> UnfinishedBatch:
        share, rows = self._dealer.trade(stage.position, stage.share, stage.rows, stage.tokens)
        return replace(stage, share=share, rows=rows)

    def _assemble(self, stage: UnfinishedBatch) -> Batch:
        with self.making.of(lambda: len(stage.share.places)):
            return self._assembled(stage)

    def _assembled(self, stage: UnfinishedBatch) -> Batch:
        mine = stage.samples[stage.share.places]
        tokens = stage.tokens[stage.share.places]
        epoch = stage.position.epoch
        num_micro_batches = self._num_micro_batches_at(stage.position)
        groups = self._groups(stage, mine, tokens, num_micro_batches)
        rows = [stage.rows] if num_micro_batches == 1 else [stage.rows.take(group) for group in groups]
        micro_batches = [self._assembler.assemble(mine[g], r, epoch) for g, r in zip(groups, rows, strict=True)]
        return Batch(
            position=stage.position,
            weight=self._assembler.weight(stage.samples, epoch),
            global_samples=stage.samples,
            micro_batches=tuple(micro_batches),
            tokens=tokens,
            figures=stage.share.figures,
        )

    def _groups(
        self, stage: UnfinishedBatch, mine: NDArray[np.int64], tokens: NDArray[np.int64], num_micro_batches: int
    ) -> list[NDArray[np.int64]]:
        """The samples of each micro-batch: after the balance over ranks, clustering inside a rank (order of
        preparation)."""
        if self._cluster is not None and num_micro_batches > 1:
            keys = self._assembler.sample_keys(mine, stage.rows, stage.position.epoch)
            if keys is not None:
                return self._cluster(keys, self._dealer.costs(stage.position, tokens), num_micro_batches)
        return self._dealer.micro_batches(stage.position, tokens, num_micro_batches)


SHARED = frozenset({"catalogue"})
"""keys that all tokens have together"""
_OFFSETS = "offsets"


def part_of(batch: MicroBatch, part: int, size: int, *, shared: Collection[str] = SHARED) -> MicroBatch:
    """What part `part` of `size` holds of a micro-batch. Keys and tensors have a row for each token, but for the
    offsets of its sequences and what is named as shared."""
    parts = TokenPartition(np.diff(batch.tensors[_OFFSETS].numpy()), size)
    places = parts.places(part)
    at = torch.from_numpy(places)
    counts = {name: len(x) for name, x in batch.keys.items()} | {name: len(x) for name, x in batch.tensors.items()}
    for name, count in counts.items():
        assert name in shared or name == _OFFSETS or count == batch.num_tokens, name
    tensors = {
        name: tensor if name in shared else tensor[at] for name, tensor in batch.tensors.items() if name != _OFFSETS
    }
    return replace(
        batch,
        keys={name: keys if name in shared else keys[places] for name, keys in batch.keys.items()},
        tensors={**tensors, _OFFSETS: torch.from_numpy(parts.offsets(part))},
        num_tokens=len(places),
        parts=parts,
    )


class ContextParallelCollator(Collator):
    """Assembles parts of samples; how many tokens they have, and what they weigh, is told of whole ones."""

    def __init__(self, whole: Collator, part: int, size: int) -> None:
        self._whole = whole
        self._part = part
        self._size = size
        self.weights = whole.weights
        self.tokens = whole.tokens
        self.shuffle_block = whole.shuffle_block
        self.window_bounds = whole.window_bounds

    def tokens_in(self, samples: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return self._whole.tokens_in(samples, epoch)

    def weight(self, samples: NDArray[np.int64], epoch: int) -> float:
        return self._whole.weight(samples, epoch)

    def read(self, samples: NDArray[np.int64]) -> DatasetRows:
        return self._whole.read(samples)

    def sample_keys(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> KeysOfSamples | None:
        return self._whole.sample_keys(samples, rows, epoch)

    def assemble(self, samples: NDArray[np.int64], rows: DatasetRows, epoch: int) -> MicroBatch:
        return part_of(self._whole.assemble(samples, rows, epoch), self._part, self._size)
