"""Schedules arrange the stages of training in time; `TrainingPipeline` joins them with a model and its tables."""

from nestrec.pipeline.options import PipelineConfig
from nestrec.pipeline.schedule_spec import SCHEDULES, ScheduleSpec
from nestrec.pipeline.stages import Compute, Coupling, Dense, Feed, Rates, Schedule, Step, Totals
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
