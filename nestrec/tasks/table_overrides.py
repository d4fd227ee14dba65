"""Options of a task's embedding tables: `--tables.NAME.OPTION` overrides the task's defaults.

    --tables.items.dim 128 --tables.brand.dim 16 --tables.tags.pooling mean --tables.*.dtype bfloat16

NAME is the name of a table, or of a feature without its prefix `event_`, `user_` or `item_`. `*` matches all tables;
options of a table by name take precedence.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from nestrec.base.config import config
from nestrec.base.config_values import Count, OneOf
from nestrec.base.errors import ErrorCollector, UserError, did_you_mean, with_period
from nestrec.embedding import TableConfig
from nestrec.embedding.row_optimizer import ROW_OPTIMIZERS, RowOptimizerConfig
from nestrec.embedding.table_config import Placement
from nestrec.ops.embedding.row_gather import Pooling

ALL = "*"
_PREFIXES = ("event_", "user_", "item_")
_OF_STORE = {
    "store": "kind",
    "store_folder": "folder",
    **{name: name for name in ("cache_rows", "admission_threshold", "eviction_policy", "max_rows")},
}
"""Options of a table and the fields of `StoreConfig` that they set."""
_OF_DYNAMIC = ("admission_threshold", "eviction_policy", "max_rows", "ttl_steps")


@config
class TableOverrides:
    """Options of one embedding table; None keeps the task's setting."""

    dim: Count | None = None
    """Embedding dimension; if it differs from the model width, a projection maps embeddings to the model width. None:
    the model width."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the row weights. 16-bit types halve memory and communication, are rounded stochastically after each
    update, and keep the optimizer state in float32. None: `training.weight_dtype`."""
    pooling: Pooling | None = None
    """Pooling of the ids of a multi-valued feature (embedding bag): sum, mean, or sum weighted by per-id weights. None:
    mean."""
    optimizer: Annotated[str, OneOf(ROW_OPTIMIZERS)] | None = None
    """Row optimizer with its default hyperparameters. None: the task's optimizer."""
    store: Literal["device", "dram", "disk"] | None = None
    """Storage tier of the rows: device memory, host memory or disk. None: the task's setting."""
    store_folder: str | None = None
    """Folder of the table's file; only for `store=disk`."""
    cache_rows: Count | None = None
    """Number of rows that each shard caches in host memory; only for `store=disk`."""
    id_mode: Literal["dense", "dynamic", "hashed"] | None = None
    """Mapping of ids to rows. dense: one row per id of the dataset. dynamic: one row per id seen in training, with
    optional admission and eviction. hashed: `num_rows` rows, shared by ids with equal hashes. None: the task's
    setting."""
    num_rows: Count | None = None
    """Number of rows; only for `id_mode=hashed`."""
    admission_threshold: Count | None = None
    """Number of steps in which an id must have been used before it is admitted; only for `id_mode=dynamic`."""
    eviction_policy: Literal["none", "lru", "lfu", "ttl"] | None = None
    """Eviction policy; only for `id_mode=dynamic`. lru and lfu apply when `max_rows` is reached, ttl after `ttl_steps`
    steps without use. none: rows are never evicted, even if the task sets a policy. null: the task's setting."""
    max_rows: Count | None = None
    """Maximum number of rows over all ranks; only for `id_mode=dynamic`."""
    ttl_steps: Count | None = None
    """Number of steps after which an unused row is evicted; only for `id_mode=dynamic`."""
    placement: Placement | None = None
    """Placement of the rows. sharded: each row is stored on one rank. replicated: every rank stores all rows and reads
    them locally, with bitwise identical results; not for dynamic ids or disk. auto: whichever transfers fewer bytes
    between ranks. None: sharded."""
    shared_with: str | None = None
    """Name of another table that the feature reads instead; ids must have the same meaning in both."""


@dataclass(frozen=True, slots=True)
class ResolvedTables:
    """Tables of a task after the run's overrides."""

    tables: tuple[TableConfig, ...]
    num_ids: Mapping[str, int | None]
    """Number of ids in the dataset for each table, independent of its number of rows; None: any int64."""
    pooling: Mapping[str, Pooling] = field(default_factory=dict)
    """Pooling of each multi-valued feature."""

    @property
    def table_of(self) -> dict[str, TableConfig]:
        """Table of each feature."""
        return {feature: table for table in self.tables for feature in table.feature_names}

    @property
    def widths(self) -> dict[str, int]:
        """Embedding dimension of each feature."""
        return {feature: table.dim for feature, table in self.table_of.items()}


