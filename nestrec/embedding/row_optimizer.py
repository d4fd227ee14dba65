"""Row optimizers: specs, state columns, row layout and updates of 16-bit rows.

The seam of row optimisers: what one is, where it is found, and how a table names it.

A row optimiser is a formula on whole rows: it changes their state and says by how much the weights move. That is its
definition, and enough to train with. A host loop and a kernel are the same arithmetic made quick. All optimisers are
lazy: a row moves only in steps that use it.

Host loops on rows of 16 bits: they are given some rows at a time as float32, whose weights are then rounded.

Weights are read by bits (bfloat16) or by a table of all 65,536 numbers (float16); state lies behind them as it is.
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
"""A host loop of one step: (rows, gradients, where each state column begins)."""
_ROWS_AT_A_TIME = 1024
"""few enough for a core's own cache"""


def update_half_rows(
    rows: torch.Tensor, grad: torch.Tensor, layout: "RowLayout", draws: torch.Tensor | None, loop: Loop
) -> None:
    """One step on (n, num_words) rows, in place; draws: keys of the random bits, or none to round to nearest."""
    weight, *states = layout.columns
    starts = np.cumsum([column.width for column in layout.columns]).tolist()
    first_state = states[0].offset_bytes // 4 if states else 0
    halves, words = rows.view(torch.int16).numpy().view(np.uint16), rows.view(torch.float32).numpy()
    wide = np.empty((min(len(rows), _ROWS_AT_A_TIME), starts[-1]), np.float32)
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        part = slice(start, min(start + _ROWS_AT_A_TIME, len(rows)))
        some = wide[: part.stop - start]
        if weight.dtype == torch.bfloat16:
            _widen_bfloat16(halves[part], weight.width, some.view(np.uint32))
        else:
            _widen_float16(halves[part], weight.width, some, _float16_numbers())
        some[:, weight.width :] = words[part, first_state : first_state + starts[-1] - weight.width]
        loop(some, grad[part].numpy(), starts[:-1])
        values = torch.from_numpy(some)
        target = rows[part].view(weight.dtype)
        if draws is None:
            target[:, : weight.width] = values[:, : weight.width]
        else:
            store_rounded(values, draws[part], target, weight.width)
        words[part, first_state : first_state + starts[-1] - weight.width] = some[:, weight.width :]


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
    """The numbers of one step."""

    number: int
    """global step, from 1"""
    learning_rate: float
    """of this step"""
    options: "RowOptimizerConfig"
    """what the table says"""
    draws: torch.Tensor | None = None
    """for each gradient the int64 key of the random bits by which its row's 16-bit weight is rounded, on the rows'
    device (nestrec.embedding.optimizer_checks); none: weights are whole, or rounded to nearest"""

    def option(self, name: str) -> float:
        """An option of the optimiser's own, as the table gives it or as it is by default."""
        own = self.options.own_options
        if name not in own:
            problem = f"it asks for its option {name!r}, which is none of those that its spec names: {sorted(own)}"
            raise ROW_OPTIMIZERS.unanswered(self.options.kind, "options", problem)
        return own[name]


@dataclass(frozen=True, slots=True)
class StateColumn:
    """A part of a row's state."""

    name: str
    """in checkpoints; begins with `state_`"""
    is_row_wise: bool
    """one number a row; else one for each element of the vector"""
    initial: Callable[["RowOptimizerConfig"], float] = lambda options: 0.0
    """what it is in a new row"""


Formula = Callable[[Sequence[torch.Tensor], torch.Tensor, RowStep], torch.Tensor]
"""(state columns, changed in place; (n, dim) gradients; step) to what is taken from the weights, (n, dim).

Elementwise or along a row, never between rows. Columns are (n, dim), or (n, 1) where they are row-wise, in the type of
the gradients."""
HostLoop = Callable[[NDArray[Any], NDArray[Any], Sequence[int], RowStep], None]
"""((n, words) rows in the type of the gradients, changed in place; (n, dim) gradients; where each state column begins;
step). Called on ranges of rows from several threads, without the GIL. Weights of 16 bits come as float32."""
Kernel = Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor, torch.Tensor | None, RowStep], None]
"""(weights, state columns, gradients, row of each gradient or none, step): changes weights and columns in place. A
negative row drops its gradient. Takes tensors of any device and type that tables have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOptimizerSpec:
    """The spec of a row optimiser: how the rows of a table follow their gradients."""

    state: tuple[StateColumn, ...]
    """what a row holds beside its weights"""
    formula: Formula
    """the definition"""
    host_loop: HostLoop | None = None
    """the same bits on a CPU; none: the formula runs there too"""
    kernel: Kernel | None = None
    """the same bits on a GPU; none: the formula runs there too"""
    kernel_rounds: bool = False
    """the kernel rounds 16-bit weights by `RowStep.draws`; else it is given them as float32"""
    reads: frozenset[str] = frozenset()
    """which of `RowOptimizerConfig`'s numbers it looks at; the others are refused where a table gives them"""
    options: Mapping[str, float] = field(default_factory=dict)
    """options of its own, with their defaults; a table gives them as `optimizer.options`"""


