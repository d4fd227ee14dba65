"""Rows on their way to all ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nestrec.ops.rows.gather import take_rows


@dataclass(frozen=True, slots=True)
class Parcel:
    """Rows that one exchange takes to other ranks, and how many come back."""

    rows: torch.Tensor
    """(n, ...)"""
    send_counts: Sequence[int]
    """Rows for each rank."""
    receive_counts: Sequence[int]
    """Rows from each rank."""
    places: torch.Tensor | None = None
    """Which rows are sent, in order of target; none: all, as they stand."""

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.rows)

    def chosen(self) -> torch.Tensor:
        """All that is sent."""
        return self.rows if self.places is None else take_rows(self.rows, self.places)

    def write(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Some of it, from `start` to `stop`, to where it is wanted."""
        if self.places is None:
            out.copy_(self.rows[start:stop])
        else:
            torch.index_select(self.rows, 0, self.places[start:stop], out=out)

    def received(self) -> torch.Tensor:
        """Memory for what comes back."""
        return self.rows.new_empty((sum(self.receive_counts), *self.rows.shape[1:]))


def row_bytes(rows: torch.Tensor) -> int:
    """Bytes of one row of (n, ...)."""
    return rows.element_size() * math.prod(rows.shape[1:])
