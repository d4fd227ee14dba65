"""Servable: an exported model folder loaded into memory.

`Servable.load` verifies every file against its SHA-256 digest in the manifest before it is read. `validate_servable`
then checks that shapes match and that all numbers are finite.
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
from nestrec.models.encoder_parts import compute_dtype, convert_model, reserve_prefix
from nestrec.models.sequence import UNCACHED, CachedForward, KVCacheSpec
from nestrec.serving.model.item_id_map import ItemIds, KeyedTable
from nestrec.serving.model.row_sources import tensor_names
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
    QUANTIZATION_KINDS,
    DeviceTable,
    QuantizedTable,
    ServedTable,
    TablesConfig,
    open_table,
)
from nestrec.serving.model.serving_spec import NoBackboneConfig, ServingSpec, serving_spec_of

_RUN_CONFIG_FILE = "config.json"
"""File that identifies a run folder; defined here because serving does not import training."""


@dataclass(frozen=True)
class Servable:
    """Exported model with its embedding tables, ready to score. Immutable."""

    spec: ServableSpec
    version: str
    model: nn.Module
    tables: Mapping[str, ServedTable]
    """Embedding table of each column; columns that share a table map to the same object."""
    item_keys: tuple[str, ...]
    """Source ids of items 1, 2, ..."""
    index: ServedTable | None
    """Retrieval index: vectors of items 1 to N in rows 0 to N - 1, as inputs of the similarity; None for ranking."""
    item_columns: Mapping[str, torch.Tensor]
    """Category of each item id (ranking), on the device on which ids are looked up."""
    golden_request: GoldenRequest | None = None
    """Request with expected scores, recorded by the export; None if the folder was exported without one."""
    item_titles: tuple[str, ...] = ()
    """Titles of items 1, 2, ...; empty if the dataset does not have item texts."""
    search: Mapping[str, torch.Tensor] | None = None
    """Tensors of the ANN search structure of the index; None for exact search."""
    precision: QuantizationReport | None = None
    """Quality loss of a quantized export; None if the export has the precision of the run."""
    exported_at_s: float | None = None
    """Time of the export in Unix seconds; None if the servable was not loaded from a folder."""

    @cached_property
    def item_ids(self) -> ItemIds:
        """Mapping of source ids to item ids."""
        return ItemIds(self.item_keys)

    @cached_property
    def columns(self) -> dict[str, ColumnSpec]:
        """Feature columns by name."""
        return {c.name: c for c in self.spec.columns}

    @cached_property
    def column_ids(self) -> dict[str, dict[str, int]]:
        """Vocabulary of each feature column: category key to id."""
        known = {c.name: {key: i + 1 for i, key in enumerate(c.keys)} for c in self.spec.columns if c.keys is not None}
        context = {
            EVENT_PREFIX + n.removeprefix(CONTEXT_PREFIX): k for n, k in known.items() if n.startswith(CONTEXT_PREFIX)
        }
        return context | known

    @cached_property
    def serving(self) -> ServingSpec:
        """Serving spec of the model's task."""
        return serving_spec_of(self.spec.task)

    @cached_property
    def encoder_config(self) -> BackboneConfig:
        """Config of the backbone, with additional positions for the user tokens before a history."""
        cfg = self.serving.encoder(self.spec.task)
        num_prefix = self.serving.num_prefix(self.spec.task)
        return reserve_prefix(cfg, num_prefix)

    @cached_property
    def cached_forward(self) -> CachedForward:
        """Forward pass with a KV cache, or of complete sequences if the backbone does not support a KV cache."""
        return cached_forward_of(self.encoder_config) if self._reads_sequence else UNCACHED

    def num_cacheable_tokens(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` request-independent tokens the KV cache stores: all or none."""
        return num_tokens if self.cached_forward.has_cache else 0

    @cached_property
    def cache_spec(self) -> KVCacheSpec:
        """Layout of the KV cache per token."""
        return self.cached_forward.cache_spec(self.encoder_config)

    @cached_property
    def _backbone(self) -> BackboneSpec:
        return backbone_of(self.encoder_config)

    def cut(self, num_tokens: int) -> int:
        """Return the first token that all layers compute in a sequence of `num_tokens`, as in training."""
        return self._backbone.cut(self.encoder_config, num_tokens) if self._reads_sequence else 0

    @cached_property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @cached_property
    def dtype(self) -> torch.dtype:
        """Data type of the computation."""
        return next(self.model.parameters()).dtype

    @cached_property
    def reads_times(self) -> bool:
        """Whether scores depend on the times of events."""
        return self._reads_sequence and self._backbone.reads_times(self.encoder_config)

    @property
    def reads_items(self) -> bool:
        """Whether events and candidates are catalog items; otherwise the model reads candidate features, no history."""
        return self.serving.reads_items

    @property
    def _reads_sequence(self) -> bool:
        return not isinstance(self.encoder_config, NoBackboneConfig)

    @property
    def reads_actions(self) -> bool:
        """Whether scores depend on the actions of events."""
        return self.serving.reads_actions

    @property
    def needs_event(self) -> bool:
        """Whether the model needs at least one event per user. Ranking models do not: they were also trained on first
        events, which have an empty history."""
        return self.serving.needs_event

    @cached_property
    def event_features(self) -> dict[str, ColumnSpec]:
        """Features of events and candidates by log column name.

        Context features (features of the query event) are included, because each event of a history was a query event.
        """
        context = {name: replace(c, name=EVENT_PREFIX + name) for name, c in self._columns_of(CONTEXT_PREFIX).items()}
        return context | self._columns_of(EVENT_PREFIX)

    @cached_property
    def event_default_examples(self) -> dict[str, str]:
        """Example value, as `export` reads it, of each default that a default history needs (`times`: `now`)."""
        examples: dict[str, str] = {}
        if self.reads_times:
            examples["times"] = "now"
        if self.reads_actions:
            examples["actions"] = next(iter(self.spec.action_bits), "[]")
        return examples | {f"features.{name}": "none" for name in self.event_features}

    @cached_property
    def context_features(self) -> tuple[str, ...]:
        """Names of the features of the query event that the model reads with the history."""
        return tuple(self._columns_of(CONTEXT_PREFIX))

    @cached_property
    def user_features(self) -> dict[str, ColumnSpec]:
        """Features of users by log column name."""
        return self._columns_of(USER_PREFIX)

    @cached_property
    def request_fields(self) -> dict[str, ColumnSpec]:
        """Column of each `History` field of the event and user features in requests."""
        columns = (*self.event_features.values(), *self.user_features.values())
        return {field: column for column in columns for field in column.fields}

    @cached_property
    def prefix_columns(self) -> tuple[ColumnSpec, ...]:
        """User feature columns that are tokens before a history."""
        return tuple(self.user_features.values()) if self.serving.num_prefix(self.spec.task) else ()

    def _columns_of(self, prefix: str) -> dict[str, ColumnSpec]:
        return {c.name.removeprefix(prefix): c for c in self.spec.columns if c.name.startswith(prefix)}

    @property
    def is_resident(self) -> bool:
        """Whether all tables are stored completely on the device."""
        tables = (table.byte_table if isinstance(table, QuantizedTable) else table for table in self.tables.values())
        return all(isinstance(table, DeviceTable) for table in tables)

    @property
    def lookup_device(self) -> torch.device:
        """Device on which ids are looked up: the CPU if a table has a cache, since its index is in host memory."""
        return self.device if self.is_resident else torch.device("cpu")

    @property
    def search_kind(self) -> str:
        """Search method of the index on its device; a GPU always uses exact search."""
        return "exact" if self.search is None or self.device.type != "cpu" else self.spec.search.kind

    def ids_of(self, keys: Sequence[str | int]) -> NDArray[np.int64]:
        """Return the item ids of source ids; unknown ones get 0, as in evaluation.

        A model without a catalog accepts every source id and returns 1 for each.
        """
        return self.item_ids.of(keys) if self.reads_items else np.ones(len(keys), np.int64)

    @staticmethod
    def load(folder: Path, device: torch.device | str = "cpu", tables: TablesConfig | None = None) -> "Servable":
        """Verify and load a servable folder.

        Args:
            folder: The folder.
            device: Device of the model.
            tables: Storage options of the embedding tables; all on the device by default.

        Raises:
            CorruptFileError: A file is missing, changed, or not listed in the manifest.
        """
        manifest = load_verified_manifest(folder)
        cfg = tables or TablesConfig()
        target = torch.device(device)
        servable = Servable.from_parts(
            {entry.name: _content(folder / entry.name) for entry in manifest.files if is_description_file(entry.name)},
            load_file(folder / WEIGHTS_FILE),
            lambda file, tensor: _open_table(folder / file, tensor, target, cfg, is_streamed=file == INDEX_FILE),
            version=manifest.version,
            device=target,
            exported_at_s=(folder / MANIFEST_FILE).stat().st_mtime,
            golden_request=_probe(folder),
        )
        servable = replace(servable, precision=manifest.precision)
        has_search = (folder / SEARCH_FILE).exists()
        return replace(servable, search=load_file(folder / SEARCH_FILE)) if has_search else servable

    @staticmethod
    def from_parts(
        descriptions: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        table: Callable[[str, str], ServedTable],
        *,
        version: str,
        device: torch.device,
        exported_at_s: float,
        golden_request: GoldenRequest | None = None,
    ) -> "Servable":
        """Create a servable from the contents of its files.

        Args:
            descriptions: Contents of the files without learned weights, by file name (see `is_description_file`).
            weights: State dict of the model.
            table: Function that opens the table of a (file name, tensor name).
            version: Version of the model.
            device: Device of the model.
            exported_at_s: Time of the export in Unix seconds.
            golden_request: Recorded request with its expected scores, if there is one.
        """
        spec = from_plain(ServableSpec, descriptions[SPEC_FILE])
        serving = serving_spec_of(spec.task)
        model = serving.model(spec)
        load_weights(model, weights)
        convert_model(model, compute_dtype(weights)).to(device).eval().requires_grad_(False)
        item_table = {"items": "items"} if serving.reads_items else {}
        table_names = item_table | {c.name: c.table_name for c in spec.columns if c.has_table}
        opened = {name: table(table_file(name), "weight") for name in dict.fromkeys(table_names.values())}
        keyed_specs = {c.table_name: c.by_key for c in spec.columns if c.by_key is not None}
        for name, keys in descriptions.get(KEYS_FILE, {}).items():
            opened[name] = KeyedTable(opened[name], keys.numpy(), keyed_specs[name])
        columns = descriptions.get(COLUMNS_FILE, {})
        servable = Servable(
            spec=spec,
            version=version,
            model=model,
            index=None if serving.index is None else table(INDEX_FILE, "vectors"),
            item_columns=columns,
            tables={column: opened[name] for column, name in table_names.items()},
            item_keys=tuple(descriptions[ITEMS_FILE]),
            golden_request=golden_request,
            item_titles=tuple(descriptions.get(TITLES_FILE, ())),
            exported_at_s=exported_at_s,
        )
        lookup_device = servable.lookup_device
        return replace(servable, item_columns={name: column.to(lookup_device) for name, column in columns.items()})


def is_description_file(file: str) -> bool:
    """Return whether a file of a servable folder contains no learned weights."""
    other_files = {WEIGHTS_FILE, INDEX_FILE, PROBE_FILE, SEARCH_FILE}
    return file not in other_files and not file.startswith(table_file("").partition(".")[0])


def _open_table(path: Path, tensor: str, device: torch.device, cfg: TablesConfig, *, is_streamed: bool) -> ServedTable:
    """Open a table; a quantized one is dequantized on lookup."""
    kind = next((kind for kind in QUANTIZATION_KINDS if kind in tensor_names(path)), None)
    table = open_table(path, kind or tensor, device, cfg, is_streamed=is_streamed)
    return table if kind is None else QuantizedTable(table, kind)


def load_verified_manifest(folder: Path) -> ServableManifest:
    """Read the manifest of a servable folder and verify all files against their digests.

    Raises:
        CorruptFileError: The folder is not a servable, or its files differ from the manifest.
    """
    if not (folder / MANIFEST_FILE).exists():
        if (folder / _RUN_CONFIG_FILE).exists():
            model = Path("models", folder.resolve().name)
            remedy = f"export it: nestrec export {shlex.quote(str(folder))} {shlex.quote(str(model))}"
            raise CorruptFileError(
                "the folder is a run, not an exported model", option="--model", value=str(folder), remedy=remedy
            )
        remedy = "use a folder written by `nestrec export RUN OUT`, or an address with a published version"
        raise CorruptFileError(
            "the folder does not contain an exported model", option="--model", value=str(folder), remedy=remedy
        )
    try:
        plain = json.loads((folder / MANIFEST_FILE).read_bytes())
        if plain["format"] != FORMAT:
            raise _corrupt(MANIFEST_FILE, f"has format {plain['format']!r}; this version reads format {FORMAT}")
        manifest = from_plain(ServableManifest, plain)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(str(folder / MANIFEST_FILE), "not a valid manifest of an exported model") from error
    except UserError as error:
        raise _corrupt(MANIFEST_FILE, str(error)) from error
    listed = {entry.name for entry in manifest.files}
    present = {path.name for path in folder.iterdir()} - {MANIFEST_FILE}
    if listed != present:
        raise _corrupt(", ".join(sorted(listed ^ present)), "missing from the folder, or not listed in the manifest")
    for entry in manifest.files:
        path = folder / entry.name
        problem = (
            "the file does not match its digest: it is a symbolic link"
            if path.is_symlink()
            else file_problem(path, entry)
        )
        if problem is not None:
            raise _corrupt(entry.name, problem)
    return manifest


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load a state dict; raise `CorruptFileError` if it does not match the model."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise _corrupt(WEIGHTS_FILE, f"the weights do not match the model of the spec: {error}") from error


def _probe(folder: Path) -> GoldenRequest | None:
    """Read the golden request; None if the folder was exported by an earlier version, which did not record one."""
    path = folder / PROBE_FILE
    return from_plain(GoldenRequest, json.loads(path.read_text())) if path.exists() else None


def _content(file: Path) -> Any:
    return load_file(file) if file.suffix == ".safetensors" else json.loads(file.read_text())


def _corrupt(name: str, problem: str) -> CorruptFileError:
    return CorruptFileError(problem, option="servable file", value=name, remedy="export the run again")


def validate_servable(servable: Servable) -> None:
    """Check that shapes match the spec and that all numbers are finite.

    Digests do not detect such errors: a file that was exported incorrectly has a valid digest.

    Raises:
        CorruptFileError: A check failed; the error names the file.
    """
    spec = servable.spec
    _check(len(servable.item_keys) == spec.num_items, ITEMS_FILE, f"must list {spec.num_items} items, as in the spec")
    _check(len(set(servable.item_keys)) == spec.num_items, ITEMS_FILE, "lists an item twice")
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
        is_in_range = not len(categories) or bool(((categories >= 0) & (categories < num_rows)).all())
        _check(is_in_range, COLUMNS_FILE, f"has categories of {name} that are not rows of its table")
    _check(_are_finite(servable.model.state_dict().values()), WEIGHTS_FILE, "contains numbers that are not finite")
    dim = servable.encoder_config.dim
    for name, table in servable.tables.items():
        if name == "items":
            _check_table(table, dim * spec.item_vectors, table_file(name))
        else:
            _check_table(table, dim, table_file(servable.columns[name].table_name))
    if servable.index is not None:
        _check_table(servable.index, dim, INDEX_FILE)


def _check_rows(table: ServedTable, num_rows: int, file: str) -> None:
    _check(table.num_rows == num_rows, file, f"has {table.num_rows} rows, but the spec has {num_rows}")


def _check_table(table: ServedTable, dim: int, file: str) -> None:
    if isinstance(table, KeyedTable):
        dim = table.spec.dim
        is_ascending = len(table.keys) == table.num_rows and bool((table.keys[1:] > table.keys[:-1]).all())
        _check(is_ascending, KEYS_FILE, "must contain one key per row, in ascending order")
    for _, part in table.parts():
        _check(part.shape[1] == dim, file, f"has rows of {part.shape[1]} numbers, but the model has {dim}")
        _check(_are_finite([part]), file, "contains numbers that are not finite")


def _are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def _check(is_valid: bool, file: str, problem: str) -> None:
    require(
        is_valid, problem, option="servable file", value=file, remedy="export the run again", error=CorruptFileError
    )
