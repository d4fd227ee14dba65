"""`nestrec export`: a trained run as a folder that can be served.

Weights, tables and the retrieval index as safetensors, everything else as JSON, one manifest with the digest of each
file. Nothing in it is executable. The folder appears whole or not at all.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from nestrec.artifacts.atomic_files import remove_folder, safetensors_content, write_file
from nestrec.artifacts.manifest import FileDigest
from nestrec.artifacts.writer_group import CheckpointGroup
from nestrec.base.config import config, dumps, to_plain
from nestrec.base.config_values import from_plain
from nestrec.base.cuda import DeviceChoice, chosen_device
from nestrec.base.errors import DataError, UserError, require
from nestrec.base.files import check_folder, fsync_path, replaced_folder
from nestrec.data.dataset_schema import EVENT_PREFIX, ITEM_PREFIX
from nestrec.data.samples.feature_inputs import Column, item_column
from nestrec.data.samples.retrieval_inputs import CONTEXT_PREFIX
from nestrec.distributed import Topology
from nestrec.distributed.collectives import raise_together
from nestrec.distributed.topology import check_device
from nestrec.exporters.export_checks import check_defaults, measured_cost, with_search
from nestrec.exporters.table_export import CHUNK_ROWS, TableExporter
from nestrec.models.encoder_parts import computed_in
from nestrec.ops.embedding.stochastic_rounding import whole
from nestrec.serving.engine.golden_request import recorded_probe
from nestrec.serving.kv_cache.kv_page_pool import PrefixDtype
from nestrec.serving.model.item_id_map import KeyedTable
from nestrec.serving.model.item_search import SearchConfig
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import (
    COLUMNS_FILE,
    INDEX_FILE,
    ITEMS_FILE,
    KEYS_FILE,
    LONGEST_LIST,
    MANIFEST_FILE,
    PROBE_FILE,
    SEARCH_FILE,
    SPEC_FILE,
    TITLES_FILE,
    WEIGHTS_FILE,
    ColumnSpec,
    InputDefaults,
    ServableManifest,
    ServableSpec,
    table_file,
)
from nestrec.serving.model.served_tables import (
    PACKED_KINDS,
    DeviceTable,
    QuantizedTable,
    ServedTable,
    mapped,
    packed_rows,
    packed_width,
)
from nestrec.serving.model.serving_spec import serving_form_of
from nestrec.training.run_checkpointer import RunWeights
from nestrec.training.run_folder import RunFolder
from nestrec.training.run_identity import Identity, check_restored, identity_of
from nestrec.training.training_session import Session

Dtype = Literal["run", "float32", "bfloat16"]
TablesDtype = Literal["run", "float32", "bfloat16", "int8", "fp8"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@config
class ExportConfig:
    defaults: InputDefaults = InputDefaults()
    """what stands in for something that the model reads and a request does not tell"""
    search: SearchConfig = SearchConfig()
    """of the index of a retrieval model"""
    dtype: Dtype = "run"
    """of the dense weights and of all computation; run: that of training"""
    tables: TablesDtype = "run"
    """of the rows of tables; int8 and fp8 have a scale for each row"""
    prefixes: PrefixDtype = "model"
    """of the kept keys and values that the cost of fewer bits is measured with; a server takes those of its
    --service.engine.prefix_dtype"""
    device: DeviceChoice = "auto"
    """where that cost is measured; auto: on a GPU where there is one that has room for the tables"""


def export_run(
    run: Path,
    output: Path,
    *,
    best: bool = True,
    defaults: InputDefaults | None = None,
    search: SearchConfig | None = None,
    dtype: Dtype = "run",
    tables: TablesDtype = "run",
    prefixes: PrefixDtype = "model",
    device: DeviceChoice = "auto",
) -> ServableManifest:
    """Write the best (or last) weights of a run as a servable folder. defaults: of inputs that requests leave out.

    dtype, tables: in fewer bits; what that costs is measured on a device, on the run's validation part, with prefixes
    kept so.
    """
    check_device(chosen_device(device))
    serving_form_of(RunFolder(run).config().task)  # refuses what cannot be served before anything is read
    check_folder(output.parent, "OUT")
    _check_new(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with restored_session(run, best=best) as (session, step):
        exported = servable_of_session(session, step, output.parent)

        def write() -> ServableManifest:
            servable = exported
            if (dtype, tables, prefixes) != ("run", "run", "model"):
                _check_fewer_bits(servable)
                chosen = in_fewer_bits(servable, dtype, tables, output.parent)
                cost = measured_cost(session, servable, chosen, tables=tables, prefixes=prefixes, device=device)
                servable = replace(chosen, precision=cost)
            servable = _with_defaults(servable, defaults)
            if search is not None and search.kind != "exact":
                servable = with_search(servable, search, Path(session.cfg.data.folder))
            return write_servable(servable, output)

        return _by_first(session.topology, write)


def servable_of_run(run: Path, scratch: Path, *, best: bool = True) -> Servable:
    """The best (or last) weights of a run, on the CPU. scratch: a folder on a disk with room for its tables."""
    with restored_session(run, best=best) as (session, step):
        return servable_of_session(session, step, scratch)


@contextlib.contextmanager
def restored_session(run: Path, *, best: bool) -> Iterator[tuple[Session, int]]:
    """A run on the CPU with its best (or last) weights, and their step."""
    with contextlib.ExitStack() as held:
        topology = held.enter_context(Topology.lent(lambda: Topology.from_environment("cpu")))
        folder = RunFolder(run)
        with folder.naming_config():
            session = Session.open(folder.config(), topology)
        held.enter_context(contextlib.closing(session.engine))
        restored, _ = RunWeights(session.cfg, folder, topology).restore(best=best)
        check_restored(restored, Identity.of(session.cfg, folder.identity() or identity_of(restored.state)))
        session.restore(restored)
        with session.dense.averaged():
            yield session, restored.step


def _by_first(topology: Topology, write: Callable[[], ServableManifest]) -> ServableManifest:
    """What the first rank has written, or its error, on all ranks; these wait for it as long as for a checkpoint."""
    peers = CheckpointGroup.of_topology(topology)
    manifest = None
    error = None
    try:
        manifest = write() if peers.is_first else None
    except UserError as refused:
        error = refused
    plain = peers.gather(None if manifest is None else to_plain(manifest))[0]
    if topology.world > 1:
        raise_together(topology.control, error)
    elif error is not None:
        raise error
    return manifest or from_plain(ServableManifest, plain)


def _check_fewer_bits(servable: Servable) -> None:
    require(
        servable.reads_items,
        "reads no histories, by which the cost of fewer bits is measured",
        option="task.kind",
        value=servable.spec.task.kind,
        remedy="leave out --dtype, --tables and --prefixes",
    )


def _with_defaults(servable: Servable, defaults: InputDefaults | None) -> Servable:
    if defaults is None:
        return servable
    check_defaults(defaults, servable)
    return replace(servable, spec=replace(servable.spec, defaults=defaults))


def write_servable(servable: Servable, output: Path) -> ServableManifest:
    """Write a model as a servable folder, which must not exist yet."""
    _check_new(output)
    remove_folder(output.with_name(output.name + ".partial"))  # the temporary name that earlier versions used
    with replaced_folder(output, marker=MANIFEST_FILE, field="OUT") as partial:
        return _write(partial, servable)


def _check_new(output: Path) -> None:
    require(not output.exists(), "exists already", option="OUT", value=str(output), remedy="name a new folder")


def servable_of_session(session: Session, step: int, scratch: Path) -> Servable:
    """The model of a session as it is now, on the CPU. Collective."""
    if (exported := serving_form_of(session.cfg.task).exported) is not None:
        return cast(Servable, exported(session, step))
    servable = described(session, step)
    tables = TableExporter(session, scratch)
    with_table = [c for c in servable.spec.columns if c.has_table]
    served = {"items": tables.items()} | {c.name: tables.rows(c.table_name) for c in with_table}
    vectors_of = servable.serving.index
    if vectors_of is None:
        return replace(servable, tables=served)
    index = _index(partial(vectors_of, servable.model), served["items"].weight, scratch)
    return replace(servable, tables=served, index=index)


def described(session: Session, step: int) -> Servable:
    """The model of a session without its tables and index."""
    task = session.cfg.task
    dataset = session.dataset
    serving = serving_form_of(task)
    tables = TableExporter(session, Path())
    columns = tuple(_column(session, tables, c) for c in serving.columns(task, dataset.card))
    spec = ServableSpec(
        name=session.cfg.name,
        step=step,
        task=task,
        num_items=dataset.num_items,
        columns=columns,
        folds_items=tables.folds_items,
        item_vectors=tables.item_vectors,
        action_bits=dict(dataset.card.action_bits),
    )
    of_items = [] if tables.folds_items else [c.name for c in columns if c.name.startswith(ITEM_PREFIX)]
    return Servable(
        spec=spec,
        version="",
        model=served_model(session),
        tables={},
        item_keys=tuple(dataset.items().column("item_key").to_pylist()),
        item_titles=tuple(dataset.item_texts()),
        index=None,
        item_columns={name: torch.from_numpy(item_column(dataset.items(), name)) for name in of_items},
    )


def served_model(session: Session) -> nn.Module:
    """A copy of the dense part, without the matrices whose products are in the exported rows."""
    model: Any = deepcopy(session.task.model)
    if hasattr(model, "to_width"):
        model.to_width = model.to_width.without_tables()
    return cast(nn.Module, model.to("cpu").eval().requires_grad_(False))


def _column(session: Session, tables: TableExporter, column: Column) -> ColumnSpec:
    """How a server reads a column of the task."""
    of_event = column.name.removeprefix(CONTEXT_PREFIX)
    stored = column.name if of_event == column.name else EVENT_PREFIX + of_event
    feature = next((f for f in session.dataset.card.features if f.column == stored), None)
    spec = ColumnSpec(name=column.name, keys=None, num_rows=0, width=column.width)
    if feature is not None:
        spec = replace(spec, kind=cast(Any, feature.kind), transform=feature.transform)
    if not column.vocabulary_size:
        return spec
    table = tables.table_of(column.name)
    most_ids = {"categories": LONGEST_LIST, "bag": spec.transform.max_ids}.get(spec.kind, 0)
    return replace(
        spec,
        most_ids=most_ids,
        keys=_vocabulary(session, stored),
        num_rows=tables.num_rows(column.name),
        table="" if table == column.name else table,
        pooling=session.task.pooling.get(column.name, ""),
    )


def _vocabulary(session: Session, column: str) -> tuple[str, ...] | None:
    try:
        return tuple(session.dataset.vocabulary(column).column("key").to_pylist())
    except DataError:
        return None


def _write(folder: Path, servable: Servable) -> ServableManifest:
    files = [
        _write_json(folder, PROBE_FILE, dumps(recorded_probe(servable))),
        _write_tensors(folder, WEIGHTS_FILE, dict(servable.model.state_dict())),
    ]
    for name, content in descriptions(servable).items():
        if name.endswith(".json"):
            files.append(_write_json(folder, name, json.dumps(content, indent=2 if name == SPEC_FILE else None)))
        else:
            files.append(_write_tensors(folder, name, content))
    file_of = {"items": "items"} | {c.name: c.table_name for c in servable.spec.columns if c.has_table}
    tables = {file_of[column]: table for column, table in servable.tables.items()}
    files += [_write_tensors(folder, table_file(name), _content(table)) for name, table in tables.items()]
    if servable.index is not None:
        ids = torch.arange(1, servable.spec.num_items + 1)
        files.append(_write_tensors(folder, INDEX_FILE, {"vectors": _weight(servable.index), "ids": ids}))
        if servable.search is not None:
            files.append(_write_tensors(folder, SEARCH_FILE, servable.search))
    manifest = ServableManifest(files=tuple(sorted(files, key=lambda f: f.name)), precision=servable.precision)
    _write_json(folder, MANIFEST_FILE, dumps(manifest))
    fsync_path(folder)
    return manifest


def descriptions(servable: Servable) -> dict[str, Any]:
    """What a folder holds beside numbers that are learnt, by file: JSON, or tensors by name."""
    found: dict[str, Any] = {SPEC_FILE: to_plain(servable.spec), ITEMS_FILE: list(servable.item_keys)}
    if servable.item_titles:
        found[TITLES_FILE] = list(servable.item_titles)
    if servable.serving.index is None:
        found[COLUMNS_FILE] = dict(servable.item_columns)
    keyed = {servable.columns[name].table_name: t for name, t in servable.tables.items() if isinstance(t, KeyedTable)}
    if keyed:
        found[KEYS_FILE] = {name: torch.from_numpy(table.keys) for name, table in keyed.items()}
    return found


def in_fewer_bits(servable: Servable, dtype: Dtype, tables: TablesDtype, scratch: Path) -> Servable:
    """The same model. scratch: a folder on a disk with room for its tables."""
    model = deepcopy(servable.model) if dtype == "run" else computed_in(deepcopy(servable.model), _DTYPES[dtype])
    if tables == "run":
        return replace(servable, model=model)
    chosen: dict[int, ServedTable] = {}
    for table in servable.tables.values():
        if id(table) not in chosen:  # columns may share one
            chosen[id(table)] = _converted(_weight(table), tables, scratch)
    index = None if servable.index is None else _converted(_weight(servable.index), _of_index(tables), scratch)
    return replace(servable, model=model, tables={n: chosen[id(t)] for n, t in servable.tables.items()}, index=index)


def _of_index(tables: TablesDtype) -> TablesDtype:
    """Its rows are searched as they lie, without a scale."""
    return "bfloat16" if tables in PACKED_KINDS else tables


def _converted(weight: torch.Tensor, tables: TablesDtype, scratch: Path) -> ServedTable:
    kind = next((kind for kind in PACKED_KINDS if kind == tables), None)
    if kind is None:
        own = _DTYPES[tables]
        return DeviceTable(_by_chunks(weight, weight.shape[1], own, lambda rows: rows.to(own), scratch))
    width = packed_width(weight.shape[1])
    return QuantizedTable(
        DeviceTable(_by_chunks(weight, width, torch.uint8, lambda rows: packed_rows(rows, kind), scratch)), kind
    )


def _by_chunks(
    weight: torch.Tensor,
    width: int,
    dtype: torch.dtype,
    of_rows: Callable[[torch.Tensor], torch.Tensor],
    scratch: Path,
) -> torch.Tensor:
    found = mapped(scratch, len(weight), width, dtype)
    for start in range(0, len(weight), CHUNK_ROWS):
        found[start : start + CHUNK_ROWS] = of_rows(weight[start : start + CHUNK_ROWS])
    return found


def _content(table: ServedTable) -> dict[str, torch.Tensor]:
    if isinstance(table, KeyedTable):
        return _content(table.by_row)
    if isinstance(table, QuantizedTable):
        return {table.kind: _weight(table.packed)}
    return {"weight": _weight(table)}


def _weight(table: ServedTable) -> torch.Tensor:
    assert isinstance(table, DeviceTable)
    return table.weight


def _index(vectors_of: Callable[[torch.Tensor], torch.Tensor], items_ND: torch.Tensor, scratch: Path) -> DeviceTable:
    """What queries meet, in the type that the model computes in, so that scores are those of evaluation."""
    vectors = mapped(scratch, len(items_ND) - 1, items_ND.shape[1], whole(items_ND[:0]).dtype)
    for start in range(0, len(vectors), CHUNK_ROWS):
        end = min(start + CHUNK_ROWS, len(vectors))
        vectors[start:end] = vectors_of(whole(items_ND[start + 1 : end + 1]))
    return DeviceTable(vectors)


def _write_json(folder: Path, name: str, text: str) -> FileDigest:
    size, digest = write_file(folder / name, iter([memoryview(text.encode())]))
    return FileDigest(name=name, bytes=size, sha256=digest)


def _write_tensors(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> FileDigest:
    size, digest = write_file(folder / name, safetensors_content(tensors))
    return FileDigest(name=name, bytes=size, sha256=digest)
