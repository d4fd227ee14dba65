"""Reading a checkpoint: tensors by name when asked for, rows of tables for whoever owns them now."""

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
from nestrec.base.thread_team import cores_of_rank, in_order
from nestrec.checkpoint.checkpoint_content import Chunk
from nestrec.checkpoint.checkpoint_manifest import Manifest, local_reads
from nestrec.embedding.hashing import range_of_shard

Owned = Callable[[torch.Tensor], torch.Tensor]
"""(n,) keys to (n,) bool: which of them the reader owns."""
MOST_THREADS = 2
"""That read files ahead of who takes their rows; each holds one in memory."""
_NO_KEYS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors of safetensors files, read from the disk each time they are asked for."""

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
    """A checkpoint, its tensors and state verified. Read it before the next save, which may delete old files."""

    def __init__(self, chain: list[tuple[Path, Manifest]]):
        self._chain = chain  # newest first; the later ones are the bases of an incremental checkpoint
        self.path, self.manifest = chain[0]
        self.bytes_read = 0
        """Of rows and removed keys, so far."""

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def tables(self) -> tuple[str, ...]:
        return self.manifest.tables

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return LazyTensors([self.path / entry.name for entry in _of_kind(self.manifest, "tensors")])

    @cached_property
    def state(self) -> dict[str, Any]:
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
        """The rows of a table in chunks, each key once with its last value.

        Any rank may read any shard's files: `owned` picks the rows to keep. `shard` = (index, number) goes with it
        where `owned` means that shard: files without a hash in its range are then not even opened. Where it was another
        number of shards that saved, files at the two ends of the range hold rows of its neighbours as well.
        `superseded` are sorted keys to leave out. A file is compared with its digest as it is read: `CorruptFileError`.
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
        """What files hold; where there are cores for it, some are read ahead."""
        calls = (partial(local_reads(path.parent).tensors, path.name, entry) for entry in entries)
        for entry, chunk in zip(entries, in_order(calls, min(MOST_THREADS, cores_of_rank() - 1)), strict=True):
            self.bytes_read += entry.bytes
            yield chunk


def _of_kind(manifest: Manifest, kind: Kind) -> list[FileEntry]:
    return [entry for entry in manifest.files if entry.kind == kind]


def _of_table(manifest: Manifest, kind: Kind, table: str, shard: tuple[int, int] | None) -> list[FileEntry]:
    entries = [entry for entry in _of_kind(manifest, kind) if entry.table == table]
    return entries if shard is None else [entry for entry in entries if _may_hold(entry, shard)]


def _may_hold(entry: FileEntry, shard: tuple[int, int]) -> bool:
    """Whether a file may hold rows of the shard (index, number)."""
    if entry.hashes is None:
        return True
    (lowest, highest) = entry.hashes
    (first, end) = range_of_shard(*shard)
    return lowest < end and first <= highest
