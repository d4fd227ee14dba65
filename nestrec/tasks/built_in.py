"""The tasks by name: ours, and those that other packages bring as entry points of `nestrec.tasks`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from nestrec.base.kinds import KindOf
from nestrec.base.seam import Seam
from nestrec.data.dataset import Dataset
from nestrec.tasks.spec import TaskConfigBase, TaskSpec
from nestrec.tasks.table_options import TableOptions, chosen_tables
from nestrec.tasks.task import Task

TASKS: Seam[TaskSpec] = Seam(
    "nestrec.tasks",
    "task",
    {
        "retrieval": "nestrec.tasks.retrieval:TASK",
        "ranking": "nestrec.tasks.ranking:TASK",
        "rows": "nestrec.tasks.rows:TASK",
    },
    of=TaskSpec,
)

TaskConfig = Annotated[TaskConfigBase, KindOf(TASKS)]
"""The config of some task."""


def task_spec(cfg: TaskConfigBase) -> TaskSpec:
    """What the task of a config says of itself."""
    return TASKS.find(cfg.kind, field="task.kind")


def make_task(
    cfg: TaskConfigBase,
    dataset: Dataset,
    *,
    seed: int,
    dtype: Literal["float32", "float64"],
    tables: Mapping[str, TableOptions] = MappingProxyType({}),
) -> Task:
    """A task on a dataset; draws the initial weights of its model. tables: what a run says of them, by name."""
    task = task_spec(cfg).make(cfg, dataset, seed=seed, dtype=dtype)
    task.take(chosen_tables(task.tables, tables, task.bags))
    return task


def store_option(cfg: TaskConfigBase) -> str | None:
    """The option of the task that says where rows of its largest table are kept, beside `tables.NAME.store`."""
    field = task_spec(cfg).store_field
    return None if field is None else f"task.{field}.kind"