def resolve_tables(
    tables: Sequence[TableConfig], options: Mapping[str, TableOverrides], bags: Collection[str] = ()
) -> ResolvedTables:
    """Apply the options of a run to the tables of its task.

    Args:
        tables: Default tables of the task.
        options: Options by table name, short feature name or `*`.
        bags: Multi-valued features.

    Raises:
        UserError: If options are invalid; the message lists all of them.
    """
    mistakes = ErrorCollector()
    option_names = dict[str, str]()
    for name in options:
        with mistakes.collecting():
            if name != ALL:
                option_names[_find_table(name, tables)] = name
    mistakes.raise_if_any()
    settings = {table.name: _TableSettings(table, options, option_names.get(table.name), bags) for table in tables}
    resolved = []
    pooling = dict[str, Pooling]()
    for table in tables:
        with mistakes.collecting():
            pooling |= settings[table.name].pooling()
            if settings[table.name].shared_with is None:
                resolved.append(settings[table.name].table())
    mistakes.raise_if_any()
    num_ids = {table.name: table.num_rows for table in tables}
    for table in tables:
        with mistakes.collecting():
            if (target := settings[table.name].shared_with) is not None:
                _share_rows(resolved, num_ids, table, _find_table(target, tables), settings[table.name])
    mistakes.raise_if_any()
    return ResolvedTables(tuple(resolved), {table.name: num_ids[table.name] for table in resolved}, pooling)


def tables_with_option(option: str, tables: Sequence[TableConfig], options: Mapping[str, TableOverrides]) -> set[str]:
    """Return the names of the tables for which an option is set, by name or for all tables."""
    names = [name for name, overrides in options.items() if getattr(overrides, option) is not None]
    return {t.name for t in tables} if ALL in names else {_find_table(name, tables) for name in names}


class _TableSettings:
    """Resolves the options of one table."""

    def __init__(
        self, table: TableConfig, options: Mapping[str, TableOverrides], name: str | None, bags: Collection[str]
    ) -> None:
        self._table = table
        self._of_one = dict(_set_options(options[name])) if name is not None else {}
        self._of_all = dict(_set_options(options[ALL])) if ALL in options else {}
        self._name = name or table.name
        self._bags = [f for f in table.feature_names if f in bags]
        self._values = self._of_all | self._of_one

    @property
    def shared_with(self) -> str | None:
        return self._of_one.get("shared_with")

    def pooling(self) -> dict[str, Pooling]:
        if "pooling" in self._of_one and not self._bags:
            raise self.mistake(
                "pooling", "the feature has one id per position, so there is nothing to pool", "remove it"
            )
        return dict.fromkeys(self._bags, self._values.get("pooling", "mean"))

    def table(self) -> TableConfig:
        if "shared_with" in self._of_all:
            raise UserError(
                "cannot be set for all tables",
                option="tables.*.shared_with",
                value="*",
                remedy="set it for a table by name",
            )
        changes: dict[str, Any] = {}
        if "dtype" in self._values:
            if self._table.dtype == "float64":
                problem, remedy = "training.weight_dtype=float64 requires float64 rows", "remove it, or train with"
                raise self.mistake("dtype", problem, f"{remedy} float32")
            changes["dtype"] = self._values["dtype"]
        if "dim" in self._values:
            changes["dim"] = self._values["dim"]
        if "placement" in self._values:
            changes["placement"] = self._placement(self._values["placement"])
        if self._values.get("optimizer", self._table.optimizer.kind) != self._table.optimizer.kind:
            changes["optimizer"] = RowOptimizerConfig(kind=self._values["optimizer"])
        return self._with_store(replace(self._table, **changes, **self._ids()))

    def _placement(self, requested: Placement) -> Placement:
        """Return the placement; `replicated` for all tables is ignored by tables that cannot be replicated."""
        is_dynamic = self._values.get("id_mode", "dynamic" if self._table.num_rows is None else "") == "dynamic"
        on_disk = self._values.get("store", self._table.store.kind) == "disk"
        if requested == "replicated" and (is_dynamic or on_disk):
            if "placement" not in self._of_one:
                return "sharded"
            why = "rows of dynamic ids are admitted and evicted by one rank" if is_dynamic else "the table is on disk"
            raise self.mistake("placement", why, "set it to sharded")
        return requested

    def others(self) -> list[str]:
        """Return the options that apply to rows of its own, which a shared table does not have."""
        return [name for name in self._of_one if name not in ("shared_with", "pooling")]

    def _ids(self) -> dict[str, Any]:
        ids = self._values.get("id_mode")
        if "num_rows" in self._of_one and ids != "hashed":
            raise self.mistake("num_rows", "only applies to hashed ids", f"add --tables.{self._name}.id_mode hashed")
        if ids == "hashed" and "num_rows" not in self._values:
            remedy = f"set the number of rows, for example --tables.{self._name}.num_rows 100000"
            raise self.mistake("id_mode", "needs a number of rows", remedy)
        if ids == "dense" and self._table.num_rows is None:
            raise self.mistake("id_mode", "the task does not know its ids in advance", "set it to dynamic or hashed")
        if ids == "hashed":
            return {"num_rows": self._values["num_rows"], "is_hashed": True}
        return {"num_rows": None} if ids == "dynamic" else {}

    def _with_store(self, table: TableConfig) -> TableConfig:
        is_dynamic = table.num_rows is None
        for name in _OF_DYNAMIC if not is_dynamic else ():
            if name in self._of_one:
                problem = "only applies to dynamic ids, whose rows are admitted and evicted"
                raise self.mistake(name, problem, f"add --tables.{self._name}.id_mode dynamic")
        changes = {
            of_store: self._values[name]
            for name, of_store in _OF_STORE.items()
            if name in self._values and (is_dynamic or name not in _OF_DYNAMIC)
        }
        if "ttl_steps" in self._values and is_dynamic:
            changes |= {
                "ttl_steps": self._values["ttl_steps"],
                "eviction_policy": self._values.get("eviction_policy", "ttl"),
            }
        if changes.get("eviction_policy") == "none" and "ttl_steps" not in self._of_one:
            changes["ttl_steps"] = None
        if changes.get("eviction_policy") in ("lru", "lfu") and changes.get("max_rows", table.store.max_rows) is None:
            remedy = f"add --tables.{self._name}.max_rows 1000000"
            raise self.mistake("eviction_policy", "needs a maximum number of rows", remedy)
        if changes.get("eviction_policy") == "ttl" and changes.get("ttl_steps", table.store.ttl_steps) is None:
            remedy = f"add --tables.{self._name}.ttl_steps 10000"
            raise self.mistake(
                "eviction_policy", "needs the number of steps after which unused rows are evicted", remedy
            )
        return replace(table, store=replace(table.store, **changes)) if changes else table

    def mistake(self, name: str, problem: str, remedy: str) -> UserError:
        table = self._name if name in self._of_one else ALL
        return UserError(problem, option=f"tables.{table}.{name}", value=self._values.get(name), remedy=remedy)


