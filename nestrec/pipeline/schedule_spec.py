"""Specs, registry and options of pipeline schedules (a plugin extension point, entry points `nestrec.schedules`)."""

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

MAX_BATCHES_AHEAD = 8
"""Upper bound of the number of batches that a schedule takes ahead of their step, in addition to prefetched ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSpec:
    """The spec of a pipeline schedule: a plugin of the entry-point group `nestrec.schedules`.

    A schedule decides when the stages of a step run (key exchange, lookup, embedding exchange, computation, update),
    and which of them overlap.

    Example:
        >>> MY_SCHEDULE = ScheduleSpec(
        ...     name="my_schedule",
        ...     build=MySchedule,  # a subclass of PipelinedSchedule with a method advance(step, feed)
        ...     is_exact=True,
        ...     splits=False,
        ... )
        >>> pipeline = nestrec.TrainingPipeline(model, tables, spec=MY_SCHEDULE)
    """

    name: str
    """Name of the schedule, as used for `pipeline.schedule`."""
    build: Build
    """Function from (engine, compute, dense, tracer, options) to a new schedule."""
    is_exact: bool
    """Whether results are bitwise identical to those of `serial`, for the same micro-batches and window cache."""
    splits: bool
    """Whether the schedule needs several micro-batches; with a single one it behaves like another schedule."""
    rows_outlive_step: bool = False
    """Whether table rows must stay for more than one step after their last use, because two batches are in flight."""
    window_ms: WindowTime | None = None
    """Model of the duration of a step's exchanges and computations in milliseconds
    (`nestrec.pipeline.window_cost_model`). None: `batch.num_micro_batches=auto` is not available."""
    options: tuple[str, ...] = ()
    """Fields of `PipelineConfig` that only this schedule uses."""

    def check_options(self, options: Any, own: dict[str, Any]) -> None:
        """Raise a UserError if an option is set that this schedule does not use.

        Args:
            options: Options of the pipeline.
            own: Default values of the fields that only some schedules use.
        """
        for name, default in own.items():
            if name not in self.options and getattr(options, name) != default:
                raise UserError(
                    f"the schedule {self.name} does not use this option",
                    option=f"pipeline.{name}",
                    value=getattr(options, name),
                    remedy=f"keep the default {default}, or use another --pipeline.schedule",
                )

    def check_tables(self, engine: "EmbeddingEngine") -> None:
        """Raise a UserError if this schedule cannot train a table."""
        for name, table in engine.tables.items():
            ttl_steps = table.store.ttl_steps
            if self.rows_outlive_step and ttl_steps is not None and ttl_steps < 1:
                problem = f"the schedule {self.name} requires that rows outlive the next step"
                field = f"tables.{name}.store.ttl_steps"
                raise UserError(problem, option=field, value=ttl_steps, remedy="use at least 1")


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
"""Name of a built-in schedule or of a plugin."""


@config
class PipelineConfig:
    """Options of the training pipeline: schedule, window cache and clustering."""

    schedule: ScheduleName = "serial"
    """Pipeline schedule. Exact ones: serial; dual_buffer (hides the lookup); frozen_window (hides the exchanges);
    nested (hides both); priority (hides the lookup, and the exchanges of rows that the next batch does not use). Not
    exact: semi_async (hides both; rows that two consecutive batches use are one step stale) and stale. Packages can add
    schedules."""
    window_cache: bool = False
    """Whether a row that several micro-batches of a rank use is exchanged once per batch. It takes memory for the
    embeddings and gradients of a batch."""
    clustering: Clustering | None = None
    """Key-centric clustering: which samples of a rank form a micro-batch. `refined` saves most traffic; `edges` is for
    the window cache. None: sample balancing decides, by cost and not by keys."""
    replay_changes: tuple[MicroBatchChange, ...] = ()
    """Logged changes of another run with `batch.num_micro_batches=auto`, to apply instead of measuring."""
    stale_steps: Count = 1
    """Number of updates that the rows of a batch miss (staleness); for `schedule=stale` only."""

    def __post_init__(self) -> None:
        if self.stale_steps != 1:
            self.spec.check_options(self, {"stale_steps": 1})

    @property
    def spec(self) -> ScheduleSpec:
        """Spec of the schedule."""
        return SCHEDULES.find(self.schedule, field="pipeline.schedule")
