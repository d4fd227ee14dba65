"""Loads counted from the batches that ranks really have."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nestrec.data.batches import Batch, MicroBatch
from nestrec.embedding import TableConfig
from nestrec.embedding.hashing import owner_of
from nestrec.embedding.table import layout_of
from nestrec.ops.rows.dedup_host import dedup
from nestrec.planning.loads import Amounts, Loads

Flops = Callable[[MicroBatch], tuple[float, float]]
"""Operations of a micro-batch that grow with tokens, and with squares of lengths."""


def counted_loads(
    batches_of_ranks: Sequence[Sequence[Batch]], tables: Sequence[TableConfig], flops: Flops, *, dense_bytes: float
) -> Loads:
    """Of the same steps on every rank; one replica group, no window cache."""
    counted = [_step([batches[p] for batches in batches_of_ranks], tables) for p in range(len(batches_of_ranks[0]))]
    owned = [_owned([batches[p] for batches in batches_of_ranks], tables) for p in range(len(batches_of_ranks[0]))]
    work = [[[flops(part) for part in batch.micro_batches] for batch in batches] for batches in batches_of_ranks]
    operations = np.swapaxes(np.array(work, dtype=np.float64), 0, 1)
    world = len(batches_of_ranks)
    shared = [_shared(keys, owned[(p + 1) % len(owned)], tables, world) for p, keys in enumerate(owned)]
    fetched = [_sizes(keys, tables, world) for keys in owned]
    gradients = np.stack([f[2] for f in fetched])
    return Loads(
        linear_flops=operations[..., 0],
        attention_flops=operations[..., 1],
        dense_bytes=dense_bytes,
        keys=np.stack([step["keys"] for step in counted]),
        asked=np.stack([step["asked"] for step in counted]),
        received_bytes=np.stack([step["received"] for step in counted]),
        returned_bytes=np.stack([step["received"] for step in counted]),
        served_bytes=np.stack([step["served"] for step in counted]),
        summed_bytes=np.stack([step["served"] for step in counted]),
        rows=np.stack([f[0] for f in fetched]),
        row_bytes=np.stack([f[1] for f in fetched]),
        gradient_bytes=gradients,
        completed_bytes=np.repeat(gradients[..., None], operations.shape[2], axis=2) / operations.shape[2],
        shared_rows=np.stack([s[0] for s in shared]),
        shared_bytes=np.stack([s[1] for s in shared]),
    )


def _step(batches: Sequence[Batch], tables: Sequence[TableConfig]) -> dict[str, Amounts]:
    """Amounts of the sources, and of the owners that serve them."""
    world, num_micro_batches = len(batches), len(batches[0].micro_batches)
    found = {name: np.zeros((world, num_micro_batches)) for name in ("asked", "received", "served")}
    keys = np.zeros(world)
    for source, batch in enumerate(batches):
        for n, part in enumerate(batch.micro_batches):
            for table in tables:
                values = _keys_of(part, table)
                distinct = dedup(values, world)
                width = table.dim * table.weight_dtype.itemsize
                keys[source] += len(values)
                found["asked"][source, n] += len(distinct.keys)
                found["received"][source, n] += len(distinct.keys) * width
                found["served"][:, n] += distinct.counts * width
    return {"keys": keys, **found}


def _keys_of(part: MicroBatch, table: TableConfig) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(part.keys[name]).reshape(-1) for name in table.feature_names])


def _owned(batches: Sequence[Batch], tables: Sequence[TableConfig]) -> Mapping[str, NDArray[np.int64]]:
    """Distinct keys of a global batch, by table."""
    parts = [part for batch in batches for part in batch.micro_batches]
    return {table.name: np.unique(np.concatenate([_keys_of(part, table) for part in parts])) for table in tables}


def _sizes(
    keys: Mapping[str, NDArray[np.int64]], tables: Sequence[TableConfig], world: int
) -> tuple[Amounts, Amounts, Amounts]:
    """Rows of each owner, their bytes, and those of their gradients."""
    rows, row_bytes, gradient_bytes = np.zeros(world), np.zeros(world), np.zeros(world)
    for table in tables:
        count = np.bincount(owner_of(keys[table.name], world), minlength=world)
        rows += count
        row_bytes += count * layout_of(table).row_bytes
        gradient_bytes += count * table.dim * table.state_dtype.itemsize
    return rows, row_bytes, gradient_bytes


def _shared(
    now: Mapping[str, NDArray[np.int64]],
    following: Mapping[str, NDArray[np.int64]],
    tables: Sequence[TableConfig],
    world: int,
) -> tuple[Amounts, Amounts]:
    both = {name: np.intersect1d(keys, following[name], assume_unique=True) for name, keys in now.items()}
    return _sizes(both, tables, world)[:2]
