"""What a script gives a `TrainingPipeline`, checked before anything is built of it."""

from collections.abc import Iterable, Mapping
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from nestrec.base.devices import known_device
from nestrec.base.errors import UserError, did_you_mean
from nestrec.embedding import TableConfig
from nestrec.embedding.table import Table
from nestrec.pipeline.compute import Precision
from nestrec.pipeline.stages import Coupling


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
                "is not one of the choices", field=name, value=value, remedy=did_you_mean(str(value), known)
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)


def check_micro_batches(count: Any) -> None:
    """A whole number of parts."""
    if not _is_count(count):
        raise UserError("must be a whole number from 1", field="micro_batches", value=count, remedy="such as 4")


def check_fence(every: Any) -> None:
    """A whole number of steps, or none."""
    if every is not None and not _is_count(every):
        remedy = "give a number of steps, or leave it out: the tables are whole after the last batch"
        raise UserError("must be a whole number from 1", field="fence_every", value=every, remedy=remedy)


def check_batches(batches: Any) -> None:
    """Several, not the fields of one."""
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        remedy = "give an iterable of batches, or call step with one"
        raise UserError("is no series of batches", field="batches", value=type(batches).__name__, remedy=remedy)


def configs_of(tables: Any) -> list[TableConfig]:
    """The tables in full."""
    remedy = 'give a list, such as [nestrec.Table("items", rows=1_000_000, dim=64)]'
    if isinstance(tables, Table | TableConfig) or not tables:
        raise UserError("must be a list of tables", field="tables", value=tables, remedy=remedy)
    for table in tables:
        if not isinstance(table, Table | TableConfig):
            raise UserError("is no table", field="tables", value=table, remedy=remedy)
    return [table.config if isinstance(table, Table) else table for table in tables]


def check_optimizer(optimizer: Any, model: Any) -> None:
    """What updates the model's weights can do so, and holds no others: they would differ between ranks."""
    if isinstance(optimizer, str | type):
        remedy = "give an optimiser over the model's weights, such as torch.optim.Adam(model.parameters())"
        raise UserError("is no optimiser", field="dense_optimizer", value=optimizer, remedy=remedy)
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(model, nn.Module):
        return
    own = {id(weight) for weight in model.parameters()}
    foreign = [w for group in optimizer.param_groups for w in group["params"] if id(w) not in own]
    if foreign:
        raise UserError(
            f"holds {len(foreign)} weights that are not the model's, and which nothing sums over ranks",
            field="dense_optimizer",
            value=type(optimizer).__name__,
            remedy="make it over the weights of the model that is given: torch.optim.Adam(model.parameters())",
        )
