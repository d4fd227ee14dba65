"""The job of `nestrec bench schedules` on one rank: a large table, tokens through a small dense network."""

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
    """rows of the table"""
    dim: int = 128
    """elements of a vector"""
    samples: int = 1024
    """samples of a rank in a step"""
    tokens: int = 32
    """keys of a sample"""
    repeat: float = 0.3
    """part of the keys that come from the hottest thousandth of the rows; the others are uniform"""
    collision: float | None = None
    """instead of `repeat`: this part of the keys of a batch are keys of the batch before; the others are in neither of
    the batches beside it"""
    hidden: int = 192
    """width of the dense network, which sets the time of computation"""
    layers: int = 2
    """hidden layers of it; many narrow ones make many short kernels where few wide ones make few long ones"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """of the dense network; bf16 is for a GPU"""
    store: str = "dram"
    """where rows are kept"""
    is_filled: bool = False
    """every row is made before the first step, not at its first use (store dram)"""
    optimizer: str = "rowwise_adagrad"
    """row optimiser of the table, by name"""
    seed: int = 0
    """of keys and first weights; the same seed repeats a run"""


class TokenNetwork(nn.Module):
    """Layers on each token, summed to a score of each sample."""

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
    """The loss of a micro-batch."""

    def loss(
        micro_batch: MicroBatch, rows: Mapping[str, torch.Tensor], index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        found: torch.Tensor = network(gather_rows(rows[TABLE], index[TABLE]), micro_batch.tensors["label"])
        return found

    return loss


def make_batches(cfg: JobConfig, topology: Topology, num_steps: int, num_micro_batches: int) -> list[Batch]:
    """The batches of a rank, the same samples for every number of parts."""
    keys = _hot_keys(cfg, topology, num_steps) if cfg.collision is None else colliding_keys(cfg, topology, num_steps)
    return [_batch(cfg, topology, step, num_micro_batches, of_step) for step, of_step in enumerate(keys)]


def _batch(cfg: JobConfig, topology: Topology, step: int, num_micro_batches: int, keys: NDArray[np.int64]) -> Batch:
    draw = np.random.default_rng([cfg.seed, topology.rank, step, 1])
    label = torch.from_numpy(draw.integers(0, 2, cfg.samples).astype(np.float32))
    parts = []
    for mine in np.array_split(np.arange(cfg.samples), num_micro_batches):
        tensors = {"label": label[torch.from_numpy(mine)]}
        parts.append(MicroBatch(mine, {TABLE: keys[mine]}, tensors, cfg.tokens, len(mine) * cfg.tokens))
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
    """Keys of each step of a rank; fresh ones of neighbouring steps are of different classes, so they never meet."""
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
    """The job's table."""
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
    """One schedule with a network of its own, and a table that others may train too, round by round."""

    def __init__(
        self, cfg: JobConfig, engine: EmbeddingEngine, options: PipelineConfig, batches: Sequence[Batch]
    ) -> None:
        self.engine = engine
        topology = engine.topology
        with engine.device:  # large ones are slow to draw on a host
            network = TokenNetwork(cfg)
        self.dense = DenseOptimizer(network, OptimizerConfig(), topology, engine.device)
        compute = LossCompute(token_loss(network), engine.device, cfg.precision)
        self.pipeline = PipelineCore.build(compute, engine, self.dense, options)
        self._batches = batches
        self._done = 0
        self._rows_sent = self._bytes_sent = 0

    def round(self, num_steps: int, first_step: int | None = None) -> list[Span]:
        """Some steps from an empty pipeline to an empty pipeline; the spans of all of them.

        first_step: its number; none: the next of this contestant.
        """
        first_step = self._done + 1 if first_step is None else first_step
        feed = LookaheadIterator(self._upcoming(num_steps))
        before = self._crossed()
        for i in range(num_steps):
            self._done += 1
            step = TrainingStep(number=first_step + i, batch=next(feed), rates=RATES, is_fence=i + 1 == num_steps)
            self.pipeline.schedule.advance(step, feed)
        after = self._crossed()
        self._rows_sent += after[0] - before[0]
        self._bytes_sent += after[1] - before[1]
        return self.pipeline.tracer.take()

    def bytes_a_step(self, num_ranks: int) -> float:
        """Vectors and gradients that leave this rank; num_ranks: those of an emulated fabric, or 1."""
        if num_ranks == 1:
            return self._bytes_sent / self._done
        return self._rows_sent / self._done * self.engine.tables[TABLE].dim * 4 * (num_ranks - 1) / num_ranks

    def replica_bytes_a_step(self) -> float:
        """Gradients or rows that leave this rank for other holders of its shard."""
        return self.engine.statistics.replicas.bytes_sent / self._done

    def weights(self) -> torch.Tensor:
        """All weights of this rank in one vector: rows in order of key, then the dense ones."""
        rows = [chunk["weight"].flatten() for chunk in self.engine.snapshot(TABLE)]
        tensors = self.dense.tensors().items()
        dense = [tensor.flatten().float().cpu() for name, tensor in tensors if name.startswith("model/")]
        return torch.cat([*rows, *dense])

    def close(self) -> None:
        self.pipeline.close()

    def _crossed(self) -> tuple[int, int]:
        """Rows and bytes that the table, which others may train too, has sent so far."""
        legs = self.engine.statistics.vectors, self.engine.statistics.gradients
        return sum(leg.rows for leg in legs), sum(leg.bytes_sent for leg in legs)

    def _upcoming(self, num_steps: int) -> Iterator[Batch]:
        first = self._done
        for i in range(num_steps):
            yield self._batches[(first + i) % len(self._batches)]
