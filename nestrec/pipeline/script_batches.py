"""Batches and losses of a user's own module, for `TrainingPipeline`.

A batch is a mapping of field names to values. A tensor or array has one row per sample; a `Jagged` has one row of any
length per sample; other values are passed to the model unchanged. Fields whose name is a feature of a table hold keys.
Batches are split into micro-batches by sample. `ModuleLoss` calls the module as the loss that schedules compute.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nestrec.balance.partition_tools import Groups
from nestrec.base.errors import UserError, require
from nestrec.base.random import fold_array
from nestrec.data.batch_loader import OFFSETS, WEIGHT, MicroBatch
from nestrec.jagged import Jagged
from nestrec.ops.embedding.row_gather import Pooling, TableRows, gather_rows, pool_bags
from nestrec.pipeline.key_clustering import Clustering, SampleKeys, cluster

Samples = Mapping[str, Any]
"""A batch as the user's script passes it."""


def parse_fields(batch: Samples | Any, features: Collection[str] = ()) -> dict[str, Any]:
    """Validate a batch and return its fields, with arrays as tensors.

    Args:
        batch: Batch of the user's script.
        features: Names of the fields that hold keys.

    Raises:
        UserError: A field is not valid, such as a `Jagged` with wrong offsets.
    """
    if not isinstance(batch, Mapping):
        remedy = "pass a mapping of names to tensors, such as {'items': keys}"
        raise UserError("a batch must be a mapping", option="batch", value=type(batch).__name__, remedy=remedy)
    return {_check_field_name(name): _parse_field(name, value, name in features) for name, value in batch.items()}


def _check_field_name(name: Any) -> str:
    if not isinstance(name, str):
        raise UserError(
            "field names must be strings", option="field of a batch", value=name, remedy="use a string as the name"
        )
    problem = f"names that end in {OFFSETS} are reserved for the offsets of a Jagged"
    require(not name.endswith(OFFSETS), problem, option="field of a batch", value=name, remedy="rename the field")
    return name


def _parse_field(name: str, value: Any, is_key_field: bool) -> Any:
    if isinstance(value, Jagged):
        _check_jagged(name, value)
        return value
    if isinstance(value, np.ndarray) and value.ndim > 0:
        return _to_tensor(name, value)
    if isinstance(value, torch.Tensor) and (value.is_nested or value.layout != torch.strided):
        remedy = "pass a nestrec.Jagged (Jagged.from_nested converts a nested tensor with layout torch.jagged)"
        raise UserError(
            "this layout cannot be split by sample",
            option="field of a batch",
            value=f"{name}: {value.layout}",
            remedy=remedy,
        )
    if is_key_field and not _has_samples(value):
        raise UserError(
            f"must contain keys, one row per sample, not a value of class {type(value).__name__}",
            option="field of a batch",
            value=name,
            remedy="pass a tensor or an array, or nestrec.Jagged.from_rows([[3, 8], [5]]) for rows of any length",
        )
    return value


def _to_tensor(name: str, array: NDArray[Any]) -> torch.Tensor:
    """Convert an array to a tensor that shares its memory if possible.

    Read-only arrays (as those of Arrow and pandas), arrays with negative strides and arrays in another byte order are
    copied.
    """
    if array.dtype.kind not in "biufc":
        remedy = "convert it to numbers, or pass a list if only the model uses it"
        raise UserError(
            f"tensors do not support the dtype {array.dtype}", option="field of a batch", value=name, remedy=remedy
        )
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    is_shareable = native.flags.writeable and all(stride >= 0 for stride in native.strides)
    return torch.from_numpy(native if is_shareable else native.copy())


