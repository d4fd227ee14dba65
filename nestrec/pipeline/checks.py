"""What a schedule cannot do, said before training begins."""

from nestrec.base.errors import UserError
from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.stages import Compute


def check_can_split(schedule: str, compute: Compute) -> None:
    """A loss that couples samples would depend on how they are dealt to micro-batches (rule 7)."""
    if compute.couples_samples:
        problem = "splits a batch into micro-batches, and this task's loss couples the samples of a batch"
        remedy = "take the schedule dual_buffer with batch.micro_batches=1, or a loss that is a sum over samples"
        raise UserError(problem, field="pipeline.schedule", value=schedule, remedy=remedy)


def check_can_pipeline(schedule: str, engine: EmbeddingEngine) -> None:
    """Two batches are in flight, so a row must live for more than one step after its last use."""
    for name, table in engine.tables.items():
        if table.store.ttl_steps is not None and table.store.ttl_steps < 1:
            problem = f"rows must outlive the next step under the schedule {schedule}"
            field = f"tables.{name}.store.ttl_steps"
            raise UserError(problem, field=field, value=table.store.ttl_steps, remedy="give at least 1")
