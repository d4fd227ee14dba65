"""Row optimisers of other packages, looked at before their first step: what they promise of themselves, on a few rows.

Two steps on three rows are enough to see a formula that gives something else than changes of weights, one that looks
from a row at others (its steps would depend on who shares a batch), and a host loop or kernel that is other arithmetic.

By what bits the 16-bit weights of a row are rounded in a step: those of (seed of the table, its name, step, key).

Neither slot nor rank, schedule or thread is in them, so a row is rounded alike wherever and whenever it is updated. The
rounding itself is nestrec.ops.rows.round.
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
"""Rounding may differ with the machine; other arithmetic differs by more."""
Columns = list[torch.Tensor]
"""weights and state of some rows"""


def check_optimizers(tables: Sequence[TableConfig], device: torch.device) -> None:
    """Raise a UserError where a row optimiser of another package does not do as its spec says."""
    for table in tables:
        if table.optimizer.kind not in ROW_OPTIMIZERS.own:
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
        begin = self._columns()
        by_formula = self._stepped(begin, self._by_formula)
        alone = self._stepped([column[:1] for column in begin], self._by_formula)
        if not _are_close(alone, [column[:1] for column in by_formula]):
            problem = "moves a row otherwise when other rows are in the batch"
            raise self._broken("formula", f"{problem}: it may look along a row, not between rows")
        if self._spec.host_loop is not None and self._device.type == "cpu":
            self._compare("host_loop", by_formula, self._stepped(begin, self._by_loop))
        if self._spec.kernel is not None and (self._device.type == "cuda" or self._spec.host_loop is None):
            self._compare("kernel", by_formula, self._stepped(begin, self._by_kernel))

    def _check_state(self) -> None:
        names = [column.name for column in self._spec.state]
        for name in names:
            if not str(name).startswith("state_") or names.count(name) > 1:
                raise self._broken("state", f"has {name!r}: names must begin with 'state_' and differ")
        for column in self._spec.state:
            if not isinstance(initial := column.initial(self._options), int | float):
                raise self._broken("state", f"begins {column.name!r} with {initial!r}, which is no number")

    def _columns(self) -> Columns:
        """The weights of some rows, and their state as it is in new ones."""
        weight = torch.randn(_ROWS, self._dim, generator=torch.Generator().manual_seed(1)).to(self._dtype)
        widths = [1 if column.is_row_wise else self._dim for column in self._spec.state]
        initial = [float(column.initial(self._options)) for column in self._spec.state]
        states = [torch.full((_ROWS, w), v, dtype=self._dtype) for w, v in zip(widths, initial, strict=True)]
        return [column.to(self._device) for column in (weight, *states)]

    def _stepped(self, begin: Columns, step: Callable[[Columns, torch.Tensor, RowStep], None]) -> Columns:
        """After two steps."""
        columns = [column.clone() for column in begin]
        draw = torch.Generator().manual_seed(2)
        for number in (1, 2):
            grad = torch.randn(_ROWS, self._dim, generator=draw).to(self._dtype)[: len(begin[0])]
            step(columns, grad.to(self._device), RowStep(number, _RATE, self._options))
        return columns

    def _by_formula(self, columns: Columns, grad: torch.Tensor, step: RowStep) -> None:
        shapes = [column.shape for column in columns]
        update_by_formula(_shown(self._spec, self._check_change), columns[0], columns[1:], grad, step, None)
        assert [column.shape for column in columns] == shapes

    def _check_change(self, change: Any, grad: torch.Tensor) -> None:
        if not isinstance(change, torch.Tensor) or change.shape != grad.shape or not change.is_floating_point():
            given = f"{change.dtype} of {tuple(change.shape)}" if isinstance(change, torch.Tensor) else repr(change)
            wanted = f"what to take from the weights, a tensor of shape {tuple(grad.shape)}"
            raise self._broken("formula", f"gives {given} and not {wanted}")

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

    def _compare(self, what: str, expected: Columns, found: Columns) -> None:
        names = ["the weights", *(column.name for column in self._spec.state)]
        for name, right, wrong in zip(names, expected, found, strict=True):
            if not _are_close([right], [wrong]):
                i = int((right - wrong).abs().sum(0).argmax())
                problem = f"gives other numbers than its formula: {name} come to {float(wrong[0, i]):g}"
                raise self._broken(what, f"{problem} after two steps, by the formula {float(right[0, i]):g}")

    def _broken(self, what: str, problem: str) -> UserError:
        return ROW_OPTIMIZERS.broken(self._options.kind, what, problem)


def _shown(spec: RowOptimizerSpec, look: Callable[[Any, torch.Tensor], None]) -> RowOptimizerSpec:
    """The same with a formula whose results are looked at."""

    def formula(states: Sequence[torch.Tensor], grad: torch.Tensor, step: RowStep) -> torch.Tensor:
        change = spec.formula(states, grad, step)
        look(change, grad)
        return change

    return RowOptimizerSpec(state=spec.state, formula=formula)


def _are_close(one: Columns, other: Columns) -> bool:
    return all(torch.allclose(a, b, **_CLOSE, equal_nan=True) for a, b in zip(one, other, strict=True))


def draws_of(table: TableConfig, keys: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """For each row the key of its random bits: `fold(seed, name of the table, step, key)`."""
    draws = np.empty(len(keys), np.int64)
    name = int.from_bytes(hashlib.blake2b(table.name.encode(), digest_size=8).digest(), "little")
    _fold(np.uint64(fold(table.seed, name, step)), keys, draws)
    return draws


@njit(cache=True, nogil=True)
def _fold(start, keys, draws):  # type: ignore[no-untyped-def]
    for i in range(len(keys)):
        draws[i] = np.int64(mix64_jit(start ^ np.uint64(keys[i])))