def _check_jagged(name: str, value: Jagged) -> None:
    """Raise a UserError unless the offsets of a `Jagged` are valid: lengths instead would give other rows."""
    values, offsets = cast(tuple[Any, Any], (value.values, value.offsets))
    if not (isinstance(values, torch.Tensor) and isinstance(offsets, torch.Tensor)):
        problem = "the values and offsets of a Jagged must be tensors"
    elif values.dim() == 0 or offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32) or not len(offsets):
        problem = f"offsets must be int64 of shape (samples + 1,), not {offsets.dtype} {tuple(offsets.shape)}"
    elif int(offsets[0]) != 0 or int(offsets[-1]) != len(values) or bool((offsets.diff() < 0).any()):
        problem = f"offsets must increase from 0 to the number of values, which is {len(values)}"
    else:
        return
    remedy = "use nestrec.Jagged.from_rows(rows), or nestrec.jagged.offsets_of(lengths) if you have lengths"
    raise UserError(problem, option="field of a batch", value=name, remedy=remedy)


def check_features(batch: Samples, features: Collection[str]) -> None:
    """Raise a UserError unless a batch has a field for every feature: the lookup of each table is collective."""
    for name in features:
        if name not in batch:
            remedy = f"add a field for each of {sorted(features)}; it can be empty"
            raise UserError("the batch does not have this feature", option="feature", value=name, remedy=remedy)


def count_samples(batch: Samples) -> int:
    """Return the number of samples of a batch.

    Raises:
        UserError: Fields have different numbers of samples, or there are no fields with samples.
    """
    counts = {name: _num_rows(value) for name, value in batch.items() if _has_samples(value)}
    if not counts:
        raise UserError(
            "the batch must contain a tensor", option="batch", value=sorted(batch), remedy="add keys of the tables"
        )
    expected = next(iter(counts.values()))
    for name, count in counts.items():
        if count != expected:
            problem = f"the field has {count} samples, but other fields have {expected}"
            raise UserError(
                problem, option="field of a batch", value=name, remedy="use one row per sample in every field"
            )
    return expected


def split_samples(
    batch: Samples, features: Mapping[str, str], num_micro_batches: int, clustering: Clustering | None
) -> Groups:
    """Assign the samples of a batch to micro-batches.

    Args:
        batch: Fields of the batch.
        features: Table of each feature.
        num_micro_batches: Number of micro-batches.
        clustering: Clustering method by keys. None: consecutive samples, nearly equal in number.

    Returns:
        Indices of the samples of each micro-batch.
    """
    count = count_samples(batch)
    if clustering is None or num_micro_batches == 1:
        return np.array_split(np.arange(count), num_micro_batches)
    tables = list(dict.fromkeys(features.values()))
    columns = [_rows_of_keys(batch[name], tables.index(table)) for name, table in features.items()]
    lengths = np.sum([np.diff(offsets) for _, offsets in columns], axis=0)
    sample_keys = [values[offsets[i] : offsets[i + 1]] for i in range(count) for values, offsets in columns]
    keys = SampleKeys(np.concatenate(sample_keys), np.concatenate([[0], np.cumsum(lengths)]))
    return cluster(clustering, keys, lengths.astype(np.float64), num_micro_batches)


def build_micro_batch(batch: Samples, features: Collection[str], samples: NDArray[np.int64]) -> MicroBatch:
    """Build a micro-batch from some samples of a batch; `batch` is the result of `parse_fields`."""
    keys: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    index = torch.from_numpy(samples)
    for name, value in batch.items():
        if not _has_samples(value):
            others[name] = value
            continue
        selected = value.take(index) if isinstance(value, Jagged) else value[index]
        if isinstance(selected, Jagged):
            tensors[name + OFFSETS] = selected.offsets
            selected = selected.values
        tensors[name] = selected
        if name in features:
            keys[name] = check_integer_keys(name, selected)
    longest = max((int(keys_of.size) for keys_of in keys.values()), default=0)
    return MicroBatch(samples, keys, tensors, longest, len(samples), others)


def check_integer_keys(name: str, values: Any) -> NDArray[np.int64]:
    """Return the keys of a field as an int64 array.

    Raises:
        UserError: Keys are not integers; they are never truncated. An empty array can have any dtype.
    """
    if isinstance(values, Jagged):
        remedy = "pass its values; the embeddings are returned in their order"
        raise UserError("must be a tensor or an array, not a Jagged", option="keys", value=name, remedy=remedy)
    keys = (_to_tensor(name, values) if isinstance(values, np.ndarray) else torch.as_tensor(values)).cpu().numpy()
    if keys.dtype.kind not in "iu" and keys.size:
        raise UserError(
            f"keys must be integers, not {keys.dtype}",
            option="field of a batch",
            value=name,
            remedy="convert the keys to int64",
        )
    return keys


