"""What a schedule needs from the outside: compute on vectors, and the dense side of an update."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from nestrec.data.batches import Batch, MicroBatch


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates of one step; they travel with the batch, however late its update is applied."""

    dense: float
    tables: float


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all ranks of one step, still on the device."""

    loss: torch.Tensor
    """loss of the global batch"""
    gradient_norm: torch.Tensor
    """of the dense gradients"""
    wants_stop: torch.Tensor
    """number of ranks that were told to stop"""


class Compute(Protocol):
    """Forward and backward of one micro-batch; dense gradients add up in the parameters."""

    def forward_backward(
        self, part: MicroBatch, rows: Mapping[str, torch.Tensor], index: Mapping[str, torch.Tensor], weight: float
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """(loss as part of the global loss, gradients of the rows)."""


class Dense(Protocol):
    """Dense gradients summed over ranks, and the update of dense weights."""

    def update(self, loss: torch.Tensor, wants_stop: bool, learning_rate: float) -> Totals: ...


class Schedule(Protocol):
    """Arranges the stages of steps in time."""

    def advance(self, batch: Batch, step: int, rates: Rates, wants_stop: bool) -> Totals: ...
