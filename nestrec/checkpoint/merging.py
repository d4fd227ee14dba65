"""Ends a chain of incremental checkpoints: a full one, made of the rows at hand and of files already written.

Only touched rows are taken from the running model. The rest comes from the files of the chain, in the background: the
training waits for no more than the copy of what it touched, also where a full checkpoint is due.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nestrec.base.errors import DamagedError
from nestrec.checkpoint.content import Chunk, Content, Hurried
from nestrec.checkpoint.manifest import Manifest
from nestrec.checkpoint.restored import Restored
from nestrec.checkpoint.verify import files_of


def can_merge(chain: list[tuple[Path, Manifest]], num_shards: int) -> bool:
    """Whether the chain's tables are divided as now; else files hold rows of several shards."""
    of_tables = [entry for _, entry in files_of(chain) if entry.table is not None]
    return all(entry.num_shards == num_shards and entry.hashes is not None for entry in of_tables)


def merged(content: Content, chain: list[tuple[Path, Manifest]], shard: tuple[int, int]) -> Content:
    """The full content: what is touched, then what the chain holds and was neither touched nor removed since.

    The chain's files are verified as they are read: damage is not copied into a checkpoint with fresh digests.
    """
    older = Restored(chain)
    tables: dict[str, Iterable[Chunk]] = {}
    for table, touched in content.tables.items():
        removed = content.removed.get(table)
        gone = np.empty(0, dtype=np.int64) if removed is None else removed.cpu().numpy()
        tables[table] = _TouchedThenOlder(table, touched, gone, older, shard)
    return replace(content, tables=tables, removed={}, base=None)


class _TouchedThenOlder:
    """The chunks of one table."""

    def __init__(
        self,
        table: str,
        touched: Iterable[Chunk],
        removed: NDArray[np.int64],
        older: Restored,
        shard: tuple[int, int],
    ) -> None:
        self._table, self._touched, self._older, self._shard = table, touched, older, shard
        self._newer = [removed]

    def __iter__(self) -> Iterator[Chunk]:
        yield from self._noted(self._touched)
        newer = np.unique(np.concatenate(self._newer))
        try:
            yield from self._older.rows(self._table, shard=self._shard, superseded=newer)
        except DamagedError as error:
            raise DamagedError(f"cannot be built on: {error.problem}", field=error.field, value=error.value) from error

    def due(self) -> Iterator[Chunk]:
        """See `Hurried`."""
        return self._noted(self._touched.due() if isinstance(self._touched, Hurried) else ())

    def _noted(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            self._newer.append(chunk["keys"].cpu().numpy())
            yield chunk
