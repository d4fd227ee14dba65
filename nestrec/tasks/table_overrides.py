"""What a run says of the tables of its task, each by its name; what it does not say stays as the task has it.

    --tables.items.dim 128 --tables.brand.dim 16 --tables.tags.pooling mean --tables.*.dtype bfloat16

A name is that of a table, or that of a feature without its `event_`, `user_` or `item_`; `*` stands for all tables, and
what is said of one by name counts more.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from nestrec.base.config import config
from nestrec.base.config_values import Count, OneOf
from nestrec.base.errors import ErrorCollector, UserError, did_you_mean
from nestrec.embedding import TableConfig
from nestrec.embedding.row_optimizer import ROW_OPTIMIZERS, RowOptimizerConfig
from nestrec.embedding.table_config import Placement
from nestrec.ops.embedding.row_gather import Pooling

ALL = "*"
_PREFIXES = ("event_", "user_", "item_")
_OF_STORE = {"store": "kind"} | {n: n for n in ("folder", "cache_rows", "admission_count", "eviction", "max_rows")}
_OF_DYNAMIC = ("admission_count", "eviction", "max_rows", "ttl_steps")


@config
class TableOverrides:
    dim: Count | None = None
    """width of its vectors; where it is not the model's, a matrix of the table's own brings them to that. none: the
    model's"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """type of the rows' weights; 16 bits take half the memory and half the bytes between ranks, are rounded by chance
    after each update, and keep optimiser state in float32. none: as training.dtype"""
    pooling: Pooling | None = None
    """how several values of a feature become one vector: sum, mean, or a sum by the weights that come with them. none:
    mean"""
    optimizer: Annotated[str, OneOf(ROW_OPTIMIZERS)] | None = None
    """row optimiser, with its usual numbers. none: the task's"""
    store: Literal["device", "dram", "disk"] | None = None
    """where rows are kept. none: as the task says"""
    folder: str | None = None
    """disk: where its file is made"""
    cache_rows: Count | None = None
    """disk: rows that a shard keeps in host memory"""
    ids: Literal["dense", "dynamic", "hashed"] | None = None
    """dense: a row for each id that the dataset knows. dynamic: a row for each id that training has met, which may be
    admitted late and evicted. hashed: `rows` rows, which ids share by their hashes. none: the task's"""
    rows: Count | None = None
    """hashed: how many rows there are"""
    admission_count: Count | None = None
    """dynamic: steps in which an id must have been used before it gets a row"""
    eviction: Literal["none", "lru", "lfu", "ttl"] | None = None
    """dynamic: what makes room, or ends a row's life"""
    max_rows: Count | None = None
    """dynamic: most rows over all ranks"""
    ttl_steps: Count | None = None
    """dynamic: a row that has not been used for more than this many steps is gone"""
    placement: Placement | None = None
    """sharded: a row is on one rank; replicated: every rank holds all of its rows and reads them from its own memory,
    with the same bits, of a table of a fixed number of rows outside of disks; auto: as fewer bytes cross between
    ranks. none: sharded"""
    share: str | None = None
    """another table, which its feature reads instead: ids must mean the same in both"""


@dataclass(frozen=True, slots=True)
class ResolvedTables:
    """The tables of a task as a run wants them."""

    tables: tuple[TableConfig, ...]
    num_ids: Mapping[str, int | None]
    """table to how many ids the dataset knows of it, however many rows it has; none: any int64"""
    pooling: Mapping[str, Pooling] = field(default_factory=dict)
    """feature with several values to how they become one vector"""

    @property
    def table_of(self) -> dict[str, TableConfig]:
        """Of each feature."""
        return {feature: table for table in self.tables for feature in table.feature_names}

    @property
    def widths(self) -> dict[str, int]:
        """Of the vectors of each feature."""
        return {feature: table.dim for feature, table in self.table_of.items()}


