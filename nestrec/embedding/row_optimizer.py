"""Row optimizers: the plugin interface, the config, the row layout and host updates of 16-bit rows.

A row optimizer is a formula on complete rows: it updates their state and returns the change of the weights. The formula
is the reference implementation and sufficient for training. An optional host loop (CPU) and kernel (GPU) implement the
same arithmetic fast. All row optimizers are lazy: a row changes only in steps that use it.

Host loops compute in float32. Rows with 16-bit weights are converted in small chunks and the weights are then rounded:
bfloat16 is converted by bit shifts, float16 by a lookup table of all 65,536 values; the state after the weights is
float32 already.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Self

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.config import config
from nestrec.base.config_values import Decay, NonNegative, OneOf, Positive
from nestrec.base.errors import UserError, did_you_mean
from nestrec.base.plugins import PluginRegistry
from nestrec.ops.embedding.row_update import store_weight
from nestrec.ops.embedding.stochastic_rounding import store_rounded

Floats = NDArray[np.float32]
Loop = Callable[[NDArray[Any], NDArray[Any], Sequence[int]], None]
"""Host loop of one step: (rows, gradients, start of each state column)."""
_ROWS_AT_A_TIME = 1024
"""Rows per chunk; small enough for the private cache of a core."""


def update_half_rows(
    rows: torch.Tensor, grad: torch.Tensor, layout: "RowLayout", draws: torch.Tensor | None, loop: Loop
) -> None:
    """Apply one step to (n, num_words) rows with 16-bit weights, in place.

    Args:
        rows: Rows to update.
        grad: (n, dim) gradients.
        layout: Layout of the rows.
        draws: Key of the random bits of each row for stochastic rounding; None rounds to nearest.
        loop: Host loop of the step, which computes in float32.
    """
    weight, *states = layout.columns
    starts = np.cumsum([column.width for column in layout.columns]).tolist()
    first_state = states[0].offset_bytes // 4 if states else 0
    halves, words = rows.view(torch.int16).numpy().view(np.uint16), rows.view(torch.float32).numpy()
    wide = np.empty((min(len(rows), _ROWS_AT_A_TIME), starts[-1]), np.float32)
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        chunk = slice(start, min(start + _ROWS_AT_A_TIME, len(rows)))
        chunk_rows = wide[: chunk.stop - start]
        if weight.dtype == torch.bfloat16:
            _widen_bfloat16(halves[chunk], weight.width, chunk_rows.view(np.uint32))
        else:
            _widen_float16(halves[chunk], weight.width, chunk_rows, _float16_numbers())
        chunk_rows[:, weight.width :] = words[chunk, first_state : first_state + starts[-1] - weight.width]
        loop(chunk_rows, grad[chunk].numpy(), starts[:-1])
        values = torch.from_numpy(chunk_rows)
        target = rows[chunk].view(weight.dtype)
        if draws is None:
            target[:, : weight.width] = values[:, : weight.width]
        else:
            store_rounded(values, draws[chunk], target, weight.width)
        words[chunk, first_state : first_state + starts[-1] - weight.width] = chunk_rows[:, weight.width :]


@njit(cache=True, nogil=True)
def _widen_bfloat16(halves: NDArray[np.uint16], dim: int, wide: NDArray[np.uint32]) -> None:
    for i in range(len(wide)):
        for j in range(dim):
            wide[i, j] = np.uint32(np.uint32(halves[i, j]) << np.uint32(16))


@njit(cache=True, nogil=True)
def _widen_float16(halves: NDArray[np.uint16], dim: int, wide: Floats, numbers: Floats) -> None:
    for i in range(len(wide)):
        for j in range(dim):
            wide[i, j] = numbers[halves[i, j]]


@lru_cache(maxsize=1)
def _float16_numbers() -> Floats:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


@dataclass(frozen=True, slots=True)
class RowStep:
    """Step number, learning rate and options of one optimizer step."""

    number: int
    """Global step number, from 1."""
    learning_rate: float
    """Learning rate of this step."""
    options: "RowOptimizerConfig"
    """Config of the row optimizer of the table."""
    draws: torch.Tensor | None = None
    """Int64 key of the random bits that round the 16-bit weights of each gradient's row, on the device of the rows (see
    nestrec.embedding.optimizer_checks). None if weights are not 16-bit or are rounded to nearest."""

    def option(self, name: str) -> float:
        """Return the value of a plugin-specific option: that of the table, or the default.

        Raises:
            UserError: If the spec of the row optimizer does not declare the option.
        """
        own = self.options.own_options
        if name not in own:
            problem = f"it reads the option {name!r}, which its spec does not declare; declared: {sorted(own)}"
            raise ROW_OPTIMIZERS.missing_field_error(self.options.kind, "options", problem)
        return own[name]


@dataclass(frozen=True, slots=True)
class StateColumn:
    """A column of the optimizer state of a row."""

    name: str
    """Name of the column in checkpoints; starts with `state_`."""
    is_row_wise: bool
    """Whether the column has one value per row instead of one per element of the vector."""
    initial: Callable[["RowOptimizerConfig"], float] = lambda options: 0.0
    """Function that returns the initial value in a new row."""


Formula = Callable[[Sequence[torch.Tensor], torch.Tensor, RowStep], torch.Tensor]
"""Reference implementation of a step: (state columns, changed in place; (n, dim) gradients; step) to the (n, dim)
values that are subtracted from the weights.

