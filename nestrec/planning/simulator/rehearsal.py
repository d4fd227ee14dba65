"""A rehearsal: a schedule trains a toy job for some steps, and its program is recorded.

The toy is real: an engine on one rank, rows, gradients, lanes with threads. Only its sizes are small, so what a stage
costs comes from a cost model and not from here.
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
    "deduplicate", "exchange_keys", "arrange", "fetch", "read_ahead", "exchange_vectors", "exchange_gradients",
    "add_gradients", "sum_over_holders", "average_over_holders", "update_rows", "write_back",
)  # fmt: skip
_ROWS, _DIM = 8, 2
SHARED, EXCLUSIVE = ":shared", ":exclusive"
"""Added to the name of an operation that is made on a part of the rows only: those that the neighbouring batch uses,
or the others."""


@functools.lru_cache(maxsize=256)
def rehearse(
    options: PipelineConfig, *, micro_batches: int, steps: int, replica_sync: ReplicaSyncConfig | None = None
) -> Program:
    """The program of `steps` steps under these options; the last one is a fence.

    replica_sync: given where there are replica groups. The other holders of the toy's rows have nothing to say.
    """
    recorder = Recorder()
    topology = Topology.single()
    if replica_sync is not None:
        topology = replace(topology, world=2, num_replicas=2)
    table = TableConfig(name="toy", dim=_DIM, num_rows=_ROWS)
    engine = EmbeddingEngine([table], topology, replica_sync=replica_sync)
    for name in ENGINE_OPERATIONS:
        setattr(engine, name, recorder.noting(name, getattr(engine, name), _PORTIONS.get(name)))
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


def _portion(keys: Iterable[int]) -> str:
    """Row 0 is shared by all batches, the others by none."""
    is_shared = [key == 0 for key in keys]
    if any(is_shared) == (not all(is_shared)):
        return ""
    return SHARED if is_shared[0] else EXCLUSIVE


def _portion_of_vectors(routed: RoutedKeys, working: WorkingSet, micro_batch: int = 0, into: Any = None) -> str:
    return _portion(routed.owned["toy"][routed.micro_batches[micro_batch].vectors.asked.places].tolist())


def _portion_of_gradients(routed: RoutedKeys, gradients: Any, micro_batch: int) -> str:
    (leg,) = routed.micro_batches[micro_batch].gradients.values()
    return _portion(routed.owned["toy"][leg.asked.places].tolist())


def _portion_of_sums(routed: RoutedKeys, working: WorkingSet, received: Any, micro_batch: int) -> str:
    return _portion_of_gradients(routed, received, micro_batch)


def _portion_of_rows(working: WorkingSet, *, learning_rate: float, places: Any = None) -> str:
    keys = working.tables["toy"].fetched.keys
    return "" if places is None else _portion(keys[places["toy"].on_host].tolist())


_PORTIONS: dict[str, Callable[..., str]] = {
    "exchange_vectors": _portion_of_vectors,
    "exchange_gradients": _portion_of_gradients,
    "add_gradients": _portion_of_sums,
    "update_rows": _portion_of_rows,
}


def _batch(number: int, micro_batches: int) -> Batch:
    """Each micro-batch reads one row of its own step and one that every step reads."""
    keys = np.array([[0, 1 + number % (_ROWS - 1)]])
    parts = [MicroBatch(np.array([i]), {"toy": keys}, {}, 2, 2) for i in range(micro_batches)]
    samples = np.arange(micro_batches)
    return Batch(
        BatchPosition(0, number), float(micro_batches), samples, tuple(parts), tokens=np.full(micro_batches, 2)
    )


class _Compute:
    """The gradient of a row is the row."""

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
        self._recorder.note("forward_backward")
        return torch.zeros(()), {name: vectors.clone() for name, vectors in rows.items()}


class _Dense:
    """No dense weights."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def early_sums(self, submit: Callable[[Callable[[], None]], None]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reduce(self, loss: torch.Tensor, wants_stop: bool) -> torch.Tensor:
        self._recorder.note("dense_reduce")
        return torch.zeros(2)

    def apply(self, sums: torch.Tensor, learning_rate: float) -> StepTotals:
        self._recorder.note("dense_apply")
        return StepTotals(loss=sums[0], gradient_norm=sums[0], wants_stop=sums[1])
