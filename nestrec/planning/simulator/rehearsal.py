"""Rehearsal: records the program of a schedule by training a toy job for some steps.

The toy job uses the real engine on one rank, with rows, gradients and lanes with threads; only its sizes are small. The
durations of its stages are not used: they come from the cost model.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nestrec.data.batch_loader import Batch, MicroBatch
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.embedding import EmbeddingEngine, RoutedKeys, TableConfig, WorkingSet
from nestrec.embedding.routing.replica_key_union import ReplicaSyncConfig
from nestrec.pipeline import (
    Coupling,
    LearningRates,
    LookaheadIterator,
    PipelineConfig,
    PipelineCore,
    StepTotals,
    TrainingStep,
)
from nestrec.planning.simulator.program import Program, Recorder

ENGINE_OPERATIONS = (
    "deduplicate", "exchange_keys", "build_exchange_plan", "fetch_rows", "prefetch_rows", "exchange_vectors",
    "exchange_gradients", "add_gradients", "all_reduce_replica_gradients", "average_replicas", "update_rows",
    "write_back",
)  # fmt: skip
_ROWS, _DIM = 8, 2
SHARED, EXCLUSIVE = ":shared", ":exclusive"
"""Suffixes of operations that process only the rows that the neighboring batch shares, or only the other rows."""


@functools.lru_cache(maxsize=256)
def rehearse(
    options: PipelineConfig, *, micro_batches: int, steps: int, replica_sync: ReplicaSyncConfig | None = None
) -> Program:
    """Record the program of some training steps.

    Args:
        options: Options of the pipeline, among them its schedule.
        micro_batches: Number of micro-batches of a step.
        steps: Number of steps; the last one drains the pipeline.
        replica_sync: Options of the synchronization of replica groups, if there are any. The other replicas of the toy
            job contribute no gradients.
    """
    recorder = Recorder()
    topology = Topology.single()
    if replica_sync is not None:
        topology = replace(topology, world=2, num_replicas=2)
    table = TableConfig(name="toy", dim=_DIM, num_rows=_ROWS)
    engine = EmbeddingEngine([table], topology, replica_sync=replica_sync)
    for name in ENGINE_OPERATIONS:
        setattr(engine, name, recorder.recording(name, getattr(engine, name), _ROW_GROUPS.get(name)))
    core = PipelineCore.build(_Compute(recorder), engine, _Dense(recorder), options, tracer=recorder)
    batches = [_batch(number, micro_batches) for number in range(1, steps + 1)]
    feed = LookaheadIterator(iter(batches))
    for number in range(1, steps + 1):
        step = TrainingStep(
            number=number, batch=next(feed), rates=LearningRates(dense=0.1, tables=0.1), is_fence=number == steps
        )
        core.schedule.advance(step, feed)
    core.close()
    return recorder.program(options.schedule, micro_batches)


def _row_group(keys: Iterable[int]) -> str:
    """Return the suffix for a set of rows: row 0 is shared by all batches, every other row by none."""
    is_shared = [key == 0 for key in keys]
    if any(is_shared) == (not all(is_shared)):
        return ""
    return SHARED if is_shared[0] else EXCLUSIVE


def _group_of_vectors(routed: RoutedKeys, working: WorkingSet, micro_batch: int = 0, into: Any = None) -> str:
    return _row_group(routed.owned["toy"][routed.micro_batches[micro_batch].vectors.requested.indices].tolist())


def _group_of_gradients(routed: RoutedKeys, gradients: Any, micro_batch: int) -> str:
    (leg,) = routed.micro_batches[micro_batch].gradients.values()
    return _row_group(routed.owned["toy"][leg.requested.indices].tolist())


def _group_of_sums(routed: RoutedKeys, working: WorkingSet, received: Any, micro_batch: int) -> str:
    return _group_of_gradients(routed, received, micro_batch)


def _group_of_rows(working: WorkingSet, *, learning_rate: float, selections: Any = None) -> str:
    keys = working.tables["toy"].fetched.keys
    return "" if selections is None else _row_group(keys[selections["toy"].on_host].tolist())


_ROW_GROUPS: dict[str, Callable[..., str]] = {
    "exchange_vectors": _group_of_vectors,
    "exchange_gradients": _group_of_gradients,
    "add_gradients": _group_of_sums,
    "update_rows": _group_of_rows,
}


def _batch(number: int, micro_batches: int) -> Batch:
    """Return a batch whose micro-batches read one row of their own step and one row that every step reads."""
    keys = np.array([[0, 1 + number % (_ROWS - 1)]])
    parts = [MicroBatch(np.array([i]), {"toy": keys}, {}, 2, 2) for i in range(micro_batches)]
    samples = np.arange(micro_batches)
    return Batch(
        BatchPosition(0, number), float(micro_batches), samples, tuple(parts), tokens=np.full(micro_batches, 2)
    )


class _Compute:
    """Model of the toy job; the gradient of a row is the row itself."""

    couples_samples: Coupling = "micro_batch"

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def transfer(self, micro_batch: MicroBatch) -> MicroBatch:
        return micro_batch

    def forward_backward(
        self,
        micro_batch: MicroBatch,
        rows: Mapping[str, torch.Tensor],
        index: Mapping[str, torch.Tensor],
        weight: float,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        self._recorder.record_operation("forward_backward")
        return torch.zeros(()), {name: vectors.clone() for name, vectors in rows.items()}


class _Dense:
    """Dense part of the toy job, without weights."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def overlap_backward(self, submit: Callable[[Callable[[], None]], None]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reduce(self, loss: torch.Tensor, stop_requested: bool) -> torch.Tensor:
        self._recorder.record_operation("dense_reduce")
        return torch.zeros(2)

    def apply(self, sums: torch.Tensor, learning_rate: float) -> StepTotals:
        self._recorder.record_operation("dense_apply")
        return StepTotals(loss=sums[0], gradient_norm=sums[0], stop_requested=sums[1])
