"""Two ranks in network namespaces with limited links: what it brings to sum dense gradients inside the backward pass.

With NESTREC_DENSE_RESULTS naming a file, what was measured is kept there.
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
"""Schedule, and whether sums begin inside the backward pass."""
WARM_UP, ROUNDS, STEPS = 1, 10, 2


class _Stop(nn.Module):
    """Where a backward pass goes on when `go_on` returns."""

    def __init__(self, go_on: Callable[[], None]) -> None:
        super().__init__()
        self._go_on = go_on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pause.apply(x, self._go_on)  # type: ignore[no-any-return,no-untyped-call]


class _Trained:
    """A run of one kind; runs of all kinds take turns."""

    def __init__(self, topology: Topology, schedule: str) -> None:
        self.topology = topology
        self._number = 0
        self._passes_until_stop, self._bytes_before = 0, 0
        torch.manual_seed(0)
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        model = nn.Sequential(*layers[:LAYERS], _Stop(self._stop), *layers[LAYERS:])
        self.dense_bytes = sum(weight.nbytes for weight in model.parameters())
        engine = EmbeddingEngine([TableConfig(name="items", dim=WIDTH, num_rows=100)], topology)
        loss = LossCompute(
            lambda part, rows, index: model(gather_rows(rows["items"], index["items"])).sum(), torch.device("cpu")
        )
        self._dense = DenseOptimizer(model, OptimizerConfig(), topology, torch.device("cpu"))
        self._pipeline = PipelineCore.build(loss, engine, self._dense, schedule)

    def steps(self, count: int) -> list[Span]:
        """What the next steps did."""
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

    def stopped_step(self) -> list[Span]:
        """A step whose last backward pass goes on past its middle when a sum of what lies behind that is done."""
        self._passes_until_stop = MICRO_BATCHES
        self._bytes_before = self._dense._sync.bytes_reduced
        return self.steps(1)

    def _stop(self) -> None:
        self._passes_until_stop -= 1
        if self._passes_until_stop == 0:
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
        found = self._pipeline.digest()
        self._pipeline.close()
        return found


def measured(topology: Topology) -> dict[str, Any]:
    """Of each kind: spans of its rounds, and the digest of what was trained."""
    late, early = (
        Topology.of_process_group(topology.device, ParallelConfig(dense_bucket_mib=BUCKET_MIB, dense_overlap=overlap))
        for overlap in (False, True)
    )
    runs = {kind: _Trained(early if kind[1] else late, kind[0]) for kind in KINDS}
    for run in runs.values():
        run.steps(WARM_UP)
    rounds = [{kind: run.steps(STEPS) for kind, run in runs.items()} for _ in range(ROUNDS)]
    return {
        "spans": {kind: [one[kind] for one in rounds] for kind in runs},
        "stopped": {kind: run.stopped_step() if kind[1] else run.steps(1) for kind, run in runs.items()},
        "dense_bytes": runs["nested", True].dense_bytes,
        "digests": {kind: run.digest() for kind, run in runs.items()},
    }


def parts(spans_of_ranks: Sequence[Sequence[Span]]) -> dict[str, float]:
    """Mean milliseconds of the steps of a round, on its slowest rank."""
    timeline = Timeline(span for spans in spans_of_ranks for span in spans)
    found = []
    for rank, spans in enumerate(spans_of_ranks):
        steps = timeline.steps(rank)
        sums = [s for s in spans if s.name == "train.dense.reduce"]
        last = {s.step: s for s in spans if s.name == "train.compute" and s.micro_batch == MICRO_BATCHES - 1}
        inside = [max(0, min(s.end_ns, last[s.step].end_ns) - max(s.start_ns, last[s.step].start_ns)) for s in sums]
        times = {
            "step_ms": sum(timeline.parts(step, rank).step_ns for step in steps),
            "compute_ms": sum(timeline.parts(step, rank).compute_ns for step in steps),
            "sums_ms": sum(s.duration_ns for s in sums),
            "sums_inside_backward_ms": sum(inside),
            "exposed_dense_ms": sum(
                timeline.exposed(step, "communication", rank).get("train.dense.reduce", 0) for step in steps
            ),
        }
        found.append({name: 1e-6 * ns / len(steps) for name, ns in times.items()})
    return max(found, key=lambda times: times["step_ms"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not can_limit(), reason="needs root, `ip` and `tc`")
def test_sums_lie_inside_the_backward_pass_and_leave_the_bits_of_serial():
    with limited_links(2, LINK_MBIT) as links:
        ranks = run_on_ranks(2, measured, enter=links.enter)
    digests = [digest for rank in ranks for digest in rank["digests"].values()]
    assert len(set(digests)) == 1
    rounds = {
        kind: [parts(spans) for spans in zip(*(rank["spans"][kind] for rank in ranks), strict=True)]
        for kind in ranks[0]["spans"]
    }
    rows = []
    for (schedule, overlap), found in rounds.items():
        ratios = sorted(a["step_ms"] / b["step_ms"] for a, b in zip(found, rounds[schedule, False], strict=True))
        row = {"schedule": schedule, "overlap": overlap}
        row |= {name: round(statistics.median(one[name] for one in found), 2) for name in found[0]}
        row |= {"step_ratio": round(statistics.median(ratios), 3)}
        row |= {"step_ratio_spread": [round(ratios[1], 3), round(ratios[-2], 3)], "equal_to_serial": True}
        row |= {"ranks": 2, "link_mbit": LINK_MBIT, "bucket_mib": BUCKET_MIB, "dense_bytes": ranks[0]["dense_bytes"]}
        rows.append(row)
        print(row)
    if name := os.environ.get("NESTREC_DENSE_RESULTS"):
        command = f"NESTREC_DENSE_RESULTS=FILE pytest {' '.join(sys.argv[1:])}"
        Path(name).write_text(json.dumps(make_frame(bench="dense", command=command, rows=rows), indent=2) + "\n")
    for rank in ranks:  # how much of them lies there is a matter of time: of the machine and of the link
        for (_, overlap), spans in rank["stopped"].items():
            (backward,) = (s for s in spans if s.name == "train.compute" and s.micro_batch == MICRO_BATCHES - 1)
            sums = [s for s in spans if s.name == "train.dense.reduce"]
            assert (min(s.start_ns for s in sums) < backward.end_ns) == overlap
    assert all(row["overlap"] or row["sums_inside_backward_ms"] == 0 for row in rows)
