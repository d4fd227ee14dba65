"""Weights of static tables as the state dict of TorchRec's EmbeddingCollection or EmbeddingBagCollection, and back.

No TorchRec is needed: the state dict of an unsharded collection is a mapping of names to dense tensors. An
EmbeddingCollection holds tables of one dim only; an EmbeddingBagCollection takes any.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch

from nestrec.base.errors import UserError, did_you_mean
from nestrec.embedding.engine import EmbeddingEngine

Collection = Literal["embeddings", "embedding_bags"]
_CHUNK_ROWS = 1 << 16


def export_embedding_collection(
    engine: EmbeddingEngine, collection: Collection = "embeddings"
) -> dict[str, torch.Tensor]:
    """`embeddings.TABLE.weight` to (num_rows, dim) for every table; on one rank, whose memory must hold them."""
    if engine.topology.num_shards > 1:
        remedy = "load a checkpoint on one rank and export from there"
        raise UserError("an export needs whole tables", field="ranks", value=engine.topology.world, remedy=remedy)
    return {f"{collection}.{name}.weight": _whole_table(engine, name) for name in engine.tables}


def import_embedding_collection(
    engine: EmbeddingEngine, state: Mapping[str, torch.Tensor], collection: Collection = "embeddings"
) -> None:
    """Take the weights of every table; each rank takes the rows it owns, and optimiser state begins anew."""
    for name, table in engine.tables.items():
        key = f"{collection}.{name}.weight"
        if key not in state:
            raise UserError("is missing in the state dict", field=key, value=None, remedy=did_you_mean(key, state))
        weight, expected = state[key], (_num_rows(engine, name), table.dim)
        if tuple(weight.shape) != expected:
            remedy = f"the table holds {expected[0]} rows of {expected[1]}"
            raise UserError("has another shape", field=key, value=tuple(weight.shape), remedy=remedy)
        engine.load(name, _chunks(weight))


def _whole_table(engine: EmbeddingEngine, name: str) -> torch.Tensor:
    table, shard = engine.tables[name], engine.shards[name]
    weight = torch.empty(_num_rows(engine, name), table.dim, dtype=table.weight_dtype)
    for start in range(0, len(weight), _CHUNK_ROWS):
        part = weight[start : start + _CHUNK_ROWS]
        part.copy_(shard.layout.view(shard.read(np.arange(start, start + len(part))), "weight"))
    return weight


def _num_rows(engine: EmbeddingEngine, name: str) -> int:
    num_rows = engine.tables[name].num_rows
    if num_rows is None:
        remedy = "export its rows by key instead (engine.snapshot)"
        raise UserError("a dynamic table has no dense form", field=f"tables.{name}", value=None, remedy=remedy)
    return num_rows


def _chunks(weight: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    for start in range(0, len(weight), _CHUNK_ROWS):
        part = weight[start : start + _CHUNK_ROWS]
        yield {"keys": torch.arange(start, start + len(part)), "weight": part}
