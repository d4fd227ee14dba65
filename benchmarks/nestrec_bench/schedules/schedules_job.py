"""Job of `nestrec bench schedules` on one rank: a large table, and a small dense network applied to each token."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nestrec.base.config import config
from nestrec.data.batch_loader import Batch, MicroBatch
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.ops.embedding.row_gather import gather_rows
from nestrec.pipeline import LearningRates, LookaheadIterator, PipelineConfig, PipelineCore, TrainingStep
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer, OptimizerConfig
from nestrec.pipeline.exchange_window import Loss, LossCompute
from nestrec.trace import Span
from nestrec_bench.harness.delayed_engine import Pace, PacedEngine
from nestrec_bench.harness.row_initialization import create_all_rows

TABLE = "items"
_CLASSES = 16
RATES = LearningRates(dense=1e-3, tables=0.05)


@config
class JobConfig:
    num_rows: int = 1_000_000
    """Number of rows of the table."""
    dim: int = 128
    """Embedding dimension."""
    samples: int = 1024
    """Number of samples per rank and step."""
    tokens: int = 32
    """Number of keys per sample."""
    repeat: float = 0.3
    """Fraction of the keys that come from the hottest thousandth of the rows; the others are uniform."""
    collision: float | None = None
    """Fraction of the keys of a batch that the previous batch contains too; neither of the two neighboring batches
    contains the other keys. Replaces `repeat`."""
    hidden: int = 192
    """Width of the dense network, which determines the computation time."""
    layers: int = 2
    """Number of hidden layers; many narrow layers run many short kernels, few wide layers run few long ones."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the dense network; bf16 is for a GPU."""
    store: str = "dram"
    """Kind of the row store."""
    is_filled: bool = False
    """Whether all rows are created before the first step instead of at their first use (store dram)."""
    optimizer: str = "rowwise_adagrad"
    """Name of the row optimizer of the table."""
    seed: int = 0
    """Seed of keys and initial weights; the same seed repeats a run."""


class TokenNetwork(nn.Module):
    """Linear layers applied to each token, and averaged to a score per sample."""

    def __init__(self, cfg: JobConfig) -> None:
        super().__init__()
        torch.manual_seed(cfg.seed)
        widths = [cfg.dim, *[cfg.hidden] * cfg.layers]
        hidden = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.GELU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(cfg.hidden, 1))

    def forward(self, vectors_BTD: torch.Tensor, label_B: torch.Tensor) -> torch.Tensor:
        score_B = self.layers(vectors_BTD).squeeze(2).float().mean(1)
        return nn.functional.binary_cross_entropy_with_logits(score_B, label_B, reduction="sum")