Operates elementwise or within a row, never across rows. Columns have shape (n, dim), or (n, 1) if they are row-wise,
and the dtype of the gradients."""
HostLoop = Callable[[NDArray[Any], NDArray[Any], Sequence[int], RowStep], None]
"""CPU implementation of a step: ((n, words) rows in the dtype of the gradients, changed in place; (n, dim) gradients;
start of each state column; step). Called on ranges of rows from several threads, without the GIL. Weights of 16 bits
are passed as float32."""
Kernel = Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor, torch.Tensor | None, RowStep], None]
"""GPU implementation of a step: (weights, state columns, gradients, row of each gradient or None, step), updates
weights and columns in place. A negative row drops its gradient. Must support every device and dtype of tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOptimizerSpec:
    """Plugin spec of a row optimizer, which updates the rows of a table from their gradients."""

    state: tuple[StateColumn, ...]
    """Columns that a row contains in addition to its weights."""
    formula: Formula
    """Reference implementation of a step."""
    host_loop: HostLoop | None = None
    """Bitwise identical CPU implementation; None uses the formula."""
    kernel: Kernel | None = None
    """Bitwise identical GPU implementation; None uses the formula."""
    kernel_rounds: bool = False
    """Whether the kernel itself rounds 16-bit weights with `RowStep.draws`; otherwise it gets float32 copies."""
    reads: frozenset[str] = frozenset()
    """Fields of `RowOptimizerConfig` that the row optimizer uses; setting one of the others is an error."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Plugin-specific options and their defaults; set with `optimizer.options`."""


ROW_OPTIMIZERS: PluginRegistry[RowOptimizerSpec] = PluginRegistry(
    "nestrec.row_optimizers",
    "row optimizer",
    {
        "sgd": "nestrec.embedding.optimizers.sgd:SGD",
        "adagrad": "nestrec.embedding.optimizers.adagrad:ADAGRAD",
        "rowwise_adagrad": "nestrec.embedding.optimizers.adagrad:ROWWISE_ADAGRAD",
        "adam": "nestrec.embedding.optimizers.adam:ADAM",
        "rowwise_adam": "nestrec.embedding.optimizers.adam:ROWWISE_ADAM",
    },
    of=RowOptimizerSpec,
)


