"""Collects the content that one rank contributes to a published version, after a training step.

A version is either full or a delta of the previous one. Most tables are served unchanged: their delta consists of the
rows that training has updated. Derived rows, which are projected, shared by several ids (hashed) or include other
features, can change without an update of the row itself. They are computed for every version and compared with those of
the previous version; each rank does this for its shard of the ids.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.artifacts.delta import json_diff, rows_diff
from nestrec.base.config import to_plain
from nestrec.checkpoint.checkpoint_content import Chunk
from nestrec.embedding.hashing import owner_of
from nestrec.embedding.table_config import DTYPES, InitConfig
from nestrec.exporters.servable_writer import copy_dense_model, describe_model, description_files
from nestrec.exporters.table_export import CHUNK_ROWS, TableExporter
from nestrec.ops.embedding.stochastic_rounding import to_float32
from nestrec.serving.model.servable_spec import SPEC_FILE, ServableSpec
from nestrec.serving.model.serving_spec import serving_spec_of
from nestrec.serving.versions.version_manifest import PublishedTable, VersionManifest
from nestrec.serving.versions.version_store import tables_of
from nestrec.training.training_session import Session

Keys = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVersionData:
    """Contribution of one rank to a version, in chunks of `keys` and `weight`; only replica 0 contributes rows."""

    rows: Mapping[str, Iterable[Chunk]]
    """Rows by table: the changed ones (delta), or all that differ from their initial value (full)."""
    removed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Keys by table whose rows were deleted, that is, have their initial value again."""
    index: Iterable[Chunk] = ()
    """Vectors of the retrieval index; their keys are row numbers of the index."""
    shard: tuple[int, int] = (0, 1)
    """Index of this rank's shard and number of shards."""
    derived_rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """This rank's derived rows by table, to compare with the next version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Content of a version that is equal on all ranks; the first rank writes it."""

    tables: tuple[PublishedTable, ...]
    files: Mapping[str, Any]
    """Contents of the files without trained parameters, by file name, as in an export."""
    spec: ServableSpec

    @staticmethod
    def of(session: Session, step: int) -> "ModelDescription":
        """Describe the model of a session. Collective."""
        servable = describe_model(session, step)
        exported = TableExporter(session, Path())
        names = dict.fromkeys(["items", *(column.table_name for column in servable.spec.columns if column.has_table)])
        tables = tuple(_published_table(session, exported, servable.spec, name) for name in names)
        return ModelDescription(tables=tables, files=description_files(servable), spec=servable.spec)

    def at_step(self, step: int) -> "ModelDescription":
        """Return the same description for another training step."""
        spec = replace(self.spec, step=step)
        return replace(self, spec=spec, files={**self.files, SPEC_FILE: to_plain(spec)})

    def diff_since(self, old: "ModelDescription | None") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the differences to an older description (None: everything) as JSON, and as tensors by name."""
        before = {} if old is None else old.files
        plain: dict[str, Any] = {"json": {}, "tensors": {}}
        tensors: dict[str, torch.Tensor] = {}
        for file, content in self.files.items():
            if file.endswith(".json"):
                plain["json"][file] = json_diff(before.get(file), content)
                continue
            for name, tensor in content.items():
                plain["tensors"][f"{file}/{name}"] = len(tensor)
                changed = rows_diff(before.get(file, {}).get(name), tensor)
                tensors |= {f"{file}/{name}/{part}": values for part, values in changed.items()}
        return plain, tensors


def _published_table(session: Session, exported: TableExporter, spec: ServableSpec, name: str) -> PublishedTable:
    table = session.engine.tables[name]
    num_rows = spec.num_items + 1 if name == "items" else exported.num_ids(name)
    if exported.serves_rows_unchanged(name):
        return PublishedTable(
            name=name, num_rows=num_rows, dim=table.dim, dtype=table.dtype, seed=table.seed, init=table.init
        )
    row = exported.vectors(name, np.zeros(1, np.int64))
    dtype: Any = next(text for text, dtype in DTYPES.items() if dtype == row.dtype)
    return PublishedTable(
        name=name, num_rows=num_rows, dim=row.shape[1], dtype=dtype, seed=0, init=InitConfig(kind="zeros")
    )


def copy_dense_weights(session: Session) -> dict[str, torch.Tensor]:
    """Return a copy of the dense weights, which later training steps do not change."""
    return dict(copy_dense_model(session).state_dict())


def delta_content(
    session: Session, now: ModelDescription, base: VersionManifest, derived_rows: Mapping[str, torch.Tensor]
) -> RankVersionData:
    """Copy everything that has changed since an earlier version. Later training steps do not change it. Collective.

    Args:
        session: Session of the run.
        now: Description of the model at the current step.
        base: Manifest of the earlier version.
        derived_rows: This rank's derived rows in the earlier version, by table.
    """
    exported = TableExporter(session, Path())
    engine = session.engine
    rows: dict[str, list[Chunk]] = {}
    removed: dict[str, torch.Tensor] = {}
    current: dict[str, torch.Tensor] = {}
    for table in now.tables:
        name = table.name
        if exported.serves_rows_unchanged(name):
            rows[name] = [_keys_and_weights(chunk) for chunk in engine.snapshot(name, since=base.step)]
            removed[name] = engine.deleted_since(name, base.step)
        else:
            rows[name], current[name] = _read_derived(session, exported, table, derived_rows.get(name))
    index: list[Chunk] = []
    if (vectors_of := _index_of(session)) is not None:
        if "items" in current:
            index = [_vectors(vectors_of, chunk) for chunk in rows["items"]]
        else:
            new = _owned_keys(session, np.arange(tables_of(base)["items"].num_rows, now.spec.num_items + 1))
            touched = [chunk["keys"].numpy() for chunk in rows["items"]]
            index = list(_index(session, vectors_of, np.unique(np.concatenate([*touched, removed["items"], new]))))
    if session.topology.replica != 0:
        return RankVersionData(rows={}, shard=_shard(session), derived_rows=current)
    return RankVersionData(rows=rows, removed=removed, index=index, shard=_shard(session), derived_rows=current)


def full_content(session: Session, now: ModelDescription) -> RankVersionData:
    """Return the full content of a version. Rows are read lazily, so it must be written before the next training step.
    Collective."""
    exported = TableExporter(session, Path())
    engine = session.engine
    rows: dict[str, Iterable[Chunk]] = {}
    current: dict[str, torch.Tensor] = {}
    for table in now.tables:
        if exported.serves_rows_unchanged(table.name):
            rows[table.name] = map(_keys_and_weights, engine.snapshot(table.name))
        else:
            rows[table.name], current[table.name] = _read_derived(session, exported, table, None)
    if session.topology.replica != 0:
        return RankVersionData(rows={}, shard=_shard(session), derived_rows=current)
    index: Iterable[Chunk] = ()
    if (vectors_of := _index_of(session)) is not None:
        keys = _owned_keys(session, np.arange(1, now.spec.num_items + 1))
        all_items = rows["items"] if "items" in current else None
        index = _index(session, vectors_of, keys) if all_items is None else _vectors_of_chunks(vectors_of, all_items)
    return RankVersionData(rows=rows, index=index, shard=_shard(session), derived_rows=current)


def _read_derived(
    session: Session, exported: TableExporter, table: PublishedTable, old: torch.Tensor | None
) -> tuple[list[Chunk], torch.Tensor]:
    """Compute this rank's derived rows of a table and compare them with the old ones.

    Every rank makes the same number of lookups, because these are collective.

    Returns:
        The changed rows in chunks, and all rows.
    """
    shard, num_shards = _shard(session)
    ids = np.arange(shard, table.num_rows, num_shards)
    num_chunks = math.ceil(math.ceil(table.num_rows / num_shards) / CHUNK_ROWS)
    parts = [
        exported.vectors(table.name, ids[number * CHUNK_ROWS : (number + 1) * CHUNK_ROWS]).cpu()
        for number in range(num_chunks)
    ]
    new = torch.cat(parts).contiguous()
    differ = torch.ones(len(new), dtype=torch.bool)
    if old is not None and old.shape[1:] == new.shape[1:] and len(old) <= len(new):
        differ[: len(old)] = (old.view(torch.uint8) != new[: len(old)].view(torch.uint8)).any(1)
    indices = differ.nonzero()[:, 0]
    chunks: list[Chunk] = [
        {"keys": torch.from_numpy(ids)[part], "weight": new[part]} for part in indices.split(CHUNK_ROWS) if len(part)
    ]
    return chunks, new


def _index_of(session: Session) -> Any:
    """Return the function that computes index vectors from item rows on the CPU, as in an export.

    It is None for a model without a retrieval index.
    """
    vectors_of = serving_spec_of(session.cfg.task).index
    if vectors_of is None:
        return None
    model = copy_dense_model(session)
    return lambda weight: vectors_of(model, to_float32(weight))


def _index(session: Session, vectors_of: Any, keys: Keys) -> Iterator[Chunk]:
    """Yield the index vectors of items whose rows this rank owns."""
    shard, keys = session.engine.shards["items"], keys[(keys > 0) & (keys <= session.dataset.num_items)]
    for start in range(0, len(keys), CHUNK_ROWS):
        part = keys[start : start + CHUNK_ROWS]
        weight = shard.layout.view(shard.read(part), "weight").cpu().contiguous()
        yield {"keys": torch.from_numpy(part - 1), "weight": vectors_of(weight)}


def _vectors_of_chunks(vectors_of: Any, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    for chunk in chunks:
        yield _vectors(vectors_of, chunk)


def _vectors(vectors_of: Any, chunk: Chunk) -> Chunk:
    is_item = chunk["keys"] > 0
    return {"keys": chunk["keys"][is_item] - 1, "weight": vectors_of(chunk["weight"][is_item])}


def _keys_and_weights(chunk: Chunk) -> Chunk:
    return {"keys": chunk["keys"], "weight": chunk["weight"]}


def _owned_keys(session: Session, keys: Keys) -> Keys:
    owned: Keys = keys[owner_of(keys, session.topology.num_shards) == session.topology.shard]
    return owned


def _shard(session: Session) -> tuple[int, int]:
    return session.topology.shard, session.topology.num_shards
