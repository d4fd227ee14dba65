"""Validation of the arguments of `TrainingPipeline`, before anything is built."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from nestrec.base.cuda import parse_device
from nestrec.base.errors import UserError, did_you_mean, require
from nestrec.embedding import TableConfig
from nestrec.embedding.table_config import Table
from nestrec.pipeline.dense.dense_optimizer import OptimizerConfig
from nestrec.pipeline.exchange_window import Coupling, Precision

MAX_EMPTY_MICRO_BATCHES = 32
"""Number of micro-batches that is allowed for batches of any size, even if some are empty; the maximum of `auto`."""


def check_choices(*, device: str, precision: str, couples_samples: str) -> None:
    """Raise a UserError if a choice is unknown."""
    parse_device(device)
    choices = {
        "precision": (precision, get_args(Precision)),
        "couples_samples": (couples_samples, get_args(Coupling)),
    }
    for name, (value, known) in choices.items():
        if value not in known:
            raise UserError("unknown value", option=name, value=value, remedy=did_you_mean(str(value), known))


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)


def check_micro_batches(count: Any) -> None:
    """Raise a UserError unless the number of micro-batches is a positive integer."""
    require(
        _is_count(count), "must be a positive integer", option="micro_batches", value=count, remedy="use 4, for example"
    )


def check_micro_batches_have_samples(
    count: int, num_samples: int, of: str = "the first batch", *, field: str = "micro_batches"
) -> None:
    """Raise a UserError if most of the `count` micro-batches of a batch would be empty.

    Args:
        count: Number of micro-batches.
        num_samples: Number of samples of the batch over all ranks. A batch without samples is accepted.
        of: Name of the batch in the message.
        field: Name of the option in the message.
    """
    if count > MAX_EMPTY_MICRO_BATCHES and 0 < num_samples < count:
        raise UserError(
            f"exceeds the number of samples of {of}, which is {num_samples:,}",
            option=field,
            value=count,
            remedy="use fewer micro-batches (4 or 8 are usually enough), or larger batches",
        )


def check_fence(every: Any) -> None:
    """Raise a UserError unless the fence interval is a positive integer or None."""
    if every is not None and not _is_count(every):
        remedy = "use a number of steps, or omit it to have one fence, after the last batch"
        raise UserError("must be a positive integer", option="fence_every", value=every, remedy=remedy)


def check_batches(batches: Any) -> None:
    """Raise a UserError unless `batches` is an iterable of batches; a single batch (a mapping) is not accepted."""
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        remedy = "pass an iterable of batches; to train on one batch, call step(batch)"
        raise UserError("must be an iterable of batches", option="batches", value=type(batches).__name__, remedy=remedy)


def check_model(model: Any) -> None:
    """Raise a UserError unless this is a module with initialized weights."""
    if not isinstance(model, nn.Module):
        remedy = "pass a module whose forward(vectors, batch) returns (loss_sum, weight)"
        raise UserError("must be an nn.Module instance", option="model", value=model, remedy=remedy)
    for name, weight in model.named_parameters():
        if isinstance(weight, nn.UninitializedParameter) or weight.is_meta:
            remedy = "call the lazy module once with a sample, or load the weights, before you build TrainingPipeline"
            raise UserError("the weight is not initialized", option="weight of the model", value=name, remedy=remedy)


def check_optional_types(**arguments: tuple[Any, type]) -> None:
    """Raise a UserError if an argument is neither None nor of its class; `arguments` are (value, class) by name."""
    for name, (value, kind) in arguments.items():
        if value is not None and not isinstance(value, kind):
            remedy = f"pass a {kind.__module__}.{kind.__qualname__}, or omit the argument"
            raise UserError(f"must be of class {kind.__qualname__}", option=name, value=value, remedy=remedy)


def check_weight(weight: Any) -> None:
    """Raise a UserError unless `weight` is a function or None."""
    if weight is not None and not callable(weight):
        remedy = "pass a function, such as lambda batch: len(batch['items'])"
        raise UserError("must be a function of a batch", option="weight", value=weight, remedy=remedy)


def parse_learning_rate(rate: Any) -> float | None:
    """Return the learning rate of the tables as a float, or None if it is None."""
    if rate is None:
        return None
    is_number = isinstance(rate, int | float | np.number) and not isinstance(rate, bool)
    if not is_number or not (math.isfinite(rate) and rate >= 0):
        remedy = "use 0.05, for example, or omit it to use the learning rate of the dense optimizer"
        raise UserError("must be a number of 0 or more", option="table_learning_rate", value=rate, remedy=remedy)
    return float(rate)


def parse_tables(tables: Any) -> list[TableConfig]:
    """Return the configs of the tables."""
    remedy = 'pass a list, such as [nestrec.Table("items", rows=1_000_000, dim=64)]'
    if not isinstance(tables, Iterable) or not (tables := list(tables)):
        raise UserError("must be a list of tables", option="tables", value=tables, remedy=remedy)
    for table in tables:
        require(isinstance(table, Table | TableConfig), "must be a table", option="tables", value=table, remedy=remedy)
    return [table.config if isinstance(table, Table) else table for table in tables]


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise a UserError unless the optimizer is supported and has weights of the model only.

    Other weights would differ between ranks, because their gradients are not all-reduced.
    """
    if optimizer is not None and not isinstance(optimizer, OptimizerConfig | torch.optim.Optimizer):
        remedy = (
            "pass an optimizer of the model's weights, such as torch.optim.Adam(model.parameters()); call a torch "
            "learning-rate scheduler in the training loop"
        )
        raise UserError(
            "must be an OptimizerConfig or a torch optimizer", option="dense_optimizer", value=optimizer, remedy=remedy
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    if isinstance(optimizer, torch.optim.LBFGS):
        remedy = "use an optimizer that needs gradients only, such as torch.optim.Adam"
        raise UserError(
            "it evaluates the loss several times per step", option="dense_optimizer", value="LBFGS", remedy=remedy
        )
    model_weights = {id(weight) for weight in model.parameters()}
    foreign = [w for group in optimizer.param_groups for w in group["params"] if id(w) not in model_weights]
    if foreign:
        raise UserError(
            f"{len(foreign)} of its weights are not weights of the model; their gradients would not be all-reduced",
            option="dense_optimizer",
            value=type(optimizer).__name__,
            remedy="build it from the weights of the model: torch.optim.Adam(model.parameters())",
        )
