"""What a schedule is given, what it gives back, and what it needs from the outside."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import torch

from nestrec.data.batches import Batch, MicroBatch
from nestrec.pipeline.feed import Feed

T = TypeVar("T")

Coupling = Literal["micro_batch", "batch"]
"""Which other samples the loss of a sample may depend on: those of its micro-batch, or all of a rank's batch."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates of one step; they travel with the batch, however late its update is applied."""

    dense: float
    tables: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A batch and what its update needs."""

    number: int
    """from 1"""
    batch: Batch
    rates: Rates
    wants_stop: bool = False
    """this rank was told to stop"""
    is_fence: bool = False
    """the tables must be whole after this step, as for an evaluation, a save or the end: no later batch has touched
    them, all rows are written back, no lane is busy. The same on every rank"""
    is_stop: bool = False
    """a fence that only a wish to stop has made: the run will go on as if it had not been there"""

    @property
    def reads_end(self) -> bool:
        """Whether batches after this step must read rows after it: what was read ahead is dropped."""
        return self.is_fence and not self.is_stop


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all ranks of one step, still on the device."""

    loss: torch.Tensor
    """loss of the global batch"""
    gradient_norm: torch.Tensor
    """of the dense gradients"""
    wants_stop: torch.Tensor
    """number of ranks that were told to stop"""
    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """for each table 0, or NaN where a row that was updated before this step, or beside it, is not finite"""


class Compute(Protocol):
    """Forward and backward of one micro-batch; dense gradients add up in the parameters.

    A sample's loss may depend on the other samples of its micro-batch (in-batch negatives, logit sharing), never on
    those of another: schedules are then equal at equal partition (coupled samples). A loss defined over the whole batch
    says so, and every schedule refuses to cut its batches.
    """

    @property
    def couples_samples(self) -> Coupling:
        """How far the loss of a sample reaches."""

    def transfer(self, part: MicroBatch) -> MicroBatch:
        """The micro-batch with its tensors on the device."""

    def forward_backward(
        self, part: MicroBatch, rows: Mapping[str, torch.Tensor], index: Mapping[str, torch.Tensor], weight: float
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """(loss as part of the global loss, gradients of the rows); `part` is on the device."""


class Dense(Protocol):
    """The dense side of an update, in two halves so that the sums can travel while rows are updated."""

    def reduce(self, loss: torch.Tensor, wants_stop: bool) -> torch.Tensor:
        """Sum gradients, loss and wish over ranks. Collective; returns (loss, number of wishes)."""

    def apply(self, sums: torch.Tensor, learning_rate: float) -> Totals:
        """Update the dense weights and clear their gradients. Local."""


class Schedule(Protocol):
    """Arranges the stages of steps in time."""

    def advance(self, step: Step, feed: Feed) -> Totals:
        """Train on the batch of `step`, which was the last one taken from `feed`; may begin with those after it."""

    def issue(self, collective: Callable[[], T]) -> T:
        """Run a collective of the caller's in its place in the order of collectives, and wait for it."""

    def close(self) -> None:
        """End the threads; only after a step that was a fence is anything saved from here on right."""

    def abandon(self, error: BaseException) -> None:
        """The run has failed: end the threads soon. A process that ends beside a running one may be aborted."""
