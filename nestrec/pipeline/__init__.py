"""Schedules arrange the stages of training in time; `PipelineCore` joins one with the parts that it drives, and
`TrainingPipeline` with the module and tables of a user."""

from nestrec.pipeline.exchange_window import Coupling
from nestrec.pipeline.pipeline_core import PipelineCore
from nestrec.pipeline.schedule_spec import SCHEDULES, PipelineConfig, ScheduleSpec
from nestrec.pipeline.schedule_types import Compute, Dense, Feed, Rates, Schedule, Step, Totals
from nestrec.pipeline.training_pipeline import TrainingPipeline

__all__ = [
    "SCHEDULES",
    "Compute",
    "Coupling",
    "Dense",
    "Feed",
    "PipelineConfig",
    "PipelineCore",
    "Rates",
    "Schedule",
    "ScheduleSpec",
    "Step",
    "Totals",
    "TrainingPipeline",
]