ROW_OPTIMIZERS: PluginRegistry[RowOptimizerSpec] = PluginRegistry(
    "nestrec.row_optimizers",
    "row optimiser",
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
    """One step on the rows of a batch. The learning rate comes with each update."""

    kind: Annotated[str, OneOf(ROW_OPTIMIZERS)] = "rowwise_adagrad"
    """The rule; the formulas stand in nestrec/embedding/optimizers, other packages add theirs."""
    eps: NonNegative = 1e-8
    """Added to the root, never under it (all but sgd)."""
    beta1: Decay = 0.9
    """Decay of the first moment (Adam)."""
    beta2: Decay = 0.999
    """Decay of the second moment (Adam)."""
    moment_scale: Positive = 1.0
    """Row-wise AdaGrad divides its moment by this (the c of 2D sparse parallelism)."""
    initial_accumulator: NonNegative = 0.0
    """What AdaGrad's sums start from."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Options of a row optimiser of another package, by name."""

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if name not in self.spec.options:
                remedy = did_you_mean(name, self.spec.options)
                raise UserError(
                    f"is no option of the row optimiser {self.kind}",
                    option=f"optimizer.options.{name}",
                    value=value,
                    remedy=remedy if self.spec.options else "leave it out: this one has none of its own",
                )

    def check_is_read(self, where: str) -> None:
        """Raise a UserError where a number is given that this row optimiser does not use. where: what holds this."""
        for name, default in _NUMBERS.items():
            if name not in self.spec.reads and getattr(self, name) != default:
                raise UserError(
                    f"the row optimiser {self.kind} does not use it",
                    option=f"{where}.{name}",
                    value=getattr(self, name),
                    remedy=_remedy(name),
                )

    def replaced(self, **given: Any) -> Self:
        """A copy with these fields; with another kind, numbers that it does not use are as by default again.

        Tasks come with numbers for the kind that they come with, and whoever names another one has not given them.
        """
        if given.get("kind", self.kind) != self.kind:
            reads = ROW_OPTIMIZERS.find(given["kind"], field="optimizer.kind").reads
            given = {**{name: number for name, number in _NUMBERS.items() if name not in reads}, **given}
        return dataclasses.replace(self, **given)

    @property
    def spec(self) -> RowOptimizerSpec:
        """The row optimiser of this kind."""
        return ROW_OPTIMIZERS.find(self.kind, field="optimizer.kind")

    @property
    def own_options(self) -> dict[str, float]:
        """All options of the optimiser's own: those given, and the defaults of the others."""
        return {**self.spec.options, **self.options}


_NUMBERS: dict[str, float] = {
    field.name: field.default for field in dataclasses.fields(RowOptimizerConfig) if isinstance(field.default, float)
}
"""The numbers that a table may give, and what they are by default."""


def _remedy(name: str) -> str:
    readers = [kind for kind in ROW_OPTIMIZERS if name in ROW_OPTIMIZERS.find(kind).reads]
    return f"leave it out, or take a row optimiser that uses it: {', '.join(readers)}"


def update_by_formula(  # noqa: PLR0917
    optimizer: RowOptimizerSpec,
    weight: torch.Tensor,
    states: list[torch.Tensor],
    grad: torch.Tensor,
    step: RowStep,
    places: torch.Tensor | None,
) -> None:
    """The definition, on rows of any type and device."""
    columns = [weight, *states]
    draws = step.draws
    if places is None:
        picked = columns
    else:
        moved = places >= 0
        chosen, grad = places[moved].long(), grad[moved]
        picked = [column[chosen] for column in columns]
        draws = None if draws is None else draws[moved]
    change = optimizer.formula(picked[1:], grad, step)
    store_weight(picked[0], picked[0].to(grad.dtype) - change, draws)
    if places is not None:
        for column, values in zip(columns, picked, strict=True):
            column[chosen] = values


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


"""By bytes: numpy does not know every type of torch."""


@dataclass(frozen=True, slots=True)
class RowColumn:
    """A named part of each row."""

    name: str
    dtype: torch.dtype
    width: int
    offset_bytes: int
    initial: float = 0.0


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the columns of a table lie inside its rows."""

    columns: tuple[RowColumn, ...]
    num_words: int
    """int32 words of a row."""
    whole_words: int | None = None
    """Where all columns are float32, which then lie side by side: their words; none: some are not."""

    @property
    def row_bytes(self) -> int:
        return 4 * self.num_words

    @property
    def weight(self) -> RowColumn:
        return self.columns[0]

    def column(self, name: str) -> RowColumn:
        return next(c for c in self.columns if c.name == name)

    def view(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """(n, width) view of a column of (n, num_words) int32 rows; rows of a slab are strided."""
        column = self.column(name)
        start = column.offset_bytes // column.dtype.itemsize
        return rows.view(column.dtype)[:, start : start + column.width]

    def columns_of(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Contiguous copies of every column."""
        return {c.name: self.view(rows, c.name).contiguous() for c in self.columns}

    def empty_columns(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Host memory for the columns of so many rows."""
        return {c.name: torch.empty(num_rows, c.width, dtype=c.dtype) for c in self.columns}

    def to_columns(self, rows: NDArray[np.int32], columns: dict[str, torch.Tensor], start: int) -> None:
        """Write host rows into columns, from the row `start` on; by this thread alone, as torch would not."""
        for column in self.columns:
            item = np.dtype(f"i{column.dtype.itemsize}")
            first = column.offset_bytes // item.itemsize
            of_column = columns[column.name].view(_INTEGERS[item.itemsize]).numpy()
            of_column[start : start + len(rows)] = rows.view(item)[:, first : first + column.width]

    def rows_of(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        """(n, num_words) rows made of given columns; the inverse of `columns_of`."""
        rows = torch.zeros(len(columns["weight"]), self.num_words, dtype=torch.int32)
        for column in self.columns:
            self.view(rows, column.name).copy_(columns[column.name].view(-1, column.width))
        return rows
