"""Config of an embedding table: keys, initial values, row optimizer, store, placement and row layout.

A row is a contiguous block of bytes: weight, then optimizer state, padded to 16 bytes. Weight and state therefore
always move together: every gather, scatter, cache and buffer copies complete rows, as int32 words that only this file
and the row optimizers interpret.

Placement: a table is sharded over the ranks (row-wise sharding) or replicated on every rank; `auto` chooses the one
that transfers fewer bytes. If a step uses U rows, a micro-batch of a rank requests n of them, and there are R ranks and
N micro-batches that exchange rows (1 with the window cache), keys of 8 bytes, vectors of w and gradients of g bytes, a
rank sends

    sharded      (R - 1) / R  N n (8 + w + g)                 keys to owners, vectors, gradients to owners
    replicated   (R - 1) / R (N n (8 R + g) + U g)            keys to all, gradients to owners, sums to all

Replication pays off for tables whose rows are used by all of several micro-batches and whose vectors are wide.
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
    """Distribution of initial vectors, which are a pure function of (table seed, key, element)."""

    kind: Literal["normal", "uniform", "zeros"] = "normal"
    """Distribution: `normal` (sum of four uniform values, nearly normal), `uniform` in [-scale, scale), or `zeros`."""
    scale: NonNegative = 0.02
    """Standard deviation of `normal`, or half the width of `uniform`."""


@config
class StoreConfig:
    """Storage of the rows of a table and, for dynamic tables, admission and eviction of rows."""

    kind: Literal["device", "dram", "disk"] = "device"
    """Storage: `device` (device memory), `dram` (host memory) or `disk` (a file with a row cache in host memory)."""
    cache_rows: Natural = 1 << 16
    """Number of rows per shard in the host-memory cache of a disk store."""
    folder: str = ""
    """Folder for the temporary file of a disk store; only checkpoints are persistent."""
    num_threads: Natural = 0
    """Number of threads that copy rows; 0 uses as many as torch."""
    admission_threshold: Count = 1
    """Number of steps that must use a key before it gets a row (dynamic tables)."""
    eviction_policy: Literal["none", "lru", "lfu", "ttl"] = "none"
    """Eviction of rows of a dynamic table: `lru` and `lfu` when it is full, `ttl` by age, or `none`."""
    max_rows: Count | None = None
    """Maximum number of rows over all shards, divided equally among them (dynamic tables); None is unlimited."""
    ttl_steps: Natural | None = None
    """Number of steps without use after which a row is deleted (eviction policy `ttl`)."""

    @property
    def usage_dependent_options(self) -> dict[str, object]:
        """Options set to values that make the existence of a row depend on the uses of its key, by name."""
        options = {
            "eviction_policy": self.eviction_policy,
            "admission_threshold": self.admission_threshold,
            "max_rows": self.max_rows,
        }
        return {name: value for name, value in options.items() if value not in ("none", 1, None)}


@config
class TableConfig:
    """Config of an embedding table; several features may read the same table."""

    name: str
    """Name of the table; unique within a model."""
    dim: int
    """Embedding dimension: number of elements of a vector."""
    num_rows: int | None = None
    """Number of rows, with keys 0 to num_rows - 1. None makes the table dynamic: any int64 is a key, and its row is
    created on first use."""
    is_hashed: bool = False
    """Whether any int64 is a key that is hashed to one of `num_rows` rows, which keys may share; key 0 has row 0 to
    itself."""
    features: tuple[str, ...] = ()
    """Names of the features that read this table; empty means one feature with the name of the table."""
    half_precision_features: tuple[str, ...] = ()
    """Features, the last ones of `features`, whose vectors are looked up and sent in `half_dtype` unless another
    feature reads the same key; gradients are not affected."""
    half_dtype: Literal["bfloat16", "float16"] = "float16"
    """Dtype in which the vectors of half-precision features are sent; models compute in the dtype of the table."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Dtype of the weights; the optimizer state is float32, or float64 with float64 weights. 16-bit weights are updated
    in float32, rounded stochastically and sent between ranks in 16 bits; models see them as float32."""
    seed: int = 0
    """Seed of the initial vectors, which are a function of seed and key."""
    init: InitConfig = field(default_factory=InitConfig)
    """Distribution of the initial vectors of new rows."""
    optimizer: RowOptimizerConfig = field(default_factory=RowOptimizerConfig)
    """Row optimizer of the table."""
    store: StoreConfig = field(default_factory=StoreConfig)
    """Storage of the rows."""
    placement: Placement = "sharded"
    """Placement of the rows. `sharded`: each row is on one rank of a replica group. `replicated`: every rank stores the
    complete table and reads its own replica; all replicas make the same optimizer steps. Results are bitwise identical.
    `auto`: training or `nestrec plan` chooses by the batches; treated as sharded otherwise."""

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
        """Whether the weights have 16 bits."""
        return self.weight_dtype in HALF_TYPES

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of the optimizer state and of gradient sums."""
        return torch.float64 if self.dtype == "float64" else torch.float32


