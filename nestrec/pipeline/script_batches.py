"""Batches and losses of a user's own module for `TrainingPipeline`.

The loss of a module of the user's own, as schedules compute it.

Batches of a script's own: fields by name, cut into micro-batches by sample.

A batch is a mapping. A tensor or array holds a sample a row, a `Jagged` a sample a row of its own length; anything else
goes to the model as it is. Fields that are named as features of tables hold keys.
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
"""A batch of a script's own."""


def fields_of(batch: Samples | Any, features: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a batch with arrays as tensors, once each is what it says it is. features: those that hold keys."""
    if not isinstance(batch, Mapping):
        remedy = "give a mapping of names to tensors, such as {'items': keys}"
        raise UserError("is no batch", option="batch", value=type(batch).__name__, remedy=remedy)
    return {_name_of(name): _field(name, value, name in features) for name, value in batch.items()}


def _name_of(name: Any) -> str:
    if not isinstance(name, str):
        raise UserError("is no name", option="field of a batch", value=name, remedy="name fields by text")
    problem = "is how the offsets of a Jagged are kept, and would not reach the model"
    require(not name.endswith(OFFSETS), problem, option="field of a batch", value=name, remedy="give it another name")
    return name


def _field(name: str, value: Any, holds_keys: bool) -> Any:
    if isinstance(value, Jagged):
        _check_jagged(name, value)
        return value
    if isinstance(value, np.ndarray) and value.ndim > 0:
        return _tensor_of(name, value)
    if isinstance(value, torch.Tensor) and (value.is_nested or value.layout != torch.strided):
        remedy = "give a nestrec.Jagged (Jagged.from_nested takes a nested tensor with layout torch.jagged)"
        raise UserError(
            "cannot be cut by sample", option="field of a batch", value=f"{name}: {value.layout}", remedy=remedy
        )
    if holds_keys and not _has_samples(value):
        raise UserError(
            f"must hold keys, a row a sample, and holds {type(value).__name__}",
            option="field of a batch",
            value=name,
            remedy="give a tensor or an array, or nestrec.Jagged.from_rows([[3, 8], [5]]) for rows of any length",
        )
    return value


def _tensor_of(name: str, array: NDArray[Any]) -> torch.Tensor:
    """The same memory where torch can have it, else a copy: of arrays that are read-only, as those of Arrow and pandas
    are, that run backwards, or whose bytes are in another order."""
    if array.dtype.kind not in "biufc":
        remedy = "give numbers; what is for the model alone may be a list"
        raise UserError(
            f"holds {array.dtype}, which no tensor does", option="field of a batch", value=name, remedy=remedy
        )
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    is_fit = native.flags.writeable and all(stride >= 0 for stride in native.strides)
    return torch.from_numpy(native if is_fit else native.copy())


def _check_jagged(name: str, value: Jagged) -> None:
    """Its offsets are that: lengths in their place would give other rows without a word."""
    values, offsets = cast(tuple[Any, Any], (value.values, value.offsets))
    if not (isinstance(values, torch.Tensor) and isinstance(offsets, torch.Tensor)):
        problem = "is no Jagged of tensors"
    elif values.dim() == 0 or offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32) or not len(offsets):
        problem = f"has offsets of {offsets.dtype} {tuple(offsets.shape)} where (samples + 1,) of int64 are due"
    elif int(offsets[0]) != 0 or int(offsets[-1]) != len(values) or bool((offsets.diff() < 0).any()):
        problem = f"has offsets that do not go from 0 to its {len(values)} values, never falling"
    else:
        return
    remedy = "make it by nestrec.Jagged.from_rows(rows), or of lengths by nestrec.jagged.offsets_of(lengths)"
    raise UserError(problem, option="field of a batch", value=name, remedy=remedy)


def check_features(batch: Samples, features: Collection[str]) -> None:
    """Every feature has a field of keys, if an empty one: all ranks must ask for all tables."""
    for name in features:
        if name not in batch:
            remedy = f"give a field for each of {sorted(features)}"
            raise UserError("a batch must hold every feature, if empty", option="feature", value=name, remedy=remedy)


def num_samples_of(batch: Samples) -> int:
    """How many samples a batch holds; all fields that have a row for each must agree."""
    counts = {name: _num_rows(value) for name, value in batch.items() if _has_samples(value)}
    if not counts:
        raise UserError("holds no tensor", option="batch", value=sorted(batch), remedy="give keys of the tables in it")
    expected = next(iter(counts.values()))
    for name, count in counts.items():
        if count != expected:
            problem = f"holds {count} samples where others hold {expected}"
            raise UserError(problem, option="field of a batch", value=name, remedy="give every sample a row in each")
    return expected


def cut(batch: Samples, features: Mapping[str, str], num_micro_batches: int, clustering: Clustering | None) -> Groups:
    """The samples of each micro-batch: in order and near equal, or by their keys. features: their tables by name."""
    count = num_samples_of(batch)
    if clustering is None or num_micro_batches == 1:
        return np.array_split(np.arange(count), num_micro_batches)
    tables = list(dict.fromkeys(features.values()))
    columns = [_rows_of_keys(batch[name], tables.index(table)) for name, table in features.items()]
    lengths = np.sum([np.diff(offsets) for _, offsets in columns], axis=0)
    pieces = [values[offsets[i] : offsets[i + 1]] for i in range(count) for values, offsets in columns]
    keys = SampleKeys(np.concatenate(pieces), np.concatenate([[0], np.cumsum(lengths)]))
    return cluster(clustering, keys, lengths.astype(np.float64), num_micro_batches)


def micro_batch_of(batch: Samples, features: Collection[str], samples: NDArray[np.int64]) -> MicroBatch:
    """Some samples of a batch, as `fields_of` has it."""
    keys: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    chosen = torch.from_numpy(samples)
    for name, value in batch.items():
        if not _has_samples(value):
            others[name] = value
            continue
        taken = value.take(chosen) if isinstance(value, Jagged) else value[chosen]
        if isinstance(taken, Jagged):
            tensors[name + OFFSETS] = taken.offsets
            taken = taken.values
        tensors[name] = taken
        if name in features:
            keys[name] = whole_keys(name, taken)
    longest = max((int(keys_of.size) for keys_of in keys.values()), default=0)
    return MicroBatch(samples, keys, tensors, longest, len(samples), others)


def whole_keys(name: str, values: Any) -> NDArray[np.int64]:
    """Keys of a field: whole numbers, never cut to them. An array without any may be of any type."""
    if isinstance(values, Jagged):
        remedy = "give its values, whose vectors come in their order"
        raise UserError("must hold a tensor or an array here", option="keys", value=name, remedy=remedy)
    keys = (_tensor_of(name, values) if isinstance(values, np.ndarray) else torch.as_tensor(values)).cpu().numpy()
    if keys.dtype.kind not in "iu" and keys.size:
        raise UserError(
            f"holds {keys.dtype} where keys are whole numbers",
            option="field of a batch",
            value=name,
            remedy="give int64 keys",
        )
    return keys


def given_to_model(micro_batch: MicroBatch) -> dict[str, Any]:
    """The fields of a batch again, of this micro-batch's samples."""
    found: dict[str, Any] = dict(micro_batch.others)
    for name, tensor in micro_batch.tensors.items():
        if not name.endswith(OFFSETS):
            found[name] = as_field(micro_batch, name, tensor)
    return found


def as_field(micro_batch: MicroBatch, name: str, values: torch.Tensor) -> torch.Tensor | Jagged:
    """Values of a field with the samples' lengths, where it has them."""
    offsets = micro_batch.tensors.get(name + OFFSETS)
    return values if offsets is None else Jagged(values, offsets)


def offsets_of_samples(micro_batch: MicroBatch, name: str) -> torch.Tensor:
    """(samples + 1,) where the values of each sample begin in a field that is laid out flat."""
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
    """Keys of each sample, made different between tables, and where each sample's begin."""
    if isinstance(value, Jagged):
        return fold_array(table, value.values.cpu().numpy()).view(np.int64), value.offsets.cpu().numpy()
    flat = value.cpu().reshape(len(value), -1).numpy()
    return fold_array(table, flat.reshape(-1)).view(np.int64), np.arange(len(flat) + 1) * flat.shape[1]


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
                    "is no feature of a table", option="pooled", value=feature, remedy=f"name one of {sorted(table_of)}"
                )
        self._module = module
        self._table_of = table_of
        self._weight = weight
        self._pooled: dict[str, Pooling] = {}
        for feature in pooled:
            how = pooled[feature] if isinstance(pooled, Mapping) else "sum"
            if how not in get_args(Pooling):
                remedy = f"give one of {', '.join(get_args(Pooling))}"
                raise UserError("is no way to pool", option=f"pooled.{feature}", value=how, remedy=remedy)
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
                option="model",
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
                option="field of a batch",
                value=feature + WEIGHT,
                remedy=f"give it in the shape of {feature!r}, or pool by sum or mean",
            )
        return found.reshape(-1)

    def _check(self, weight: Any, batch: Samples) -> None:
        """What was announced before the computation must be what the model computed."""
        found = _number(weight, "the weight that the model returns")
        said = announced(self._weight(batch))
        if not abs(found - said) <= _TOLERANCE * max(1.0, abs(said)):
            raise UserError(
                f"the model says {found:g} of a micro-batch that was announced with {said:g}",
                option="weight",
                value=found,
                remedy="give TrainingPipeline weight=..., a function of a batch that says the same",
            )


