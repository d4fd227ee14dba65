"""Registry of tasks: the built-in ones, and plugins registered as entry points of the group `nestrec.tasks`.

Tasks and losses of plugins are validated: the task must have the documented attributes, and the loss must be a scalar
sum over samples, which is checked before training starts.
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
from nestrec.tasks.table_overrides import TableOverrides, resolve_tables
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
"""Type of a task config field: the config of any registered task."""


def task_spec(cfg: TaskConfigBase) -> TaskSpec:
    """Return the spec of the task that a config belongs to."""
    return TASKS.find(cfg.kind, field="task.kind")


def make_task(
    cfg: TaskConfigBase,
    dataset: Dataset,
    *,
    seed: int,
    dtype: Literal["float32", "float64"],
    tables: Mapping[str, TableOverrides] = MappingProxyType({}),
) -> Task:
    """Build a task for a dataset and initialize the weights of its model.

    Args:
        cfg: Config of the task.
        dataset: Prepared dataset.
        seed: Seed of the initial embeddings, negatives and dropout.
        dtype: Data type of the weights.
        tables: Overrides of the embedding tables by name.

    Raises:
        UserError: If the dataset does not fit the task, or the plugin does not return a valid task.
    """
    make = task_spec(cfg).make
    if missing := getattr(make, "__abstractmethods__", None):
        problem = f"its task {make!r} does not implement {' and '.join(sorted(missing))}"
        raise TASKS.missing_field_error(cfg.kind, "make", problem)
    task = make(cfg, dataset, seed=seed, dtype=dtype)
    _check_made(cfg.kind, task)
    task.set_tables(resolve_tables(task.tables, tables, task.bags))
    return task


_PARTS: Mapping[str, type] = {"model": nn.Module, "tables": tuple, "collator": Collator, "remedy_if_empty": str}
"""Required attributes of a task and their types."""


def _check_made(kind: str, task: Any) -> None:
    if not isinstance(task, Task):
        raise TASKS.contract_error(kind, "make", f"returns {task!r}, which is not a {Task.__module__}.Task")
    for name, of in _PARTS.items():
        if not isinstance(value := getattr(task, name, None), of):
            problem = f"returns a task whose `{name}` is {value!r}, but it must be a {of.__name__}"
            raise TASKS.contract_error(kind, "make", problem)
    for table in task.tables:
        if not isinstance(table, TableConfig):
            raise TASKS.contract_error(kind, "make", f"returns a task with {table!r} in `tables`, not a TableConfig")
    for name in ("tokens", "weights"):
        if not isinstance(value := getattr(task.collator, name, None), np.ndarray) or value.ndim != 1:
            problem = f"returns a task whose collator has {value!r} as `{name}`, but it must be a 1-D array"
            raise TASKS.contract_error(kind, "make", problem)
    if len(task.collator.tokens) != len(task.collator.weights):
        counts = f"{len(task.collator.tokens)} tokens and {len(task.collator.weights)} weights"
        raise TASKS.contract_error(
            kind, "make", f"returns a task whose collator has {counts}: both need one per sample"
        )


def store_option(cfg: TaskConfigBase) -> str | None:
    """Return the option that sets the storage tier of the task's largest table; `tables.NAME.store` overrides it."""
    field = task_spec(cfg).store_field
    return None if field is None else f"task.{field}.kind"


_SAMPLES = 4
_CLOSE = 1e-4


def check_loss(kind: str, loss: Any) -> torch.Tensor:
    """Return the loss of a task if it is a scalar with a gradient, or raise a UserError."""
    if not isinstance(loss, torch.Tensor):
        problem = f"returns {type(loss).__name__}, but it must be a tensor"
    elif loss.dim() > 0 or not loss.is_floating_point():
        problem = f"returns {loss.dtype} of shape {tuple(loss.shape)}, but it must be a scalar, the sum of the losses"
    elif not loss.requires_grad:
        problem = "returns a scalar without a gradient: it does not depend on a weight or an embedding row"
    else:
        return loss
    raise TASKS.contract_error(kind, "loss", problem)


def check_loss_is_additive(kind: str, task: Task, engine: EmbeddingEngine) -> None:
    """Raise a UserError if the loss of a plugin's task is the mean over samples instead of the sum.

    The trainer divides by the weight of the global batch, so a mean would make updates smaller for larger batches.
    Collective; leaves the state of the run unchanged.
    """
    samples = np.flatnonzero(task.collator.tokens > 0)[:_SAMPLES].astype(np.int64)
    if kind in TASKS.built_in_names or len(samples) < 2:
        return
    modes = {module: module.training for module in task.model.modules()}
    with torch.random.fork_rng(devices=[]):
        task.model.eval()
        joint, *each = [_loss_of(kind, task, engine, some) for some in (samples, *samples[:, None])]
    for module, mode in modes.items():
        module.training = mode
    total = sum(each)
    if _is_close(joint, total):
        return
    for weights in (np.ones(len(samples)), task.collator.tokens[samples], task.collator.weights[samples]):
        if weights.any() and _is_close(joint, float(np.average(each, weights=weights))):
            problem = (
                f"returns {joint:g} for {len(samples)} samples, the mean of their losses, but it must return the sum"
            )
            raise TASKS.contract_error(
                kind, "loss", f"{problem}, {total:g}, which the trainer divides by the weight of the batch"
            )


def _loss_of(kind: str, task: Task, engine: EmbeddingEngine, samples: NDArray[np.int64]) -> float:
    batch: MicroBatch = task.collator.collate(samples, task.collator.read(samples), 0)
    rows, index = {}, {}
    for table in task.tables:
        keys = {name: np.asarray(batch.keys[name]) for name in table.feature_names}
        unique, inverse = np.unique(np.concatenate([k.reshape(-1) for k in keys.values()]), return_inverse=True)
        first = table.feature_names[0]
        rows[table.name] = engine.lookup_readonly({first: unique})[first].requires_grad_()
        starts = np.cumsum([0, *(k.size for k in keys.values())])
        for (name, k), start in zip(keys.items(), starts, strict=False):
            part = inverse.reshape(-1)[start : start + k.size].reshape(k.shape)
            index[name] = torch.from_numpy(part).to(engine.device)
    return float(check_loss(kind, task.loss(on_device(batch, engine.device), rows, index)).detach())


def _is_close(value: float, expected: float) -> bool:
    return abs(value - expected) <= _CLOSE * abs(expected)
