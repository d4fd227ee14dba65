"""Measures traffic between two hosts of two ranks and step times, with limited links between network namespaces.

The results are written to the file named by NESTREC_HIERARCHY_RESULTS, if it is set.
"""

import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestrec.data.batch_loader import Batch, MicroBatch
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.distributed.collectives import barrier
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding import EmbeddingEngine, TableConfig
from nestrec.embedding.hashing import owner_of
from nestrec.pipeline import LearningRates, LookaheadIterator, PipelineCore, TrainingStep
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer, OptimizerConfig
from nestrec.pipeline.exchange_window import LossCompute
from nestrec.report.result_file import make_frame
from nestrec_bench.harness.links import bytes_on_link, can_limit, limited_links
from nestrec_bench.harness.local_ranks import run_on_ranks

HOSTS, RANKS, DIM, MICRO_BATCHES = 2, 2, 64, 2
SAMPLES = 6000
NUM_ROWS = 10_000
LINK_MBIT = 100.0
WARM_UP, ROUNDS = 2, 8


def keys_of(rank: int, step: int) -> list[np.ndarray]:
    """Return the keys of each micro-batch; the frequency of a key is inversely proportional to its popularity rank."""
    uniform = np.random.default_rng([rank, step]).random((MICRO_BATCHES, SAMPLES))
    return list(np.exp(uniform * np.log(NUM_ROWS)).astype(np.int64))


def bytes_between(step: int, *, by_hosts: bool) -> int:
    """Return the expected bytes between hosts: keys with their segment, vectors and gradients.

    Keys are unique per rank, or per host with `by_hosts`.
    """
    rows = 0
    for host in range(HOSTS):
        ranks = [keys_of(rank, step) for rank in range(host * RANKS, (host + 1) * RANKS)]
        for parts in zip(*ranks, strict=True):
            for keys in [np.concatenate(parts)] if by_hosts else parts:
                unique = np.unique(keys)
                rows += int((owner_of(unique, HOSTS * RANKS) // RANKS != host).sum())
    return rows * (8 + 2 + 2 * 4 * DIM)


class _Run:
    """A run of one kind; runs of all kinds alternate."""

    def __init__(self, topology: Topology, schedule: str) -> None:
        self.topology = topology
        self._number = 0
        model = torch.nn.Linear(DIM, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        engine = EmbeddingEngine([TableConfig(name="items", dim=DIM, num_rows=NUM_ROWS)], topology)
        loss = LossCompute(
            lambda part, rows, index: model(rows["items"][index["items"].long()]).sin().sum(), torch.device("cpu")
        )
        dense = DenseOptimizer(model, OptimizerConfig(), topology, torch.device("cpu"))
        self._engine = engine
        self._pipeline = PipelineCore.build(loss, engine, dense, schedule)

    def steps(self, count: int) -> tuple[float, int]:
        """Run the next steps, and return the mean seconds per step and the mean bytes between hosts per step."""
        first = self._number + 1
        feed = LookaheadIterator(self._batch(n) for n in range(first, first + count))
        barrier(self.topology.control)
        sent = bytes_on_link()
        start = time.perf_counter()
        for number in range(first, first + count):
            is_fence = number == first + count - 1
            step = TrainingStep(
                number=number, batch=next(feed), rates=LearningRates(dense=0.01, tables=0.1), is_fence=is_fence
            )
            self._pipeline.schedule.advance(step, feed)
        barrier(self.topology.control)
        self._number += count
        return (time.perf_counter() - start) / count, (bytes_on_link() - sent) // count

    def _batch(self, number: int) -> Batch:
        keys = keys_of(self.topology.rank, number)
        parts = [MicroBatch(np.arange(SAMPLES), {"items": k}, {}, 1, SAMPLES) for k in keys]
        total = np.arange(SAMPLES * MICRO_BATCHES)
        return Batch(BatchPosition(0, number), 1.0, total, tuple(parts), tokens=np.ones(len(total), np.int64))

    def digest(self) -> str:
        digest = self._engine.digest("items")
        self._pipeline.close()
        return digest


def measure(topology: Topology) -> list[dict[str, Any]]:
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    hosts = Topology.of_process_group(topology.device, ParallelConfig(hierarchical_all_to_all=True), timeout_s=60.0)
    kinds = [(s, by_hosts) for s in ("serial", "nested") for by_hosts in (False, True)]
    runs = {kind: _Run(hosts if kind[1] else topology, kind[0]) for kind in kinds}
    for run in runs.values():
        run.steps(WARM_UP)
    rounds = [{kind: run.steps(3) for kind, run in runs.items()} for _ in range(ROUNDS)]
    first = WARM_UP + 1
    last = WARM_UP + 3 * ROUNDS
    rows = []
    for kind, run in runs.items():
        times = sorted(1e3 * round_[kind][0] for round_ in rounds)
        expected = sum(bytes_between(step, by_hosts=kind[1]) for step in range(first, last + 1)) / (last - first + 1)
        rows.append(
            {
                "schedule": kind[0],
                "hierarchy": kind[1],
                "step_ms": round(statistics.median(times), 3),
                "step_ms_spread": [round(times[1], 1), round(times[-2], 1)],
                "bytes_of_host": round(statistics.mean(round_[kind][1] for round_ in rounds)),
                "formula_bytes": round(expected),
                "digest": run.digest(),
            }
        )
    return rows


@pytest.mark.slow
@pytest.mark.skipif(not can_limit(), reason="needs root, `ip` and `tc`")
def test_hierarchical_all_to_all_bytes_match_formula():
    with limited_links(HOSTS, LINK_MBIT) as links:
        ranks = run_on_ranks(HOSTS * RANKS, measure, enter=functools.partial(_enter, links))
    rows = ranks[0]
    for row, other in zip(rows, ranks[RANKS], strict=True):  # the first rank of each host measures its link
        row["bytes_between_hosts"] = row.pop("bytes_of_host") + other["bytes_of_host"]
        row |= {"hosts": HOSTS, "ranks_of_host": RANKS, "link_mbit": LINK_MBIT, "dim": DIM}
    by_kind = {(row["schedule"], row["hierarchy"]): row for row in rows}
    for row in rows:
        for figure, ratio in (("step_ms", "step_ratio"), ("bytes_between_hosts", "bytes_ratio")):
            row[ratio] = round(row[figure] / by_kind[row["schedule"], False][figure], 3)
        print(row)
    if name := os.environ.get("NESTREC_HIERARCHY_RESULTS"):
        command = f"NESTREC_HIERARCHY_RESULTS=FILE pytest {' '.join(sys.argv[1:])}"
        results = [{k: v for k, v in row.items() if k != "digest"} for row in rows]
        Path(name).write_text(json.dumps(make_frame(bench="hierarchy", command=command, rows=results), indent=2) + "\n")
    for row in rows:
        assert row["formula_bytes"] < row["bytes_between_hosts"] < 1.08 * row["formula_bytes"]
        assert row["digest"] == by_kind["serial", row["hierarchy"]]["digest"]


def _enter(links, rank: int) -> None:
    links.enter(rank // RANKS)
