"""Rows of 16 bits as a loss reads them: gathered or scaled as they are stored, with gradients in float32.

autograd gives a tensor a gradient of its own type, so rows of 16 bits would have rounded ones, and a float32 leaf would
be a copy of all rows, twice as large as they are. So the leaf is an anchor: a float32 tensor of the rows' shape that is
one number in memory. Operators that know `StoredRows` read the values and give their gradient to the anchor.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class StoredRows:
    """(U, D) rows; what is computed from them is float32."""

    values: torch.Tensor
    """as they are stored, of 16 bits"""
    anchor: torch.Tensor
    """float32 of the same shape; nothing but its gradient means anything"""

    @staticmethod
    def of(values: torch.Tensor) -> "StoredRows":
        """A leaf on these values."""
        anchor = torch.zeros((), dtype=torch.float32, device=values.device).expand(values.shape)
        return StoredRows(values.detach(), anchor.detach().requires_grad_())

    def whole(self) -> torch.Tensor:
        """All rows as float32: for whoever needs more of them than `gather_rows` and `unit_rows` give."""
        return _Widened.apply(self.anchor, self.values)  # type: ignore[no-any-return]


TableRows = torch.Tensor | StoredRows
"""Distinct rows of a table."""


def leaf_and_values(rows: TableRows) -> tuple[torch.Tensor, torch.Tensor]:
    """What the gradient is of, and what is read: the same tensor, or anchor and values."""
    return (rows.anchor, rows.values) if isinstance(rows, StoredRows) else (rows, rows)


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
