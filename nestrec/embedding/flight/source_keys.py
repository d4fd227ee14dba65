"""The keys of a batch on the rank that asks for them: checked, deduplicated and grouped by owner, before any exchange.

Without the window cache each micro-batch asks for all of its distinct keys. With it, a micro-batch asks only for the
keys that no earlier micro-batch has asked for, and the gradient of a key leaves after the last micro-batch that uses
it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.embedding.flight.device_dedup import MIN_KEYS, dedup_on_device
from nestrec.embedding.flight.half_rows import Flags, flags_of_micro_batches
from nestrec.embedding.flight.window_plan import WindowPlan, plan_window
from nestrec.embedding.table import TableConfig
from nestrec.ops.rows.dedup_host import Deduplicated, dedup

FeatureKeys = Mapping[str, NDArray[np.int64] | torch.Tensor]
ERROR_WORDS = 3


@dataclass(frozen=True, slots=True)
class SourceMicroBatch:
    """A micro-batch before the exchange."""

    shapes: dict[str, tuple[int, ...]]
    """Feature to the shape of its keys."""
    tables: list[Deduplicated]
    """For each table the keys to ask for, grouped by owner; `inverse` is the place among the micro-batch's distinct
    keys."""


@dataclass(frozen=True, slots=True)
class SourceKeys:
    """The keys of a batch before the exchange."""

    micro_batches: list[SourceMicroBatch]
    windows: list[WindowPlan] | None
    """For each table, where the window cache is on."""
    half: list[list[Flags]] | None
    """[micro_batch][table] which of the keys to ask for cross in half precision; none: no table has such features."""
    error: list[int]
    """[1, number of the feature, key] of a key outside its static table, or zeros."""


def deduplicate(
    micro_batches: Sequence[FeatureKeys],
    tables: Sequence[TableConfig],
    num_shards: int,
    device: torch.device,
    *,
    window_cache: bool,
) -> SourceKeys:
    """Local; a mistake is not raised here but told to all ranks by the exchange.

    device: where the index of the keys will be used; large batches are deduplicated there, without the window cache.
    """
    flat = [{name: _flat(values) for name, values in keys.items()} for keys in micro_batches]
    if not window_cache:
        found = [[_distinct(micro_batch, table, num_shards, device) for table in tables] for micro_batch in flat]
        right = [[d for d in of_micro_batch if d is not None] for of_micro_batch in found]
        if all(len(of_micro_batch) == len(tables) for of_micro_batch in right):
            return _source(micro_batches, right, None, _half(flat, tables, right, None), [0] * ERROR_WORDS)
    error = max(_range_error(micro_batch, tables) for micro_batch in flat)
    keys_of = [[_keys_of(micro_batch, table, is_bad=error[0] > 0) for micro_batch in flat] for table in tables]
    plans = [plan_window(keys, num_shards) for keys in keys_of]
    planned = [[plan.micro_batches[p] for plan in plans] for p in range(len(micro_batches))]
    half = None if error[0] else _half(flat, tables, planned, plans)
    return _source(micro_batches, planned, plans if window_cache else None, half, error)


def _source(
    micro_batches: Sequence[FeatureKeys],
    found: list[list[Deduplicated]],
    plans: list[WindowPlan] | None,
    half: list[list[Flags]] | None,
    error: list[int],
) -> SourceKeys:
    shapes = [{name: tuple(values.shape) for name, values in keys.items()} for keys in micro_batches]
    return SourceKeys([SourceMicroBatch(s, f) for s, f in zip(shapes, found, strict=True)], plans, half, error)


def _half(
    flat: Sequence[dict[str, NDArray[np.int64]]],
    tables: Sequence[TableConfig],
    found: list[list[Deduplicated]],
    plans: list[WindowPlan] | None,
) -> list[list[Flags]] | None:
    if not any(table.half_features for table in tables):
        return None
    by_table = []
    for t, table in enumerate(tables):
        num_whole = [_num_whole(micro_batch, table) for micro_batch in flat]
        plan = None if plans is None else plans[t]
        by_table.append(flags_of_micro_batches(table, num_whole, [micro_batch[t] for micro_batch in found], plan))
    return [list(flags) for flags in zip(*by_table, strict=True)]


def _num_whole(flat: dict[str, NDArray[np.int64]], table: TableConfig) -> int:
    """Keys of the features whose rows cross whole; they come first."""
    return sum(len(flat[f]) for f in table.feature_names if f not in table.half_features)


def _distinct(
    flat: dict[str, NDArray[np.int64]], table: TableConfig, num_shards: int, device: torch.device
) -> Deduplicated | None:
    """Of a micro-batch and table; none where a key is not one of the table."""
    pieces = [flat[f] for f in table.feature_names]
    if device.type == "cuda" and sum(map(len, pieces)) >= MIN_KEYS:
        num_on_host = _num_whole(flat, table) if table.half_features else 0
        return dedup_on_device(pieces, num_shards, device, table.num_rows, num_on_host=num_on_host)
    if any(_wrong_key(piece, table) is not None for piece in pieces):
        return None
    return dedup(pieces[0] if len(pieces) == 1 else np.concatenate(pieces), num_shards)


def _keys_of(flat: dict[str, NDArray[np.int64]], table: TableConfig, *, is_bad: bool) -> NDArray[np.int64]:
    """Keys of all features of a table; none where the batch holds a mistake, which the exchange will raise."""
    keys = [flat[f] for f in table.feature_names]
    if is_bad:
        return np.empty(0, np.int64)
    return keys[0] if len(keys) == 1 else np.concatenate(keys)


def _flat(values: NDArray[np.int64] | torch.Tensor) -> NDArray[np.int64]:
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    return np.ascontiguousarray(array.reshape(-1), np.int64)


def _range_error(flat: dict[str, NDArray[np.int64]], tables: Sequence[TableConfig]) -> list[int]:
    """[1, number of the feature, key] of the first key outside its static table, or zeros."""
    features = [(f, t) for t in tables for f in t.feature_names]
    for number, (feature, table) in enumerate(features):
        key = _wrong_key(flat[feature], table)
        if key is not None:
            return [1, number, key]
    return [0] * ERROR_WORDS


def _wrong_key(keys: NDArray[np.int64], table: TableConfig) -> int | None:
    """A key outside a static table."""
    if table.num_rows is None or not len(keys):
        return None
    low, high = int(keys.min()), int(keys.max())
    if low < 0:
        return low
    return high if high >= table.num_rows else None