def token_loss(network: nn.Module) -> Loss:
    """Return the loss function of a micro-batch."""

    def loss(
        micro_batch: MicroBatch, rows: Mapping[str, torch.Tensor], index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        found: torch.Tensor = network(gather_rows(rows[TABLE], index[TABLE]), micro_batch.tensors["label"])
        return found

    return loss


def make_batches(cfg: JobConfig, topology: Topology, num_steps: int, num_micro_batches: int) -> list[Batch]:
    """Create the batches of a rank, with the same samples for every number of micro-batches."""
    keys = _hot_keys(cfg, topology, num_steps) if cfg.collision is None else colliding_keys(cfg, topology, num_steps)
    return [_batch(cfg, topology, step, num_micro_batches, step_keys) for step, step_keys in enumerate(keys)]


def _batch(cfg: JobConfig, topology: Topology, step: int, num_micro_batches: int, keys: NDArray[np.int64]) -> Batch:
    draw = np.random.default_rng([cfg.seed, topology.rank, step, 1])
    label = torch.from_numpy(draw.integers(0, 2, cfg.samples).astype(np.float32))
    parts = []
    for group in np.array_split(np.arange(cfg.samples), num_micro_batches):
        tensors = {"label": label[torch.from_numpy(group)]}
        parts.append(MicroBatch(group, {TABLE: keys[group]}, tensors, cfg.tokens, len(group) * cfg.tokens))
    samples = np.arange(cfg.samples * topology.world)
    tokens = np.full(cfg.samples, cfg.tokens)
    return Batch(BatchPosition(0, step), float(len(samples)), samples, tuple(parts), tokens=tokens)


def _hot_keys(cfg: JobConfig, topology: Topology, num_steps: int) -> Iterator[NDArray[np.int64]]:
    shape = (cfg.samples, cfg.tokens)
    for step in range(num_steps):
        draw = np.random.default_rng([cfg.seed, topology.rank, step])
        hot = draw.integers(0, max(1, cfg.num_rows // 1000), shape)
        yield np.where(draw.random(shape) < cfg.repeat, hot, draw.integers(0, cfg.num_rows, shape))


def colliding_keys(cfg: JobConfig, topology: Topology, num_steps: int) -> Iterator[NDArray[np.int64]]:
    """Yield the keys of each step of a rank; new keys of neighboring steps have different residues, so they differ."""
    shape = (cfg.samples, cfg.tokens)
    before = None
    for step in range(num_steps):
        draw = np.random.default_rng([cfg.seed, topology.rank, step])
        keys = draw.integers(0, cfg.num_rows // _CLASSES, shape) * _CLASSES + step % _CLASSES
        if before is not None:
            keys = np.where(
                draw.random(shape) < (cfg.collision or 0.0), draw.permutation(before.ravel()).reshape(shape), keys
            )
        before = keys
        yield keys


def make_engine(
    cfg: JobConfig, topology: Topology, pace: Pace | None = None, replica_sync: ReplicaSyncConfig | None = None
) -> PacedEngine:
    """Create the embedding engine with the table of the job."""
    table = TableConfig(
        name=TABLE,
        dim=cfg.dim,
        num_rows=cfg.num_rows,
        seed=cfg.seed,
        store=StoreConfig(kind=cfg.store),  # type: ignore[arg-type]
        optimizer=RowOptimizerConfig(kind=cfg.optimizer),
    )
    engine = PacedEngine([table], topology, pace or Pace(), replica_sync)
    if cfg.is_filled:
        create_all_rows(engine.shards[TABLE])
    return engine


class Contestant:
    """A schedule with its own network, and a table that other contestants may train too."""

    def __init__(
        self, cfg: JobConfig, engine: EmbeddingEngine, options: PipelineConfig, batches: Sequence[Batch]
    ) -> None:
        self.engine = engine
        topology = engine.topology
        with engine.device:  # because large networks are slow to initialize on the host
            network = TokenNetwork(cfg)
        self.dense = DenseOptimizer(network, OptimizerConfig(), topology, engine.device)
        compute = LossCompute(token_loss(network), engine.device, cfg.precision)
        self.pipeline = PipelineCore.build(compute, engine, self.dense, options)
        self._batches = batches
        self._done = 0
        self._rows_sent = self._bytes_sent = 0

    def round(self, num_steps: int, first_step: int | None = None) -> list[Span]:
        """Train some steps, from an empty pipeline to an empty pipeline, and return their spans.

        Args:
            num_steps: Number of steps.
            first_step: Number of the first step. None: the next one of this contestant.
        """
        first_step = self._done + 1 if first_step is None else first_step
        feed = LookaheadIterator(self._upcoming(num_steps))
        before = self._sent()
        for i in range(num_steps):
            self._done += 1
            step = TrainingStep(number=first_step + i, batch=next(feed), rates=RATES, is_fence=i + 1 == num_steps)
            self.pipeline.schedule.advance(step, feed)
        after = self._sent()
        self._rows_sent += after[0] - before[0]
        self._bytes_sent += after[1] - before[1]
        return self.pipeline.tracer.take()

    def bytes_per_step(self, num_ranks: int) -> float:
        """Return the bytes of vectors and gradients that this rank sends per step.

        Args:
            num_ranks: Number of ranks of an emulated fabric, or 1.
        """
        if num_ranks == 1:
            return self._bytes_sent / self._done
        return self._rows_sent / self._done * self.engine.tables[TABLE].dim * 4 * (num_ranks - 1) / num_ranks

    def replica_bytes_per_step(self) -> float:
        """Return the bytes of gradients or rows that this rank sends to other replicas of its shard per step."""
        return self.engine.statistics.replicas.bytes_sent / self._done

    def weights(self) -> torch.Tensor:
        """Return all weights of this rank in one vector: rows in order of key, then dense weights."""
        rows = [chunk["weight"].flatten() for chunk in self.engine.snapshot(TABLE)]
        tensors = self.dense.tensors().items()
        dense = [tensor.flatten().float().cpu() for name, tensor in tensors if name.startswith("model/")]
        return torch.cat([*rows, *dense])

    def close(self) -> None:
        self.pipeline.close()

    def _sent(self) -> tuple[int, int]:
        """Return the rows and bytes that the table has sent, also for other contestants."""
        legs = self.engine.statistics.vectors, self.engine.statistics.gradients
        return sum(leg.rows for leg in legs), sum(leg.bytes_sent for leg in legs)

    def _upcoming(self, num_steps: int) -> Iterator[Batch]:
        first = self._done
        for i in range(num_steps):
            yield self._batches[(first + i) % len(self._batches)]
