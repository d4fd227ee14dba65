"""Contract checks of plugin row optimizers, and the random bits of stochastic rounding.

Row optimizers of other packages are checked on a few rows before the first training step. Two steps on three rows are
enough to detect a formula that does not return weight changes, a formula that mixes rows (its steps would depend on the
other rows of a batch), and a host loop or kernel whose arithmetic differs from the formula.

The random bits that round the 16-bit weights of a row are a function of (table seed, table name, step, key). They
depend neither on slot and rank nor on schedule and thread, so a row is rounded in the same way wherever and whenever it
is updated. nestrec.ops.embedding.stochastic_rounding implements the rounding.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from nestrec.base.errors import UserError
from nestrec.base.random import fold, mix64_jit
from nestrec.embedding.row_optimizer import ROW_OPTIMIZERS, RowOptimizerSpec, RowStep, update_by_formula
from nestrec.embedding.table_config import TableConfig

_ROWS = 3
_RATE = 0.01
_CLOSE = {"rtol": 1e-4, "atol": 1e-6}
"""Tolerances: rounding may differ between machines; wrong arithmetic differs by more."""
Columns = list[torch.Tensor]
"""Weights and state columns of some rows."""


def check_optimizers(tables: Sequence[TableConfig], device: torch.device) -> None:
    """Check that the row optimizers of other packages fulfill their contract.

    Raises:
        UserError: If a plugin row optimizer does not behave as its spec declares.
    """
    for table in tables:
        if table.optimizer.kind not in ROW_OPTIMIZERS.built_in_names:
            _Trial(table, device).run()


class _Trial:
    def __init__(self, table: TableConfig, device: torch.device) -> None:
        self._options = table.optimizer
        self._spec = table.optimizer.spec
        self._device = device
        self._dim = table.dim
        self._dtype = table.state_dtype

    def run(self) -> None:
        self._check_state()
        initial = self._columns()
        by_formula = self._stepped(initial, self._by_formula)
        alone = self._stepped([column[:1] for column in initial], self._by_formula)
        if not _are_close(alone, [column[:1] for column in by_formula]):
            problem = "updates a row differently if other rows are in the batch"
            raise self._contract_error("formula", f"{problem}: it may combine elements of a row, not different rows")
        if self._spec.host_loop is not None and self._device.type == "cpu":
            self._compare("host_loop", by_formula, self._stepped(initial, self._by_loop))
        if self._spec.kernel is not None and (self._device.type == "cuda" or self._spec.host_loop is None):
            self._compare("kernel", by_formula, self._stepped(initial, self._by_kernel))

    def _check_state(self) -> None:
        names = [column.name for column in self._spec.state]
        for name in names:
            if not str(name).startswith("state_") or names.count(name) > 1:
                raise self._contract_error("state", f"contains {name!r}: names must start with 'state_' and be unique")
        for column in self._spec.state:
            if not isinstance(initial := column.initial(self._options), int | float):
                raise self._contract_error(
                    "state", f"initializes {column.name!r} with {initial!r}, which is not a number"
                )

    def _columns(self) -> Columns:
        """Return random weights of some rows and the initial state of new rows."""
        weight = torch.randn(_ROWS, self._dim, generator=torch.Generator().manual_seed(1)).to(self._dtype)
        widths = [1 if column.is_row_wise else self._dim for column in self._spec.state]
        initial = [float(column.initial(self._options)) for column in self._spec.state]
        states = [torch.full((_ROWS, w), v, dtype=self._dtype) for w, v in zip(widths, initial, strict=True)]
        return [column.to(self._device) for column in (weight, *states)]

    def _stepped(self, initial: Columns, step: Callable[[Columns, torch.Tensor, RowStep], None]) -> Columns:
        """Return the columns after two steps."""
        columns = [column.clone() for column in initial]
        draw = torch.Generator().manual_seed(2)
        for number in (1, 2):
            grad = torch.randn(_ROWS, self._dim, generator=draw).to(self._dtype)[: len(initial[0])]
            step(columns, grad.to(self._device), RowStep(number, _RATE, self._options))
        return columns

    def _by_formula(self, columns: Columns, grad: torch.Tensor, step: RowStep) -> None:
        shapes = [column.shape for column in columns]
        update_by_formula(_shown(self._spec, self._check_change), columns[0], columns[1:], grad, step, None)
        assert [column.shape for column in columns] == shapes

    def _check_change(self, change: Any, grad: torch.Tensor) -> None:
        if not isinstance(change, torch.Tensor) or change.shape != grad.shape or not change.is_floating_point():
            received = f"{change.dtype} of {tuple(change.shape)}" if isinstance(change, torch.Tensor) else repr(change)
            expectation = f"the values to subtract from the weights, a tensor of shape {tuple(grad.shape)}"
            raise self._contract_error("formula", f"returns {received} instead of {expectation}")

    def _by_loop(self, columns: Columns, grad: torch.Tensor, step: RowStep) -> None:
        rows = torch.cat(columns, 1).numpy()
        starts = [sum(column.shape[1] for column in columns[: i + 1]) for i in range(len(columns) - 1)]
        assert self._spec.host_loop is not None
        self._spec.host_loop(rows, grad.numpy(), starts, step)
        for column, part in zip(columns, torch.from_numpy(rows).tensor_split(starts, 1), strict=True):
            column.copy_(part)

    def _by_kernel(self, columns: Columns, grad: torch.Tensor, step: RowStep) -> None:
        assert self._spec.kernel is not None
        self._spec.kernel(columns[0], columns[1:], grad, None, step)

    def _compare(self, member: str, expected: Columns, actual: Columns) -> None:
        names = ["the weights", *(column.name for column in self._spec.state)]
        for name, expected_values, actual_values in zip(names, expected, actual, strict=True):
            if not _are_close([expected_values], [actual_values]):
                i = int((expected_values - actual_values).abs().sum(0).argmax())
                problem = f"differs from the formula: after two steps, {name} are {float(actual_values[0, i]):g}"
                raise self._contract_error(member, f"{problem} instead of {float(expected_values[0, i]):g}")

    def _contract_error(self, member: str, problem: str) -> UserError:
        return ROW_OPTIMIZERS.contract_error(self._options.kind, member, problem)


def _shown(spec: RowOptimizerSpec, check: Callable[[Any, torch.Tensor], None]) -> RowOptimizerSpec:
    """Return a spec whose formula passes each result to `check`."""

    def formula(states: Sequence[torch.Tensor], grad: torch.Tensor, step: RowStep) -> torch.Tensor:
        change = spec.formula(states, grad, step)
        check(change, grad)
        return change

    return RowOptimizerSpec(state=spec.state, formula=formula)


def _are_close(one: Columns, other: Columns) -> bool:
    return all(torch.allclose(a, b, **_CLOSE, equal_nan=True) for a, b in zip(one, other, strict=True))


def draws_of(table: TableConfig, keys: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """Return the key of the random bits of each row: `fold(seed, name of the table, step, key)`."""
    draws = np.empty(len(keys), np.int64)
    name = int.from_bytes(hashlib.blake2b(table.name.encode(), digest_size=8).digest(), "little")
    _fold(np.uint64(fold(table.seed, name, step)), keys, draws)
    return draws


@njit(cache=True, nogil=True)
def _fold(start, keys, draws):  # type: ignore[no-untyped-def]
    for i in range(len(keys)):
        draws[i] = np.int64(mix64_jit(start ^ np.uint64(keys[i])))