def _places(vectors: torch.Tensor) -> torch.Tensor:
    """Of each vector among all of them."""
    return torch.arange(vectors[..., 0].numel(), device=vectors.device).reshape(vectors.shape[:-1])


def announced(weight: Any) -> float:
    """What `weight` gave for a batch or a part of it, where a sum of losses can be divided by it."""
    found = _number(weight, "what the function `weight` gives")
    remedy = "let the function give 0 or more, and 0 only where no sample counts"
    require(math.isfinite(found) and found >= 0, "is no weight of a batch", option="weight", value=found, remedy=remedy)
    return found


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        remedy = "give a number, such as how many samples there are"
        raise UserError(f"{what} is no number", option="weight", value=value, remedy=remedy) from None


def _checked_sum(loss: Any) -> torch.Tensor:
    """A number that a gradient can be taken of."""
    if not isinstance(loss, torch.Tensor):
        problem = "its loss is no tensor"
        value = type(loss).__name__
    elif loss.dim() > 0 or not loss.is_floating_point():
        problem = "its loss must be one number, the sum over samples"
        value = f"{loss.dtype} of {tuple(loss.shape)}"
    elif not loss.requires_grad:
        problem, value = "its loss depends on no weight and no row of a table", "a loss without a gradient"
    else:
        return loss
    remedy = "return losses.sum() as it was computed from the vectors, without detach, item or no_grad"
    raise UserError(problem, option="model", value=value, remedy=remedy)
