"""The tasks by name: ours, and those that other packages bring as entry points of `nestrec.tasks`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from torch import nn

from nestrec.base.kinds import KindOf
from nestrec.base.seam import Seam
from nestrec.data.batches import Assembler
from nestrec.data.dataset import Dataset
from nestrec.embedding import TableConfig
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
    make = task_spec(cfg).make
    if missing := getattr(make, "__abstractmethods__", None):
        problem = f"its task {make!r} has no {' and no '.join(sorted(missing))}"
        raise TASKS.unanswered(cfg.kind, "make", problem)
    task = make(cfg, dataset, seed=seed, dtype=dtype)
    _check_made(cfg.kind, task)
    task.take(chosen_tables(task.tables, tables, task.bags))
    return task


_PARTS: Mapping[str, type] = {"model": nn.Module, "tables": tuple, "assembler": Assembler, "remedy_if_empty": str}
"""What every task has, whoever made it."""


def _check_made(kind: str, task: Any) -> None:
    if not isinstance(task, Task):
        raise TASKS.broken(kind, "make", f"gives {task!r} and no {Task.__module__}.Task")
    for name, of in _PARTS.items():
        if not isinstance(value := getattr(task, name, None), of):
            problem = f"gives a task with {value!r} as `{name}`, where a {of.__name__} is asked for"
            raise TASKS.broken(kind, "make", problem)
    for table in task.tables:
        if not isinstance(table, TableConfig):
            raise TASKS.broken(kind, "make", f"gives a task with {table!r} in `tables`, which is no TableConfig")
    for name in ("tokens", "weights"):
        if not isinstance(value := getattr(task.assembler, name, None), np.ndarray) or value.ndim != 1:
            problem = f"gives a task whose assembler has {value!r} as `{name}`, where an array is asked for"
            raise TASKS.broken(kind, "make", problem)
    if len(task.assembler.tokens) != len(task.assembler.weights):
        counts = f"{len(task.assembler.tokens)} tokens and {len(task.assembler.weights)} weights"
        raise TASKS.broken(kind, "make", f"gives a task whose assembler has {counts}: each sample has one of both")


def store_option(cfg: TaskConfigBase) -> str | None:
    """The option of the task that says where rows of its largest table are kept, beside `tables.NAME.store`."""
    field = task_spec(cfg).store_field
    return None if field is None else f"task.{field}.kind"
