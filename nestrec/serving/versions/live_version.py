"""Model in memory that is updated in place from one published version to the next.

A delta is staged first, while the model serves: its rows are copied to the memory from which the table is updated, its
weights to the device, and the ids of new items to lists. Then it is applied between two batches, in one step: rows are
overwritten in place, so no second copy of a table is needed, and captured CUDA graphs read the new rows without being
captured again. Tables have spare capacity for new rows. Rows that no version contains have their initial values.

`open_model` opens the newest version at an address, or the one that is named as ADDRESS@VERSION.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestrec.artifacts.delta import IDS, VALUES, apply_json_diff, apply_rows_diff
from nestrec.artifacts.storage import Storage, storage_of
from nestrec.base.compat import foreach_copy_
from nestrec.base.config_values import from_plain
from nestrec.base.cuda import record_stream_use
from nestrec.base.errors import CorruptFileError, UserError
from nestrec.base.failpoints import fail_point
from nestrec.embedding.initial import initial_vectors
from nestrec.embedding.table_config import DTYPES, TableConfig
from nestrec.serving.model.row_sources import DramRows
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.servable_spec import (
    COLUMNS_FILE,
    INDEX_FILE,
    ITEMS_FILE,
    MANIFEST_FILE,
    SPEC_FILE,
    TITLES_FILE,
    ServableSpec,
    table_file,
)
from nestrec.serving.model.served_tables import CachedTable, DeviceTable, ServedTable, TablesConfig, allocate_mapped
from nestrec.serving.versions.version_manifest import NEWEST_FILE, VERSIONS, PublishedTable
from nestrec.serving.versions.version_store import READ_TIMEOUT_S, VersionRows, VersionStep, VersionStore, tables_of

_CHUNK_ROWS = 1 << 16
_SPARE_DIVISOR, _MIN_SPARE_ROWS = 8, 1024
"""Spare capacity of tables: an eighth of the rows, but at least 1024; beyond it the model must be loaded in full."""


class TableFullError(Exception):
    """A delta has more rows than a table has capacity for: the model must be loaded in full."""


@dataclass(frozen=True, slots=True)
class LiveModelVersion:
    """Version of a model in memory, and the description files to which deltas apply."""

    servable: Servable
    files: Mapping[str, Any]
    """Contents of the description files (all files except tables and weights), as `nestrec export` would write them."""
    step: VersionStep

    @staticmethod
    def open(
        versions: VersionStore,
        chain: list[VersionStep],
        device: torch.device | str = "cpu",
        tables: TablesConfig | None = None,
        scratch: Path | None = None,
    ) -> "LiveModelVersion":
        """Load the last version of a chain.

        Args:
            versions: Store of the versions.
            chain: A full version and the deltas that lead from it to the version to load, oldest first.
            device: Device of the model.
            tables: Options of the embedding tables.
            scratch: Folder for memory-mapped tables; None keeps all tables in memory.

        Raises:
            CorruptFileError: A file is corrupt, or a delta does not apply.
            FileNotFoundError: A file is missing.
        """
        full, last = chain[0], chain[-1].manifest
        files = _files({}, *versions.descriptions(full))
        target_device = torch.device(device)
        cfg = tables or TablesConfig()
        capacity = {table.name: _capacity(table.num_rows) for table in last.tables}
        published = tables_of(full.manifest)
        num_items = published["items"].num_rows - 1

        def open_table(file: str, tensor: str) -> ServedTable:
            if file == INDEX_FILE:
                vectors = _index(versions.index(full, num_items), capacity["items"], cfg, scratch)
                return _served(vectors, num_items, target_device, cfg, is_streamed=True)
            table = next(t for t in full.manifest.tables if table_file(t.name) == file)
            weight = _initial_weight(table, capacity[table.name], cfg, scratch)
            for ids, rows in versions.rows(full, table):
                weight.index_copy_(0, ids, _checked_rows(rows, weight, table.name))
            return _served(weight, table.num_rows, target_device, cfg)

        columns = {name: _pad(column, capacity["items"]) for name, column in files.get(COLUMNS_FILE, {}).items()}
        servable = Servable.from_parts(
            {**files, COLUMNS_FILE: columns} if columns else files,
            versions.weights(full),
            open_table,
            version=full.servable_version,
            device=target_device,
            exported_at_s=full.manifest.published_s,
        )
        live = LiveModelVersion(servable, files, full)
        for step in chain[1:]:
            staged = live.stage(versions, step)
            staged.apply()
            live = staged.after
        return live

    def stage(self, versions: VersionStore, step: VersionStep) -> "StagedVersion":
        """Read and verify a delta of this version, and copy its contents to the device, without applying it.

        Raises:
            CorruptFileError: The delta is corrupt, or has a different parent.
            TableFullError: The delta has more rows than a table has capacity for.
        """
        manifest = step.manifest
        if manifest.parent is None or manifest.parent.version != self.step.manifest.version:
            raise CorruptFileError("its parent is not the version in service", option="version", value=step.folder)
        plain, tensors = versions.descriptions(step)
        files = _files(self.files, plain, tensors)
        spec = _spec(self.servable.spec, self.files[SPEC_FILE], files[SPEC_FILE])
        updates = [self._row_update(versions, step, table) for table in manifest.tables]
        if self.servable.index is not None:
            index = list(versions.index(step, spec.num_items))
            updates.append(_RowUpdate.of(self.servable.index, spec.num_items, _concatenate(index)))
        weights = versions.weights(step)
        _check_weights(self.servable, weights)  # on the host, because a check on the device would synchronize
        return StagedVersion(
            before=self,
            after=LiveModelVersion(
                self._servable(spec, files, step.servable_version, manifest.published_s), files, step
            ),
            updates=tuple(updates),
            columns=_columns(self.servable, tensors, files),
            weights={name: tensor.to(self.servable.device) for name, tensor in weights.items()},
        )

    def warm_up(self) -> None:
        """Apply the version to itself, so that the GPU loads the kernels before the first delta, not while requests
        wait."""
        one = torch.zeros(1, dtype=torch.int64)
        servable = self.servable
        tables = {id(table): table for table in (*servable.tables.values(), servable.index) if table is not None}
        updates = [_RowUpdate.of(table, table.num_rows, (one, table.rows(one))) for table in tables.values()]
        columns = {name: (one.to(c.device), c[one.to(c.device)]) for name, c in servable.item_columns.items()}
        weights = {name: tensor.clone() for name, tensor in servable.model.state_dict().items()}
        StagedVersion(before=self, after=self, updates=tuple(updates), columns=columns, weights=weights).apply()

    def _row_update(self, versions: VersionStore, step: VersionStep, table: PublishedTable) -> "_RowUpdate":
        served = _table_of(self.servable, table.name)
        removed = versions.removed_keys(step, table)
        initial = initial_vectors(removed.numpy(), _config(table))
        return _RowUpdate.of(served, table.num_rows, _concatenate([*versions.rows(step, table), (removed, initial)]))

    def _servable(self, spec: ServableSpec, files: Mapping[str, Any], version: str, published_s: float) -> Servable:
        """Return the next servable over the same tables; `apply` adds new items to the shared id map."""
        old = self.servable
        is_same = files[ITEMS_FILE] is self.files[ITEMS_FILE]
        titles = files.get(TITLES_FILE, ())
        servable = replace(
            old,
            spec=spec,
            version=version,
            item_keys=old.item_keys if is_same else tuple(files[ITEMS_FILE]),
            item_titles=old.item_titles if is_same else tuple(titles),
            exported_at_s=published_s,
            golden_request=None,
        )
        servable.__dict__["item_ids"] = old.item_ids
        if spec.columns is old.spec.columns:
            servable.__dict__["column_ids"] = old.column_ids
        return servable


@dataclass(frozen=True, slots=True)
class _RowUpdate:
    """Rows to write into a table."""

    table: ServedTable
    num_rows: int
    """Number of rows of the table after the update."""
    ids: torch.Tensor
    rows: torch.Tensor

    @staticmethod
    def of(table: ServedTable, num_rows: int, rows: VersionRows | None) -> "_RowUpdate":
        if num_rows > table.capacity:
            raise TableFullError
        device = table.row_device
        if rows is None:
            no_ids = torch.zeros(0, dtype=torch.int64, device=device)
            return _RowUpdate(table, num_rows, no_ids, table.rows(no_ids.cpu()).to(device))
        ids, new_rows = rows
        return _RowUpdate(table, num_rows, ids.to(device), new_rows.to(device))


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """Delta that is verified and in memory, ready to be applied to the version in service."""

    before: LiveModelVersion
    after: LiveModelVersion
    updates: tuple[_RowUpdate, ...]
    columns: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """Changed item features: item ids and their categories, by column name."""
    weights: Mapping[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the rows that are copied between two batches."""
        return sum(update.rows.numel() * update.rows.element_size() for update in self.updates)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that may have been copied to the device on another stream than the one that reads them."""
        for update in self.updates:
            yield from (update.ids, update.rows)
        for ids, categories in self.columns.values():
            yield from (ids, categories)
        yield from self.weights.values()

    @torch.inference_mode()
    def apply(self) -> None:
        """Update the model to the new version, or restore the old one if that fails; no engine may run a batch then."""
        record_stream_use(self._tensors())
        old_rows = [(u, u.table.rows(u.ids.cpu() if _has_host_rows(u.table) else u.ids)) for u in self.updates]
        old_counts = [update.table.num_rows for update in self.updates]
        model = self.before.servable.model
        servable = self.before.servable
        old_weights = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
        _copy_all(list(old_weights.values()), list(model.state_dict().values()))
        old_columns = {name: servable.item_columns[name][ids].clone() for name, (ids, _) in self.columns.items()}
        try:
            for update in self.updates:
                update.table.put(update.ids, update.rows)
                update.table.num_rows = update.num_rows
                fail_point("follow.between_tables")
            for name, (ids, categories) in self.columns.items():
                servable.item_columns[name][ids] = categories
            _set_weights(model, self.weights)
            fail_point("follow.before_names")
        except BaseException:
            for (update, rows), count in zip(old_rows, old_counts, strict=True):
                update.table.put(update.ids, rows.to(update.rows.device))
                update.table.num_rows = count
            for name, (ids, _) in self.columns.items():
                servable.item_columns[name][ids] = old_columns[name]
            _set_weights(model, old_weights)
            raise
        new_keys = self.after.servable.item_keys[len(servable.item_keys) :]
        servable.item_ids.grow(new_keys, len(servable.item_keys))


def _table_of(servable: Servable, name: str) -> ServedTable:
    """Return a table by its name, which differs from the column's name if several columns share the table."""
    column = next((column.name for column in servable.spec.columns if column.table_name == name), name)
    return servable.tables[column]


