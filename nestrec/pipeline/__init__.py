"""Schedules arrange the stages of training in time; `TrainingPipeline` joins them with a model and its tables."""

from nestrec.pipeline.exchange_window import Coupling
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
    "Rates",
    "Schedule",
    "ScheduleSpec",
    "Step",
    "Totals",
    "TrainingPipeline",
]
