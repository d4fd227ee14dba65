"""Saves and restores the embedding tables of a rank: rows, removed keys and keys that wait for admission.

If a schedule with stale reads is stopped, the checkpoint also contains the vectors that were prefetched for the next
batches.
"""

import itertools
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.checkpoint import Chunk, LoadedCheckpoint
from nestrec.embedding import EmbeddingEngine
from nestrec.embedding.table_snapshot import TableSnapshot

WAITING = "/waiting"
"""Suffix of the checkpoint entry of a table for keys that wait for admission."""
AHEAD = "/read-ahead"
"""Infix of the checkpoint entries of prefetched vectors: TABLE, this infix, the step of the batch, and the replica."""


class TableCheckpointer:
    """Saves the tables of one rank in checkpoints and restores them, on any number of ranks."""

    def __init__(self, engine: EmbeddingEngine):
        self._engine = engine
        self._shard = (engine.topology.shard, engine.topology.num_shards)
        self._waiting: dict[str, dict[int, NDArray[np.int64]]] = {
            name: {} for name, table in engine.tables.items() if table.store.admission_threshold > 1
        }
        """Keys that wait for admission in the checkpoint of each step, by table and step."""
        self._snapshots: list[TableSnapshot] = []
        self._base_step: int | None = None
        self._retained_from: int | None = None

    def rows(self, step: int, base: int | None, max_bytes: int | None) -> dict[str, Iterable[Chunk]]:
        """Return the rows of all tables as chunks, which are read when they are written.

        The chunks are copy-on-write snapshots of the current rows until `release_snapshots` is called.

        Args:
            step: Step of the checkpoint.
            base: Step since which rows must have been used; None for all rows.
            max_bytes: Memory for rows that change before they are read, in bytes; None if no row changes until then.
        """
        engine = self._engine
        since = -1 if base is None else base
        share = None if max_bytes is None else max_bytes // len(engine.tables)
        self._snapshots = [engine.snapshot_async(name, since=since, max_bytes=share) for name in engine.tables]
        tables: dict[str, Iterable[Chunk]] = dict(zip(engine.tables, self._snapshots, strict=True))
        for name, keys_at in self._waiting.items():
            waiting = engine.pending_key_state(name)
            keys_at[step] = waiting["keys"].numpy()
            tables[name + WAITING] = [{column: waiting[column] for column in ("keys", "uses", "last_step")}]
        return tables

    def release_snapshots(self) -> None:
        """Release the snapshots of `rows`."""
        for snapshot in self._snapshots:
            snapshot.close()
        self._snapshots = []

    def prefetched_rows(self) -> dict[str, Iterable[Chunk]]:
        """Return the vectors that this rank has prefetched for later batches, per replica because copies may differ."""
        return {
            self._prefetch_name(name, step): [{"keys": torch.from_numpy(keys), "weight": vectors}]
            for step, read in self._engine.prefetched_rows.pending().items()
            for name, (keys, vectors) in read.items()
        }

    def _prefetch_name(self, table: str, step: int) -> str:
        return f"{table}{AHEAD}-{step}-{self._engine.topology.replica}"

    def removed(self, step: int, base: int) -> dict[str, torch.Tensor]:
        """Return the keys that are in the checkpoint of the step `base` and must not be in that of `step`."""
        engine = self._engine
        evicting = [name for name, table in engine.tables.items() if table.store.eviction_policy != "none"]
        removed = {name: engine.evicted_since(name, base) for name in evicting}
        for name, keys_at in self._waiting.items():
            removed[name + WAITING] = torch.from_numpy(np.setdiff1d(keys_at[base], keys_at[step]))
        return removed

    def set_base(self, step: int) -> None:
        """Set the step on which later incremental saves are based, and discard what only earlier ones needed."""
        self._base_step = step
        self._drop_evictions()
        for keys_at in self._waiting.values():
            for earlier in [at for at in keys_at if at < step]:
                del keys_at[earlier]

    def retain_evictions_from(self, step: int | None) -> None:
        """Retain the eviction log from this step on for another reader, such as the publisher; None: not needed."""
        self._retained_from = step
        self._drop_evictions()

    def _drop_evictions(self) -> None:
        needed = [step for step in (self._base_step, self._retained_from) if step is not None]
        for name in self._engine.tables if needed else ():
            self._engine.drop_eviction_log(name, min(needed))

    def load_rows(self, restored: LoadedCheckpoint) -> None:
        """Replace the tables of this rank by the content of a checkpoint.

        Not collective; call `rebalance_capacity` next.
        """
        for name in self._engine.tables:
            self._engine.clear(name)
            is_replicated = self._engine.tables[name].is_replicated
            self._engine.load(name, restored.rows(name, shard=None if is_replicated else self._shard))
            self._engine.load_pending_key_state(name, self._empty_admission_state(restored.step))
        for name, keys_at in self._waiting.items():
            for chunk in restored.rows(name + WAITING, shard=self._shard):
                self._engine.load_pending_key_state(name, {**chunk, "newest_step": torch.tensor([restored.step])})
            keys_at.clear()
            keys_at[restored.step] = self._engine.pending_key_state(name)["keys"].numpy()
        self._load_prefetched(restored)

    def rebalance_capacity(self) -> None:
        """Exchange capacities between shards after `load_rows`. Collective."""
        for name in self._engine.tables:
            self._engine.rebalance_capacity(name)

    def _load_prefetched(self, restored: LoadedCheckpoint) -> None:
        self._engine.prefetched_rows.clear()
        for step in itertools.count(restored.step + 1):
            saved = [name for name in self._engine.tables if self._prefetch_name(name, step) in restored.tables]
            if not saved:
                return
            read = {name: list(restored.rows(self._prefetch_name(name, step))) for name in saved}
            self._engine.prefetched_rows.restore(
                step,
                {
                    name: (
                        np.concatenate([chunk["keys"].numpy() for chunk in chunks]),
                        torch.cat([chunk["weight"] for chunk in chunks]),
                    )
                    for name, chunks in read.items()
                    if chunks
                },
            )

    @staticmethod
    def _empty_admission_state(step: int) -> Chunk:
        """Return an empty admission state: the time to live of rows is counted from this step."""
        empty = torch.empty(0, dtype=torch.int64)
        return {"keys": empty, "uses": empty, "last_step": empty, "newest_step": torch.tensor([step])}
