"""The peers' job through our engine: one rank, in the serial schedule.

The loss of a rank is the mean over its samples, and ranks are averaged: row gradients and dense gradients alike.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from nestrec import __version__
from nestrec.bench.peers.dense import DenseKind, DensePart
from nestrec.bench.peers.workload import BAG, BAG_TABLE, SEQUENCE, SEQUENCE_TABLE, TABLE_OF, PeersBatch, PeersWorkload
from nestrec.distributed import DenseSync, Topology
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, TableConfig
from nestrec.jagged import offsets_of
from nestrec.ops.rows.gather import gather_rows
from nestrec.ops.rows.pool import pool_rows

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
    """Of this rank's samples, one for each step so far."""

    def step(self) -> None:
        """One step of training. Collective."""


class Laps:
    """What the parts of a step take the thread that trains."""

    def __init__(self) -> None:
        self._wall_s: dict[str, list[float]] = {}
        self._cpu_s: dict[str, list[float]] = {}
        self._last = 0.0, 0.0

    def start(self) -> None:
        self._last = time.perf_counter(), time.thread_time()

    def lap(self, part: str) -> None:
        """What came since the last call was this part."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        self._wall_s.setdefault(part, []).append(wall_s - self._last[0])
        self._cpu_s.setdefault(part, []).append(cpu_s - self._last[1])
        self._last = wall_s, cpu_s

    def medians_ms(self) -> dict[str, list[float]]:
        """Part to [time, processor time]; the difference is waiting, for a peer or for the processor."""
        parts = ((name, (self._wall_s[name], self._cpu_s[name])) for name in self._wall_s)
        return {name: [round(1e3 * statistics.median(t), 2) for t in times] for name, times in parts}


class NestrecJob:
    """Our side, built from the engine's public steps."""

    system, version = "nestrec", __version__

    def __init__(
        self, workload: PeersWorkload, batches: Sequence[PeersBatch], dense: DenseKind, topology: Topology,
        mode: str = "serial",
    ) -> None:  # fmt: skip
        self.mode = mode
        self._batches, self._topology = batches, topology
        self._engine = EmbeddingEngine(_tables(workload), topology)
        for number, table in enumerate(TABLE_OF.values()):
            self._engine.load(table, _first_rows(workload, number))
        self._dense = DensePart(workload.cfg, dense)
        self._adam = torch.optim.Adam(self._dense.parameters(), lr=DENSE_LEARNING_RATE)
        self._sync = DenseSync(self._dense.parameters(), topology.dense)
        self.losses: list[torch.Tensor] = []
        self.laps = Laps()

    def step(self) -> None:
        """One step of training. Collective."""
        engine, lap = self._engine, self.laps.lap
        batch = self._batches[len(self.losses) % len(self._batches)]
        self.laps.start()
        routed = engine.route(batch.keys)
        lap("route")
        working = engine.fetch(routed, step=len(self.losses) + 1)
        lap("fetch")
        vectors = {name: v.requires_grad_() for name, v in engine.exchange_vectors(routed, working).items()}
        lap("exchange vectors")
        self._adam.zero_grad()
        loss = self._loss(batch, vectors, routed.index)
        lap("forward")
        (loss / self._topology.world).backward()
        lap("backward")
        engine.accumulate(routed, working, {name: v.grad for name, v in vectors.items() if v.grad is not None})
        lap("exchange and add gradients")
        self._sync.reduce()
        self._adam.step()
        lap("dense all-reduce and Adam")
        engine.update(working, learning_rate=ROW_LEARNING_RATE)
        lap("row update")
        engine.write_back(working)
        lap("write back")
        self.losses.append(loss.detach())

    def _loss(
        self, batch: PeersBatch, vectors: dict[str, torch.Tensor], index: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        tokens = gather_rows(vectors[SEQUENCE_TABLE], index[SEQUENCE])
        bags = pool_rows(vectors[BAG_TABLE], index[BAG], offsets_of(batch.lengths[BAG]))
        loss: torch.Tensor = self._dense(tokens, batch.lengths[SEQUENCE], bags, batch.dense, batch.label)
        return loss


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
