"""The peers' job through our engine: run by torchrun, one process a rank.

    torchrun --nproc-per-node 2 -m nestrec.bench.peers --workload workload.py --dense mlp

The workload file (given by path, so that every system under test reads the very same one) defines `Cfg`, `Workload`
and `make_dense`: two tables of a million rows, one looked up as a sequence and one summed into bags, row-wise AdaGrad
for rows and Adam for the dense part. Losses are means over a rank's samples, averaged over ranks.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nestrec.distributed import DenseSync, Topology
from nestrec.distributed.exchange import all_reduce_sum, barrier
from nestrec.embedding import EmbeddingEngine, RowOptimizerConfig, StoreConfig, TableConfig
from nestrec.jagged import offsets_of
from nestrec.ops.gather_rows import gather_rows
from nestrec.ops.pool_rows import pool_rows

ROW_LEARNING_RATE, DENSE_LEARNING_RATE = 0.05, 1e-3
NUM_BATCHES = 12
_LOAD_ROWS = 1 << 16


class PeersJob:
    """The job on one rank, step by step, in the serial schedule."""

    def __init__(self, workload: ModuleType, dense: str, topology: Topology, store: str = "device") -> None:
        self._cfg = workload.Cfg()
        self._workload = workload.Workload(self._cfg)
        self._topology = topology
        self._engine = EmbeddingEngine(self._tables(store), topology)
        for number, name in enumerate(self._workload.TABLES):
            self._engine.load(name, self._initial_rows(number))
        self._tower, self._head = workload.make_dense(self._cfg, dense)
        parameters = [*self._tower.parameters(), *self._head.parameters()]
        self._adam = torch.optim.Adam(parameters, lr=DENSE_LEARNING_RATE)
        self._sync = DenseSync(parameters, topology.dense)
        self._batches = [self._workload.batch(topology.rank, step) for step in range(NUM_BATCHES)]
        self._num_steps = 0
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """One step of training."""
        batch = self._batches[self._num_steps % NUM_BATCHES]
        self._num_steps += 1
        engine = self._engine
        routed = engine.route({name: batch[name][0] for name in self._workload.FEATURES})
        working = engine.fetch(routed, step=self._num_steps)
        vectors = {name: v.requires_grad_() for name, v in engine.exchange_vectors(routed, working).items()}
        self._adam.zero_grad()
        loss = self._loss(batch, vectors, routed.index)
        (loss / self._topology.world).backward()
        engine.accumulate(routed, working, {name: v.grad for name, v in vectors.items() if v.grad is not None})
        self._sync.reduce()
        self._adam.step()
        engine.update(working, learning_rate=ROW_LEARNING_RATE)
        engine.write_back(working)
        self.losses.append(loss.detach())

    def global_losses(self) -> list[float]:
        """Losses so far, averaged over ranks. Collective."""
        total = torch.stack(self.losses)
        all_reduce_sum(self._topology.dense, total)
        return [round(float(x), 6) for x in total / self._topology.world]

    def _loss(
        self, batch: dict[str, Any], vectors: dict[str, torch.Tensor], index: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        sequence, bag = self._workload.FEATURES
        sequence_table, bag_table = self._workload.TABLES
        tokens = gather_rows(vectors[sequence_table], index[sequence])
        bags = pool_rows(vectors[bag_table], index[bag], offsets_of(batch[bag][1]))
        loss: torch.Tensor = self._head(batch["dense"], self._tower(tokens, batch[sequence][1]), bags, batch["label"])[
            0
        ]
        return loss

    def _tables(self, store: str) -> list[TableConfig]:
        names = zip(self._workload.TABLES, self._workload.FEATURES, strict=True)
        where = StoreConfig(kind=store)  # type: ignore[arg-type]
        return [
            TableConfig(name=table, dim=self._cfg.dim, num_rows=self._cfg.rows, features=(feature,), store=where,
                        optimizer=RowOptimizerConfig(kind="rowwise_adagrad", eps=1e-8))
            for table, feature in names
        ]  # fmt: skip

    def _initial_rows(self, table: int) -> Iterator[dict[str, torch.Tensor]]:
        for low in range(0, self._cfg.rows, _LOAD_ROWS):
            high = min(low + _LOAD_ROWS, self._cfg.rows)
            yield {"keys": torch.arange(low, high), "weight": self._workload.init_rows(table, low, high)}


def load_workload(path: Path) -> ModuleType:
    """The module in a file given by path."""
    spec = importlib.util.spec_from_file_location("peers_workload", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def measure(job: PeersJob, topology: Topology, *, warmup: int, rounds: int, steps: int, batch: int) -> dict[str, Any]:
    """Samples a second of rounds of steps, over all ranks. Collective."""
    for _ in range(warmup):
        job.step()
    rates = []
    for _ in range(rounds):
        barrier(topology.control)
        start_s = time.perf_counter()
        for _ in range(steps):
            job.step()
        barrier(topology.control)
        rates.append(batch * topology.world * steps / (time.perf_counter() - start_s))
    return {
        "samples_per_s": round(statistics.median(rates), 1),
        "samples_per_s_spread": [round(min(rates), 1), round(max(rates), 1)],
        "losses": job.global_losses()[:8],
    }


def main() -> None:
    """Entry point under torchrun; rank 0 prints one JSON row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", type=Path, required=True, help="file that defines the job")
    parser.add_argument("--dense", default="mlp", help="dense part: mlp, bucket, packed or padded")
    parser.add_argument("--store", default="device", help="where rows are kept: device or dram")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--warmup", type=int, default=4)
    given = parser.parse_args()
    topology = Topology.from_environment("cpu")
    workload = load_workload(given.workload)
    job = PeersJob(workload, given.dense, topology, given.store)
    found = measure(
        job, topology, warmup=given.warmup, rounds=given.rounds, steps=given.steps, batch=workload.Cfg().batch
    )
    if topology.is_first:
        print(json.dumps({"system": "nestrec", "mode": "serial", "dense": given.dense, **found}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
