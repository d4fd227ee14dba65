"""Config of an embedding table: rows, initial values, optimizer, store and placement.

Whether a table is sharded over ranks or held whole by every rank: what can be, and which crosses in fewer bytes.

Of a table with U rows in a step, n of which a micro-batch of a rank asks for, on R ranks, with N micro-batches in which
rows cross (1 with the window cache), keys of 8 bytes, vectors of w and gradients of g bytes, a rank sends

    sharded      (R - 1) / R  N n (8 + w + g)                 keys to owners, vectors, gradients to owners
    replicated   (R - 1) / R (N n (8 R + g) + U g)            keys to all, gradients to owners, sums to all

so a replicated table is one whose rows all micro-batches use, of vectors wide enough, in several micro-batches.

What a table is: its keys, initial values, row optimiser and where its rows are kept; and what one of its rows is.

A row is one run of bytes: weight, then optimiser state, padded to 16 bytes. Because they lie together, weight and state
cannot be moved apart: every gather, scatter, cache and buffer copy moves whole rows, as int32 words whose meaning only
this file and the row optimisers know.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Count, Natural, NonNegative, from_plain
from nestrec.base.errors import UserError, require
from nestrec.distributed.topology import Topology
from nestrec.embedding.row_optimizer import RowColumn, RowLayout, RowOptimizerConfig
from nestrec.ops.embedding.stochastic_rounding import HALF_TYPES

Placement = Literal["sharded", "replicated", "auto"]
ALIGNMENT_BYTES = 16
WORD_BYTES = 4
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@config
class InitConfig:
    """Initial vectors: pure functions of (table seed, key, element)."""

    kind: Literal["normal", "uniform", "zeros"] = "normal"
    """`normal`: near-normal sum of four uniforms; `uniform`: in [-scale, scale)."""
    scale: NonNegative = 0.02
    """Standard deviation, or half width of the uniform."""


@config
class StoreConfig:
    """Where rows are kept, and for dynamic tables which rows are kept."""

    kind: Literal["device", "dram", "disk"] = "device"
    """`device`: memory of the engine's device; `dram`: host memory; `disk`: a file under a row cache in host memory."""
    cache_rows: Natural = 1 << 16
    """Rows a shard keeps in host memory above its file (disk)."""
    folder: str = ""
    """Where the file of the disk store is made; it is scratch, checkpoints are what lasts."""
    num_threads: Natural = 0
    """Threads that copy rows; 0: as many as torch uses."""
    admission_count: Count = 1
    """Steps in which a key must have been used before it gets a row (dynamic tables)."""
    eviction: Literal["none", "lru", "lfu", "ttl"] = "none"
    """What makes room, or ends a row's life (dynamic tables)."""
    max_rows: Count | None = None
    """Most rows over all shards (dynamic tables); each shard holds an equal part of it."""
    ttl_steps: Natural | None = None
    """A row that has not been used for more than this many steps is gone."""

    @property
    def counts_uses(self) -> dict[str, object]:
        """The options, with their values, by which it depends on the uses of a key whether that has a row."""
        options = {"eviction": self.eviction, "admission_count": self.admission_count, "max_rows": self.max_rows}
        return {name: value for name, value in options.items() if value not in ("none", 1, None)}


@config
class TableConfig:
    """A table of rows; several features may read it."""

    name: str
    """Unique among the tables of a model."""
    dim: int
    """Elements of a vector."""
    num_rows: int | None = None
    """Keys are 0 to num_rows - 1; none: dynamic, any int64 is a key and its row appears on first use."""
    is_hashed: bool = False
    """Any int64 is a key, and its hash says which of `num_rows` rows stands for it, alone or with others; 0 has row 0
    to itself."""
    features: tuple[str, ...] = ()
    """Names of the features that read this table; none: one feature, named as the table."""
    half_features: tuple[str, ...] = ()
    """The last of them, if any: keys that only these read are looked up and sent in `half_dtype`, gradients as ever."""
    half_dtype: Literal["bfloat16", "float16"] = "float16"
    """Type in which such rows cross; they are computed with in the type of the table."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Type of the weights; optimiser state is float32, or float64 beside float64 weights. 16-bit weights are updated in
    float32 and rounded by chance, and cross between ranks as they are; models see them as float32."""
    seed: int = 0
    """Initial vectors are a function of this and the key."""
    init: InitConfig = field(default_factory=InitConfig)
    """How new rows begin."""
    optimizer: RowOptimizerConfig = field(default_factory=RowOptimizerConfig)
    """How rows learn."""
    store: StoreConfig = field(default_factory=StoreConfig)
    """Where rows are kept."""
    placement: Placement = "sharded"
    """`sharded`: a row is on one rank of a group; `replicated`: every rank holds the table whole and reads its own
    copy, and all copies make the same steps. The bits are the same. `auto`: left to who knows the batches (training,
    `nestrec plan`); sharded until then."""

    @property
    def is_replicated(self) -> bool:
        return self.placement == "replicated"

    @property
    def feature_names(self) -> tuple[str, ...]:
        return self.features or (self.name,)

    @property
    def weight_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def is_half(self) -> bool:
        """Whether weights have 16 bits."""
        return self.weight_dtype in HALF_TYPES

    @property
    def state_dtype(self) -> torch.dtype:
        """Type of optimiser state and of gradient sums."""
        return torch.float64 if self.dtype == "float64" else torch.float32