@config
class RowOptimizerConfig:
    """Config of a row optimizer. The learning rate is passed with each update."""

    kind: Annotated[str, OneOf(ROW_OPTIMIZERS)] = "rowwise_adagrad"
    """Name of the row optimizer; formulas are in nestrec/embedding/optimizers, plugins add more."""
    eps: NonNegative = 1e-8
    """Epsilon added to the square root, outside of it (all except sgd)."""
    beta1: Decay = 0.9
    """Decay rate of the first moment (Adam)."""
    beta2: Decay = 0.999
    """Decay rate of the second moment (Adam)."""
    moment_scale: Positive = 1.0
    """Divisor of the moment of row-wise AdaGrad (the c of 2D sparse parallelism)."""
    initial_accumulator_value: NonNegative = 0.0
    """Initial value of the sums of squares of AdaGrad."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Options of a plugin row optimizer, by name."""

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if name not in self.spec.options:
                remedy = did_you_mean(name, self.spec.options)
                raise UserError(
                    f"the row optimizer {self.kind} has no such option",
                    option=f"optimizer.options.{name}",
                    value=value,
                    remedy=remedy if self.spec.options else "remove it: this row optimizer has no options of its own",
                )

    def check_is_read(self, where: str) -> None:
        """Check that no field is set that this row optimizer does not use.

        Args:
            where: Name of the section that contains this config, for the error message.

        Raises:
            UserError: If such a field is set.
        """
        for name, default in _NUMBERS.items():
            if name not in self.spec.reads and getattr(self, name) != default:
                raise UserError(
                    f"not used by the row optimizer {self.kind}",
                    option=f"{where}.{name}",
                    value=getattr(self, name),
                    remedy=_remedy(name),
                )

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with changed fields; a new kind resets the fields that it does not use to their defaults.

        Tasks define defaults for their own kind of row optimizer. A user who selects another kind did not set them.
        """
        if changes.get("kind", self.kind) != self.kind:
            reads = ROW_OPTIMIZERS.find(changes["kind"], field="optimizer.kind").reads
            changes = {**{name: number for name, number in _NUMBERS.items() if name not in reads}, **changes}
        return dataclasses.replace(self, **changes)

    @property
    def spec(self) -> RowOptimizerSpec:
        """Spec of this kind of row optimizer."""
        return ROW_OPTIMIZERS.find(self.kind, field="optimizer.kind")

    @property
    def own_options(self) -> dict[str, float]:
        """Values of all plugin-specific options: those that are set, and the defaults of the others."""
        return {**self.spec.options, **self.options}


_NUMBERS: dict[str, float] = {
    field.name: field.default for field in dataclasses.fields(RowOptimizerConfig) if isinstance(field.default, float)
}
"""Numeric fields of `RowOptimizerConfig` and their defaults."""


def _remedy(name: str) -> str:
    readers = [kind for kind in ROW_OPTIMIZERS if name in ROW_OPTIMIZERS.find(kind).reads]
    return f"remove it, or use a row optimizer that supports it: {', '.join(readers)}"


def update_by_formula(  # noqa: PLR0917
    optimizer: RowOptimizerSpec,
    weight: torch.Tensor,
    states: list[torch.Tensor],
    grad: torch.Tensor,
    step: RowStep,
    indices: torch.Tensor | None,
) -> None:
    """Apply one step by the formula (reference implementation), to rows of any dtype and device."""
    columns = [weight, *states]
    draws = step.draws
    if indices is None:
        picked = columns
    else:
        moved = indices >= 0
        chosen, grad = indices[moved].long(), grad[moved]
        picked = [column[chosen] for column in columns]
        draws = None if draws is None else draws[moved]
    change = optimizer.formula(picked[1:], grad, step)
    store_weight(picked[0], picked[0].to(grad.dtype) - change, draws)
    if indices is not None:
        for column, values in zip(columns, picked, strict=True):
            column[chosen] = values


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes; columns are copied as integers, because numpy lacks some dtypes of torch."""


@dataclass(frozen=True, slots=True)
class RowColumn:
    """A named column of a row."""

    name: str
    dtype: torch.dtype
    width: int
    offset_bytes: int
    initial: float = 0.0


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Layout of the columns inside the rows of a table."""

    columns: tuple[RowColumn, ...]
    num_words: int
    """Size of a row in int32 words."""
    float32_words: int | None = None
    """Number of words of all columns if every column is float32, which makes them contiguous; otherwise None."""

    @property
    def row_bytes(self) -> int:
        return 4 * self.num_words

    @property
    def weight(self) -> RowColumn:
        return self.columns[0]

    def column(self, name: str) -> RowColumn:
        return next(c for c in self.columns if c.name == name)

    def view(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """Return an (n, width) strided view of a column of (n, num_words) int32 rows."""
        column = self.column(name)
        start = column.offset_bytes // column.dtype.itemsize
        return rows.view(column.dtype)[:, start : start + column.width]

    def columns_of(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return contiguous copies of all columns."""
        return {c.name: self.view(rows, c.name).contiguous() for c in self.columns}

    def empty_columns(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Allocate host memory for the columns of `num_rows` rows."""
        return {c.name: torch.empty(num_rows, c.width, dtype=c.dtype) for c in self.columns}

    def to_columns(self, rows: NDArray[np.int32], columns: dict[str, torch.Tensor], start: int) -> None:
        """Copy host rows to columns from row `start` on; single-threaded, because torch would use several threads."""
        for column in self.columns:
            item = np.dtype(f"i{column.dtype.itemsize}")
            first = column.offset_bytes // item.itemsize
            of_column = columns[column.name].view(_INTEGERS[item.itemsize]).numpy()
            of_column[start : start + len(rows)] = rows.view(item)[:, first : first + column.width]

    def rows_of(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return (n, num_words) rows built from columns; the inverse of `columns_of`."""
        rows = torch.zeros(len(columns["weight"]), self.num_words, dtype=torch.int32)
        for column in self.columns:
            self.view(rows, column.name).copy_(columns[column.name].view(-1, column.width))
        return rows