def _set_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy weights in place, because captured CUDA graphs read them at fixed addresses."""
    state = model.state_dict()
    _copy_all(list(state.values()), [weights[name] for name in state])


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors with as few kernel launches as possible, because batches wait."""
    if targets:
        foreach_copy_(targets, sources)


def _has_host_rows(table: ServedTable) -> bool:
    return isinstance(table, CachedTable)


def _check_weights(servable: Servable, weights: Mapping[str, torch.Tensor]) -> None:
    state = servable.model.state_dict()
    is_compatible = state.keys() == weights.keys() and all(state[name].shape == t.shape for name, t in weights.items())
    if not is_compatible or not all(bool(t.isfinite().all()) for t in weights.values() if t.is_floating_point()):
        raise CorruptFileError("the weights do not fit the model or are not finite", option="version", value="weights")


def _files(old: Mapping[str, Any], plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Apply the changes of a version to the contents of the description files."""
    files = {file: apply_json_diff(old.get(file), difference) for file, difference in plain["json"].items()}
    for path, num_rows in plain["tensors"].items():
        file, _, name = path.partition("/")
        before = old.get(file, {}).get(name)
        changed = {part: tensors[f"{path}/{part}"] for part in (IDS, VALUES)}
        is_same = before is not None and len(before) == num_rows and not len(changed[IDS])
        files.setdefault(file, {})[name] = before if is_same else apply_rows_diff(before, num_rows, changed)
    return files


def _spec(spec: ServableSpec, old: Mapping[str, Any], new: Mapping[str, Any]) -> ServableSpec:
    """Return the new spec; parse it only if more than step and item count changed, because vocabularies are long."""
    counts = {name: new[name] for name in ("step", "num_items")}
    if {**old, **counts} == new:
        return replace(spec, **counts)
    return from_plain(ServableSpec, dict(new))


def _columns(
    servable: Servable, tensors: Mapping[str, torch.Tensor], files: Mapping[str, Any]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    columns = {}
    for name in files.get(COLUMNS_FILE, {}):
        ids, categories = (tensors[f"{COLUMNS_FILE}/{name}/{part}"] for part in (IDS, VALUES))
        column = servable.item_columns[name]
        if len(ids) and int(ids.max()) >= len(column):
            raise TableFullError
        columns[name] = (ids.to(column.device), categories.to(column.device))
    return columns


def _concatenate(parts: Iterable[VersionRows]) -> VersionRows | None:
    nonempty = [(ids, rows) for ids, rows in parts if len(ids)]
    if len(nonempty) <= 1:
        return nonempty[0] if nonempty else None
    return torch.cat([ids for ids, _ in nonempty]), torch.cat([rows for _, rows in nonempty])


def _capacity(num_rows: int) -> int:
    return num_rows + max(_MIN_SPARE_ROWS, num_rows // _SPARE_DIVISOR)


def _pad(column: torch.Tensor, capacity: int) -> torch.Tensor:
    padding = torch.zeros(max(0, capacity - len(column)), *column.shape[1:], dtype=column.dtype)
    return torch.cat([column, padding])


def _config(table: PublishedTable) -> TableConfig:
    return TableConfig(name=table.name, dim=table.dim, dtype=table.dtype, seed=table.seed, init=table.init)


def _initial_weight(table: PublishedTable, capacity: int, cfg: TablesConfig, scratch: Path | None) -> torch.Tensor:
    weight = _allocate(capacity, table.dim, DTYPES[table.dtype], cfg, scratch)
    for first in range(0, capacity, _CHUNK_ROWS):
        keys = np.arange(first, min(first + _CHUNK_ROWS, capacity))
        weight[first : first + len(keys)] = initial_vectors(keys, _config(table))
    return weight


def _index(rows: Iterable[VersionRows], capacity: int, cfg: TablesConfig, scratch: Path | None) -> torch.Tensor:
    weight: torch.Tensor | None = None
    for ids, vectors in rows:
        if weight is None:
            weight = _allocate(capacity, vectors.shape[1], vectors.dtype, cfg, scratch).zero_()
        weight.index_copy_(0, ids, vectors)
    if weight is None:
        raise CorruptFileError("the search index does not contain any vectors", option="version", value=INDEX_FILE)
    return weight


def _allocate(num_rows: int, dim: int, dtype: torch.dtype, cfg: TablesConfig, scratch: Path | None) -> torch.Tensor:
    if cfg.store == "disk" and scratch is not None and num_rows > cfg.cache_rows:
        return allocate_mapped(scratch, num_rows, dim, dtype)
    return torch.empty(num_rows, dim, dtype=dtype)


def _served(
    weight: torch.Tensor, num_rows: int, device: torch.device, cfg: TablesConfig, *, is_streamed: bool = False
) -> ServedTable:
    if cfg.store == "device" or num_rows <= cfg.cache_rows:
        return DeviceTable(weight.to(device), num_rows)
    return CachedTable(DramRows(weight), device, 0 if is_streamed else cfg.cache_rows, num_rows)


def _checked_rows(rows: torch.Tensor, weight: torch.Tensor, table: str) -> torch.Tensor:
    if rows.shape[1:] != weight.shape[1:] or rows.dtype != weight.dtype:
        raise CorruptFileError(
            "the shape or data type of the rows differs from the table's", option="version", value=table
        )
    return rows


_ADDRESS_WITH_VERSION = re.compile(r"(.+)@([0-9a-f]{1,64}|[0-9]{8}-[0-9a-f]{0,8})")
"""ADDRESS@VERSION, where VERSION is a name, number or prefix of a version (see `VersionStore.find`)."""


@dataclass(frozen=True, slots=True)
class ModelAddress:
    """Address of published versions, optionally with a version."""

    address: str
    version: str | None = None
    """Name, number or prefix of the version to which a model is pinned; None follows the newest version."""

    @property
    def storage(self) -> Storage:
        return storage_of(self.address)

    def at(self, version: str | None) -> "ModelAddress":
        return replace(self, version=version)

    def __str__(self) -> str:
        return self.address if self.version is None else f"{self.address}@{self.version}"


def parse_model_address(text: str) -> ModelAddress | None:
    """Parse ADDRESS or ADDRESS@VERSION; return None if the text names a folder that `nestrec export` wrote."""
    match = _ADDRESS_WITH_VERSION.fullmatch(text)
    address, version = (match[1], match[2]) if match else (text, None)
    if "://" in address:
        return ModelAddress(address, version)
    folder = Path(address).resolve()
    is_published = (folder / NEWEST_FILE).exists() or (folder / VERSIONS).is_dir()
    if is_published and not (folder / MANIFEST_FILE).exists():
        return ModelAddress(str(folder), version)
    if match is None and "@" in folder.name and not folder.exists():  # no version has such a name; the error lists them
        address, _, version = text.rpartition("@")
        source = parse_model_address(address)
        return source.at(version) if source is not None and version else None
    return None


def open_model(
    source: ModelAddress,
    device: torch.device | str = "cpu",
    tables: TablesConfig | None = None,
    scratch: Path | None = None,
    read_timeout_s: float = READ_TIMEOUT_S,
) -> LiveModelVersion:
    """Load the newest readable version at an address, or the version that the address names.

    Args:
        source: Address of the versions.
        device: Device of the model.
        tables: Options of the embedding tables.
        scratch: Folder for memory-mapped tables; None keeps all tables in memory.
        read_timeout_s: Timeout in seconds for reading a file.

    Raises:
        UserError: The address contains no readable version, or not the named one.
    """
    versions = VersionStore(source.storage, read_timeout_s)
    problem = "the address contains no versions"
    for at in versions.published() if source.version is None else [versions.find(source.version)]:
        try:
            return LiveModelVersion.open(versions, versions.chain_from_full(at), device, tables, scratch)
        except (CorruptFileError, FileNotFoundError) as error:
            problem = f"no version at the address can be read: {error}"
    remedy = "publish a version with: nestrec publish RUN ADDRESS"
    raise UserError(problem, option="address", value=source.address, remedy=remedy)
