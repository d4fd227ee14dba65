"""Exports a trained run as a servable folder (`nestrec export`).

A servable contains the dense weights, the embedding tables and the retrieval index as safetensors, everything else as
JSON, and a manifest with the SHA-256 digest of each file. It contains no executable code. The folder is written
atomically. Weights and tables can be quantized on export.
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
from nestrec.base.cuda import DeviceChoice, resolve_device
from nestrec.base.errors import DataError, UserError, require
from nestrec.base.files import check_folder, fsync_path, replaced_folder
from nestrec.data.dataset_schema import EVENT_PREFIX, ITEM_PREFIX
from nestrec.data.samples.feature_inputs import Column, item_column
from nestrec.data.samples.retrieval_inputs import CONTEXT_PREFIX
from nestrec.distributed import Topology
from nestrec.distributed.collectives import raise_on_all_ranks
from nestrec.distributed.topology import check_device
from nestrec.exporters.export_checks import add_search_index, check_defaults, measure_quantization
from nestrec.exporters.table_export import CHUNK_ROWS, TableExporter
from nestrec.models.encoder_parts import convert_model
from nestrec.ops.embedding.stochastic_rounding import to_float32
from nestrec.serving.engine.golden_request import record_golden_request
from nestrec.serving.kv_cache.kv_page_pool import KVCacheDtype
from nestrec.serving.model.item_id_map import KeyedTable
from nestrec.serving.model.item_search import SearchConfig
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import (
    COLUMNS_FILE,
    INDEX_FILE,
    ITEMS_FILE,
    KEYS_FILE,
    MANIFEST_FILE,
    MAX_LIST_LENGTH,
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
    QUANTIZATION_KINDS,
    DeviceTable,
    QuantizedTable,
    ServedTable,
    allocate_mapped,
    quantize_rows,
    quantized_width,
)
from nestrec.serving.model.serving_spec import serving_spec_of
from nestrec.training.run_checkpointer import RunWeights
from nestrec.training.run_folder import RunFolder
from nestrec.training.run_identity import Identity, check_restored, identity_of
from nestrec.training.training_session import Session

Dtype = Literal["run", "float32", "bfloat16"]
TablesDtype = Literal["run", "float32", "bfloat16", "int8", "fp8"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@config
class ExportConfig:
    """Options of `nestrec export`."""

    defaults: InputDefaults = InputDefaults()
    """Default values of model inputs that a request does not contain."""
    search: SearchConfig = SearchConfig()
    """Search options of the index of a retrieval model (exact or approximate nearest neighbor search)."""
    dtype: Dtype = "run"
    """Data type of the dense weights and of all computation; `run` keeps that of training."""
    table_dtype: TablesDtype = "run"
    """Data type of the embedding tables; `int8` and `fp8` quantize each row with its own scale, `run` keeps that of
    training."""
    kv_cache_dtype: KVCacheDtype = "model"
    """Data type of the KV cache while the quality loss of quantization is measured. It does not configure the server,
    which uses its own `--service.engine.kv_cache_dtype`."""
    device: DeviceChoice = "auto"
    """Device on which the quality loss is measured; `auto` uses a GPU if one is available with enough memory for the
    tables."""


def export_run(
    run: Path,
    output: Path,
    *,
    best: bool = True,
    defaults: InputDefaults | None = None,
    search: SearchConfig | None = None,
    dtype: Dtype = "run",
    table_dtype: TablesDtype = "run",
    kv_cache_dtype: KVCacheDtype = "model",
    device: DeviceChoice = "auto",
) -> ServableManifest:
    """Write the best (or last) weights of a run as a servable folder. Collective if several ranks are started.

    If weights, tables or KV cache are quantized, the quality loss is measured on the validation split of the run and
    stored in the manifest.

    Args:
        run: Folder of the run.
        output: Folder to write, which must not exist.
        best: Export the weights with the best validation score instead of the last ones.
        defaults: Default values of inputs that requests leave out.
        search: Search options of a retrieval model.
        dtype: Data type of the dense weights.
        table_dtype: Data type of the embedding tables.
        kv_cache_dtype: Data type of the KV cache for the measurement.
        device: Device of the measurement.

    Returns:
        The manifest of the servable.

    Raises:
        UserError: The task cannot be served, the output exists, or an option does not fit the model.
    """
    check_device(resolve_device(device))
    serving_spec_of(RunFolder(run).config().task)  # rejects a task that cannot be served before any data is read
    check_folder(output.parent, "OUT")
    _check_new(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with restored_session(run, best=best) as (session, step):
        exported = servable_from_session(session, step, output.parent)

        def write() -> ServableManifest:
            servable = exported
            if (dtype, table_dtype, kv_cache_dtype) != ("run", "run", "model"):
                _check_quantizable(servable)
                converted = quantize_servable(servable, dtype, table_dtype, output.parent)
                cost = measure_quantization(
                    session,
                    servable,
                    converted,
                    table_dtype=table_dtype,
                    kv_cache_dtype=kv_cache_dtype,
                    device=device,
                )
                servable = replace(converted, precision=cost)
            servable = _apply_defaults(servable, defaults)
            if search is not None and search.kind != "exact":
                servable = add_search_index(servable, search, Path(session.cfg.data.folder))
            return write_servable(servable, output)

        return _run_on_first_rank(session.topology, write)


def servable_from_run(run: Path, scratch: Path, *, best: bool = True) -> Servable:
    """Load the best (or last) weights of a run as a servable on the CPU, without writing a servable folder.

    Args:
        run: Folder of the run.
        scratch: Folder on a disk with enough free space for the tables.
        best: Load the weights with the best validation score instead of the last ones.
    """
    with restored_session(run, best=best) as (session, step):
        return servable_from_session(session, step, scratch)


@contextlib.contextmanager
def restored_session(run: Path, *, best: bool) -> Iterator[tuple[Session, int]]:
    """Open a run on the CPU with its best (or last) weights; yield its session and the step of the weights."""
    with contextlib.ExitStack() as stack:
        topology = stack.enter_context(Topology.scoped(lambda: Topology.from_environment("cpu")))
        folder = RunFolder(run)
        with folder.naming_config_file():
            session = Session.open(folder.config(), topology)
        stack.enter_context(contextlib.closing(session.engine))
        restored, _ = RunWeights(session.cfg, folder, topology).restore(best=best)
        check_restored(restored, Identity.of(session.cfg, folder.identity() or identity_of(restored.state)))
        session.restore(restored)
        with session.dense.averaged():
            yield session, restored.step


def _run_on_first_rank(topology: Topology, write: Callable[[], ServableManifest]) -> ServableManifest:
    """Call `write` on the first rank and return its manifest, or raise its error, on all ranks.

    The other ranks wait with the timeout of a checkpoint, because an export can take longer than a collective.
    """
    peers = CheckpointGroup.of_topology(topology)
    manifest = None
    error = None
    try:
        manifest = write() if peers.is_first else None
    except UserError as raised:
        error = raised
    plain = peers.gather(None if manifest is None else to_plain(manifest))[0]
    if topology.world > 1:
        raise_on_all_ranks(topology.control, error)
    elif error is not None:
        raise error
    return manifest or from_plain(ServableManifest, plain)


def _check_quantizable(servable: Servable) -> None:
    require(
        servable.reads_items,
        "the model does not read histories, which are required to measure the quality loss of quantization",
        option="task.kind",
        value=servable.spec.task.kind,
        remedy="remove --dtype, --table_dtype and --kv_cache_dtype",
    )


def _apply_defaults(servable: Servable, defaults: InputDefaults | None) -> Servable:
    if defaults is None:
        return servable
    check_defaults(defaults, servable)
    return replace(servable, spec=replace(servable.spec, defaults=defaults))


def write_servable(servable: Servable, output: Path) -> ServableManifest:
    """Write a model as a servable folder, atomically; the folder must not exist yet."""
    _check_new(output)
    remove_folder(output.with_name(output.name + ".partial"))  # the temporary name in earlier versions of nestrec
    with replaced_folder(output, marker=MANIFEST_FILE, field="OUT") as partial:
        return _write(partial, servable)


def _check_new(output: Path) -> None:
    require(
        not output.exists(), "the folder already exists", option="OUT", value=str(output), remedy="use a new folder"
    )


def servable_from_session(session: Session, step: int, scratch: Path) -> Servable:
    """Build a servable on the CPU from the current weights and tables of a session. Collective."""
    if (exported := serving_spec_of(session.cfg.task).export) is not None:
        return cast(Servable, exported(session, step))
    servable = describe_model(session, step)
    tables = TableExporter(session, scratch)
    with_table = [c for c in servable.spec.columns if c.has_table]
    served = {"items": tables.items()} | {c.name: tables.rows(c.table_name) for c in with_table}
    vectors_of = servable.serving.index
    if vectors_of is None:
        return replace(servable, tables=served)
    index = _index(partial(vectors_of, servable.model), served["items"].weight, scratch)
    return replace(servable, tables=served, index=index)


def describe_model(session: Session, step: int) -> Servable:
    """Return the servable of a session without its tables and index."""
    task = session.cfg.task
    dataset = session.dataset
    serving = serving_spec_of(task)
    tables = TableExporter(session, Path())
    columns = tuple(_column_spec(session, tables, c) for c in serving.columns(task, dataset.card))
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
        model=copy_dense_model(session),
        tables={},
        item_keys=tuple(dataset.items().column("item_key").to_pylist()),
        item_titles=tuple(dataset.item_texts()),
        index=None,
        item_columns={name: torch.from_numpy(item_column(dataset.items(), name)) for name in of_items},
    )


def copy_dense_model(session: Session) -> nn.Module:
    """Return a CPU copy of the dense model, without the projections that are already applied to the exported rows."""
    model: Any = deepcopy(session.task.model)
    if hasattr(model, "to_width"):
        model.to_width = model.to_width.without_tables()
    return cast(nn.Module, model.to("cpu").eval().requires_grad_(False))


def _column_spec(session: Session, tables: TableExporter, column: Column) -> ColumnSpec:
    """Return how a server reads a column of the task."""
    of_event = column.name.removeprefix(CONTEXT_PREFIX)
    stored = column.name if of_event == column.name else EVENT_PREFIX + of_event
    feature = next((f for f in session.dataset.card.features if f.column == stored), None)
    spec = ColumnSpec(name=column.name, keys=None, num_rows=0, width=column.width)
    if feature is not None:
        spec = replace(spec, kind=cast(Any, feature.kind), transform=feature.transform)
    if not column.vocabulary_size:
        return spec
    table = tables.table_of(column.name)
    most_ids = {"categories": MAX_LIST_LENGTH, "bag": spec.transform.max_ids}.get(spec.kind, 0)
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
        _write_json(folder, PROBE_FILE, dumps(record_golden_request(servable))),
        _write_tensors(folder, WEIGHTS_FILE, dict(servable.model.state_dict())),
    ]
    for name, content in description_files(servable).items():
        if name.endswith(".json"):
            files.append(_write_json(folder, name, json.dumps(content, indent=2 if name == SPEC_FILE else None)))
        else:
            files.append(_write_tensors(folder, name, content))
    file_of = {"items": "items"} | {c.name: c.table_name for c in servable.spec.columns if c.has_table}
    tables = {file_of[column]: table for column, table in servable.tables.items()}
    files += [_write_tensors(folder, table_file(name), _table_tensors(table)) for name, table in tables.items()]
    if servable.index is not None:
        ids = torch.arange(1, servable.spec.num_items + 1)
        files.append(_write_tensors(folder, INDEX_FILE, {"vectors": _weight(servable.index), "ids": ids}))
        if servable.search is not None:
            files.append(_write_tensors(folder, SEARCH_FILE, servable.search))
    manifest = ServableManifest(files=tuple(sorted(files, key=lambda f: f.name)), precision=servable.precision)
    _write_json(folder, MANIFEST_FILE, dumps(manifest))
    fsync_path(folder)
    return manifest


def description_files(servable: Servable) -> dict[str, Any]:
    """Return the contents of all files without trained parameters, by file name: JSON values, or tensors by name."""
    result: dict[str, Any] = {SPEC_FILE: to_plain(servable.spec), ITEMS_FILE: list(servable.item_keys)}
    if servable.item_titles:
        result[TITLES_FILE] = list(servable.item_titles)
    if servable.serving.index is None:
        result[COLUMNS_FILE] = dict(servable.item_columns)
    keyed = {servable.columns[name].table_name: t for name, t in servable.tables.items() if isinstance(t, KeyedTable)}
    if keyed:
        result[KEYS_FILE] = {name: torch.from_numpy(table.keys) for name, table in keyed.items()}
    return result


def quantize_servable(servable: Servable, dtype: Dtype, tables: TablesDtype, scratch: Path) -> Servable:
    """Return a copy of the model with other data types for its weights and tables.

    Args:
        servable: Model to convert.
        dtype: Data type of the dense weights.
        tables: Data type of the tables; a retrieval index is stored in bfloat16 instead of int8 or fp8.
        scratch: Folder on a disk with enough free space for the tables.
    """
    model = deepcopy(servable.model) if dtype == "run" else convert_model(deepcopy(servable.model), _DTYPES[dtype])
    if tables == "run":
        return replace(servable, model=model)
    converted: dict[int, ServedTable] = {}
    for table in servable.tables.values():
        if id(table) not in converted:  # columns may share one
            converted[id(table)] = _convert_table(_weight(table), tables, scratch)
    index = None if servable.index is None else _convert_table(_weight(servable.index), _index_dtype(tables), scratch)
    return replace(servable, model=model, tables={n: converted[id(t)] for n, t in servable.tables.items()}, index=index)


def _index_dtype(tables: TablesDtype) -> TablesDtype:
    """Return the data type of a retrieval index: the search multiplies stored rows directly, without a scale."""
    return "bfloat16" if tables in QUANTIZATION_KINDS else tables


def _convert_table(weight: torch.Tensor, tables: TablesDtype, scratch: Path) -> ServedTable:
    kind = next((kind for kind in QUANTIZATION_KINDS if kind == tables), None)
    if kind is None:
        dtype = _DTYPES[tables]
        return DeviceTable(_convert_in_chunks(weight, weight.shape[1], dtype, lambda rows: rows.to(dtype), scratch))
    width = quantized_width(weight.shape[1])
    return QuantizedTable(
        DeviceTable(_convert_in_chunks(weight, width, torch.uint8, lambda rows: quantize_rows(rows, kind), scratch)),
        kind,
    )


def _convert_in_chunks(
    weight: torch.Tensor,
    width: int,
    dtype: torch.dtype,
    convert: Callable[[torch.Tensor], torch.Tensor],
    scratch: Path,
) -> torch.Tensor:
    result = allocate_mapped(scratch, len(weight), width, dtype)
    for start in range(0, len(weight), CHUNK_ROWS):
        result[start : start + CHUNK_ROWS] = convert(weight[start : start + CHUNK_ROWS])
    return result


def _table_tensors(table: ServedTable) -> dict[str, torch.Tensor]:
    if isinstance(table, KeyedTable):
        return _table_tensors(table.row_table)
    if isinstance(table, QuantizedTable):
        return {table.kind: _weight(table.byte_table)}
    return {"weight": _weight(table)}


def _weight(table: ServedTable) -> torch.Tensor:
    assert isinstance(table, DeviceTable)
    return table.weight


def _index(vectors_of: Callable[[torch.Tensor], torch.Tensor], items_ND: torch.Tensor, scratch: Path) -> DeviceTable:
    """Compute the vectors of the retrieval index in the compute data type, so that scores equal those of evaluation."""
    vectors = allocate_mapped(scratch, len(items_ND) - 1, items_ND.shape[1], to_float32(items_ND[:0]).dtype)
    for start in range(0, len(vectors), CHUNK_ROWS):
        end = min(start + CHUNK_ROWS, len(vectors))
        vectors[start:end] = vectors_of(to_float32(items_ND[start + 1 : end + 1]))
    return DeviceTable(vectors)


def _write_json(folder: Path, name: str, text: str) -> FileDigest:
    size, digest = write_file(folder / name, iter([memoryview(text.encode())]))
    return FileDigest(name=name, bytes=size, sha256=digest)


def _write_tensors(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> FileDigest:
    size, digest = write_file(folder / name, safetensors_content(tensors))
    return FileDigest(name=name, bytes=size, sha256=digest)