def _set_options(options: TableOverrides) -> Iterator[tuple[str, Any]]:
    for each in dataclasses.fields(options):
        if (value := getattr(options, each.name)) is not None:
            yield each.name, value


def _find_table(name: str, tables: Sequence[TableConfig]) -> str:
    """Return the table with this name, or of the feature with this name without prefix."""
    names = [table.name for table in tables]
    matches = [name] if name in names else [prefix + name for prefix in _PREFIXES if prefix + name in names]
    if len(matches) > 1:
        remedy = f"use the full name: {' or '.join(matches)}"
        raise UserError("the name is ambiguous", option=f"tables.{name}", value=name, remedy=remedy)
    if not matches:
        short = [n.removeprefix(prefix) for n in names for prefix in _PREFIXES if n.startswith(prefix)]
        remedy = f"{with_period(did_you_mean(name, [*names, *short]))} The task has {', '.join(names)}"
        raise UserError("no such table in this task", option=f"tables.{name}", value=name, remedy=remedy)
    return matches[0]


def _share_rows(
    resolved: list[TableConfig],
    num_ids: dict[str, int | None],
    table: TableConfig,
    with_name: str,
    settings: _TableSettings,
) -> None:
    """Let the features of a table read another one."""
    if settings.others():
        problem = f"this option is ignored, because the table shares the rows of {with_name}"
        raise settings.mistake(settings.others()[0], problem, f"set it for tables.{with_name}")
    index = next((i for i, other in enumerate(resolved) if other.name == with_name), None)
    if index is None:
        raise settings.mistake(
            "shared_with", "must be another table with its own rows", "choose a table that shares no rows"
        )
    other = resolved[index]
    ids = num_ids[with_name]
    more = table.num_rows
    num_ids[with_name] = None if ids is None or more is None else max(ids, more)
    is_dense = other.num_rows is not None and not other.is_hashed
    num_full = len(other.feature_names) - len(other.half_precision_features)
    features = (*other.feature_names[:num_full], *table.feature_names, *other.half_precision_features)
    resolved[index] = replace(other, features=features, num_rows=num_ids[with_name] if is_dense else other.num_rows)