@dataclass(frozen=True, slots=True)
class Table:
    """An embedding table of a training script: the common options of `TableConfig`.

    `TableConfig` has further options and is accepted wherever a `Table` is.

    Example:
        >>> items = nestrec.Table("items", rows=1_000_000, dim=64, optimizer="rowwise_adagrad", store="dram")
    """

    name: str
    """Name of the table; unique within a pipeline."""
    rows: int | None
    """Number of rows, with keys 0 to rows - 1. None makes the table dynamic: any int64 is a key, and its row is created
    on first use."""
    dim: int
    """Embedding dimension: number of elements of a vector."""
    optimizer: str | RowOptimizerConfig = "rowwise_adagrad"
    """Row optimizer: its name, or a config with options."""
    store: str | StoreConfig = "device"
    """Storage of the rows: `device`, `dram`, or a config with options."""
    features: tuple[str, ...] = ()
    """Fields of a batch that contain keys of this table; empty means one field with the name of the table."""
    seed: int = 0
    """Seed of the initial vectors, which are a function of seed and key."""
    init: str | InitConfig = field(default_factory=InitConfig)
    """Distribution of initial vectors: `normal`, `uniform`, `zeros`, or a config with a scale."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Dtype of the weights."""
    hashed: bool = False
    """Whether any int64 is a key that is hashed to one of the rows."""
    placement: Placement = "sharded"
    """Placement: `sharded` over the ranks, or `replicated` on every rank."""

    @property
    def config(self) -> TableConfig:
        """The complete `TableConfig` of this table."""
        optimizer = self.optimizer
        store = self.store
        if isinstance(optimizer, RowOptimizerConfig):
            optimizer.check_is_read(f"optimizer of table {self.name}")
        where = f"tables.{self.name}"
        plain = {
            "name": self.name,
            "dim": _as_int(self.dim),
            "num_rows": _as_int(self.rows),
            "is_hashed": self.hashed,
            "features": self.features,
            "dtype": self.dtype,
            "seed": _as_int(self.seed),
            "init": _by_kind(self.init),
            "optimizer": _by_kind(optimizer),
            "store": _by_kind(store),
            "placement": self.placement,
        }
        return from_plain(TableConfig, plain, where)


def _by_kind(value: Any) -> Any:
    """Convert the name of a kind to a config dict with default options."""
    return {"kind": value} if isinstance(value, str) else value


def _as_int(value: Any) -> Any:
    """Convert integers of numpy and torch to int; return other values unchanged."""
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def check_tables(tables: Sequence[TableConfig]) -> None:
    """Check the configs of all tables.

    Raises:
        UserError: For the first error in the configs.
    """
    _check_unique("tables", [t.name for t in tables])
    _check_unique("features", [f for t in tables for f in t.feature_names])
    for table in tables:
        _check_table(table)


def _check_unique(field_name: str, names: Sequence[str]) -> None:
    for name in names:
        require(names.count(name) <= 1, "used more than once", option=field_name, value=name, remedy="use unique names")


