"""Core of a training pipeline: computation, embedding engine, dense optimizer, schedule and tracer.

The trainer, the rehearsal of a plan and the benchmarks build a core from their own components.
`nestrec.TrainingPipeline` builds one for a user's module, and adds batches that are plain mappings, validation of
arguments and a training loop.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from nestrec.distributed import Topology
from nestrec.distributed.context_ring import ContextRing
from nestrec.embedding import EmbeddingEngine
from nestrec.embedding.routing.deduplicated_keys import FeatureKeys
from nestrec.pipeline.dense.dense_optimizer import DenseOptimizer
from nestrec.pipeline.lanes import make_tracer
from nestrec.pipeline.schedule_spec import PipelineConfig, ScheduleSpec
from nestrec.pipeline.schedule_types import DenseSide, ModelCompute, Schedule
from nestrec.trace import Tracer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PipelineCore:
    """A schedule and the components that it runs.

    The caller numbers the steps, splits batches into micro-batches and calls `schedule.advance`.
    """

    compute: ModelCompute
    engine: EmbeddingEngine
    dense: DenseSide
    schedule: Schedule
    tracer: Tracer

    @staticmethod
    def build(
        compute: ModelCompute,
        engine: EmbeddingEngine,
        dense: DenseSide,
        schedule: str | PipelineConfig = "serial",
        *,
        tracer: Tracer | None = None,
        spec: ScheduleSpec | None = None,
        context: ContextRing | None = None,
    ) -> "PipelineCore":
        """Build the schedule for these components.

        Args:
            compute: Forward and backward pass of a micro-batch.
            engine: Embedding tables.
            dense: Optimizer of the dense weights.
            schedule: Name of the schedule, or its options.
            tracer: Tracer of the steps; a new one by default.
            spec: Schedule that is not registered under a name; its options are still taken from `schedule`.
            context: Ring over which several ranks exchange the keys and values of one sample.
        """
        options = schedule if isinstance(schedule, PipelineConfig) else PipelineConfig(schedule=str(schedule))
        spec = spec or options.spec
        spec.check_tables(engine)
        tracer = tracer or make_tracer(engine.device, rank=engine.topology.rank)
        built = spec.build(engine, compute, dense, tracer, options)
        if context is not None:
            # All ranks must run the exchanges inside a forward pass and the schedule's collectives in the same order.
            context.issue = built.submit_collective
        return PipelineCore(compute, engine, dense, built, tracer)

    @property
    def topology(self) -> Topology:
        return self.engine.topology

    def submit_collective(self, collective: Callable[[], T]) -> T:
        """Run a collective of the caller on the lane of the schedule's collectives, and wait for it.

        All ranks then run all collectives in the same order.
        """
        return self.schedule.submit_collective(collective)

    def lookup(self, keys: FeatureKeys) -> dict[str, torch.Tensor]:
        """Return the current embeddings of keys, by feature, without changing the tables. Collective."""
        return self.submit_collective(lambda: self.engine.lookup_readonly(keys))

    def digest(self) -> str:
        """Return a hash of the tables and the dense weights that does not depend on the number of ranks. Collective."""
        digest = hashlib.sha256()
        for name in self.engine.tables:
            digest.update(self.submit_collective(lambda name=name: self.engine.digest(name)).encode())  # type: ignore[misc]
        if isinstance(self.dense, DenseOptimizer):
            for name, tensor in sorted(self.dense.tensors().items()):  # sorted: the order of creation may differ
                digest.update(name.encode())
                digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """End the threads, and release the memory and files of the tables."""
        self.schedule.close()
        self.engine.close()
