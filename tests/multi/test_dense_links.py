"""Measures the overlap of dense all-reduces with the backward pass, on two ranks with limited links.

The ranks run in network namespaces. The results are written to the file named by NESTREC_DENSE_RESULTS, if it is set.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_jobs import Pause, wait_for_sum
from torch import nn

from nestrec.data.batch_loader import Batch, MicroBatch
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.distributed.collectives import barrier
from nestrec.distributed.topology import ParallelConfig
from nestrec.embedding import EmbeddingEngine, TableConfig
from nestrec.ops.embedding.row_gather import gather_rows
from nestrec.pipeline import LearningRates, LookaheadIterator, PipelineCore, TrainingStep
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer, OptimizerConfig
from nestrec.pipeline.exchange_window import LossCompute
from nestrec.report.result_file import make_frame
from nestrec.trace import Span
from nestrec.trace.exposed import Timeline
from nestrec_bench.harness.links import can_limit, limited_links
from nestrec_bench.harness.local_ranks import run_on_ranks

WIDTH = 512
LAYERS = 8
SAMPLES = 512
MICRO_BATCHES = 2
LINK_MBIT = 400.0
BUCKET_MIB = 1.0
KINDS = (("serial", False), ("nested", False), ("nested", True))
"""Schedule, and whether all-reduces start inside the backward pass."""
WARM_UP, ROUNDS, STEPS = 1, 10, 2


class _BackwardPause(nn.Module):
    """A layer whose backward pass continues when `wait` returns."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pause.apply(x, self._wait)  # type: ignore[no-any-return,no-untyped-call]


class _Run:
    """A run of one kind; runs of all kinds alternate."""

    def __init__(self, topology: Topology, schedule: str) -> None:
        self.topology = topology
        self._number = 0
        self._passes_until_pause = 0
        self._bytes_before = 0
        torch.manual_seed(0)
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        model = nn.Sequential(*layers[:LAYERS], _BackwardPause(self._pause), *layers[LAYERS:])
        self.dense_bytes = sum(weight.nbytes for weight in model.parameters())
        engine = EmbeddingEngine([TableConfig(name="items", dim=WIDTH, num_rows=100)], topology)
        loss = LossCompute(
            lambda part, rows, index: model(gather_rows(rows["items"], index["items"])).sum(), torch.device("cpu")
        )
        self._dense = DenseOptimizer(model, OptimizerConfig(), topology, torch.device("cpu"))
        self._pipeline = PipelineCore.build(loss, engine, self._dense, schedule)

    def steps(self, count: int) -> list[Span]:
        """Run the next steps and return their spans."""
        first = self._number + 1
        feed = LookaheadIterator(self._batch(n) for n in range(first, first + count))
        barrier(self.topology.control)
        for number in range(first, first + count):
            is_fence = number == first + count - 1
            step = TrainingStep(
                number=number, batch=next(feed), rates=LearningRates(dense=0.01, tables=0.1), is_fence=is_fence
            )
            self._pipeline.schedule.advance(step, feed)
        barrier(self.topology.control)
        self._number += count
        return self._pipeline.tracer.take()

    def paused_step(self) -> list[Span]:
        """Run a step whose last backward pass waits in its middle for an all-reduce of the later layers."""
        self._passes_until_pause = MICRO_BATCHES
        self._bytes_before = self._dense._sync.bytes_reduced
        return self.steps(1)

    def _pause(self) -> None:
        self._passes_until_pause -= 1
        if self._passes_until_pause == 0:
            wait_for_sum(self._dense, self._bytes_before)

    def _batch(self, number: int) -> Batch:
        draw = np.random.default_rng([self.topology.rank, number])
        parts = [
            MicroBatch(np.arange(SAMPLES), {"items": draw.integers(0, 100, SAMPLES)}, {}, 1, SAMPLES)
            for _ in range(MICRO_BATCHES)
        ]
        total = np.arange(SAMPLES * MICRO_BATCHES)
        return Batch(BatchPosition(0, number), 1.0, total, tuple(parts), tokens=np.ones(len(total), np.int64))

    def digest(self) -> str:
        digest = self._pipeline.digest()
        self._pipeline.close()
        return digest


