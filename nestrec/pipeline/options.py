"""How the stages of steps share the time."""

from typing import Annotated

from nestrec.base.bounds import Count, OneOf
from nestrec.base.config import config
from nestrec.pipeline.clustering import Clustering
from nestrec.pipeline.schedule_spec import SCHEDULES, ScheduleSpec
from nestrec.pipeline.window_changes import WindowChange

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
    replay: tuple[WindowChange, ...] = ()
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
