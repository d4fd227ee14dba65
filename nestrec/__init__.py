"""nestrec trains and serves large sequence (generative) recommenders, from a laptop CPU to a cluster.

    run = nestrec.train("demo", {"training.epochs": 2})
    nestrec.load(run).recommend({"items": ["12", "7"], "times_ms": [1642271351894, 1642271387634]}, k=5)

The public names below are imported when they are first asked for: `import nestrec` alone loads nothing heavy.
"""

from typing import TYPE_CHECKING

from nestrec.base.lazy import lazy_exports

if TYPE_CHECKING:
    from nestrec.base.config import config as config
    from nestrec.base.errors import UserError as UserError
    from nestrec.data.growth.append import append as append
    from nestrec.data.prepare.preparation import prepare as prepare
    from nestrec.distributed.context_ring import ContextRing as ContextRing
    from nestrec.embedding.row_optimizer import RowOptimizer as RowOptimizer
    from nestrec.embedding.table import Table as Table
    from nestrec.jagged import Jagged as Jagged
    from nestrec.library.exports import export as export
    from nestrec.library.exports import publish as publish
    from nestrec.library.loaded import Ranking as Ranking
    from nestrec.library.loaded import Recommender as Recommender
    from nestrec.library.loaded import load as load
    from nestrec.library.pipeline_checkpoints import PipelineCheckpoints as PipelineCheckpoints
    from nestrec.library.runs import Run as Run
    from nestrec.library.runs import evaluate as evaluate
    from nestrec.library.runs import follow as follow
    from nestrec.library.runs import train as train
    from nestrec.models.backbone import Backbone as Backbone
    from nestrec.models.backbone import ForwardFlops as ForwardFlops
    from nestrec.models.segments import CachedForward as CachedForward
    from nestrec.models.sequence import SequenceInfo as SequenceInfo
    from nestrec.ops.context.parts import TokenParts as TokenParts
    from nestrec.ops.context.ring_sum import Context as Context
    from nestrec.ops.rows.pool import pool_rows as pool_rows
    from nestrec.pipeline.schedule_spec import ScheduleSpec as ScheduleSpec
    from nestrec.pipeline.training_pipeline import TrainingPipeline as TrainingPipeline
    from nestrec.tasks.spec import TaskSpec as TaskSpec
    from nestrec.tasks.task import Evaluation as Evaluation
    from nestrec.tasks.task import Task as Task
    from nestrec.training.config import RunConfig as RunConfig

__version__ = "0.1.0"

_EXPORTS = {
    "Backbone": "nestrec.models.backbone:Backbone",
    "CachedForward": "nestrec.models.segments:CachedForward",
    "Context": "nestrec.ops.context.ring_sum:Context",
    "ContextRing": "nestrec.distributed.context_ring:ContextRing",
    "Evaluation": "nestrec.tasks.task:Evaluation",
    "ForwardFlops": "nestrec.models.backbone:ForwardFlops",
    "Jagged": "nestrec.jagged:Jagged",
    "PipelineCheckpoints": "nestrec.library.pipeline_checkpoints:PipelineCheckpoints",
    "Ranking": "nestrec.library.loaded:Ranking",
    "Recommender": "nestrec.library.loaded:Recommender",
    "RowOptimizer": "nestrec.embedding.row_optimizer:RowOptimizer",
    "Run": "nestrec.library.runs:Run",
    "RunConfig": "nestrec.training.config:RunConfig",
    "ScheduleSpec": "nestrec.pipeline.schedule_spec:ScheduleSpec",
    "SequenceInfo": "nestrec.models.sequence:SequenceInfo",
    "Table": "nestrec.embedding.table:Table",
    "Task": "nestrec.tasks.task:Task",
    "TaskSpec": "nestrec.tasks.spec:TaskSpec",
    "TokenParts": "nestrec.ops.context.parts:TokenParts",
    "TrainingPipeline": "nestrec.pipeline.training_pipeline:TrainingPipeline",
    "UserError": "nestrec.base.errors:UserError",
    "append": "nestrec.data.growth.append:append",
    "config": "nestrec.base.config:config",
    "evaluate": "nestrec.library.runs:evaluate",
    "export": "nestrec.library.exports:export",
    "follow": "nestrec.library.runs:follow",
    "load": "nestrec.library.loaded:load",
    "pool_rows": "nestrec.ops.rows.pool:pool_rows",
    "prepare": "nestrec.data.prepare.preparation:prepare",
    "publish": "nestrec.library.exports:publish",
    "train": "nestrec.library.runs:train",
}
"""Public name to `module:attribute`."""

__all__ = [*_EXPORTS]  # noqa: PLE0604
__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
