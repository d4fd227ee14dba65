"""Writes one rank's files of full and incremental checkpoints, and merges a chain into a full checkpoint.

A merge ends a chain of incremental checkpoints. Only the touched rows are copied from the running model; the other rows
are read from the files of the chain in the background. So training waits only for the copy of the touched rows, even if
a full checkpoint is due.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.artifacts.atomic_files import safetensors_content, write_file
from nestrec.artifacts.manifest import FileEntry, entry_of, safe_name
from nestrec.artifacts.writer_group import CheckpointGroup
from nestrec.base.errors import CorruptFileError
from nestrec.base.failpoints import fail_point
from nestrec.base.thread_team import cores_per_rank, run_ahead
from nestrec.checkpoint.checkpoint_content import (
    Chunk,
    PriorityChunks,
    RankCheckpoint,
    check_chunk,
    check_finite,
    chunks_of,
    parts_of,
)
from nestrec.checkpoint.checkpoint_manifest import Manifest, files_of
from nestrec.checkpoint.loaded_checkpoint import LoadedCheckpoint
from nestrec.embedding.hashing import hash_of


def can_merge(chain: list[tuple[Path, Manifest]], num_shards: int) -> bool:
    """Return whether the chain has the current number of shards; otherwise its files contain rows of several shards."""
    table_entries = [entry for _, entry in files_of(chain) if entry.table is not None]
    return all(entry.num_shards == num_shards and entry.hashes is not None for entry in table_entries)


def merge_increments(
    content: RankCheckpoint, chain: list[tuple[Path, Manifest]], shard: tuple[int, int]
) -> RankCheckpoint:
    """Return the full content: touched rows, then rows of the chain that were neither touched nor removed since.

    The files of the chain are verified while they are read, so that corrupt data is not copied to a checkpoint with
    valid digests.
    """
    older = LoadedCheckpoint(chain)
    tables: dict[str, Iterable[Chunk]] = {}
    for table, touched in content.tables.items():
        removed = content.removed.get(table)
        removed_keys = np.empty(0, dtype=np.int64) if removed is None else removed.cpu().numpy()
        tables[table] = _MergedChunks(table, touched, removed_keys, older, shard)
    return replace(content, tables=tables, removed={}, base=None)


class _MergedChunks:
    """Chunks of one table: the touched rows, then the older rows of the chain."""

    def __init__(
        self,
        table: str,
        touched: Iterable[Chunk],
        removed: NDArray[np.int64],
        older: LoadedCheckpoint,
        shard: tuple[int, int],
    ) -> None:
        self._table = table
        self._touched = touched
        self._older = older
        self._shard = shard
        self._newer = [removed]

    def __iter__(self) -> Iterator[Chunk]:
        yield from self._record_keys(self._touched)
        newer = np.unique(np.concatenate(self._newer))
        try:
            yield from self._older.rows(self._table, shard=self._shard, superseded=newer)
        except CorruptFileError as error:
            raise CorruptFileError(
                f"the base checkpoint is corrupt: {error.problem}", option=error.option, value=error.value
            ) from error

    def urgent_chunks(self) -> Iterator[Chunk]:
        """Yield the urgent chunks; see `PriorityChunks`."""
        return self._record_keys(self._touched.urgent_chunks() if isinstance(self._touched, PriorityChunks) else ())

    def _record_keys(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        for chunk in chunks:
            self._newer.append(chunk["keys"].cpu().numpy())
            yield chunk


PART_BYTES = 256 << 20
"""Approximate size of the files into which dense tensors are split, in bytes."""
MAX_WRITE_THREADS = 2
"""Maximum number of threads that write rows while another thread reads them; each holds a chunk in memory."""


def write_files(folder: Path, content: RankCheckpoint, peers: CheckpointGroup) -> list[FileEntry]:
    """Write this rank's files of a checkpoint; return their entries for the manifest."""
    fail_point("checkpoint.before_first_file")
    entries = []
    for entry in _write_all(folder, content, peers):
        entries.append(entry)
        fail_point("checkpoint.between_files")
    return entries


def _write_all(folder: Path, content: RankCheckpoint, peers: CheckpointGroup) -> Iterator[FileEntry]:
    if peers.is_first:
        yield _write_state(folder, content)
        for part, tensors in enumerate(parts_of(content.tensors, PART_BYTES)):
            check_finite("the dense weights and their optimizer state", tensors)
            name = f"tensors-{part:05d}.safetensors"
            yield entry_of(name, write_file(folder / name, safetensors_content(tensors), direct_io=True), "tensors")
    for table, keys in content.removed.items():
        name = f"removed-{safe_name(table)}-{peers.rank:05d}.safetensors"
        written = write_file(folder / name, safetensors_content({"keys": keys}))
        yield entry_of(name, written, "removed", table=table, shard=_shard(content, peers), hashes=_bounds(keys))
    # One core trains and one reads rows. Without further cores, rows are read and written alternately.
    yield from run_ahead(_rows(folder, content, peers), min(MAX_WRITE_THREADS, cores_per_rank() - 2))


def _rows(folder: Path, content: RankCheckpoint, peers: CheckpointGroup) -> Iterator[Callable[[], FileEntry]]:
    parts = dict.fromkeys(content.tables, 0)
    shard = _shard(content, peers)
    for table, chunk in chunks_of(content.tables):
        name = f"rows-{safe_name(table)}-{peers.rank:05d}-{parts[table]:05d}.safetensors"
        parts[table] += 1
        yield partial(_write_rows, folder / name, table, chunk, shard)


def _write_rows(path: Path, table: str, chunk: Chunk, shard: tuple[int, int]) -> FileEntry:
    check_chunk(table, chunk)
    check_finite(f"table {table!r}", chunk)
    written = write_file(path, safetensors_content(chunk), direct_io=True)
    return entry_of(path.name, written, "rows", table=table, shard=shard, hashes=_bounds(chunk["keys"]))


def _write_state(folder: Path, content: RankCheckpoint) -> FileEntry:
    text = json.dumps(dict(content.state), indent=1).encode()
    return entry_of("state.json", write_file(folder / "state.json", iter([memoryview(text)])), "state")


def _shard(content: RankCheckpoint, peers: CheckpointGroup) -> tuple[int, int]:
    return content.shard or (peers.rank, peers.world)


def _bounds(keys: torch.Tensor) -> tuple[int, int]:
    """Return the lowest and highest hash of the keys; (1, 0) without keys."""
    if not len(keys):
        return 1, 0
    hashes = hash_of(keys.cpu().numpy())
    return int(hashes.min()), int(hashes.max())