def chosen_tables(
    tables: Sequence[TableConfig], options: Mapping[str, TableOverrides], bags: Collection[str] = ()
) -> ResolvedTables:
    """What a run makes of the tables of its task; a UserError that names every mistake. bags: features with several
    values."""
    mistakes = ErrorCollector()
    named = dict[str, str]()
    for name in options:
        with mistakes.collecting():
            if name != ALL:
                named[_table_named(name, tables)] = name
    mistakes.raise_if_any()
    said = {table.name: _TableSettings(table, options, named.get(table.name), bags) for table in tables}
    kept = []
    pooling = dict[str, Pooling]()
    for table in tables:
        with mistakes.collecting():
            pooling |= said[table.name].pooling()
            if said[table.name].shared_with is None:
                kept.append(said[table.name].table())
    mistakes.raise_if_any()
    num_ids = {table.name: table.num_rows for table in tables}
    for table in tables:
        with mistakes.collecting():
            if (where := said[table.name].shared_with) is not None:
                _join(kept, num_ids, table, _table_named(where, tables), said[table.name])
    mistakes.raise_if_any()
    return ResolvedTables(tuple(kept), {table.name: num_ids[table.name] for table in kept}, pooling)


def tables_with(option: str, tables: Sequence[TableConfig], options: Mapping[str, TableOverrides]) -> set[str]:
    """Names of the tables of which this option is said, of one by its name or of all."""
    said = [name for name, given in options.items() if getattr(given, option) is not None]
    return {t.name for t in tables} if ALL in said else {_table_named(name, tables) for name in said}


class _TableSettings:
    """All that is said of one table."""

    def __init__(
        self, table: TableConfig, options: Mapping[str, TableOverrides], name: str | None, bags: Collection[str]
    ) -> None:
        self._table = table
        self._of_one = dict(_given(options[name])) if name is not None else {}
        self._of_all = dict(_given(options[ALL])) if ALL in options else {}
        self._name = name or table.name
        self._bags = [f for f in table.feature_names if f in bags]
        self._values = self._of_all | self._of_one

    @property
    def shared_with(self) -> str | None:
        return self._of_one.get("share")

    def pooling(self) -> dict[str, Pooling]:
        if "pooling" in self._of_one and not self._bags:
            raise self.mistake("pooling", "each place has one id, so nothing is pooled", "leave it out")
        return dict.fromkeys(self._bags, self._values.get("pooling", "mean"))

    def table(self) -> TableConfig:
        if "share" in self._of_all:
            raise UserError("cannot be said of all", option="tables.*.share", value="*", remedy="name the table")
        changes: dict[str, Any] = {}
        if "dtype" in self._values:
            if self._table.dtype == "float64":
                problem, remedy = "training.dtype = 'float64' asks for rows of the same", "leave it out, or train in"
                raise self.mistake("dtype", problem, f"{remedy} float32")
            changes["dtype"] = self._values["dtype"]
        if "dim" in self._values:
            changes["dim"] = self._values["dim"]
        if "placement" in self._values:
            changes["placement"] = self._placement(self._values["placement"])
        if self._values.get("optimizer", self._table.optimizer.kind) != self._table.optimizer.kind:
            changes["optimizer"] = RowOptimizerConfig(kind=self._values["optimizer"])
        return self._stored(replace(self._table, **changes, **self._ids()))

    def _placement(self, wanted: Placement) -> Placement:
        """What is said of all holds for those that can be so."""
        is_dynamic = self._values.get("ids", "dynamic" if self._table.num_rows is None else "") == "dynamic"
        on_disk = self._values.get("store", self._table.store.kind) == "disk"
        if wanted == "replicated" and (is_dynamic or on_disk):
            if "placement" not in self._of_one:
                return "sharded"
            why = "rows of dynamic ids are admitted and evicted by one rank" if is_dynamic else "it is kept on disk"
            raise self.mistake("placement", why, "leave it sharded")
        return wanted

    def others(self) -> list[str]:
        """Options of its own rows, which it has none of where it shares another's."""
        return [name for name in self._of_one if name not in ("share", "pooling")]

    def _ids(self) -> dict[str, Any]:
        ids = self._values.get("ids")
        if "rows" in self._of_one and ids != "hashed":
            raise self.mistake("rows", "is read of hashed ids alone", f"add --tables.{self._name}.ids hashed")
        if ids == "hashed" and "rows" not in self._values:
            remedy = f"say how many rows they share: --tables.{self._name}.rows 100000"
            raise self.mistake("ids", "needs a number of rows", remedy)
        if ids == "dense" and self._table.num_rows is None:
            raise self.mistake("ids", "the task does not know which ids there are", "leave it dynamic, or hash them")
        if ids == "hashed":
            return {"num_rows": self._values["rows"], "is_hashed": True}
        return {"num_rows": None} if ids == "dynamic" else {}

    def _stored(self, table: TableConfig) -> TableConfig:
        is_dynamic = table.num_rows is None
        for name in _OF_DYNAMIC if not is_dynamic else ():
            if name in self._of_one:
                problem = "only rows of dynamic ids are admitted and evicted"
                raise self.mistake(name, problem, f"add --tables.{self._name}.ids dynamic")
        changes = {
            of_store: self._values[name]
            for name, of_store in _OF_STORE.items()
            if name in self._values and (is_dynamic or name not in _OF_DYNAMIC)
        }
        if "ttl_steps" in self._values and is_dynamic:
            changes |= {"ttl_steps": self._values["ttl_steps"], "eviction": self._values.get("eviction", "ttl")}
        if changes.get("eviction") in ("lru", "lfu") and changes.get("max_rows", table.store.max_rows) is None:
            remedy = f"add --tables.{self._name}.max_rows 1000000"
            raise self.mistake("eviction", "needs a number of rows to keep", remedy)
        if changes.get("eviction") == "ttl" and changes.get("ttl_steps", table.store.ttl_steps) is None:
            remedy = f"add --tables.{self._name}.ttl_steps 10000"
            raise self.mistake("eviction", "needs the steps that a row lives unused", remedy)
        return replace(table, store=replace(table.store, **changes)) if changes else table

    def mistake(self, name: str, problem: str, remedy: str) -> UserError:
        whose = self._name if name in self._of_one else ALL
        return UserError(problem, option=f"tables.{whose}.{name}", value=self._values.get(name), remedy=remedy)