@dataclass(frozen=True, slots=True)
class Table:
    """A sharded table as a script names it: rows of vectors, with their optimiser and the place where they are kept.

        nestrec.Table("items", rows=1_000_000, dim=64, optimizer="rowwise_adagrad", store="dram")

    Everything else that a table can be told stands in `TableConfig`, which is taken wherever a `Table` is.
    """

    name: str
    """unique among the tables of a pipeline"""
    rows: int | None
    """keys are 0 to rows - 1; none: any int64 is a key, and its row appears on first use"""
    dim: int
    """elements of a vector"""
    optimizer: str | RowOptimizerConfig = "rowwise_adagrad"
    """of the rows: a name, or one with its options"""
    store: str | StoreConfig = "device"
    """where rows are kept: device, dram, or a store with its options"""
    features: tuple[str, ...] = ()
    """fields of a batch that hold keys of this table; none: one field, named as the table"""
    seed: int = 0
    """initial vectors are a function of this and the key"""
    init: str | InitConfig = field(default_factory=InitConfig)
    """how new rows begin: normal, uniform, zeros, or one with its scale"""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """type of the weights"""
    hashed: bool = False
    """any int64 is a key, and its hash says which of the rows stands for it"""
    placement: Placement = "sharded"
    """over the ranks, or replicated: whole on every rank"""

    @property
    def config(self) -> TableConfig:
        """The same in full."""
        optimizer = self.optimizer
        store = self.store
        if isinstance(optimizer, RowOptimizerConfig):
            optimizer.check_is_read(f"optimizer of table {self.name}")
        where = f"tables.{self.name}"
        plain = {
            "name": self.name,
            "dim": _whole_number(self.dim),
            "num_rows": _whole_number(self.rows),
            "is_hashed": self.hashed,
            "features": self.features,
            "dtype": self.dtype,
            "seed": _whole_number(self.seed),
            "init": _by_kind(self.init),
            "optimizer": _by_kind(optimizer),
            "store": _by_kind(store),
            "placement": self.placement,
        }
        return from_plain(TableConfig, plain, where)


def _by_kind(given: Any) -> Any:
    """Options that are given by the name of their kind alone, with those as usual."""
    return {"kind": given} if isinstance(given, str) else given


