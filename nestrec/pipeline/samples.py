"""Batches of a script's own: fields by name, cut into micro-batches by sample.

A batch is a mapping. A tensor or array holds a sample a row, a `Jagged` a sample a row of its own length; anything else
goes to the model as it is. Fields that are named as features of tables hold keys.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.balance.ordering import Groups
from nestrec.base.errors import UserError
from nestrec.base.random import fold_array
from nestrec.data.batches import OFFSETS, MicroBatch
from nestrec.jagged import Jagged
from nestrec.pipeline.clustering import Clustering, SampleKeys, cluster

Samples = Mapping[str, Any]
"""A batch of a script's own."""


def num_samples_of(batch: Samples | Any) -> int:
    """How many samples a batch holds; all fields that have a row for each must agree."""
    if not isinstance(batch, Mapping):
        remedy = "give a mapping of names to tensors, such as {'items': keys}"
        raise UserError("is no batch", field="batch", value=type(batch).__name__, remedy=remedy)
    counts = {name: _num_rows(value) for name, value in batch.items() if _has_samples(value)}
    if not counts:
        raise UserError("holds no tensor", field="batch", value=sorted(batch), remedy="give keys of the tables in it")
    expected = next(iter(counts.values()))
    for name, count in counts.items():
        if count != expected:
            problem = f"holds {count} samples where others hold {expected}"
            raise UserError(problem, field="field of a batch", value=name, remedy="give every sample a row in each")
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
    """Some samples of a batch."""
    keys: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    chosen = torch.from_numpy(samples)
    for name, value in batch.items():
        if name.endswith(OFFSETS):
            problem = "is how the offsets of a Jagged are kept, and would not reach the model"
            raise UserError(problem, field="field of a batch", value=name, remedy="give it another name")
        if not _has_samples(value):
            others[name] = value
            continue
        taken = value.take(chosen) if isinstance(value, Jagged) else torch.as_tensor(value)[chosen]
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
        raise UserError("must hold a tensor or an array here", field="keys", value=name, remedy=remedy)
    keys = torch.as_tensor(values).cpu().numpy()
    if keys.dtype.kind not in "iu" and keys.size:
        raise UserError(
            f"holds {keys.dtype} where keys are whole numbers",
            field="field of a batch",
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
    return isinstance(value, Jagged) or (isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0)


def _num_rows(value: Any) -> int:
    return value.num_rows if isinstance(value, Jagged) else len(value)


def _rows_of_keys(value: Any, table: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Keys of each sample, made different between tables, and where each sample's begin."""
    if isinstance(value, Jagged):
        return fold_array(table, value.values.cpu().numpy()).view(np.int64), value.offsets.cpu().numpy()
    flat = torch.as_tensor(value).cpu().reshape(len(value), -1).numpy()
    return fold_array(table, flat.reshape(-1)).view(np.int64), np.arange(len(flat) + 1) * flat.shape[1]
