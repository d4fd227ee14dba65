"""Vectors of several tables, and columns of numbers, as one vector of the model's width.

A table whose rows have another width has a matrix of its own, which brings them to the model's; features that share a
table share it. What is looked up for one token is summed.

Legend: E places, D channels of the model.
"""

from collections.abc import Mapping

import torch
from torch import nn


class ToWidth(nn.Module):
    """The matrices of the tables that need one; no weights at all where none does."""

    def __init__(self, dim: int, widths: Mapping[str, int], dense: Mapping[str, int] | None = None):
        """widths: of the rows of each table. dense: of columns that have no table, numbers and vectors, each of which
        has a matrix whatever its width."""
        super().__init__()
        self.matrices = nn.ModuleDict(
            {_key(table): nn.Linear(width, dim, bias=False) for table, width in widths.items() if width != dim}
        )

        self.dense = tuple(dense or ())
        """columns that have no table"""
        for column, width in (dense or {}).items():
            matrix = nn.Linear(width, dim, bias=False)
            nn.init.normal_(matrix.weight, std=0.02)  # as rows begin: a column of numbers shall not drown the others
            self.matrices[_key(column)] = matrix

    def forward(self, table: str, vectors: torch.Tensor) -> torch.Tensor:
        """(..., D) of (..., width of the table)."""
        key = _key(table)
        return self.matrices[key](vectors) if key in self.matrices else vectors

    def without_tables(self) -> "ToWidth":
        """The matrices of columns of numbers alone, shared with this."""
        kept = ToWidth(0, {})
        kept.dense = self.dense
        kept.matrices.update({_key(column): self.matrices[_key(column)] for column in self.dense})
        return kept

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes; float32 where it has nothing to compute."""
        return next((p.dtype for p in self.parameters()), torch.float32)

    def changes(self, table: str) -> bool:
        """Whether its vectors are not what its rows hold."""
        return _key(table) in self.matrices


def summed(vectors: list[torch.Tensor]) -> torch.Tensor:
    """(E, D) of as many (E, D) as there are features."""
    return torch.stack(vectors).sum(0)


def _key(table: str) -> str:
    """Names of tables are those of columns; a module's may hold no dot, and not be those of a dictionary's methods."""
    return "of_" + table.replace(".", "_")
