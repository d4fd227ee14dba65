"""nestrec trains and serves large sequence (generative) recommenders, from a laptop CPU to a cluster.

    run = nestrec.train("demo", {"training.epochs": 2})
    nestrec.load(run).recommend({"items": ["12", "7"], "times_ms": [1642271351894, 1642271387634]}, k=5)

The public names below are imported lazily, at their first use, so that `import nestrec` alone does not load torch.
"""

from typing import TYPE_CHECKING

from nestrec.base.lazy import lazy_exports

if TYPE_CHECKING:
    from nestrec.api import Run as Run
    from nestrec.api import evaluate as evaluate
    from nestrec.api import export as export
    from nestrec.api import follow as follow
    from nestrec.api import publish as publish
    from nestrec.api import train as train
    from nestrec.base.config import config as config
    from nestrec.base.errors import UserError as UserError
    from nestrec.checkpoint.pipeline_checkpointer import PipelineCheckpoints as PipelineCheckpoints
    from nestrec.data.formats.format_registry import prepare as prepare
    from nestrec.data.incremental.append import append as append
    from nestrec.distributed.context_ring import ContextRing as ContextRing
    from nestrec.embedding.row_optimizer import RowOptimizerSpec as RowOptimizerSpec
    from nestrec.embedding.table_config import Table as Table
    from nestrec.inference.recommender import Recommender as Recommender
    from nestrec.inference.recommender import ScoredItems as ScoredItems
    from nestrec.inference.recommender import load as load
    from nestrec.jagged import Jagged as Jagged
    from nestrec.models.backbone_spec import BackboneSpec as BackboneSpec
    from nestrec.models.backbone_spec import ForwardFlops as ForwardFlops
    from nestrec.models.sequence import CachedForward as CachedForward
    from nestrec.models.sequence import SequenceInfo as SequenceInfo
    from nestrec.ops.context_parallel.ring_sum import ContextParallelGroup as ContextParallelGroup
    from nestrec.ops.context_parallel.token_partition import TokenPartition as TokenPartition
    from nestrec.ops.embedding.row_gather import pool_rows as pool_rows
    from nestrec.pipeline.schedule_spec import ScheduleSpec as ScheduleSpec
    from nestrec.pipeline.training_pipeline import TrainingPipeline as TrainingPipeline
    from nestrec.tasks.task import Evaluation as Evaluation
    from nestrec.tasks.task import Task as Task
    from nestrec.tasks.task import TaskSpec as TaskSpec
    from nestrec.training.run_config import RunConfig as RunConfig

__version__ = "0.1.0"

_EXPORTS = {
    "BackboneSpec": "nestrec.models.backbone_spec:BackboneSpec",
    "CachedForward": "nestrec.models.sequence:CachedForward",
    "ContextParallelGroup": "nestrec.ops.context_parallel.ring_sum:ContextParallelGroup",
    "ContextRing": "nestrec.distributed.context_ring:ContextRing",
    "Evaluation": "nestrec.tasks.task:Evaluation",
    "ForwardFlops": "nestrec.models.backbone_spec:ForwardFlops",
    "Jagged": "nestrec.jagged:Jagged",
    "PipelineCheckpoints": "nestrec.checkpoint.pipeline_checkpointer:PipelineCheckpoints",
    "ScoredItems": "nestrec.inference.recommender:ScoredItems",
    "Recommender": "nestrec.inference.recommender:Recommender",
    "RowOptimizerSpec": "nestrec.embedding.row_optimizer:RowOptimizerSpec",
    "Run": "nestrec.api:Run",
    "RunConfig": "nestrec.training.run_config:RunConfig",
    "ScheduleSpec": "nestrec.pipeline.schedule_spec:ScheduleSpec",
    "SequenceInfo": "nestrec.models.sequence:SequenceInfo",
    "Table": "nestrec.embedding.table_config:Table",
    "Task": "nestrec.tasks.task:Task",
    "TaskSpec": "nestrec.tasks.task:TaskSpec",
    "TokenPartition": "nestrec.ops.context_parallel.token_partition:TokenPartition",
    "TrainingPipeline": "nestrec.pipeline.training_pipeline:TrainingPipeline",
    "UserError": "nestrec.base.errors:UserError",
    "append": "nestrec.data.incremental.append:append",
    "config": "nestrec.base.config:config",
    "evaluate": "nestrec.api:evaluate",
    "export": "nestrec.api:export",
    "follow": "nestrec.api:follow",
    "load": "nestrec.inference.recommender:load",
    "pool_rows": "nestrec.ops.embedding.row_gather:pool_rows",
    "prepare": "nestrec.data.formats.format_registry:prepare",
    "publish": "nestrec.api:publish",
    "train": "nestrec.api:train",
}
"""Maps each public name to `module:attribute`."""

__all__ = [*_EXPORTS]  # noqa: PLE0604
__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
