"""Job of `nestrec bench schedules` with TorchRec: one table sharded by rows, the same network and batches.

TorchRec is imported inside functions, because it is optional.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nestrec.data.batch_loader import Batch
from nestrec.trace import Span, Tracer
from nestrec_bench.external.torchrec_job import make_progress, make_sharders, shard_by_rows
from nestrec_bench.schedules.schedules_job import TABLE, JobConfig, TokenNetwork

_TABLE = "t_items"  # `items` is a method of the ModuleDict in which TorchRec stores tables
PREFIX = "torchrec_"
TORCHREC_SCHEDULES = ("torchrec_plain", "torchrec_sparse_dist")
"""A plain loop, and TorchRec's pipeline. Its input deduplication does not have a CPU kernel (1.8.0)."""


@dataclass(frozen=True, slots=True)
class _KeyedBatch:
    """Batch for TorchRec's pipelines, which implements their interface Pipelineable."""

    keyed: Any
    label: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "_KeyedBatch":
        parts = (self.keyed, self.label)
        return _KeyedBatch(*(part.to(device=device, non_blocking=non_blocking) for part in parts))

    def record_stream(self, stream: Any) -> None:
        """Do nothing, because a CPU does not have streams."""


class _TokenModel(nn.Module):
    """An embedding collection with one table, and the network."""

    def __init__(self, cfg: JobConfig) -> None:
        from torchrec import EmbeddingCollection, EmbeddingConfig

        super().__init__()
        table = EmbeddingConfig(name=_TABLE, feature_names=[TABLE], embedding_dim=cfg.dim, num_embeddings=cfg.num_rows)
        self.rows = EmbeddingCollection(device=torch.device("meta"), tables=[table])
        self.network = TokenNetwork(cfg)
        self._shape = cfg.samples, cfg.tokens, cfg.dim

    def forward(self, batch: _KeyedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = self.rows(batch.keyed)[TABLE].values().view(self._shape)
        loss = self.network(vectors, batch.label) / self._shape[0]
        return loss, loss.detach()


class TorchRecContestant:
    """TorchRec on one rank; only the duration of its steps is measured, not their parts."""

    def __init__(self, cfg: JobConfig, schedule: str, batches: Sequence[Batch], rank: int) -> None:
        model = _TokenModel(cfg)
        sharded, optimizer = shard_by_rows(model, [model.rows], make_sharders(), [_TABLE], cfg.samples)
        self._batches = _endless(batches)
        self._progress = make_progress(schedule.removeprefix(PREFIX), sharded, optimizer)
        self._tracer = Tracer(rank=rank)

    def round(self, num_steps: int, first_step: int) -> list[Span]:
        """Train some steps; TorchRec's pipeline remains filled between rounds."""
        for number in range(first_step, first_step + num_steps):
            with self._tracer.span("train.step", kind="step", lane="compute", step=number):
                self._progress(self._batches)
        return self._tracer.take()


def _endless(batches: Sequence[Batch]) -> Iterator[_KeyedBatch]:
    from torchrec import KeyedJaggedTensor
    from torchrec.streamable import Pipelineable

    Pipelineable.register(_KeyedBatch)
    for batch in itertools.cycle(batches):
        (part,) = batch.micro_batches
        keys = torch.as_tensor(part.keys[TABLE])
        lengths = torch.full((len(keys),), keys.shape[1], dtype=torch.int64)
        keyed = KeyedJaggedTensor(keys=[TABLE], values=keys.reshape(-1), lengths=lengths)
        yield _KeyedBatch(keyed, part.tensors["label"])