def _check_table(table: TableConfig) -> None:
    where = f"tables.{table.name}"
    if table.dim < 1:
        raise UserError("must be at least 1", option=f"{where}.dim", value=table.dim, remedy="set a positive number")
    if (
        table.half_precision_features
        and table.feature_names[-len(table.half_precision_features) :] != table.half_precision_features
    ):
        raise UserError(
            f"must be the last features of {table.feature_names}",
            option=f"{where}.half_precision_features",
            value=table.half_precision_features,
            remedy="list them last in both",
        )
    if table.half_precision_features and table.is_half:
        raise UserError(
            f"not supported by a table of {table.dtype}, whose rows are already sent in 16 bits",
            option=f"{where}.half_precision_features",
            value=table.half_precision_features,
            remedy="remove one of task.negatives.lookup_dtype and tables.NAME.dtype",
        )
    if table.num_rows is not None and table.num_rows < 1:
        remedy = "set a positive number, or none for a dynamic table"
        raise UserError("must be at least 1", option=f"{where}.num_rows", value=table.num_rows, remedy=remedy)
    if table.is_hashed and table.num_rows is None:
        remedy = "set the number of rows, or use a dynamic table instead of a hashed one"
        raise UserError("required for a hashed table", option=f"{where}.num_rows", value=None, remedy=remedy)
    store = table.store
    if table.is_replicated and (table.num_rows is None or store.kind == "disk"):
        why = "dynamic tables" if table.num_rows is None else "disk stores"
        remedy = "use placement=sharded, or a fixed number of rows in memory"
        raise UserError(
            f"not supported for {why}",
            option=f"{where}.placement",
            value=table.placement,
            remedy=remedy,
        )
    if store.kind == "disk" and not store.folder:
        raise UserError("required by the disk store", option=f"{where}.store.folder", value="", remedy="set a folder")
    if table.num_rows is not None and store.usage_dependent_options:
        name, value = next(iter(store.usage_dependent_options.items()))
        raise UserError(
            f"not supported for a table with a fixed number of rows ({table.num_rows}), which are never evicted",
            option=f"{where}.{name}",
            value=value,
            remedy="remove it, also from task.table_store, or use dynamic ids (tables.NAME.id_mode, num_rows=None)",
        )
    if store.eviction_policy in ("lru", "lfu") and store.max_rows is None:
        field_name = f"{where}.store.max_rows"
        raise UserError(
            f"required by eviction_policy={store.eviction_policy}",
            option=field_name,
            value=None,
            remedy="set a maximum number of rows",
        )
    if (store.eviction_policy == "ttl") != (store.ttl_steps is not None):
        field_name = f"{where}.store.ttl_steps"
        remedy = "set both eviction_policy=ttl and ttl_steps, or neither"
        raise UserError(
            "must be set together with eviction_policy=ttl", option=field_name, value=store.ttl_steps, remedy=remedy
        )


