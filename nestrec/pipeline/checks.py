"""What a schedule cannot do, said before training begins."""

from nestrec.base.errors import UserError
from nestrec.embedding import EmbeddingEngine


def check_can_pipeline(schedule: str, engine: EmbeddingEngine) -> None:
    """Two batches are in flight, so a row must live for more than one step after its last use."""
    for name, table in engine.tables.items():
        if table.store.ttl_steps is not None and table.store.ttl_steps < 1:
            problem = f"rows must outlive the next step under the schedule {schedule}"
            field = f"tables.{name}.store.ttl_steps"
            raise UserError(problem, field=field, value=table.store.ttl_steps, remedy="give at least 1")
