"""The peers' job as a user of nestrec would write it: one rank, in the serial schedule.

All ranks have equally many samples, so the mean over the global batch is the mean of the ranks' means.
"""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from nestrec import __version__
from nestrec.bench.peers.dense import DenseKind, DensePart
from nestrec.bench.peers.workload import BAG, SEQUENCE, TABLE_OF, PeersBatch, PeersWorkload
from nestrec.distributed import Topology
from nestrec.embedding import RowOptimizerConfig, TableConfig
from nestrec.jagged import Jagged, offsets_of
from nestrec.pipeline import TrainingPipeline

ROW_LEARNING_RATE, ROW_EPS, DENSE_LEARNING_RATE = 0.05, 1e-8, 1e-3
_LOAD_ROWS = 1 << 16
OUR_MODES = ("serial", "serial_gloo")
"""The serial schedule; the same with exchanges through Gloo's sockets, as TorchRec's, and not through shared memory."""


class Job(Protocol):
    """A system that trains the job on one rank."""

    system: str
    version: str
    mode: str
    losses: list[torch.Tensor]
    """Of the global batch, or of this rank's samples; one for each step so far."""

    def step(self) -> None:
        """One step of training. Collective."""


class _PeersModel(nn.Module):
    def __init__(self, workload: PeersWorkload, dense: DenseKind) -> None:
        super().__init__()
        self.dense = DensePart(workload.cfg, dense)

    def forward(self, vectors: dict[str, Any], batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
        sequence, label = vectors[SEQUENCE], batch["label"]
        mean = self.dense(sequence.values, sequence.lengths(), vectors[BAG], batch["dense"], label)
        return mean * len(label), len(label)


class NestrecJob:
    """Our side: a module of one's own in `nestrec.TrainingPipeline`."""

    system, version = "nestrec", __version__

    def __init__(
        self,
        workload: PeersWorkload,
        batches: Sequence[PeersBatch],
        dense: DenseKind,
        topology: Topology,
        mode: str = "serial",
    ) -> None:
        self.mode = mode
        model = _PeersModel(workload, dense)
        self.pipeline = TrainingPipeline(
            model,
            _tables(workload),
            dense_optimizer=torch.optim.Adam(model.parameters(), lr=DENSE_LEARNING_RATE),
            table_learning_rate=ROW_LEARNING_RATE,
            pooled=(BAG,),
            device="cpu",
            topology=topology,
        )
        for number, table in enumerate(TABLE_OF.values()):
            self.pipeline.engine.load(table, _first_rows(workload, number))
        self._trained = self.pipeline.run(itertools.cycle([_as_fields(batch) for batch in batches]))
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """One step of training. Collective."""
        self.losses.append(next(self._trained))

    def parts_ms(self) -> dict[str, list[float]]:
        """Stage of a step to [its median time], in the thread that trains."""
        spans: dict[str, list[int]] = {}
        for span in self.pipeline.tracer.spans():
            if span.kind != "step":
                spans.setdefault(span.name.removeprefix("train."), []).append(span.duration_ns)
        return {name: [round(1e-6 * statistics.median(times), 2)] for name, times in spans.items()}


def _as_fields(batch: PeersBatch) -> dict[str, Any]:
    jagged = {name: Jagged(keys, offsets_of(batch.lengths[name])) for name, keys in batch.keys.items()}
    return {**jagged, "dense": batch.dense, "label": batch.label}


def _tables(workload: PeersWorkload) -> list[TableConfig]:
    cfg, optimizer = workload.cfg, RowOptimizerConfig(kind="rowwise_adagrad", eps=ROW_EPS)
    return [
        TableConfig(name=table, dim=cfg.dim, num_rows=cfg.num_rows, features=(feature,), optimizer=optimizer)
        for feature, table in TABLE_OF.items()
    ]


def _first_rows(workload: PeersWorkload, table: int) -> Iterator[dict[str, torch.Tensor]]:
    num_rows = workload.cfg.num_rows
    for low in range(0, num_rows, _LOAD_ROWS):
        high = min(low + _LOAD_ROWS, num_rows)
        yield {"keys": torch.arange(low, high), "weight": workload.first_rows(table, low, high)}
