"""Writes one rank's files of a checkpoint."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote

import torch

from nestrec.base.failpoints import fail_point
from nestrec.base.parallel import cores_of_rank, in_order
from nestrec.checkpoint.content import Chunk, Content, check_chunk, check_finite, chunks_of, parts_of
from nestrec.checkpoint.durable import safetensors_content, write_file
from nestrec.checkpoint.manifest import FileEntry, Kind
from nestrec.checkpoint.peers import Peers
from nestrec.embedding.hashing import hash_of

PART_BYTES = 256 << 20
"""Dense tensors are split into files of about this size."""
MOST_THREADS = 2
"""That write rows beside the one that reads them; each holds a chunk of them in memory."""


def write_files(folder: Path, content: Content, peers: Peers) -> list[FileEntry]:
    """Write what `content` gives this rank to write; entries for the manifest."""
    fail_point("checkpoint.before_first_file")
    entries = []
    for entry in _write_all(folder, content, peers):
        entries.append(entry)
        fail_point("checkpoint.between_files")
    return entries


def _write_all(folder: Path, content: Content, peers: Peers) -> Iterator[FileEntry]:
    if peers.is_first:
        yield _write_state(folder, content)
        for part, tensors in enumerate(parts_of(content.tensors, PART_BYTES)):
            check_finite("the dense weights and their optimiser state", tensors)
            name = f"tensors-{part:05d}.safetensors"
            yield _entry(name, write_file(folder / name, safetensors_content(tensors), past_cache=True), "tensors")
    for table, keys in content.removed.items():
        name = f"removed-{_safe(table)}-{peers.rank:05d}.safetensors"
        written = write_file(folder / name, safetensors_content({"keys": keys}))
        yield _entry(name, written, "removed", table, content.shard or (peers.rank, peers.world), _bounds(keys))
    # One core trains, one reads rows. Where there are no more, rows are read and written in turn.
    yield from in_order(_rows(folder, content, peers), min(MOST_THREADS, cores_of_rank() - 2))


def _rows(folder: Path, content: Content, peers: Peers) -> Iterator[Callable[[], FileEntry]]:
    parts, shard = dict.fromkeys(content.tables, 0), content.shard or (peers.rank, peers.world)
    for table, chunk in chunks_of(content.tables):
        name = f"rows-{_safe(table)}-{peers.rank:05d}-{parts[table]:05d}.safetensors"
        parts[table] += 1
        yield partial(_write_rows, folder / name, table, chunk, shard)


def _write_rows(path: Path, table: str, chunk: Chunk, shard: tuple[int, int]) -> FileEntry:
    check_chunk(table, chunk)
    check_finite(f"table {table!r}", chunk)
    written = write_file(path, safetensors_content(chunk), past_cache=True)
    return _entry(path.name, written, "rows", table, shard, _bounds(chunk["keys"]))


def _write_state(folder: Path, content: Content) -> FileEntry:
    text = json.dumps(dict(content.state), indent=1).encode()
    return _entry("state.json", write_file(folder / "state.json", iter([memoryview(text)])), "state")


def _entry(  # noqa: PLR0917
    name: str,
    written: tuple[int, str],
    kind: Kind,
    table: str | None = None,
    shard: tuple[int, int] = (0, 1),
    hashes: tuple[int, int] | None = None,
) -> FileEntry:
    size, digest = written
    return FileEntry(
        name=name,
        bytes=size,
        sha256=digest,
        kind=kind,
        table=table,
        shard=shard[0],
        num_shards=shard[1],
        hashes=hashes,
    )


def _bounds(keys: torch.Tensor) -> tuple[int, int]:
    """Lowest and highest hash; with nothing between them where there are no keys."""
    if not len(keys):
        return 1, 0
    hashes = hash_of(keys.cpu().numpy())
    return int(hashes.min()), int(hashes.max())


def _safe(table: str) -> str:
    return quote(table, safe="")