def _given(options: TableOverrides) -> Iterator[tuple[str, Any]]:
    for each in dataclasses.fields(options):
        if (value := getattr(options, each.name)) is not None:
            yield each.name, value


def _table_named(name: str, tables: Sequence[TableConfig]) -> str:
    """The table that a name stands for: its own, or that of a feature without the prefix of its kind."""
    names = [table.name for table in tables]
    found = [name] if name in names else [prefix + name for prefix in _PREFIXES if prefix + name in names]
    if len(found) > 1:
        remedy = f"give its whole name: {' or '.join(found)}"
        raise UserError("may be any of several tables", option=f"tables.{name}", value=name, remedy=remedy)
    if not found:
        short = [n.removeprefix(prefix) for n in names for prefix in _PREFIXES if n.startswith(prefix)]
        remedy = f"{did_you_mean(name, [*names, *short])} The task has {', '.join(names)}"
        raise UserError("is no table of this task", option=f"tables.{name}", value=name, remedy=remedy)
    return found[0]


def _join(
    kept: list[TableConfig], num_ids: dict[str, int | None], table: TableConfig, with_name: str, said: _TableSettings
) -> None:
    """Let the features of a table read another one."""
    if said.others():
        problem = f"has no rows of its own, since it shares those of {with_name}"
        raise said.mistake(said.others()[0], problem, f"say it of tables.{with_name}")
    place = next((i for i, other in enumerate(kept) if other.name == with_name), None)
    if place is None:
        raise said.mistake("share", "is itself, or shares another one's rows", "name a table with rows of its own")
    other = kept[place]
    ids = num_ids[with_name]
    more = table.num_rows
    num_ids[with_name] = None if ids is None or more is None else max(ids, more)
    is_dense = other.num_rows is not None and not other.is_hashed
    num_full = len(other.feature_names) - len(other.half_features)
    features = (*other.feature_names[:num_full], *table.feature_names, *other.half_features)
    kept[place] = replace(other, features=features, num_rows=num_ids[with_name] if is_dense else other.num_rows)
