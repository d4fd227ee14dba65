"""What a script gives a `TrainingPipeline`, checked before anything is built of it."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from nestrec.base.cuda import known_device
from nestrec.base.errors import UserError, did_you_mean, require
from nestrec.embedding import TableConfig
from nestrec.embedding.table_config import Table
from nestrec.pipeline.dense.dense_optimizer import OptimizerConfig
from nestrec.pipeline.exchange_window import Coupling, Precision

MOST_EMPTY = 32
"""Micro-batches that a batch may have whatever its size: as many as `auto` takes in training."""


def check_choices(*, device: str, precision: str, couples_samples: str) -> None:
    """Names are among those that mean something."""
    known_device(device)
    given = {
        "precision": (precision, get_args(Precision)),
        "couples_samples": (couples_samples, get_args(Coupling)),
    }
    for name, (value, known) in given.items():
        if value not in known:
            raise UserError(
                "is not one of the choices", option=name, value=value, remedy=did_you_mean(str(value), known)
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)


def check_micro_batches(count: Any) -> None:
    """A whole number of parts."""
    require(_is_count(count), "must be a whole number from 1", option="micro_batches", value=count, remedy="such as 4")


def check_cut(count: int, num_samples: int, of: str = "the first batch", *, field: str = "micro_batches") -> None:
    """Raise a UserError if most of the `count` micro-batches of a batch would be empty.

    num_samples: samples of the batch over all ranks; a batch without samples is accepted. of: the batch as the message
    calls it. field: the option as the message calls it.
    """
    if count > MOST_EMPTY and 0 < num_samples < count:
        raise UserError(
            f"is more than the samples of {of}, of which there are {num_samples:,}",
            option=field,
            value=count,
            remedy="give less (4 or 8 will mostly do), or larger batches",
        )


def check_fence(every: Any) -> None:
    """A whole number of steps, or none."""
    if every is not None and not _is_count(every):
        remedy = "give a number of steps, or leave it out: the tables are whole after the last batch"
        raise UserError("must be a whole number from 1", option="fence_every", value=every, remedy=remedy)


def check_batches(batches: Any) -> None:
    """Several, not the fields of one."""
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        remedy = "give an iterable of batches, or call step with one"
        raise UserError("is no series of batches", option="batches", value=type(batches).__name__, remedy=remedy)


def check_model(model: Any) -> None:
    """Raise a UserError unless this is a module whose weights have values."""
    if not isinstance(model, nn.Module):
        remedy = "give an instance of an nn.Module; forward(vectors, batch) returns the sum of the losses and a weight"
        raise UserError("is no module", option="model", value=model, remedy=remedy)
    for name, weight in model.named_parameters():
        if isinstance(weight, nn.UninitializedParameter) or weight.is_meta:
            remedy = "call a lazy module once with a sample, or load the weights, before TrainingPipeline is made"
            raise UserError("has no values yet", option="weight of the model", value=name, remedy=remedy)


def check_parts(**given: tuple[Any, type]) -> None:
    """Objects that are taken as they are. given: what was given, if anything, and the class that it must be of."""
    for name, (value, kind) in given.items():
        if value is not None and not isinstance(value, kind):
            remedy = f"give a {kind.__module__}.{kind.__qualname__}, or leave it out"
            raise UserError(f"is no {kind.__qualname__}", option=name, value=value, remedy=remedy)


def check_weight(weight: Any) -> None:
    """A function, or none."""
    if weight is not None and not callable(weight):
        remedy = "give a function of a batch, such as lambda batch: len(batch['items'])"
        raise UserError("is no function of a batch", option="weight", value=weight, remedy=remedy)


def checked_rate(rate: Any) -> float | None:
    """The learning rate of the tables as a number, or none."""
    if rate is None:
        return None
    is_number = isinstance(rate, int | float | np.number) and not isinstance(rate, bool)
    if not is_number or not (math.isfinite(rate) and rate >= 0):
        remedy = "such as 0.05; or leave it out, and tables take the rate of the dense optimiser"
        raise UserError("must be a number from 0", option="table_learning_rate", value=rate, remedy=remedy)
    return float(rate)


def configs_of(tables: Any) -> list[TableConfig]:
    """The tables in full."""
    remedy = 'give a list, such as [nestrec.Table("items", rows=1_000_000, dim=64)]'
    if not isinstance(tables, Iterable) or not (tables := list(tables)):
        raise UserError("must be a list of tables", option="tables", value=tables, remedy=remedy)
    for table in tables:
        require(isinstance(table, Table | TableConfig), "is no table", option="tables", value=table, remedy=remedy)
    return [table.config if isinstance(table, Table) else table for table in tables]


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """What updates the model's weights can do so, and holds no others: they would differ between ranks."""
    if optimizer is not None and not isinstance(optimizer, OptimizerConfig | torch.optim.Optimizer):
        remedy = (
            "give an optimiser over the model's weights, such as torch.optim.Adam(model.parameters()); a learning rate "
            "schedule of torch's is stepped in the loop"
        )
        raise UserError("is no optimiser", option="dense_optimizer", value=optimizer, remedy=remedy)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    if isinstance(optimizer, torch.optim.LBFGS):
        remedy = "take one that makes a step of gradients alone, such as torch.optim.Adam"
        raise UserError("computes the loss several times a step", option="dense_optimizer", value="LBFGS", remedy=remedy)
    own = {id(weight) for weight in model.parameters()}
    foreign = [w for group in optimizer.param_groups for w in group["params"] if id(w) not in own]
    if foreign:
        raise UserError(
            f"holds {len(foreign)} weights that are not the model's, and which nothing sums over ranks",
            option="dense_optimizer",
            value=type(optimizer).__name__,
            remedy="make it over the weights of the model that is given: torch.optim.Adam(model.parameters())",
        )
