"""What one rank gives to a version, taken from its session after a step.

Most tables are served as they are: what has changed of them is what training has touched. Rows that go through a
matrix, stand for several ids or hold other features as well change with all of those: they are computed anew for every
version and compared with what the last one held, each rank for its part of the ids.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.artifacts.delta import json_difference, rows_difference
from nestrec.base.config import to_plain
from nestrec.checkpoint.checkpoint_content import Chunk
from nestrec.embedding.hashing import owner_of
from nestrec.embedding.table_config import DTYPES, InitConfig
from nestrec.exporters.servable_writer import described, descriptions, served_model
from nestrec.exporters.table_export import CHUNK_ROWS, TableExporter
from nestrec.ops.embedding.stochastic_rounding import whole
from nestrec.serving.model.servable_spec import SPEC_FILE, ServableSpec
from nestrec.serving.model.serving_spec import serving_form_of
from nestrec.serving.versions.version_manifest import PublishedTable, VersionManifest
from nestrec.serving.versions.version_store import tables_of
from nestrec.training.training_session import Session

Keys = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVersionData:
    """Rows in chunks of `keys` and `weight`. A replica that holds a copy gives none."""

    rows: Mapping[str, Iterable[Chunk]]
    """by table: those that have changed, or all that are not as they begin"""
    removed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """by table: keys whose rows are as they begin again"""
    index: Iterable[Chunk] = ()
    """vectors that are retrieved, by their rows in the index"""
    shard: tuple[int, int] = (0, 1)
    """(index, number)"""
    compared: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """by table: this rank's rows of those that are compared, as they are now"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What is the same on all ranks, of which the first writes its own."""

    tables: tuple[PublishedTable, ...]
    files: Mapping[str, Any]
    """what is not learnt, as `export` would write it"""
    spec: ServableSpec

    @staticmethod
    def of(session: Session, step: int) -> "ModelDescription":
        """Collective."""
        servable = described(session, step)
        exported = TableExporter(session, Path())
        names = dict.fromkeys(["items", *(column.table_name for column in servable.spec.columns if column.has_table)])
        tables = tuple(_published(session, exported, servable.spec, name) for name in names)
        return ModelDescription(tables=tables, files=descriptions(servable), spec=servable.spec)

    def at(self, step: int) -> "ModelDescription":
        """The same after another step."""
        spec = replace(self.spec, step=step)
        return replace(self, spec=spec, files={**self.files, SPEC_FILE: to_plain(spec)})

    def since(self, old: "ModelDescription | None") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What has changed: JSON, and tensors by name."""
        before = {} if old is None else old.files
        plain: dict[str, Any] = {"json": {}, "tensors": {}}
        tensors: dict[str, torch.Tensor] = {}
        for file, content in self.files.items():
            if file.endswith(".json"):
                plain["json"][file] = json_difference(before.get(file), content)
                continue
            for name, tensor in content.items():
                plain["tensors"][f"{file}/{name}"] = len(tensor)
                changed = rows_difference(before.get(file, {}).get(name), tensor)
                tensors |= {f"{file}/{name}/{part}": values for part, values in changed.items()}
        return plain, tensors


def _published(session: Session, exported: TableExporter, spec: ServableSpec, name: str) -> PublishedTable:
    table = session.engine.tables[name]
    num_rows = spec.num_items + 1 if name == "items" else exported.num_ids(name)
    if exported.holds_rows_of(name):
        return PublishedTable(
            name=name, num_rows=num_rows, dim=table.dim, dtype=table.dtype, seed=table.seed, init=table.init
        )
    one = exported.vectors(name, np.zeros(1, np.int64))
    dtype: Any = next(text for text, dtype in DTYPES.items() if dtype == one.dtype)
    return PublishedTable(
        name=name, num_rows=num_rows, dim=one.shape[1], dtype=dtype, seed=0, init=InitConfig(kind="zeros")
    )


def weights_of(session: Session) -> dict[str, torch.Tensor]:
    """Dense weights, safe from later steps."""
    return dict(served_model(session).state_dict())


def changes_of(
    session: Session, now: ModelDescription, base: VersionManifest, compared: Mapping[str, torch.Tensor]
) -> RankVersionData:
    """What has changed since an earlier version, safe from later steps. compared: what that held. Collective."""
    exported = TableExporter(session, Path())
    engine = session.engine
    rows: dict[str, list[Chunk]] = {}
    removed: dict[str, torch.Tensor] = {}
    kept: dict[str, torch.Tensor] = {}
    for table in now.tables:
        name = table.name
        if exported.holds_rows_of(name):
            rows[name] = [_weights_alone(chunk) for chunk in engine.snapshot(name, since=base.step)]
            removed[name] = engine.gone_since(name, base.step)
        else:
            rows[name], kept[name] = _compared(session, exported, table, compared.get(name))
    index: list[Chunk] = []
    if (vectors_of := _index_of(session)) is not None:
        if "items" in kept:
            index = [_vectors(vectors_of, chunk) for chunk in rows["items"]]
        else:
            new = _owned(session, np.arange(tables_of(base)["items"].num_rows, now.spec.num_items + 1))
            touched = [chunk["keys"].numpy() for chunk in rows["items"]]
            index = list(_index(session, vectors_of, np.unique(np.concatenate([*touched, removed["items"], new]))))
    if session.topology.replica != 0:
        return RankVersionData(rows={}, shard=_shard(session), compared=kept)
    return RankVersionData(rows=rows, removed=removed, index=index, shard=_shard(session), compared=kept)


def everything_of(session: Session, now: ModelDescription) -> RankVersionData:
    """All of it, read when it is written: before the next step. Collective."""
    exported = TableExporter(session, Path())
    engine = session.engine
    rows: dict[str, Iterable[Chunk]] = {}
    kept: dict[str, torch.Tensor] = {}
    for table in now.tables:
        if exported.holds_rows_of(table.name):
            rows[table.name] = map(_weights_alone, engine.snapshot(table.name))
        else:
            rows[table.name], kept[table.name] = _compared(session, exported, table, None)
    if session.topology.replica != 0:
        return RankVersionData(rows={}, shard=_shard(session), compared=kept)
    index: Iterable[Chunk] = ()
    if (vectors_of := _index_of(session)) is not None:
        keys = _owned(session, np.arange(1, now.spec.num_items + 1))
        whole_items = rows["items"] if "items" in kept else None
        index = _index(session, vectors_of, keys) if whole_items is None else _all_vectors(vectors_of, whole_items)
    return RankVersionData(rows=rows, index=index, shard=_shard(session), compared=kept)


def _compared(
    session: Session, exported: TableExporter, table: PublishedTable, old: torch.Tensor | None
) -> tuple[list[Chunk], torch.Tensor]:
    """This rank's rows that are not as they were, and all of its rows. Every rank asks equally often."""
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
    places = differ.nonzero()[:, 0]
    chunks: list[Chunk] = [
        {"keys": torch.from_numpy(ids)[part], "weight": new[part]} for part in places.split(CHUNK_ROWS) if len(part)
    ]
    return chunks, new


