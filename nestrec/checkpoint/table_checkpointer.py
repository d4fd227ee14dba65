"""What checkpoints hold of tables: rows, keys that lost theirs since the last one, keys that wait for admission.

After a stop under a schedule that uses rows late, also the vectors that the batches after it have read already.
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
"""Ends the name under which a checkpoint keeps the keys of a table that wait for admission."""
AHEAD = "/read-ahead"
"""Under TABLE, this, a step and a replica, a checkpoint keeps the vectors that the batch of that step has read."""


class TableCheckpointer:
    """Gives the tables of one rank to checkpoints and takes them back, on any number of ranks."""

    def __init__(self, engine: EmbeddingEngine):
        self._engine = engine
        self._shard = (engine.topology.shard, engine.topology.num_shards)
        self._waiting: dict[str, dict[int, NDArray[np.int64]]] = {
            name: {} for name, table in engine.tables.items() if table.store.admission_count > 1
        }
        """Table to step to the keys that its checkpoint holds as waiting."""
        self._frozen: list[TableSnapshot] = []
        self._built_on: int | None = None
        self._held_from: int | None = None

    def rows(self, step: int, base: int | None, max_bytes: int | None) -> dict[str, Iterable[Chunk]]:
        """Rows used after the step `base`, or all, as they are now, until `thaw`; read when they are written.

        max_bytes: of rows that change before they are read, and are put aside; none: nothing changes until then.
        """
        engine = self._engine
        since = -1 if base is None else base
        share = None if max_bytes is None else max_bytes // len(engine.tables)
        self._frozen = [engine.freeze(name, since=since, max_bytes=share) for name in engine.tables]
        tables: dict[str, Iterable[Chunk]] = dict(zip(engine.tables, self._frozen, strict=True))
        for name, keys_at in self._waiting.items():
            waiting = engine.unsettled(name)
            keys_at[step] = waiting["keys"].numpy()
            tables[name + WAITING] = [{column: waiting[column] for column in ("keys", "uses", "last_step")}]
        return tables

    def thaw(self) -> None:
        """What `rows` gave is read, or not wanted any more."""
        for frozen in self._frozen:
            frozen.close()
        self._frozen = []

    def read_ahead(self) -> dict[str, Iterable[Chunk]]:
        """Vectors that this rank has read for batches to come: those of its replica, whose copies may differ."""
        return {
            self._ahead(name, step): [{"keys": torch.from_numpy(keys), "weight": vectors}]
            for step, read in self._engine.reads_ahead.pending().items()
            for name, (keys, vectors) in read.items()
        }

    def _ahead(self, table: str, step: int) -> str:
        return f"{table}{AHEAD}-{step}-{self._engine.topology.replica}"

    def removed(self, step: int, base: int) -> dict[str, torch.Tensor]:
        """Keys that the checkpoint of the step `base` holds and that of `step` must not."""
        engine = self._engine
        evicting = [name for name, table in engine.tables.items() if table.store.eviction != "none"]
        gone = {name: engine.evicted_since(name, base) for name in evicting}
        for name, keys_at in self._waiting.items():
            gone[name + WAITING] = torch.from_numpy(np.setdiff1d(keys_at[base], keys_at[step]))
        return gone

    def build_on(self, step: int) -> None:
        """Later incremental saves build on this step: forget what only earlier ones needed."""
        self._built_on = step
        self._drop_evictions()
        for keys_at in self._waiting.values():
            for earlier in [at for at in keys_at if at < step]:
                del keys_at[earlier]

    def hold_from(self, step: int | None) -> None:
        """Somebody else will ask what was evicted after this step; none: nobody will."""
        self._held_from = step
        self._drop_evictions()

    def _drop_evictions(self) -> None:
        needed = [step for step in (self._built_on, self._held_from) if step is not None]
        for name in self._engine.tables if needed else ():
            self._engine.drop_eviction_log(name, min(needed))

    def take(self, restored: LoadedCheckpoint) -> None:
        """Take back what a checkpoint holds for this shard; nothing else remains. Local; then `settle`."""
        for name in self._engine.tables:
            self._engine.clear(name)
            holds_all = self._engine.tables[name].is_replicated
            self._engine.load(name, restored.rows(name, shard=None if holds_all else self._shard))
            self._engine.load_unsettled(name, self._no_keys(restored.step))
        for name, keys_at in self._waiting.items():
            for chunk in restored.rows(name + WAITING, shard=self._shard):
                self._engine.load_unsettled(name, {**chunk, "newest_step": torch.tensor([restored.step])})
            keys_at.clear()
            keys_at[restored.step] = self._engine.unsettled(name)["keys"].numpy()
        self._load_ahead(restored)

    def settle(self) -> None:
        """After `take`: what shards must tell each other of it. Collective."""
        for name in self._engine.tables:
            self._engine.divide_room(name)

    def _load_ahead(self, restored: LoadedCheckpoint) -> None:
        self._engine.reads_ahead.forget()
        for step in itertools.count(restored.step + 1):
            saved = [name for name in self._engine.tables if self._ahead(name, step) in restored.tables]
            if not saved:
                return
            read = {name: list(restored.rows(self._ahead(name, step))) for name in saved}
            self._engine.reads_ahead.keep(
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
    def _no_keys(step: int) -> Chunk:
        """For a table without waiting keys: time to live counts from this step all the same."""
        none = torch.empty(0, dtype=torch.int64)
        return {"keys": none, "uses": none, "last_step": none, "newest_step": torch.tensor([step])}
