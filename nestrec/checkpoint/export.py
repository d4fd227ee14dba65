"""A table of a checkpoint for other programs: Parquet (one row a key) or one safetensors file."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from nestrec.base.errors import UserError
from nestrec.checkpoint.content import Chunk
from nestrec.checkpoint.restored import Restored

if TYPE_CHECKING:
    import pyarrow as pa


def export_parquet(restored: Restored, table: str, path: Path, *, with_state: bool = False) -> int:
    """Write `keys` and `weight` (a list column), and optimiser state when asked; chunk by chunk. Returns the row count.

    Parquet has no bfloat16: such columns are written as float32, which holds them exactly.
    """
    import pyarrow.parquet as pq

    writer: pq.ParquetWriter | None = None
    num_rows = 0
    for chunk in _chunks(restored, table, with_state):
        batch = _to_arrow(chunk)
        writer = writer or pq.ParquetWriter(path, batch.schema)
        writer.write_table(batch)
        num_rows += batch.num_rows
    if writer is None:
        raise UserError("has no rows to export", field="table", value=table)
    writer.close()
    return num_rows


def export_safetensors(restored: Restored, table: str, path: Path, *, with_state: bool = False) -> int:
    """Write one file with `keys` in increasing order and `weight`, held in memory as a whole. Returns the row count."""
    chunks = list(_chunks(restored, table, with_state))
    if not chunks:
        raise UserError("has no rows to export", field="table", value=table)
    columns = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    order = columns["keys"].argsort()
    save_file({name: column[order].contiguous() for name, column in columns.items()}, path)
    return len(order)


def _chunks(restored: Restored, table: str, with_state: bool) -> Iterator[Chunk]:
    if table not in restored.tables:
        remedy = f"tables of this checkpoint: {', '.join(restored.tables)}"
        raise UserError("no such table", field="table", value=table, remedy=remedy)
    for chunk in restored.rows(table):
        yield chunk if with_state else {name: chunk[name] for name in _without_state(chunk)}


def _without_state(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("state_")]


def _to_arrow(chunk: Chunk) -> "pa.Table":
    import pyarrow as pa

    columns = {}
    for name, column in chunk.items():
        array = (column.float() if column.dtype == torch.bfloat16 else column).contiguous().numpy()
        flat = pa.array(array.reshape(-1))
        if array.ndim == 1:
            columns[name] = flat
        else:
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, array[0].size)
    return pa.table(columns)