def _index_of(session: Session) -> Any:
    """How vectors that are retrieved are made of rows, on the CPU as `export` does it; none where nothing is."""
    vectors_of = serving_form_of(session.cfg.task).index
    if vectors_of is None:
        return None
    model = served_model(session)
    return lambda weight: vectors_of(model, whole(weight))


def _index(session: Session, vectors_of: Any, keys: Keys) -> Iterator[Chunk]:
    """Of items whose rows this rank owns."""
    shard, keys = session.engine.shards["items"], keys[(keys > 0) & (keys <= session.dataset.num_items)]
    for start in range(0, len(keys), CHUNK_ROWS):
        part = keys[start : start + CHUNK_ROWS]
        weight = shard.layout.view(shard.read(part), "weight").cpu().contiguous()
        yield {"keys": torch.from_numpy(part - 1), "weight": vectors_of(weight)}


def _all_vectors(vectors_of: Any, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    for chunk in chunks:
        yield _vectors(vectors_of, chunk)


def _vectors(vectors_of: Any, chunk: Chunk) -> Chunk:
    is_item = chunk["keys"] > 0
    return {"keys": chunk["keys"][is_item] - 1, "weight": vectors_of(chunk["weight"][is_item])}


def _weights_alone(chunk: Chunk) -> Chunk:
    return {"keys": chunk["keys"], "weight": chunk["weight"]}


def _owned(session: Session, keys: Keys) -> Keys:
    owned: Keys = keys[owner_of(keys, session.topology.num_shards) == session.topology.shard]
    return owned


def _shard(session: Session) -> tuple[int, int]:
    return session.topology.shard, session.topology.num_shards
