"""`nestrec export`: a trained run as a folder that can be served.

Weights, tables and the retrieval index as safetensors, everything else as JSON, one manifest with the digest of each
file. Nothing in it is executable. The folder appears whole or not at all.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from nestrec.base.config import dumps
from nestrec.base.errors import DataError, UserError
from nestrec.checkpoint import Checkpoints, Restored
from nestrec.checkpoint.durable import remove_folder, rename_folder, safetensors_content, sync_folder, write_file
from nestrec.data.ranking import checked_columns, item_column
from nestrec.distributed import Topology
from nestrec.models.retrieval import RetrievalModel
from nestrec.serving.spec import (
    COLUMNS_FILE,
    INDEX_FILE,
    ITEMS_FILE,
    MANIFEST_FILE,
    SPEC_FILE,
    WEIGHTS_FILE,
    ColumnSpec,
    FileDigest,
    ServableManifest,
    ServableSpec,
    table_file,
)  # fmt: skip
from nestrec.training.run_folder import RunFolder
from nestrec.training.session import Session
from nestrec.training.tasks.ranking import RankingTaskConfig
from nestrec.training.tasks.rows import RowsTaskConfig

_CHUNK_ROWS = 1 << 16


def export_run(run: Path, output: Path, *, best: bool = True) -> ServableManifest:
    """Write the best (or last) weights of a run as a servable folder."""
    cfg = RunFolder(run).config()
    if isinstance(cfg.task, RowsTaskConfig):
        raise UserError("has no sequences to serve", field="RUN", value=str(run), remedy="export a sequence model")
    if output.exists():
        raise UserError("exists already", field="OUT", value=str(output), remedy="name a new folder")
    session = Session.open(cfg, Topology.from_environment("cpu"))
    restored = _newest(RunFolder(run), best)
    session.restore(restored)
    spec = _spec(session, restored.step)
    partial = output.with_name(output.name + ".partial")
    remove_folder(partial)
    partial.mkdir(parents=True)
    manifest = _write(partial, session, spec)
    rename_folder(partial, output)
    return manifest


def _newest(folder: RunFolder, best: bool) -> Restored:
    found = Checkpoints(folder.best, keep=1).restore_latest() if best else None
    found = found or Checkpoints(folder.checkpoints).restore_latest()
    if found is None:
        raise UserError("has no checkpoint yet", field="RUN", value=str(folder.path), remedy="train it first")
    return found


def _spec(session: Session, step: int) -> ServableSpec:
    task, card = session.cfg.task, session.dataset.card
    assert not isinstance(task, RowsTaskConfig)
    columns: tuple[ColumnSpec, ...] = ()
    if isinstance(task, RankingTaskConfig):
        columns = tuple(
            ColumnSpec(name=c.name, keys=_vocabulary(session, c.name), num_rows=c.vocabulary_size)
            for c in checked_columns(card, task.inputs)
        )
    return ServableSpec(
        name=session.cfg.name, step=step, task=task, num_items=card.counts.items, action_bits=dict(card.action_bits),
        columns=columns,
    )  # fmt: skip


def _vocabulary(session: Session, column: str) -> tuple[str, ...] | None:
    try:
        return tuple(session.dataset.vocabulary(column).column("key").to_pylist())
    except DataError:
        return None


def _write(folder: Path, session: Session, spec: ServableSpec) -> ServableManifest:
    items = session.dataset.items()
    files = [
        _write_json(folder, SPEC_FILE, dumps(spec)),
        _write_json(folder, ITEMS_FILE, json.dumps(items.column("item_key").to_pylist())),
        _write_tensors(folder, WEIGHTS_FILE, dict(session.task.model.state_dict())),
    ]
    tables = {name: _table(session, name) for name in session.engine.tables}
    files += [_write_tensors(folder, table_file(name), {"weight": rows}) for name, rows in tables.items()]
    model = session.task.model
    if isinstance(model, RetrievalModel):
        index = {"vectors": model.item_vectors(tables["items"][1:]), "ids": torch.arange(1, spec.num_items + 1)}
        files.append(_write_tensors(folder, INDEX_FILE, index))
    else:
        names = [c.name for c in spec.columns if c.name.startswith("item_")]
        columns = {name: torch.from_numpy(item_column(items, name)) for name in names}
        files.append(_write_tensors(folder, COLUMNS_FILE, columns))
    manifest = ServableManifest(files=tuple(sorted(files, key=lambda f: f.name)))
    _write_json(folder, MANIFEST_FILE, dumps(manifest))
    sync_folder(folder)
    return manifest


def _table(session: Session, name: str) -> torch.Tensor:
    """(num_rows, D) every row as evaluation reads it: keys that never trained have their initial vector."""
    table = session.engine.tables[name]
    assert table.num_rows is not None
    rows = torch.empty(table.num_rows, table.dim, dtype=table.weight_dtype)
    feature = table.feature_names[0]
    for start in range(0, table.num_rows, _CHUNK_ROWS):
        keys = np.arange(start, min(start + _CHUNK_ROWS, table.num_rows))
        rows[start : start + len(keys)] = session.engine.lookup_readonly({feature: keys})[feature]
    return rows


def _write_json(folder: Path, name: str, text: str) -> FileDigest:
    size, digest = write_file(folder / name, iter([memoryview(text.encode())]))
    return FileDigest(name=name, bytes=size, sha256=digest)


def _write_tensors(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> FileDigest:
    size, digest = write_file(folder / name, safetensors_content(tensors))
    return FileDigest(name=name, bytes=size, sha256=digest)
