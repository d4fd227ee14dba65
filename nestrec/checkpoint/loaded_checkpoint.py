"""Reads a checkpoint: tensors lazily by name, and table rows by the shard that owns them now (resharding)."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from nestrec.artifacts.delta import newest_rows
from nestrec.artifacts.manifest import FileEntry, Kind
from nestrec.base.thread_team import cores_per_rank, run_ahead
from nestrec.checkpoint.checkpoint_content import Chunk
from nestrec.checkpoint.checkpoint_manifest import Manifest, local_reads
from nestrec.embedding.hashing import range_of_shard

Owned = Callable[[torch.Tensor], torch.Tensor]
"""Function from (n,) keys to an (n,) bool mask of the keys that the reader owns."""
MAX_READ_THREADS = 2
"""Maximum number of threads that read files ahead; each holds one file in memory."""
_NO_KEYS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors of safetensors files, read from disk at each access."""

    def __init__(self, paths: list[Path]):
        self._path_of: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                self._path_of.update(dict.fromkeys(file.keys(), path))

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._path_of[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._path_of)

    def __len__(self) -> int:
        return len(self._path_of)


class LoadedCheckpoint:
    """Checkpoint whose tensors and state are verified. Read it before the next save, which may delete old files."""

    def __init__(self, chain: list[tuple[Path, Manifest]]):
        self._chain = chain  # newest first; the later ones are the bases of an incremental checkpoint
        self.path, self.manifest = chain[0]
        self.bytes_read = 0
        """Number of bytes of rows and removed keys that were read so far."""

    @property
    def step(self) -> int:
        """Number of training steps completed."""
        return self.manifest.step

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables of the checkpoint."""
        return self.manifest.tables

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Dense tensors by name, read at access."""
        return LazyTensors([self.path / entry.name for entry in _of_kind(self.manifest, "tensors")])

    @cached_property
    def state(self) -> dict[str, Any]:
        """JSON state of the checkpoint."""
        (entry,) = _of_kind(self.manifest, "state")
        state: dict[str, Any] = json.loads((self.path / entry.name).read_bytes())
        return state

    def rows(
        self,
        table: str,
        *,
        shard: tuple[int, int] | None = None,
        owned: Owned | None = None,
        superseded: NDArray[np.int64] = _NO_KEYS,
    ) -> Iterator[Chunk]:
        """Yield the rows of a table in chunks, each key once with its newest values.

        Files are verified against their digests while they are read. Any rank may read the files of any shard.

        Args:
            table: Name of the table.
            shard: Index and number of shards of the reader, if `owned` selects this shard. Files without a hash in its
                range are not opened. If the checkpoint was saved with another number of shards, the files at both ends
                of the range also contain rows of adjacent shards.
            owned: Function that selects the rows to yield; None yields all.
            superseded: Sorted keys to leave out.

        Raises:
            CorruptFileError: A file does not match its digest.
        """
        layers = [
            (
                self._read(path, _of_table(manifest, "rows", table, shard)),
                self._read(path, _of_table(manifest, "removed", table, shard)),
            )
            for path, manifest in self._chain
        ]
        yield from newest_rows(layers, superseded=superseded, owned=owned)

    def _read(self, path: Path, entries: list[FileEntry]) -> Iterator[Chunk]:
        """Yield the content of files; some are read ahead if there are spare cores."""
        calls = (partial(local_reads(path.parent).tensors, path.name, entry) for entry in entries)
        for entry, chunk in zip(entries, run_ahead(calls, min(MAX_READ_THREADS, cores_per_rank() - 1)), strict=True):
            self.bytes_read += entry.bytes
            yield chunk


def _of_kind(manifest: Manifest, kind: Kind) -> list[FileEntry]:
    return [entry for entry in manifest.files if entry.kind == kind]


def _of_table(manifest: Manifest, kind: Kind, table: str, shard: tuple[int, int] | None) -> list[FileEntry]:
    entries = [entry for entry in _of_kind(manifest, kind) if entry.table == table]
    return entries if shard is None else [entry for entry in entries if _may_hold(entry, shard)]


def _may_hold(entry: FileEntry, shard: tuple[int, int]) -> bool:
    """Return whether a file may contain rows of the shard (index, number)."""
    if entry.hashes is None:
        return True
    (lowest, highest) = entry.hashes
    (first, end) = range_of_shard(*shard)
    return lowest < end and first <= highest