def _whole_number(value: Any) -> Any:
    """Numbers of numpy and torch as Python's; anything else as it is."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def check_tables(tables: Sequence[TableConfig]) -> None:
    """Raise a UserError for the first mistake in the configs."""
    _check_unique("tables", [t.name for t in tables])
    _check_unique("features", [f for t in tables for f in t.feature_names])
    for table in tables:
        _check_table(table)


def _check_unique(field_name: str, names: Sequence[str]) -> None:
    for name in names:
        require(names.count(name) <= 1, "is used twice", option=field_name, value=name, remedy="give each its own name")


def _check_table(table: TableConfig) -> None:
    where = f"tables.{table.name}"
    if table.dim < 1:
        raise UserError("must be at least 1", option=f"{where}.dim", value=table.dim, remedy="give a positive number")
    if table.half_features and table.feature_names[-len(table.half_features) :] != table.half_features:
        raise UserError(
            f"must be the last of the features {table.feature_names}",
            option=f"{where}.half_features",
            value=table.half_features,
            remedy="name them last in both",
        )
    if table.half_features and table.is_half:
        raise UserError(
            f"rows of {table.dtype} cross in 16 bits as they are",
            option=f"{where}.half_features",
            value=table.half_features,
            remedy="leave one of the two out (task.negatives.lookup, tables.NAME.dtype)",
        )
    if table.num_rows is not None and table.num_rows < 1:
        remedy = "give a positive number, or none for a dynamic table"
        raise UserError("must be at least 1", option=f"{where}.num_rows", value=table.num_rows, remedy=remedy)
    if table.is_hashed and table.num_rows is None:
        remedy = "say how many rows it has, or make it dynamic without a hash"
        raise UserError("is required by a hashed table", option=f"{where}.num_rows", value=None, remedy=remedy)
    store = table.store
    if table.is_replicated and (table.num_rows is None or store.kind == "disk"):
        why = "of any number of ids" if table.num_rows is None else "on a disk"
        remedy = "leave it sharded, or give it a fixed number of rows in memory"
        raise UserError(
            f"a table {why} is not held whole by every rank",
            option=f"{where}.placement",
            value=table.placement,
            remedy=remedy,
        )
    if store.kind == "disk" and not store.folder:
        raise UserError(
            "is required by the disk store", option=f"{where}.store.folder", value="", remedy="name a folder"
        )
    if table.num_rows is not None and store.counts_uses:
        name, value = next(iter(store.counts_uses.items()))
        raise UserError(
            f"a table of {table.num_rows} rows keeps every row",
            option=f"{where}.{name}",
            value=value,
            remedy="leave it out, of the task's store too, or let ids be dynamic (tables.NAME.ids, num_rows=None)",
        )
    if store.eviction in ("lru", "lfu") and store.max_rows is None:
        field_name = f"{where}.store.max_rows"
        raise UserError(f"is required by {store.eviction}", option=field_name, value=None, remedy="give a bound")
    if (store.eviction == "ttl") != (store.ttl_steps is not None):
        field_name = f"{where}.store.ttl_steps"
        remedy = "give both eviction=ttl and ttl_steps, or neither"
        raise UserError("goes with eviction=ttl", option=field_name, value=store.ttl_steps, remedy=remedy)


def layout_of(table: TableConfig) -> RowLayout:
    """The layout of a table's rows."""
    columns = [RowColumn("weight", table.weight_dtype, table.dim, 0)]
    offset = table.dim * table.weight_dtype.itemsize
    for state in table.optimizer.spec.state:
        offset = _round_up(offset, table.state_dtype.itemsize)
        width = 1 if state.is_row_wise else table.dim
        columns.append(RowColumn(state.name, table.state_dtype, width, offset, state.initial(table.optimizer)))
        offset += width * table.state_dtype.itemsize
    is_whole = all(column.dtype == torch.float32 for column in columns)
    return RowLayout(tuple(columns), _round_up(offset, ALIGNMENT_BYTES) // 4, offset // 4 if is_whole else None)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class RowShapes:
    """What rows of each table are like where they cross."""

    words: NDArray[np.int64]
    """int32 words of a vector; where any table has half features, then those of a vector in half precision."""
    strides: NDArray[np.int64]
    """int32 words from row to row of a working set."""
    dims: NDArray[np.int64]
    """Elements of a gradient."""
    states: tuple[torch.dtype, ...]
    """Type of a table's gradients."""
    weights: tuple[torch.dtype, ...]
    halves: tuple[torch.dtype | None, ...]
    """Type in which some rows of a table cross; none: none do."""
    num_tables: int
    gradient_types: tuple[torch.dtype, ...]
    """In each of them gradients cross on their own; nearly always one."""
    has_type: Mapping[torch.dtype, NDArray[np.bool_]]
    """For each of them, which tables have gradients of this type. Not to be written to."""

    @staticmethod
    def of(tables: Sequence[TableConfig]) -> "RowShapes":
        dims = np.array([t.dim for t in tables], np.int64)
        words = -(-dims * np.array([t.weight_dtype.itemsize for t in tables]) // WORD_BYTES)
        halves = tuple(DTYPES[t.half_dtype] if t.half_features else None for t in tables)
        strides = np.array([layout_of(t).num_words for t in tables], np.int64)
        if any(half is not None for half in halves):
            words, strides = np.concatenate([words, -(-dims * 2 // WORD_BYTES)]), np.concatenate([strides, strides])
        states, weights = tuple(t.state_dtype for t in tables), tuple(t.weight_dtype for t in tables)
        gradient_types = tuple(dict.fromkeys(states))
        has_type = {dtype: np.array([state == dtype for state in states]) for dtype in gradient_types}
        return RowShapes(words, strides, dims, states, weights, halves, len(tables), gradient_types, has_type)


@dataclass(frozen=True, slots=True)
class TableSpecs:
    """What the routing of keys needs of the tables, taken from their configs once: batches ask for it many times.

    _T: for each table; _F: for each feature, table by table.
    """

    num_tables: int
    names_T: tuple[str, ...]
    features_T: tuple[tuple[str, ...], ...]
    """Features of each table."""
    features_F: tuple[str, ...]
    table_of_F: NDArray[np.int64]
    """Number of its table."""
    first_feature_T: NDArray[np.int64]
    num_rows_T: tuple[int | None, ...]
    """Keys are 0 to this - 1; none: any key."""
    num_rows_F: NDArray[np.int64]
    """The same of the feature's table; -1: any key."""
    has_half_T: tuple[bool, ...]
    """Whether some rows cross in half precision."""
    is_whole_F: NDArray[np.bool_]
    """Whether the rows of a feature cross whole."""
    is_replicated_T: NDArray[np.bool_]

    @staticmethod
    def of(tables: Sequence[TableConfig]) -> "TableSpecs":
        features_T = tuple(t.feature_names for t in tables)
        num_features_T = [len(features) for features in features_T]
        table_of_F = np.repeat(np.arange(len(tables)), num_features_T)
        num_rows_T = tuple(t.num_rows for t in tables)
        return TableSpecs(
            num_tables=len(tables),
            names_T=tuple(t.name for t in tables),
            features_T=features_T,
            features_F=tuple(f for features in features_T for f in features),
            table_of_F=table_of_F,
            first_feature_T=np.cumsum([0, *num_features_T[:-1]]),
            num_rows_T=num_rows_T,
            num_rows_F=np.array([-1 if n is None else n for n in num_rows_T], np.int64)[table_of_F],
            has_half_T=tuple(bool(t.half_features) for t in tables),
            is_whole_F=np.array([f not in t.half_features for t in tables for f in t.feature_names]),
            is_replicated_T=np.array([t.is_replicated for t in tables]),
        )


_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class TrafficEstimate:
    """Bytes that a rank sends for a table in a step."""

    sharded: float
    replicated: float

    @property
    def fewer(self) -> Placement:
        """In which placement fewer bytes cross."""
        return "replicated" if self.replicated < self.sharded else "sharded"


def bytes_crossed(
    *, vector_bytes: int, gradient_bytes: int, ranks: int, used: float, asked: float, micro_batches: int
) -> TrafficEstimate:
    """used: rows of a step over all ranks. asked: of a micro-batch of a rank. micro_batches: in which rows cross."""
    others = (ranks - 1) / ranks
    each = micro_batches * asked
    return TrafficEstimate(
        sharded=others * each * (_KEY_BYTES + vector_bytes + gradient_bytes),
        replicated=others * (each * (_KEY_BYTES * ranks + gradient_bytes) + used * gradient_bytes),
    )


def can_be_replicated(table: TableConfig) -> bool:
    """It has a fixed number of rows, in memory."""
    return table.num_rows is not None and table.store.kind != "disk"


def with_placements(tables: Sequence[TableConfig], crossed: Mapping[str, TrafficEstimate]) -> tuple[TableConfig, ...]:
    """The tables, those that leave it open as fewer bytes cross. crossed: by table; of what is missing, sharded."""
    found = []
    for table in tables:
        placement = table.placement
        if placement == "auto":
            is_open = can_be_replicated(table) and table.name in crossed
            placement = crossed[table.name].fewer if is_open else "sharded"
        found.append(replace(table, placement=placement))
    return tuple(found)


def check_placements(tables: Sequence[TableConfig], topology: Topology) -> None:
    """Raise a UserError where ranks are laid out in a way that no replicated table goes with."""
    for table in tables:
        if not table.is_replicated:
            continue
        for is_so, what in (
            (topology.num_replicas > 1, "replica groups (ranks.replicas)"),
            (topology.hosts is not None, "exchanges by hosts (ranks.hierarchy)"),
        ):
            if is_so:
                raise UserError(
                    f"does not go with {what}",
                    option=f"tables.{table.name}.placement",
                    value=table.placement,
                    remedy="leave the table sharded, or leave out the other",
                )
