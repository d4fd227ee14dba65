"""Losses of tasks: what one gave, and, of tasks of other packages, whether it is a sum before anything is trained."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.data.batches import MicroBatch
from nestrec.embedding import EmbeddingEngine
from nestrec.pipeline.compute import on_device
from nestrec.tasks.built_in import TASKS
from nestrec.tasks.task import Task

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
