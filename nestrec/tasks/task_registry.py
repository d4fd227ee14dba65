"""The tasks by name: ours, and those that other packages bring as entry points of `nestrec.tasks`.

Losses of tasks: what one gave, and, of tasks of other packages, whether it is a sum before anything is trained.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nestrec.base.config_values import PluginConfig
from nestrec.base.plugins import PluginRegistry
from nestrec.data.batch_loader import Collator, MicroBatch
from nestrec.data.dataset import Dataset
from nestrec.embedding import EmbeddingEngine, TableConfig
from nestrec.pipeline.exchange_window import on_device
from nestrec.tasks.table_overrides import TableOverrides, chosen_tables
from nestrec.tasks.task import Task, TaskConfigBase, TaskSpec

TASKS: PluginRegistry[TaskSpec] = PluginRegistry(
    "nestrec.tasks",
    "task",
    {
        "retrieval": "nestrec.tasks.retrieval_task:TASK",
        "ranking": "nestrec.tasks.ranking_task:TASK",
        "rows": "nestrec.tasks.ctr_task:TASK",
    },
    of=TaskSpec,
)

TaskConfig = Annotated[TaskConfigBase, PluginConfig(TASKS)]
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
    tables: Mapping[str, TableOverrides] = MappingProxyType({}),
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


_PARTS: Mapping[str, type] = {"model": nn.Module, "tables": tuple, "assembler": Collator, "remedy_if_empty": str}
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


_SAMPLES = 4
_CLOSE = 1e-4


def check_loss(kind: str, loss: Any) -> torch.Tensor:
    """What the loss of a task gave, where a gradient can be taken of it; a UserError where it cannot."""
    if not isinstance(loss, torch.Tensor):
        problem = f"gives {type(loss).__name__} and no tensor"
    elif loss.dim() > 0 or not loss.is_floating_point():
        problem = f"gives {loss.dtype} of {tuple(loss.shape)} and not one number, the sum of its losses"
    elif not loss.requires_grad:
        problem = "gives a number without a gradient: it depends on no weight and no row of a table"
    else:
        return loss
    raise TASKS.broken(kind, "loss", problem)


def check_loss_is_sum(kind: str, task: Task, engine: EmbeddingEngine) -> None:
    """Raise a UserError where the loss of some samples is the mean of their losses: steps would be the smaller the
    larger their batches are. Of tasks of other packages. Collective; changes nothing."""
    samples = np.flatnonzero(task.assembler.tokens > 0)[:_SAMPLES].astype(np.int64)
    if kind in TASKS.own or len(samples) < 2:
        return
    modes = {module: module.training for module in task.model.modules()}
    with torch.random.fork_rng(devices=[]):
        task.model.eval()
        together, *each = [_loss_of(kind, task, engine, some) for some in (samples, *samples[:, None])]
    for module, mode in modes.items():
        module.training = mode
    total = sum(each)
    if _is_close(together, total):
        return
    for weights in (np.ones(len(samples)), task.assembler.tokens[samples], task.assembler.weights[samples]):
        if weights.any() and _is_close(together, float(np.average(each, weights=weights))):
            problem = (
                f"gives {together:g} of {len(samples)} samples, the mean of what it gives of each, and not the sum"
            )
            raise TASKS.broken(kind, "loss", f"{problem}, {total:g}, that is to be divided by the weight of the batch")


def _loss_of(kind: str, task: Task, engine: EmbeddingEngine, samples: NDArray[np.int64]) -> float:
    batch: MicroBatch = task.assembler.assemble(samples, task.assembler.read(samples), 0)
    rows, index = {}, {}
    for table in task.tables:
        keys = {name: np.asarray(batch.keys[name]) for name in table.feature_names}
        unique, places = np.unique(np.concatenate([k.reshape(-1) for k in keys.values()]), return_inverse=True)
        first = table.feature_names[0]
        rows[table.name] = engine.lookup_readonly({first: unique})[first].requires_grad_()
        starts = np.cumsum([0, *(k.size for k in keys.values())])
        for (name, k), start in zip(keys.items(), starts, strict=False):
            part = places.reshape(-1)[start : start + k.size].reshape(k.shape)
            index[name] = torch.from_numpy(part).to(engine.device)
    return float(check_loss(kind, task.loss(on_device(batch, engine.device), rows, index)).detach())


def _is_close(found: float, expected: float) -> bool:
    return abs(found - expected) <= _CLOSE * abs(expected)
