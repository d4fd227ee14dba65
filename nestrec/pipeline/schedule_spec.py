"""The seam of schedules: what one says of itself, and where it is found by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nestrec.base.errors import UserError
from nestrec.base.seam import Seam
from nestrec.pipeline.window_size import WindowTime

if TYPE_CHECKING:
    from nestrec.embedding import EmbeddingEngine
    from nestrec.pipeline.options import PipelineConfig
    from nestrec.pipeline.stages import Compute, Dense, Schedule
    from nestrec.trace import Tracer

Build = Callable[["EmbeddingEngine", "Compute", "Dense", "Tracer", "PipelineConfig"], "Schedule"]

MOST_AHEAD = 8
"""More batches than any schedule takes before their step, beyond those that are made ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSpec:
    """The spec of a schedule: how the stages of steps share the time, and what that needs."""

    name: str
    """as it is asked for"""
    build: Build
    """(engine, compute, dense, tracer, options) to a schedule that has not begun"""
    is_exact: bool
    """whether its result equals that of `serial` to the bit, at the same micro-batches and window cache"""
    splits: bool
    """whether it is about micro-batches: with one of them it is another schedule under another name"""
    rows_outlive_step: bool = False
    """whether it needs rows to live for more than one step after their last use, because two batches are in flight"""
    window_ms: WindowTime | None = None
    """how long a step's exchanges and computations take together, by the order in which it has them
    (nestrec.pipeline.window_size); none: it cannot tell, and the number of micro-batches cannot be left to `auto`"""
    options: tuple[str, ...] = ()
    """fields of the pipeline's options that mean something to this schedule only"""

    def check_options(self, options: Any, own: dict[str, Any]) -> None:
        """Refuse options that are not this schedule's. own: fields that belong to some schedules, with defaults."""
        for name, usual in own.items():
            if name not in self.options and getattr(options, name) != usual:
                raise UserError(
                    f"means nothing to the schedule {self.name}",
                    field=f"pipeline.{name}",
                    value=getattr(options, name),
                    remedy=f"leave it at {usual}, or take another --pipeline.schedule",
                )

    def check_tables(self, engine: "EmbeddingEngine") -> None:
        """Refuse tables that this schedule cannot train."""
        for name, table in engine.tables.items():
            ttl_steps = table.store.ttl_steps
            if self.rows_outlive_step and ttl_steps is not None and ttl_steps < 1:
                problem = f"rows must outlive the next step under the schedule {self.name}"
                field = f"tables.{name}.store.ttl_steps"
                raise UserError(problem, field=field, value=ttl_steps, remedy="give at least 1")


SCHEDULES: Seam[ScheduleSpec] = Seam(
    "nestrec.schedules",
    "schedule",
    {
        "serial": "nestrec.pipeline.schedules.serial:SERIAL",
        "stale": "nestrec.pipeline.schedules.stale:STALE",
        "dual_buffer": "nestrec.pipeline.schedules.dual_buffer:DUAL_BUFFER",
        "frozen_window": "nestrec.pipeline.schedules.frozen_window:FROZEN_WINDOW",
        "nested": "nestrec.pipeline.schedules.nested:NESTED",
        "priority": "nestrec.pipeline.schedules.priority:PRIORITY",
        "semi_async": "nestrec.pipeline.schedules.semi_async:SEMI_ASYNC",
    },
    of=ScheduleSpec,
)
