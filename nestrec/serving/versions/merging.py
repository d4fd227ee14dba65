"""A version told in full, made of files already written: the last full one, and what has changed since.

Nothing is asked of the tables in training, and no more than a file is in memory at a time: a full version costs a
training run no pause, however large its tables are.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.checkpoint.content import Chunk
from nestrec.serving.versions.content import RankContent
from nestrec.serving.versions.manifest import VersionFile
from nestrec.serving.versions.reader import Versions, VersionStep, tensors_of


def can_merge(chain: Sequence[VersionStep], num_shards: int) -> bool:
    """Whether the files of a chain belong to the same shards as now."""
    return all(entry.num_shards == num_shards for step in chain for entry in step.manifest.files if _is_of_rows(entry))


def merged(versions: Versions, chain: Sequence[VersionStep], shard: tuple[int, int], *, owns_copy: bool) -> RankContent:
    """This shard's rows after the last of the chain, which begins with a full version, oldest first."""
    if not owns_copy:
        return RankContent(rows={}, shard=shard)
    names = [table.name for table in chain[-1].manifest.tables]
    return RankContent(
        rows={name: _newest_rows(versions, chain, shard, "rows", name) for name in names},
        index=_newest_rows(versions, chain, shard, "index", None),
        shard=shard,
    )


def _newest_rows(
    versions: Versions, chain: Sequence[VersionStep], shard: tuple[int, int], kind: str, table: str | None
) -> Iterator[Chunk]:
    """Each key once, with its last row; a key that was removed later than written is left out."""
    superseded: NDArray[np.int64] = np.zeros(0, np.int64)
    for step in reversed(chain):
        newer = [superseded]
        mine = [e for e in step.manifest.files if e.shard == shard[0] and e.table == table]
        for entry in mine:
            if entry.kind == kind:
                tensors = tensors_of(versions.read(step, entry), entry.name)
                keys = tensors["keys"].numpy()
                newer.append(keys)
                keep = torch.from_numpy(~np.isin(keys, superseded))
                if bool(keep.any()):
                    yield {name: values[keep] for name, values in tensors.items()}
        removed = [entry for entry in mine if entry.kind == "removed" and kind == "rows"]
        newer += [tensors_of(versions.read(step, entry), entry.name)["keys"].numpy() for entry in removed]
        superseded = np.unique(np.concatenate(newer))


def _is_of_rows(entry: VersionFile) -> bool:
    return entry.kind in {"rows", "removed", "index"}