def layout_of(table: TableConfig) -> RowLayout:
    """Return the layout of the rows of a table."""
    columns = [RowColumn("weight", table.weight_dtype, table.dim, 0)]
    offset = table.dim * table.weight_dtype.itemsize
    for state in table.optimizer.spec.state:
        offset = _round_up(offset, table.state_dtype.itemsize)
        width = 1 if state.is_row_wise else table.dim
        columns.append(RowColumn(state.name, table.state_dtype, width, offset, state.initial(table.optimizer)))
        offset += width * table.state_dtype.itemsize
    is_float32 = all(column.dtype == torch.float32 for column in columns)
    return RowLayout(tuple(columns), _round_up(offset, ALIGNMENT_BYTES) // 4, offset // 4 if is_float32 else None)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class RowShapes:
    """Shapes and dtypes of the rows of each table in exchanges."""

    words: NDArray[np.int64]
    """int32 words of a vector of each table; followed by those in half precision if any table has such features."""
    strides: NDArray[np.int64]
    """int32 words per row of a working set."""
    dims: NDArray[np.int64]
    """Elements of a gradient of each table."""
    gradient_dtypes: tuple[torch.dtype, ...]
    """Dtype of the gradients of each table."""
    weight_dtypes: tuple[torch.dtype, ...]
    half_dtypes: tuple[torch.dtype | None, ...]
    """Dtype of half-precision rows of each table; None if it has none."""
    num_tables: int
    gradient_types: tuple[torch.dtype, ...]
    """Unique gradient dtypes, usually one; gradients of each dtype are exchanged separately."""
    has_type: Mapping[torch.dtype, NDArray[np.bool_]]
    """Per gradient dtype, flags of the tables with gradients of this dtype; read-only."""

    @staticmethod
    def of(tables: Sequence[TableConfig]) -> "RowShapes":
        dims = np.array([t.dim for t in tables], np.int64)
        words = -(-dims * np.array([t.weight_dtype.itemsize for t in tables]) // WORD_BYTES)
        halves = tuple(DTYPES[t.half_dtype] if t.half_precision_features else None for t in tables)
        strides = np.array([layout_of(t).num_words for t in tables], np.int64)
        if any(half is not None for half in halves):
            words, strides = np.concatenate([words, -(-dims * 2 // WORD_BYTES)]), np.concatenate([strides, strides])
        states, weights = tuple(t.state_dtype for t in tables), tuple(t.weight_dtype for t in tables)
        gradient_types = tuple(dict.fromkeys(states))
        has_type = {dtype: np.array([state == dtype for state in states]) for dtype in gradient_types}
        return RowShapes(words, strides, dims, states, weights, halves, len(tables), gradient_types, has_type)


@dataclass(frozen=True, slots=True)
class TableSpecs:
    """Specs of the tables for key routing, extracted from their configs once because every batch reads them.

    _T: per table; _F: per feature, table by table.
    """

    num_tables: int
    names_T: tuple[str, ...]
    features_T: tuple[tuple[str, ...], ...]
    """Features of each table."""
    features_F: tuple[str, ...]
    table_of_F: NDArray[np.int64]
    """Index of the table of each feature."""
    first_feature_T: NDArray[np.int64]
    num_rows_T: tuple[int | None, ...]
    """Number of rows of each table, with keys 0 to num_rows - 1; None allows any key."""
    num_rows_F: NDArray[np.int64]
    """Number of rows of the table of each feature; -1 allows any key."""
    has_half_T: tuple[bool, ...]
    """Whether each table has features in half precision."""
    is_full_precision_F: NDArray[np.bool_]
    """Whether the rows of each feature are sent in full precision."""
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
            has_half_T=tuple(bool(t.half_precision_features) for t in tables),
            is_full_precision_F=np.array([f not in t.half_precision_features for t in tables for f in t.feature_names]),
            is_replicated_T=np.array([t.is_replicated for t in tables]),
        )


_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class TrafficEstimate:
    """Bytes that a rank sends for a table per step, for both placements."""

    sharded: float
    replicated: float

    @property
    def cheaper_placement(self) -> Placement:
        """Placement that transfers fewer bytes."""
        return "replicated" if self.replicated < self.sharded else "sharded"


def estimate_traffic(
    *, vector_bytes: int, gradient_bytes: int, ranks: int, used_rows: float, requested_rows: float, micro_batches: int
) -> TrafficEstimate:
    """Estimate the bytes that a rank sends for a table per step, by the formulas of the module docstring.

    Args:
        vector_bytes: Size of a vector.
        gradient_bytes: Size of a gradient.
        ranks: Number of ranks.
        used_rows: Rows that a step uses, over all ranks.
        requested_rows: Rows that a micro-batch of a rank requests.
        micro_batches: Number of micro-batches that exchange rows.
    """
    others = (ranks - 1) / ranks
    each = micro_batches * requested_rows
    return TrafficEstimate(
        sharded=others * each * (_KEY_BYTES + vector_bytes + gradient_bytes),
        replicated=others * (each * (_KEY_BYTES * ranks + gradient_bytes) + used_rows * gradient_bytes),
    )


def can_be_replicated(table: TableConfig) -> bool:
    """Return whether a table can be replicated: it must have a fixed number of rows, in memory."""
    return table.num_rows is not None and table.store.kind != "disk"


def with_placements(tables: Sequence[TableConfig], estimates: Mapping[str, TrafficEstimate]) -> tuple[TableConfig, ...]:
    """Resolve placement `auto` to the placement with less traffic; tables without an estimate are sharded."""
    result = []
    for table in tables:
        placement = table.placement
        if placement == "auto":
            is_open = can_be_replicated(table) and table.name in estimates
            placement = estimates[table.name].cheaper_placement if is_open else "sharded"
        result.append(replace(table, placement=placement))
    return tuple(result)


def check_placements(tables: Sequence[TableConfig], topology: Topology) -> None:
    """Check that the topology supports the placements of the tables.

    Raises:
        UserError: If a table is replicated and the topology does not support replicated tables.
    """
    for table in tables:
        if not table.is_replicated:
            continue
        for is_used, feature in (
            (topology.num_replicas > 1, "replica groups (parallel.num_replicas)"),
            (topology.hosts is not None, "hierarchical all-to-all (parallel.hierarchical_all_to_all)"),
        ):
            if is_used:
                raise UserError(
                    f"not supported with {feature}",
                    option=f"tables.{table.name}.placement",
                    value=table.placement,
                    remedy="use placement=sharded, or disable the other option",
                )
