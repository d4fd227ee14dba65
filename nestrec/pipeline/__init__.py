"""Schedules arrange the stages of training in time; `PipelineCore` joins one with the parts that it drives, and
`TrainingPipeline` with the module and tables of a user."""

from nestrec.pipeline.exchange_window import Coupling
from nestrec.pipeline.pipeline_core import PipelineCore
from nestrec.pipeline.schedule_spec import SCHEDULES, PipelineConfig, ScheduleSpec
from nestrec.pipeline.schedule_types import (
    DenseSide,
    LearningRates,
    LookaheadIterator,
    ModelCompute,
    Schedule,
    StepTotals,
    TrainingStep,
)
from nestrec.pipeline.training_pipeline import TrainingPipeline

__all__ = [
    "SCHEDULES",
    "Coupling",
    "DenseSide",
    "LearningRates",
    "LookaheadIterator",
    "ModelCompute",
    "PipelineConfig",
    "PipelineCore",
    "Schedule",
    "ScheduleSpec",
    "StepTotals",
    "TrainingPipeline",
    "TrainingStep",
]
