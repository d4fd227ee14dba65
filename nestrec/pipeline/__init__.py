"""Training pipeline: schedules that overlap lookup, communication and computation of training steps.

`PipelineCore` combines a schedule with the components that it runs. `TrainingPipeline` is the public entry point for a
module and tables of your own.
"""

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