def model_inputs(micro_batch: MicroBatch) -> dict[str, Any]:
    """Return the fields of the batch, with the samples of this micro-batch only."""
    fields: dict[str, Any] = dict(micro_batch.extra_fields)
    for name, tensor in micro_batch.tensors.items():
        if not name.endswith(OFFSETS):
            fields[name] = as_field(micro_batch, name, tensor)
    return fields


def as_field(micro_batch: MicroBatch, name: str, values: torch.Tensor) -> torch.Tensor | Jagged:
    """Return the values of a field, as a `Jagged` if the field has offsets."""
    offsets = micro_batch.tensors.get(name + OFFSETS)
    return values if offsets is None else Jagged(values, offsets)


def offsets_of_samples(micro_batch: MicroBatch, name: str) -> torch.Tensor:
    """Return the (samples + 1,) offsets of each sample's values in the flattened field."""
    offsets = micro_batch.tensors.get(name + OFFSETS)
    if offsets is not None:
        return offsets
    values = micro_batch.tensors[name]
    return torch.arange(len(values) + 1, device=values.device) * (values.numel() // max(1, len(values)))


def _has_samples(value: Any) -> bool:
    return isinstance(value, Jagged) or (isinstance(value, torch.Tensor) and value.dim() > 0)


def _num_rows(value: Any) -> int:
    return value.num_rows if isinstance(value, Jagged) else len(value)


def _rows_of_keys(value: Jagged | torch.Tensor, table: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the keys of all samples, hashed so that keys of different tables differ, and the offsets of samples."""
    if isinstance(value, Jagged):
        return fold_array(table, value.values.cpu().numpy()).view(np.int64), value.offsets.cpu().numpy()
    flat = value.cpu().reshape(len(value), -1).numpy()
    return fold_array(table, flat.reshape(-1)).view(np.int64), np.arange(len(flat) + 1) * flat.shape[1]


_TOLERANCE = 1e-6


class ModuleLoss:
    """Loss that calls a user's module with the embeddings of each feature, gathered or pooled from unique rows.

    Args:
        module: Module of the user; `forward(vectors, batch)` returns (loss_sum, weight).
        table_of: Table of each feature.
        weight: Function that returns the weight of a batch or micro-batch before it is computed.
        pooled: Features with one vector per sample, and optionally how they are pooled; the default is a sum.
    """

    def __init__(
        self,
        module: nn.Module,
        table_of: Mapping[str, str],
        weight: Callable[[Samples], float],
        pooled: Collection[str] | Mapping[str, Pooling] = (),
    ) -> None:
        pooled = (pooled,) if isinstance(pooled, str) else pooled or ()
        for feature in pooled:
            if feature not in table_of:
                raise UserError(
                    "unknown feature", option="pooled", value=feature, remedy=f"use one of {sorted(table_of)}"
                )
        self._module = module
        self._table_of = table_of
        self._weight = weight
        self._pooled: dict[str, Pooling] = {}
        for feature in pooled:
            pooling = pooled[feature] if isinstance(pooled, Mapping) else "sum"
            if pooling not in get_args(Pooling):
                remedy = f"use one of {', '.join(get_args(Pooling))}"
                raise UserError("unknown pooling method", option=f"pooled.{feature}", value=pooling, remedy=remedy)
            self._pooled[feature] = pooling

    def __call__(
        self, micro_batch: MicroBatch, rows: Mapping[str, TableRows], index: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        vectors = {
            feature: self._vectors(micro_batch, feature, rows[table], index[feature])
            for feature, table in self._table_of.items()
        }
        batch = model_inputs(micro_batch)
        result = self._module(vectors, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise UserError(
                "the model must return the sum of its losses and their weight",
                option="model",
                value=type(result).__name__,
                remedy="return loss.sum(), num_samples (or the value of `weight` for the batch)",
            )
        loss, weight = result
        loss_sum = _check_loss(loss)
        if loss_sum.device.type == "cpu":  # on a GPU, the host would wait for the device
            self._check(weight, batch)
        return loss_sum

    def inputs(
        self, micro_batch: MicroBatch, embeddings: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor | Jagged], dict[str, Any]]:
        """Return the arguments of the module for a micro-batch.

        Args:
            micro_batch: Micro-batch on the device.
            embeddings: (*shape of the keys, dim) embeddings, by feature.
        """
        vectors = {
            feature: self._vectors(
                micro_batch, feature, embeddings[feature].flatten(end_dim=-2), _flat_index(embeddings[feature])
            )
            for feature in self._table_of
            if feature in micro_batch.keys
        }
        return vectors, model_inputs(micro_batch)

    def _vectors(
        self, micro_batch: MicroBatch, feature: str, rows: TableRows, index: torch.Tensor
    ) -> torch.Tensor | Jagged:
        if (pooling := self._pooled.get(feature)) is not None:
            weight_P = self._weights_of(micro_batch, feature, index) if pooling == "weighted" else None
            return pool_bags(rows, index.reshape(-1), offsets_of_samples(micro_batch, feature), pooling, weight_P)
        return as_field(micro_batch, feature, gather_rows(rows, index))

    @staticmethod
    def _weights_of(micro_batch: MicroBatch, feature: str, index: torch.Tensor) -> torch.Tensor:
        weights = micro_batch.tensors.get(feature + WEIGHT)
        if weights is None or weights.numel() != index.numel():
            raise UserError(
                "weighted pooling requires this field, with one weight per key",
                option="field of a batch",
                value=feature + WEIGHT,
                remedy=f"add the field in the shape of {feature!r}, or pool by sum or mean",
            )
        return weights.reshape(-1)

    def _check(self, weight: Any, batch: Samples) -> None:
        """Raise a UserError if the weight that the model returned differs from the one declared before."""
        returned = _number(weight, "the weight that the model returns")
        declared = declared_weight(self._weight(batch))
        if not abs(returned - declared) <= _TOLERANCE * max(1.0, abs(declared)):
            raise UserError(
                f"the model returned the weight {returned:g}, but the function `weight` returned {declared:g}",
                option="weight",
                value=returned,
                remedy="pass weight=... to TrainingPipeline, a function of a batch that returns the same as the model",
            )


def _flat_index(vectors: torch.Tensor) -> torch.Tensor:
    """Return the index of each vector in the flattened tensor, in the shape of the keys."""
    return torch.arange(vectors[..., 0].numel(), device=vectors.device).reshape(vectors.shape[:-1])


def declared_weight(weight: Any) -> float:
    """Return the declared weight of a batch or micro-batch as a float; it must be finite and not negative."""
    number = _number(weight, "the result of the function `weight`")
    remedy = "return 0 or more from the function `weight`, and 0 only if there are no samples to count"
    require(
        math.isfinite(number) and number >= 0,
        "a weight must be finite and not negative",
        option="weight",
        value=number,
        remedy=remedy,
    )
    return number


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        remedy = "return a number, such as the number of samples"
        raise UserError(f"{what} must be a number", option="weight", value=value, remedy=remedy) from None


def _check_loss(loss: Any) -> torch.Tensor:
    """Return the loss if it is a scalar tensor with a gradient, or raise a UserError."""
    if not isinstance(loss, torch.Tensor):
        problem = "the loss of the model must be a tensor"
        value = type(loss).__name__
    elif loss.dim() > 0 or not loss.is_floating_point():
        problem = "the loss of the model must be a scalar, the sum over samples"
        value = f"{loss.dtype} of {tuple(loss.shape)}"
    elif not loss.requires_grad:
        problem, value = "the loss of the model does not depend on weights or embeddings", "a loss without a gradient"
    else:
        return loss
    remedy = "return losses.sum(), computed from the vectors without detach, item or no_grad"
    raise UserError(problem, option="model", value=value, remedy=remedy)
