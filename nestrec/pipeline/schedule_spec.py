"""The seam of schedules: what one says of itself, and where it is found by name.

How the stages of steps share the time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from nestrec.base.config import config
from nestrec.base.config_values import Count, OneOf
from nestrec.base.errors import UserError
from nestrec.base.plugins import PluginRegistry
from nestrec.pipeline.key_clustering import Clustering
from nestrec.pipeline.window_cost_model import MicroBatchChange, WindowTime

if TYPE_CHECKING:
    from nestrec.embedding import EmbeddingEngine
    from nestrec.pipeline.schedule_types import DenseSide, ModelCompute, Schedule
    from nestrec.trace import Tracer


Build = Callable[["EmbeddingEngine", "ModelCompute", "DenseSide", "Tracer", "PipelineConfig"], "Schedule"]

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
    (nestrec.pipeline.window_cost_model); none: it cannot tell, and `auto` cannot choose the number of micro-batches"""
    options: tuple[str, ...] = ()
    """fields of the pipeline's options that mean something to this schedule only"""

    def check_options(self, options: Any, own: dict[str, Any]) -> None:
        """Refuse options that are not this schedule's. own: fields that belong to some schedules, with defaults."""
        for name, usual in own.items():
            if name not in self.options and getattr(options, name) != usual:
                raise UserError(
                    f"means nothing to the schedule {self.name}",
                    option=f"pipeline.{name}",
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
                raise UserError(problem, option=field, value=ttl_steps, remedy="give at least 1")


SCHEDULES: PluginRegistry[ScheduleSpec] = PluginRegistry(
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


ScheduleName = Annotated[str, OneOf(SCHEDULES)]
"""Ours, and those of other packages."""


@config
class PipelineConfig:
    schedule: ScheduleName = "serial"
    """serial, dual_buffer (lookup hidden), frozen_window (exchanges hidden), nested (both), priority (lookup, and the
    exchanges of rows that the next batch does not use); semi_async (all hidden, rows in two consecutive batches one
    step late) and stale are not exact. Other packages add theirs"""
    window_cache: bool = False
    """a row that several micro-batches of a rank use crosses the network once; costs the memory of a batch's vectors
    and gradients"""
    clustering: Clustering | None = None
    """which samples of a rank form a micro-batch; none leaves it to balance, which knows costs and no keys. `refined`
    saves most traffic; `edges` is for the window cache"""
    replay: tuple[MicroBatchChange, ...] = ()
    """changes of batch.micro_batches=auto that another run has logged, taken instead of measuring"""
    stale_steps: Count = 1
    """`stale` only: how many updates the rows of a batch may miss"""

    def __post_init__(self) -> None:
        if self.stale_steps != 1:
            self.spec.check_options(self, {"stale_steps": 1})

    @property
    def spec(self) -> ScheduleSpec:
        """The schedule of this name."""
        return SCHEDULES.find(self.schedule, field="pipeline.schedule")
