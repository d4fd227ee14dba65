"""Which tables every rank holds whole, of those that leave it open: where that is fewer bytes between ranks.

How many rows a micro-batch of a rank asks for, and a step over all ranks, is counted in samples of the data.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from nestrec.data.batches import BatchConfig
from nestrec.distributed import Topology
from nestrec.embedding import TableConfig
from nestrec.embedding.placement import Crossed, bytes_crossed, with_placements
from nestrec.tasks.task import Task

_MOST_COUNTED = 4096


def placed(task: Task, batch: BatchConfig, topology: Topology, *, window_cache: bool) -> tuple[TableConfig, ...]:
    """The tables of a task, none of them left open. The same on every rank."""
    if not any(table.placement == "auto" for table in task.tables):
        return tuple(task.tables)
    can_be = topology.num_shards > 1 and topology.num_replicas == 1 and topology.hosts is None
    return with_placements(task.tables, _crossed(task, batch, topology, window_cache) if can_be else {})


def _crossed(task: Task, batch: BatchConfig, topology: Topology, window_cache: bool) -> dict[str, Crossed]:
    tokens = task.assembler.tokens
    samples = np.flatnonzero(tokens > 0)
    size = batch.batch_samples or max(1, round((batch.batch_tokens or 1) / max(1.0, float(tokens[samples].mean()))))
    parts = batch.micro_batches if isinstance(batch.micro_batches, int) and not window_cache else 1
    used, asked = (_distinct(task, _spread(samples, n)) for n in (size, -(-size // (topology.world * parts))))
    return {
        table.name: bytes_crossed(
            vector_bytes=table.dim * table.weight_dtype.itemsize,
            gradient_bytes=table.dim * table.state_dtype.itemsize,
            ranks=topology.num_shards,
            used=used[table.name],
            asked=asked[table.name],
            micro_batches=parts,
        )
        for table in task.tables
    }


def _spread(samples: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """So many of them, from one end to the other."""
    places = np.linspace(0, len(samples) - 1, min(count, len(samples), _MOST_COUNTED))
    return samples[places.astype(np.int64)]


def _distinct(task: Task, samples: NDArray[np.int64]) -> Mapping[str, int]:
    """Table to the rows that these samples ask for."""
    keys = task.assembler.assemble(samples, task.assembler.read(samples), 0).keys
    found = {}
    for table in task.tables:
        asked = np.unique(np.concatenate([np.asarray(keys[name]).reshape(-1) for name in table.feature_names]))
        found[table.name] = min(len(asked), table.num_rows or len(asked))
    return found
