"""nestrec trains and serves large sequence (generative) recommenders, from a laptop CPU to a cluster.

The public names below are imported when they are first asked for: `import nestrec` alone loads nothing heavy.
"""

from typing import TYPE_CHECKING

from nestrec.base.lazy import lazy_exports

if TYPE_CHECKING:
    from nestrec.embedding.row_optimizer import RowOptimizer as RowOptimizer
    from nestrec.embedding.table import Table as Table
    from nestrec.jagged import Jagged as Jagged
    from nestrec.pipeline.schedule_spec import ScheduleSpec as ScheduleSpec
    from nestrec.pipeline.training_pipeline import TrainingPipeline as TrainingPipeline

__version__ = "0.1.0"

_EXPORTS = {
    "Jagged": "nestrec.jagged:Jagged",
    "RowOptimizer": "nestrec.embedding.row_optimizer:RowOptimizer",
    "ScheduleSpec": "nestrec.pipeline.schedule_spec:ScheduleSpec",
    "Table": "nestrec.embedding.table:Table",
    "TrainingPipeline": "nestrec.pipeline.training_pipeline:TrainingPipeline",
}
"""Public name to `module:attribute`."""

__all__ = [*_EXPORTS]  # noqa: PLE0604
__getattr__ = lazy_exports(__name__, _EXPORTS)
