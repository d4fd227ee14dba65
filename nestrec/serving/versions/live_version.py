"""A model in memory that goes from version to version.

What is new is brought beside the model first: rows to where the table takes them from, weights to the device, names of
new items to lists. What is left is copied between two batches, in one go: a row of a table is written where it stands,
so no table is ever there twice, and a captured graph reads the new rows without being captured again. Tables have room
for rows to come; rows that no version holds are as they begin, and lie there already.

Models of an address: the newest version, or one that is named as ADDRESS@VERSION.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestrec.artifacts.delta import IDS, VALUES, json_changed, rows_changed
from nestrec.artifacts.storage import Storage, storage_of
from nestrec.base.compat import foreach_copy_
from nestrec.base.config_values import from_plain
from nestrec.base.cuda import used_here
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
from nestrec.serving.model.served_tables import CachedTable, DeviceTable, ServedTable, TablesConfig, mapped
from nestrec.serving.versions.version_manifest import NEWEST_FILE, VERSIONS, PublishedTable
from nestrec.serving.versions.version_store import READ_TIMEOUT_S, VersionRows, VersionStep, VersionStore, tables_of

_CHUNK_ROWS = 1 << 16
_SPARE_SHARE, _FEWEST_SPARE = 8, 1024
"""an eighth of the rows, and at least so many, may come before the model is loaded anew"""


class TableFullError(Exception):
    """More rows have come than there is room for: the model is to be loaded anew."""


@dataclass(frozen=True, slots=True)
class LiveModelVersion:
    """A version in memory, and what its descriptions were made of."""

    servable: Servable
    files: Mapping[str, Any]
    """what is not learnt, as `export` would write it"""
    step: VersionStep

    @staticmethod
    def open(
        versions: VersionStore,
        way: list[VersionStep],
        device: torch.device | str = "cpu",
        tables: TablesConfig | None = None,
        scratch: Path | None = None,
    ) -> "LiveModelVersion":
        """The last version of a way that begins with a full one. scratch: for tables on the disk."""
        full, last = way[0], way[-1].manifest
        files = _files({}, *versions.descriptions(full))
        place = torch.device(device)
        cfg = tables or TablesConfig()
        room = {table.name: _room(table.num_rows) for table in last.tables}
        published = tables_of(full.manifest)
        num_items = published["items"].num_rows - 1

        def opened(file: str, tensor: str) -> ServedTable:
            if file == INDEX_FILE:
                vectors = _index(versions.index(full, num_items), room["items"], cfg, scratch)
                return _served(vectors, num_items, place, cfg, is_streamed=True)
            table = next(t for t in full.manifest.tables if table_file(t.name) == file)
            weight = _as_they_begin(table, room[table.name], cfg, scratch)
            for ids, fresh in versions.rows(full, table):
                weight.index_copy_(0, ids, _fitting(fresh, weight, table.name))
            return _served(weight, table.num_rows, place, cfg)

        columns = {name: _with_room(column, room["items"]) for name, column in files.get(COLUMNS_FILE, {}).items()}
        servable = Servable.of_parts(
            {**files, COLUMNS_FILE: columns} if columns else files,
            versions.weights(full),
            opened,
            version=full.servable_version,
            device=place,
            exported_at_s=full.manifest.published_s,
        )
        found = LiveModelVersion(servable, files, full)
        for step in way[1:]:
            staged = found.staged(versions, step)
            staged.apply()
            found = staged.after
        return found

    def staged(self, versions: VersionStore, step: VersionStep) -> "StagedVersion":
        """The next version, brought beside this one and verified."""
        manifest = step.manifest
        if manifest.parent is None or manifest.parent.version != self.step.manifest.version:
            raise CorruptFileError("does not follow from the one in service", option="version", value=step.folder)
        plain, tensors = versions.descriptions(step)
        files = _files(self.files, plain, tensors)
        spec = _spec(self.servable.spec, self.files[SPEC_FILE], files[SPEC_FILE])
        puts = [self._put(versions, step, table) for table in manifest.tables]
        if self.servable.index is not None:
            index = list(versions.index(step, spec.num_items))
            puts.append(_Put.of(self.servable.index, spec.num_items, _joined(index)))
        weights = versions.weights(step)
        _check_weights(self.servable, weights)  # on the host: a device would have to be waited for
        return StagedVersion(
            before=self,
            after=LiveModelVersion(
                self._servable(spec, files, step.servable_version, manifest.published_s), files, step
            ),
            puts=tuple(puts),
            columns=_columns(self.servable, tensors, files),
            weights={name: tensor.to(self.servable.device) for name, tensor in weights.items()},
        )

    def rehearse(self) -> None:
        """Write what is there over itself, as a version is written. A GPU loads what that needs with its first use, and
        requests would wait for it."""
        one = torch.zeros(1, dtype=torch.int64)
        servable = self.servable
        tables = {id(table): table for table in (*servable.tables.values(), servable.index) if table is not None}
        puts = [_Put.of(table, table.num_rows, (one, table.rows(one))) for table in tables.values()]
        columns = {name: (one.to(c.device), c[one.to(c.device)]) for name, c in servable.item_columns.items()}
        weights = {name: tensor.clone() for name, tensor in servable.model.state_dict().items()}
        StagedVersion(before=self, after=self, puts=tuple(puts), columns=columns, weights=weights).apply()

    def _put(self, versions: VersionStore, step: VersionStep, table: PublishedTable) -> "_Put":
        served = _table_of(self.servable, table.name)
        removed = versions.removed(step, table)
        begun = initial_vectors(removed.numpy(), _config(table))
        return _Put.of(served, table.num_rows, _joined([*versions.rows(step, table), (removed, begun)]))

    def _servable(self, spec: ServableSpec, files: Mapping[str, Any], version: str, published_s: float) -> Servable:
        """The next one over the same tables; maps from names to ids grow in place when it is applied."""
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
            probe=None,
        )
        servable.__dict__["item_ids"] = old.item_ids
        if spec.columns is old.spec.columns:
            servable.__dict__["column_ids"] = old.column_ids
        return servable


@dataclass(frozen=True, slots=True)
class _Put:
    """Rows that are to be written into a table."""

    table: ServedTable
    num_rows: int
    """of the table afterwards"""
    ids: torch.Tensor
    rows: torch.Tensor

    @staticmethod
    def of(table: ServedTable, num_rows: int, rows: VersionRows | None) -> "_Put":
        if num_rows > table.room:
            raise TableFullError
        place = table.row_device
        if rows is None:
            none = torch.zeros(0, dtype=torch.int64, device=place)
            return _Put(table, num_rows, none, table.rows(none.cpu()).to(place))
        ids, fresh = rows
        return _Put(table, num_rows, ids.to(place), fresh.to(place))


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version beside the one in service."""

    before: LiveModelVersion
    after: LiveModelVersion
    puts: tuple[_Put, ...]
    columns: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """by name: ids and categories of items"""
    weights: Mapping[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """that are copied between two batches"""
        return sum(put.rows.numel() * put.rows.element_size() for put in self.puts)

    def _brought(self) -> Iterator[torch.Tensor]:
        """Whatever lies on the device, perhaps by another stream than the one that will read it."""
        for put in self.puts:
            yield from (put.ids, put.rows)
        for ids, categories in self.columns.values():
            yield from (ids, categories)
        yield from self.weights.values()

    @torch.inference_mode()
    def apply(self) -> None:
        """Make the model that of the new version, while nobody reads it; all of it, or nothing."""
        used_here(self._brought())
        old_rows = [(put, put.table.rows(put.ids.cpu() if _asks_host(put.table) else put.ids)) for put in self.puts]
        old_counts = [put.table.num_rows for put in self.puts]
        model = self.before.servable.model
        servable = self.before.servable
        old_weights = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
        _copy_all(list(old_weights.values()), list(model.state_dict().values()))
        old_columns = {name: servable.item_columns[name][ids].clone() for name, (ids, _) in self.columns.items()}
        try:
            for put in self.puts:
                put.table.put(put.ids, put.rows)
                put.table.num_rows = put.num_rows
                fail_point("follow.between_tables")
            for name, (ids, categories) in self.columns.items():
                servable.item_columns[name][ids] = categories
            _set_weights(model, self.weights)
            fail_point("follow.before_names")
        except BaseException:
            for (put, rows), count in zip(old_rows, old_counts, strict=True):
                put.table.put(put.ids, rows.to(put.rows.device))
                put.table.num_rows = count
            for name, (ids, _) in self.columns.items():
                servable.item_columns[name][ids] = old_columns[name]
            _set_weights(model, old_weights)
            raise
        new = self.after.servable.item_keys[len(servable.item_keys) :]
        servable.item_ids.grow(new, len(servable.item_keys))


def _table_of(servable: Servable, name: str) -> ServedTable:
    """By its own name: columns that share one have theirs."""
    column = next((column.name for column in servable.spec.columns if column.table_name == name), name)
    return servable.tables[column]


def _set_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """In place: graphs that were captured read them where they are."""
    now = model.state_dict()
    _copy_all(list(now.values()), [weights[name] for name in now])


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """By as few launches as there can be: batches wait meanwhile."""
    if targets:
        foreach_copy_(targets, sources)


def _asks_host(table: ServedTable) -> bool:
    return isinstance(table, CachedTable)


def _check_weights(servable: Servable, weights: Mapping[str, torch.Tensor]) -> None:
    now = servable.model.state_dict()
    fit = now.keys() == weights.keys() and all(now[name].shape == t.shape for name, t in weights.items())
    if not fit or not all(bool(t.isfinite().all()) for t in weights.values() if t.is_floating_point()):
        raise CorruptFileError(
            "has weights that do not fit the model, or are not finite", option="version", value="weights"
        )


def _files(old: Mapping[str, Any], plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What is not learnt, after a version has told what changed of it."""
    files = {file: json_changed(old.get(file), difference) for file, difference in plain["json"].items()}
    for path, num_rows in plain["tensors"].items():
        file, _, name = path.partition("/")
        before = old.get(file, {}).get(name)
        changed = {part: tensors[f"{path}/{part}"] for part in (IDS, VALUES)}
        is_same = before is not None and len(before) == num_rows and not len(changed[IDS])
        files.setdefault(file, {})[name] = before if is_same else rows_changed(before, num_rows, changed)
    return files


def _spec(spec: ServableSpec, old: Mapping[str, Any], new: Mapping[str, Any]) -> ServableSpec:
    """Read anew only where more than the step and the number of items has changed: vocabularies are long."""
    counts = {name: new[name] for name in ("step", "num_items")}
    if {**old, **counts} == new:
        return replace(spec, **counts)
    return from_plain(ServableSpec, dict(new))


def _columns(
    servable: Servable, tensors: Mapping[str, torch.Tensor], files: Mapping[str, Any]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for name in files.get(COLUMNS_FILE, {}):
        ids, categories = (tensors[f"{COLUMNS_FILE}/{name}/{part}"] for part in (IDS, VALUES))
        column = servable.item_columns[name]
        if len(ids) and int(ids.max()) >= len(column):
            raise TableFullError
        found[name] = (ids.to(column.device), categories.to(column.device))
    return found


def _joined(parts: Iterable[VersionRows]) -> VersionRows | None:
    kept = [(ids, rows) for ids, rows in parts if len(ids)]
    if len(kept) <= 1:
        return kept[0] if kept else None
    return torch.cat([ids for ids, _ in kept]), torch.cat([rows for _, rows in kept])


def _room(num_rows: int) -> int:
    return num_rows + max(_FEWEST_SPARE, num_rows // _SPARE_SHARE)


def _with_room(column: torch.Tensor, room: int) -> torch.Tensor:
    more = torch.zeros(max(0, room - len(column)), *column.shape[1:], dtype=column.dtype)
    return torch.cat([column, more])


def _config(table: PublishedTable) -> TableConfig:
    return TableConfig(name=table.name, dim=table.dim, dtype=table.dtype, seed=table.seed, init=table.init)


def _as_they_begin(table: PublishedTable, room: int, cfg: TablesConfig, scratch: Path | None) -> torch.Tensor:
    weight = _memory(room, table.dim, DTYPES[table.dtype], cfg, scratch)
    for first in range(0, room, _CHUNK_ROWS):
        keys = np.arange(first, min(first + _CHUNK_ROWS, room))
        weight[first : first + len(keys)] = initial_vectors(keys, _config(table))
    return weight


def _index(rows: Iterable[VersionRows], room: int, cfg: TablesConfig, scratch: Path | None) -> torch.Tensor:
    weight: torch.Tensor | None = None
    for ids, vectors in rows:
        if weight is None:
            weight = _memory(room, vectors.shape[1], vectors.dtype, cfg, scratch).zero_()
        weight.index_copy_(0, ids, vectors)
    if weight is None:
        raise CorruptFileError("has no vectors to retrieve from", option="version", value=INDEX_FILE)
    return weight


def _memory(num_rows: int, dim: int, dtype: torch.dtype, cfg: TablesConfig, scratch: Path | None) -> torch.Tensor:
    if cfg.store == "disk" and scratch is not None and num_rows > cfg.cache_rows:
        return mapped(scratch, num_rows, dim, dtype)
    return torch.empty(num_rows, dim, dtype=dtype)


def _served(
    weight: torch.Tensor, num_rows: int, device: torch.device, cfg: TablesConfig, *, is_streamed: bool = False
) -> ServedTable:
    if cfg.store == "device" or num_rows <= cfg.cache_rows:
        return DeviceTable(weight.to(device), num_rows)
    return CachedTable(DramRows(weight), device, 0 if is_streamed else cfg.cache_rows, num_rows)


def _fitting(rows: torch.Tensor, weight: torch.Tensor, table: str) -> torch.Tensor:
    if rows.shape[1:] != weight.shape[1:] or rows.dtype != weight.dtype:
        raise CorruptFileError("has rows of another shape or type", option="version", value=table)
    return rows


_NAMED = re.compile(r"(.+)@([0-9a-f]{1,64}|[0-9]{8}-[0-9a-f]{0,8})")
"""an address, and the beginning of a version's name or digest"""


@dataclass(frozen=True, slots=True)
class ModelAddress:
    """Where versions of a model come from."""

    address: str
    version: str | None = None
    """the one that is to stay; none: the newest"""

    @property
    def storage(self) -> Storage:
        return storage_of(self.address)

    def at(self, version: str | None) -> "ModelAddress":
        return replace(self, version=version)

    def __str__(self) -> str:
        return self.address if self.version is None else f"{self.address}@{self.version}"


def source_of(text: str) -> ModelAddress | None:
    """The address of versions that a text names; none where it names a folder that `nestrec export` wrote."""
    named = _NAMED.fullmatch(text)
    address, version = (named[1], named[2]) if named else (text, None)
    if "://" in address:
        return ModelAddress(address, version)
    folder = Path(address).resolve()
    is_published = (folder / NEWEST_FILE).exists() or (folder / VERSIONS).is_dir()
    is_one = is_published and not (folder / MANIFEST_FILE).exists()
    return ModelAddress(str(folder), version) if is_one else None


def open_source(
    source: ModelAddress,
    device: torch.device | str = "cpu",
    tables: TablesConfig | None = None,
    scratch: Path | None = None,
    read_timeout_s: float = READ_TIMEOUT_S,
) -> LiveModelVersion:
    """The newest version that can be read, or the one that is named. A `UserError` where there is none."""
    versions = VersionStore(source.storage, read_timeout_s)
    problem = "holds no version yet"
    for at in versions.published() if source.version is None else [versions.find(source.version)]:
        try:
            return LiveModelVersion.open(versions, versions.way_from_full(at), device, tables, scratch)
        except (CorruptFileError, FileNotFoundError) as error:
            problem = f"holds no version that can be read: {error}"
    remedy = "publish one: nestrec publish RUN ADDRESS"
    raise UserError(problem, option="address", value=source.address, remedy=remedy)
