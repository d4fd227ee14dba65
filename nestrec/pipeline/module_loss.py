"""The loss of a module of the user's own, as schedules compute it."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_args

import torch
from torch import nn

from nestrec.base.errors import UserError
from nestrec.data.batches import WEIGHT, MicroBatch
from nestrec.jagged import Jagged
from nestrec.ops.rows.gather import gather_rows
from nestrec.ops.rows.pool import Pooling, pool_bags
from nestrec.ops.rows.stored import TableRows
from nestrec.pipeline.samples import Samples, as_field, given_to_model, offsets_of_samples

_TOLERANCE = 1e-6


class ModuleLoss:
    """Gives a module the vectors of each feature instead of distinct rows and their places."""

    def __init__(
        self,
        module: nn.Module,
        table_of: Mapping[str, str],
        weight: Callable[[Samples], float],
        pooled: Collection[str] | Mapping[str, Pooling] = (),
    ) -> None:
        """table_of: features to tables. pooled: those that have one vector a sample, and how it is made; by default a
        sum."""
        pooled = (pooled,) if isinstance(pooled, str) else pooled or ()
        for feature in pooled:
            if feature not in table_of:
                raise UserError(
                    "is no feature of a table", field="pooled", value=feature, remedy=f"name one of {sorted(table_of)}"
                )
        self._module, self._table_of, self._weight = module, table_of, weight
        self._pooled: dict[str, Pooling] = {}
        for feature in pooled:
            how = pooled[feature] if isinstance(pooled, Mapping) else "sum"
            if how not in get_args(Pooling):
                remedy = f"give one of {', '.join(get_args(Pooling))}"
                raise UserError("is no way to pool", field=f"pooled.{feature}", value=how, remedy=remedy)
            self._pooled[feature] = how

    def __call__(
        self, micro_batch: MicroBatch, rows: Mapping[str, TableRows], index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        vectors = {
            feature: self._vectors(micro_batch, feature, rows[table], index[feature])
            for feature, table in self._table_of.items()
        }
        batch = given_to_model(micro_batch)
        answer = self._module(vectors, batch)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise UserError(
                "must return the sum of its losses and their weight",
                field="model",
                value=type(answer).__name__,
                remedy="return loss.sum(), num_samples (or what `weight` gives for the batch)",
            )
        loss, weight = answer
        summed = _checked_sum(loss)
        if summed.device.type == "cpu":  # on a GPU the host would wait for it
            self._check(weight, batch)
        return summed

    def inputs(
        self, micro_batch: MicroBatch, found: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor | Jagged], dict[str, Any]]:
        """What the module is called with. found: feature to the rows of its keys."""
        vectors = {
            feature: self._vectors(micro_batch, feature, found[feature].flatten(end_dim=-2), _places(found[feature]))
            for feature in self._table_of
            if feature in micro_batch.keys
        }
        return vectors, given_to_model(micro_batch)

    def _vectors(
        self, micro_batch: MicroBatch, feature: str, rows: TableRows, index: torch.Tensor
    ) -> torch.Tensor | Jagged:
        if (how := self._pooled.get(feature)) is not None:
            weight_P = self._weights_of(micro_batch, feature, index) if how == "weighted" else None
            return pool_bags(rows, index.reshape(-1), offsets_of_samples(micro_batch, feature), how, weight_P)
        return as_field(micro_batch, feature, gather_rows(rows, index))

    @staticmethod
    def _weights_of(micro_batch: MicroBatch, feature: str, index: torch.Tensor) -> torch.Tensor:
        found = micro_batch.tensors.get(feature + WEIGHT)
        if found is None or found.numel() != index.numel():
            raise UserError(
                "must hold a number for each key",
                field="field of a batch",
                value=feature + WEIGHT,
                remedy=f"give it in the shape of {feature!r}, or pool by sum or mean",
            )
        return found.reshape(-1)

    def _check(self, weight: Any, batch: Samples) -> None:
        """What was announced before the computation must be what the model computed."""
        found, said = _number(weight, "the weight that the model returns"), announced(self._weight(batch))
        if not abs(found - said) <= _TOLERANCE * max(1.0, abs(said)):
            raise UserError(
                f"the model says {found:g} of a micro-batch that was announced with {said:g}",
                field="weight",
                value=found,
                remedy="give TrainingPipeline weight=..., a function of a batch that says the same",
            )


def _places(vectors: torch.Tensor) -> torch.Tensor:
    """Of each vector among all of them."""
    return torch.arange(vectors[..., 0].numel(), device=vectors.device).reshape(vectors.shape[:-1])


def announced(weight: Any) -> float:
    """What `weight` gave for a batch or a part of it, where a sum of losses can be divided by it."""
    found = _number(weight, "what the function `weight` gives")
    if not (math.isfinite(found) and found >= 0):
        remedy = "let the function give 0 or more, and 0 only where no sample counts"
        raise UserError("is no weight of a batch", field="weight", value=found, remedy=remedy)
    return found


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        remedy = "give a number, such as how many samples there are"
        raise UserError(f"{what} is no number", field="weight", value=value, remedy=remedy) from None


def _checked_sum(loss: Any) -> torch.Tensor:
    """A number that a gradient can be taken of."""
    if not isinstance(loss, torch.Tensor):
        problem, value = "its loss is no tensor", type(loss).__name__
    elif loss.dim() > 0 or not loss.is_floating_point():
        problem, value = "its loss must be one number, the sum over samples", f"{loss.dtype} of {tuple(loss.shape)}"
    elif not loss.requires_grad:
        problem, value = "its loss depends on no weight and no row of a table", "a loss without a gradient"
    else:
        return loss
    remedy = "return losses.sum() as it was computed from the vectors, without detach, item or no_grad"
    raise UserError(problem, field="model", value=value, remedy=remedy)
