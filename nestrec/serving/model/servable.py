"""A servable folder in memory. Every file is checked against its digest before anything is read from it.

Whether a model that was read can serve: shapes that belong together, and finite numbers throughout.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import nn

from nestrec.artifacts.manifest import file_problem
from nestrec.base.config_values import from_plain
from nestrec.base.errors import CorruptFileError, UserError, require
from nestrec.data.dataset_schema import EVENT_PREFIX, USER_PREFIX
from nestrec.data.samples.retrieval_inputs import CONTEXT_PREFIX
from nestrec.models.backbone_registry import backbone_of, cached_forward_of
from nestrec.models.backbone_spec import BackboneConfig, BackboneSpec
from nestrec.models.encoder_parts import computed_in, dtype_of, with_room
from nestrec.models.sequence import WHOLE, CachedForward, KVCacheSpec
from nestrec.serving.model.item_id_map import ItemIds, KeyedTable
from nestrec.serving.model.row_sources import tensors_in
from nestrec.serving.model.servable_spec import (
    COLUMNS_FILE,
    FORMAT,
    INDEX_FILE,
    ITEMS_FILE,
    KEYS_FILE,
    MANIFEST_FILE,
    PROBE_FILE,
    SEARCH_FILE,
    SPEC_FILE,
    TITLES_FILE,
    WEIGHTS_FILE,
    ColumnSpec,
    GoldenRequest,
    QuantizationReport,
    ServableManifest,
    ServableSpec,
    table_file,
)
from nestrec.serving.model.served_tables import (
    PACKED_KINDS,
    DeviceTable,
    QuantizedTable,
    ServedTable,
    TablesConfig,
    open_table,
)
from nestrec.serving.model.serving_spec import NoBackboneConfig, ServingSpec, serving_form_of

_RUN_CONFIG_FILE = "config.json"
"""File that every folder of a run contains; serving does not import training."""


@dataclass(frozen=True)
class Servable:
    """A model with its tables, ready to score. Nothing of it is ever changed."""

    spec: ServableSpec
    version: str
    model: nn.Module
    tables: Mapping[str, ServedTable]
    """by column; columns that share one have the same"""
    item_keys: tuple[str, ...]
    """source id of item 1, 2, ..."""
    index: ServedTable | None
    """vectors of items 1 to N, in rows 0 to N - 1, as the similarity sees them (retrieval)"""
    item_columns: Mapping[str, torch.Tensor]
    """category of each item id (ranking), where ids are looked up"""
    probe: GoldenRequest | None = None
    """a request that the export has recorded the scores of"""
    item_titles: tuple[str, ...] = ()
    """what people call item 1, 2, ...; none where the dataset had no text of its items"""
    search: Mapping[str, torch.Tensor] | None = None
    """what was built over the index, where a search on a CPU does not look at every row (retrieval)"""
    precision: QuantizationReport | None = None
    """what fewer bits than those of the run cost"""
    exported_at_s: float | None = None
    """Unix seconds; none for one that was not read from a folder"""

    @cached_property
    def item_ids(self) -> ItemIds:
        return ItemIds(self.item_keys)

    @cached_property
    def columns(self) -> dict[str, ColumnSpec]:
        """by name"""
        return {c.name: c for c in self.spec.columns}

    @cached_property
    def column_ids(self) -> dict[str, dict[str, int]]:
        known = {c.name: {key: i + 1 for i, key in enumerate(c.keys)} for c in self.spec.columns if c.keys is not None}
        asked = {
            EVENT_PREFIX + n.removeprefix(CONTEXT_PREFIX): k for n, k in known.items() if n.startswith(CONTEXT_PREFIX)
        }
        return asked | known

    @cached_property
    def serving(self) -> ServingSpec:
        """What the task of the model says of serving it."""
        return serving_form_of(self.spec.task)

    @cached_property
    def encoder_config(self) -> BackboneConfig:
        """Of the backbone, with room for what stands before a history."""
        own = self.serving.encoder(self.spec.task)
        num_prefix = self.serving.num_prefix(self.spec.task)
        return with_room(own, num_prefix)

    @cached_property
    def cached(self) -> CachedForward:
        """How new tokens are computed against a kept prefix, or whole sequences where the backbone keeps none."""
        return cached_forward_of(self.encoder_config) if self._reads_sequence else WHOLE

    def cacheable(self, num_tokens: int) -> int:
        """Of so many tokens that do not depend on the request, those that are kept."""
        return num_tokens if self.cached.keeps else 0

    @cached_property
    def kept(self) -> KVCacheSpec:
        """What is kept of a token of a prefix."""
        return self.cached.kept(self.encoder_config)

    @cached_property
    def _backbone(self) -> BackboneSpec:
        return backbone_of(self.encoder_config)

    def cut(self, num_tokens: int) -> int:
        """First token that all layers compute of a sequence of so many, as training has it."""
        return self._backbone.cut(self.encoder_config, num_tokens) if self._reads_sequence else 0

    @cached_property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model.parameters()).device

    @cached_property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        return next(self.model.parameters()).dtype

    @cached_property
    def reads_times(self) -> bool:
        """Scores depend on when events happened."""
        return self._reads_sequence and self._backbone.reads_times(self.encoder_config)

    @property
    def reads_items(self) -> bool:
        """Events and candidates are items that it knows; else it reads what is told of candidates, and no history."""
        return self.serving.reads_items

    @property
    def _reads_sequence(self) -> bool:
        return not isinstance(self.encoder_config, NoBackboneConfig)

    @property
    def reads_actions(self) -> bool:
        """Scores depend on what the user did at events."""
        return self.serving.reads_actions

    @property
    def needs_event(self) -> bool:
        """It knows a user by nothing but events. A ranking model has learned from first events, before which there is
        none."""
        return self.serving.needs_event

    @cached_property
    def event_features(self) -> dict[str, ColumnSpec]:
        """Features of events and candidates, by the name that the log gives them; what is read of the event that is
        asked for alone is told of all events, each of which was asked for."""
        asked = {name: replace(c, name=EVENT_PREFIX + name) for name, c in self._columns_of(CONTEXT_PREFIX).items()}
        return asked | self._columns_of(EVENT_PREFIX)

    @cached_property
    def event_default_examples(self) -> dict[str, str]:
        """An example value, as `export` reads it, of each default that a default history needs (`times`: `now`)."""
        found: dict[str, str] = {}
        if self.reads_times:
            found["times"] = "now"
        if self.reads_actions:
            found["actions"] = next(iter(self.spec.action_bits), "[]")
        return found | {f"features.{name}": "none" for name in self.event_features}

    @cached_property
    def context_features(self) -> tuple[str, ...]:
        """Those that are read of the event that is asked for."""
        return tuple(self._columns_of(CONTEXT_PREFIX))

    @cached_property
    def user_features(self) -> dict[str, ColumnSpec]:
        """Features of users, by the name that the log gives them."""
        return self._columns_of(USER_PREFIX)

    @cached_property
    def given_fields(self) -> dict[str, ColumnSpec]:
        """Of all that requests tell of events and users: under which names histories and candidates hold it."""
        told = (*self.event_features.values(), *self.user_features.values())
        return {field: column for column in told for field in column.fields}

    @cached_property
    def prefix_columns(self) -> tuple[ColumnSpec, ...]:
        """Those of users that are tokens of their own before a history."""
        return tuple(self.user_features.values()) if self.serving.num_prefix(self.spec.task) else ()

    def _columns_of(self, prefix: str) -> dict[str, ColumnSpec]:
        return {c.name.removeprefix(prefix): c for c in self.spec.columns if c.name.startswith(prefix)}

    @property
    def is_resident(self) -> bool:
        """All of its tables lie on the device."""
        tables = (table.packed if isinstance(table, QuantizedTable) else table for table in self.tables.values())
        return all(isinstance(table, DeviceTable) for table in tables)

    @property
    def lookup_device(self) -> torch.device:
        """Where ids are when they are looked up: a cache is asked by the host."""
        return self.device if self.is_resident else torch.device("cpu")

    @property
    def search_kind(self) -> str:
        """How its index is searched where it is: a GPU looks at every row."""
        return "exact" if self.search is None or self.device.type != "cpu" else self.spec.search.kind

    def ids_of(self, keys: Sequence[str | int]) -> NDArray[np.int64]:
        """Item ids of source ids; an unknown one gives 0, whose vector evaluation uses too. Without a catalogue nobody
        is unknown."""
        return self.item_ids.of(keys) if self.reads_items else np.ones(len(keys), np.int64)

    @staticmethod
    def load(folder: Path, device: torch.device | str = "cpu", tables: TablesConfig | None = None) -> "Servable":
        """Verify and load; `CorruptFileError` where a file is missing, changed or foreign."""
        manifest = verified_manifest(folder)
        cfg = tables or TablesConfig()
        place = torch.device(device)
        servable = Servable.of_parts(
            {entry.name: _content(folder / entry.name) for entry in manifest.files if is_description(entry.name)},
            load_file(folder / WEIGHTS_FILE),
            lambda file, tensor: _open_table(folder / file, tensor, place, cfg, is_streamed=file == INDEX_FILE),
            version=manifest.version,
            device=place,
            exported_at_s=(folder / MANIFEST_FILE).stat().st_mtime,
            probe=_probe(folder),
        )
        servable = replace(servable, precision=manifest.precision)
        has_search = (folder / SEARCH_FILE).exists()
        return replace(servable, search=load_file(folder / SEARCH_FILE)) if has_search else servable

    @staticmethod
    def of_parts(
        descriptions: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        table: Callable[[str, str], ServedTable],
        *,
        version: str,
        device: torch.device,
        exported_at_s: float,
        probe: GoldenRequest | None = None,
    ) -> "Servable":
        """descriptions: content of the files that hold no learnt numbers, by their names. table: the one that a file
        holds under the name of a tensor."""
        spec = from_plain(ServableSpec, descriptions[SPEC_FILE])
        serving = serving_form_of(spec.task)
        model = serving.model(spec)
        fill(model, weights)
        computed_in(model, dtype_of(weights)).to(device).eval().requires_grad_(False)
        of_items = {"items": "items"} if serving.reads_items else {}
        read = of_items | {c.name: c.table_name for c in spec.columns if c.has_table}
        opened = {name: table(table_file(name), "weight") for name in dict.fromkeys(read.values())}
        begins = {c.table_name: c.by_key for c in spec.columns if c.by_key is not None}
        for name, keys in descriptions.get(KEYS_FILE, {}).items():
            opened[name] = KeyedTable(opened[name], keys.numpy(), begins[name])
        columns = descriptions.get(COLUMNS_FILE, {})
        servable = Servable(
            spec=spec,
            version=version,
            model=model,
            index=None if serving.index is None else table(INDEX_FILE, "vectors"),
            item_columns=columns,
            tables={column: opened[name] for column, name in read.items()},
            item_keys=tuple(descriptions[ITEMS_FILE]),
            probe=probe,
            item_titles=tuple(descriptions.get(TITLES_FILE, ())),
            exported_at_s=exported_at_s,
        )
        place = servable.lookup_device
        return replace(servable, item_columns={name: column.to(place) for name, column in columns.items()})


def is_description(file: str) -> bool:
    """Of a servable folder: it holds no learnt numbers."""
    learnt = {WEIGHTS_FILE, INDEX_FILE, PROBE_FILE, SEARCH_FILE}
    return file not in learnt and not file.startswith(table_file("").partition(".")[0])


def _open_table(path: Path, tensor: str, device: torch.device, cfg: TablesConfig, *, is_streamed: bool) -> ServedTable:
    """As numbers, whatever they are kept in."""
    kind = next((kind for kind in PACKED_KINDS if kind in tensors_in(path)), None)
    found = open_table(path, kind or tensor, device, cfg, is_streamed=is_streamed)
    return found if kind is None else QuantizedTable(found, kind)


def verified_manifest(folder: Path) -> ServableManifest:
    """The manifest of a folder whose files are exactly those that were exported."""
    if not (folder / MANIFEST_FILE).exists():
        if (folder / _RUN_CONFIG_FILE).exists():
            model = Path("models", folder.resolve().name)
            remedy = f"export it: nestrec export {shlex.quote(str(folder))} {shlex.quote(str(model))}"
            raise CorruptFileError("is a run, not an exported model", option="--model", value=str(folder), remedy=remedy)
        remedy = "name a folder that `nestrec export RUN OUT` wrote, or an address where a run has published a version"
        raise CorruptFileError("holds no exported model", option="--model", value=str(folder), remedy=remedy)
    try:
        plain = json.loads((folder / MANIFEST_FILE).read_bytes())
        if plain["format"] != FORMAT:
            raise _damaged(MANIFEST_FILE, f"has format {plain['format']!r}; this version reads {FORMAT}")
        manifest = from_plain(ServableManifest, plain)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(str(folder / MANIFEST_FILE), "is no manifest of an exported model") from error
    except UserError as error:
        raise _damaged(MANIFEST_FILE, str(error)) from error
    listed = {entry.name for entry in manifest.files}
    present = {path.name for path in folder.iterdir()} - {MANIFEST_FILE}
    if listed != present:
        raise _damaged(", ".join(sorted(listed ^ present)), "is missing, or was not exported")
    for entry in manifest.files:
        path = folder / entry.name
        problem = "does not match its digest: is a link" if path.is_symlink() else file_problem(path, entry)
        if problem is not None:
            raise _damaged(entry.name, problem)
    return manifest


def fill(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise _damaged(WEIGHTS_FILE, f"does not fit the model of the spec: {error}") from error


def _probe(folder: Path) -> GoldenRequest | None:
    """None in a folder of an earlier version, which recorded none."""
    path = folder / PROBE_FILE
    return from_plain(GoldenRequest, json.loads(path.read_text())) if path.exists() else None


def _content(file: Path) -> Any:
    return load_file(file) if file.suffix == ".safetensors" else json.loads(file.read_text())


def _damaged(name: str, problem: str) -> CorruptFileError:
    return CorruptFileError(problem, option="servable file", value=name, remedy="export the run again")


def check_sound(servable: Servable) -> None:
    """`CorruptFileError` that names the file. Digests do not tell: what was written wrong has the right ones."""
    spec = servable.spec
    _check(len(servable.item_keys) == spec.num_items, ITEMS_FILE, f"must name {spec.num_items} items, as the spec says")
    _check(len(set(servable.item_keys)) == spec.num_items, ITEMS_FILE, "names an item twice")
    if servable.reads_items:
        _check_rows(servable.tables["items"], spec.num_items + 1, table_file("items"))
    if servable.index is not None:
        _check_rows(servable.index, spec.num_items, INDEX_FILE)
    for column in spec.columns:
        if not column.has_table:
            continue
        _check_rows(servable.tables[column.name], column.num_rows, table_file(column.name))
        if column.by_key is not None:
            continue
        num_keys = 0 if column.keys is None else len(column.keys)
        _check(num_keys < column.num_rows, SPEC_FILE, f"has more keys of {column.name} than its table has rows")
    for name, categories in servable.item_columns.items():
        _check(len(categories) >= spec.num_items + 1, COLUMNS_FILE, f"must have {spec.num_items + 1} values of {name}")
        num_rows = servable.columns[name].num_rows
        is_there = not len(categories) or bool(((categories >= 0) & (categories < num_rows)).all())
        _check(is_there, COLUMNS_FILE, f"has categories of {name} that its table does not have")
    _check(_are_finite(servable.model.state_dict().values()), WEIGHTS_FILE, "has numbers that are not finite")
    dim = servable.encoder_config.dim
    for name, table in servable.tables.items():
        if name == "items":
            _check_table(table, dim * spec.item_vectors, table_file(name))
        else:
            _check_table(table, dim, table_file(servable.columns[name].table_name))
    if servable.index is not None:
        _check_table(servable.index, dim, INDEX_FILE)


def _check_rows(table: ServedTable, num_rows: int, file: str) -> None:
    _check(table.num_rows == num_rows, file, f"has {table.num_rows} rows where the spec has {num_rows}")


def _check_table(table: ServedTable, dim: int, file: str) -> None:
    if isinstance(table, KeyedTable):
        dim = table.begins.dim
        is_ascending = len(table.keys) == table.num_rows and bool((table.keys[1:] > table.keys[:-1]).all())
        _check(is_ascending, KEYS_FILE, "must have a key for each row, ascending")
    for _, part in table.parts():
        _check(part.shape[1] == dim, file, f"has rows of {part.shape[1]} numbers where the model has {dim}")
        _check(_are_finite([part]), file, "has numbers that are not finite")


def _are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def _check(is_so: bool, file: str, problem: str) -> None:
    require(is_so, problem, option="servable file", value=file, remedy="export the run again", error=CorruptFileError)