def measure(topology: Topology) -> dict[str, Any]:
    """Return the spans and the final digest of each kind of run."""
    late, early = (
        Topology.of_process_group(
            topology.device, ParallelConfig(grad_bucket_mib=BUCKET_MIB, overlap_grad_reduce=overlap)
        )
        for overlap in (False, True)
    )
    runs = {kind: _Run(early if kind[1] else late, kind[0]) for kind in KINDS}
    for run in runs.values():
        run.steps(WARM_UP)
    rounds = [{kind: run.steps(STEPS) for kind, run in runs.items()} for _ in range(ROUNDS)]
    return {
        "spans": {kind: [round_[kind] for round_ in rounds] for kind in runs},
        "paused": {kind: run.paused_step() if kind[1] else run.steps(1) for kind, run in runs.items()},
        "dense_bytes": runs["nested", True].dense_bytes,
        "digests": {kind: run.digest() for kind, run in runs.items()},
    }


def parts(spans_of_ranks: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Return the mean milliseconds of the parts of a step in a round, on its slowest rank."""
    timeline = Timeline(span for spans in spans_of_ranks for span in spans)
    times_of_ranks = []
    for rank, spans in enumerate(spans_of_ranks):
        steps = timeline.steps(rank)
        sums = [s for s in spans if s.name == "train.dense.all_reduce"]
        last = {s.step: s for s in spans if s.name == "train.forward_backward" and s.micro_batch == MICRO_BATCHES - 1}
        inside = [max(0, min(s.end_ns, last[s.step].end_ns) - max(s.start_ns, last[s.step].start_ns)) for s in sums]
        times = {
            "step_ms": sum(timeline.parts(step, rank).step_ns for step in steps),
            "compute_ms": sum(timeline.parts(step, rank).compute_ns for step in steps),
            "sums_ms": sum(s.duration_ns for s in sums),
            "sums_inside_backward_ms": sum(inside),
            "exposed_dense_ms": sum(
                timeline.exposed(step, "communication", rank).get("train.dense.all_reduce", 0) for step in steps
            ),
        }
        times_of_ranks.append({name: 1e-6 * ns / len(steps) for name, ns in times.items()})
    return max(times_of_ranks, key=lambda times: times["step_ms"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not can_limit(), reason="needs root, `ip` and `tc`")
def test_overlapped_all_reduce_over_slow_link_is_bitwise():
    with limited_links(2, LINK_MBIT) as links:
        ranks = run_on_ranks(2, measure, enter=links.enter)
    digests = [digest for rank in ranks for digest in rank["digests"].values()]
    assert len(set(digests)) == 1
    rounds = {
        kind: [parts(spans) for spans in zip(*(rank["spans"][kind] for rank in ranks), strict=True)]
        for kind in ranks[0]["spans"]
    }
    rows = []
    for (schedule, overlap), results in rounds.items():
        ratios = sorted(a["step_ms"] / b["step_ms"] for a, b in zip(results, rounds[schedule, False], strict=True))
        row = {"schedule": schedule, "overlap": overlap}
        row |= {name: round(statistics.median(times[name] for times in results), 2) for name in results[0]}
        row |= {"step_ratio": round(statistics.median(ratios), 3)}
        row |= {"step_ratio_spread": [round(ratios[1], 3), round(ratios[-2], 3)], "equal_to_serial": True}
        row |= {"ranks": 2, "link_mbit": LINK_MBIT, "bucket_mib": BUCKET_MIB, "dense_bytes": ranks[0]["dense_bytes"]}
        rows.append(row)
        print(row)
    if name := os.environ.get("NESTREC_DENSE_RESULTS"):
        command = f"NESTREC_DENSE_RESULTS=FILE pytest {' '.join(sys.argv[1:])}"
        Path(name).write_text(json.dumps(make_frame(bench="dense", command=command, rows=rows), indent=2) + "\n")
    for rank in ranks:  # how many of them start there depends on the speed of the machine and of the link
        for (_, overlap), spans in rank["paused"].items():
            (backward,) = (
                s for s in spans if s.name == "train.forward_backward" and s.micro_batch == MICRO_BATCHES - 1
            )
            sums = [s for s in spans if s.name == "train.dense.all_reduce"]
            assert (min(s.start_ns for s in sums) < backward.end_ns) == overlap
    assert all(row["overlap"] or row["sums_inside_backward_ms"] == 0 for row in rows)
