"""Types of the schedules: steps, batches in each phase, learning rates.

A batch in flight: one type for each phase, which has what the phase has and nothing that comes later.

    LoadedBatch     on its way to the device, its keys deduplicated
    RoutedBatch     its keys exchanged, what crosses with each micro-batch put together
    FetchedBatch    its rows in a buffer on their owners; through its window vectors come and gradients go

Each phase is begun before it is done: what a lane is still at work on is `FutureLike`.

What a schedule is given, what it gives back, and what it needs from the outside.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

import torch

from nestrec.base.errors import BatchError, UserError, require
from nestrec.base.thread_team import FutureLike
from nestrec.data.batch_loader import Batch, MicroBatch
from nestrec.embedding.routing.batch_overlap import Overlap
from nestrec.embedding.routing.deduplicated_keys import DeduplicatedKeys
from nestrec.embedding.routing.key_routing import RoutedKeys
from nestrec.embedding.routing.window_cache_plan import MOST_MICRO_BATCHES
from nestrec.embedding.routing.working_set import WorkingSet
from nestrec.pipeline.exchange_window import Coupling, ExchangeWindow

WindowT_co = TypeVar("WindowT_co", bound=ExchangeWindow, covariant=True)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the first phase makes."""

    micro_batches: tuple[MicroBatch, ...]
    """on the device"""
    source: DeduplicatedKeys


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A batch whose loading has begun."""

    number: int
    """of its step"""
    batch: Batch
    loaded: FutureLike[LoadResult]


@dataclass(frozen=True, slots=True)
class RoutedBatch:
    """A batch whose keys are being exchanged."""

    number: int
    batch: Batch
    loaded: FutureLike[LoadResult]
    routed: FutureLike[RoutedKeys]

    @property
    def num_micro_batches(self) -> int:
        return len(self.batch.micro_batches)

    def is_refused(self) -> bool:
        """Whether its keys hold a mistake, which its own step will raise. The same on every rank; waits for them."""
        try:
            self.routed.wait()
        except BatchError:
            return True
        return False


class FetchedBatch(Generic[WindowT_co]):
    """A batch whose rows are being read."""

    def __init__(
        self,
        keys: RoutedBatch,
        rows: FutureLike[WorkingSet],
        open_window: "Callable[[FetchedBatch[WindowT_co]], WindowT_co]",
    ) -> None:
        self.keys = keys
        self.rows = rows
        self._open = open_window
        self.number = keys.number
        self.num_micro_batches = keys.num_micro_batches
        self._window: WindowT_co | None = None

    @property
    def window(self) -> WindowT_co:
        """Its exchanges; whoever asks first waits for the rows."""
        if self._window is None:
            self._window = self._open(self)
        return self._window


@dataclass(frozen=True, slots=True)
class NextBatch(Generic[WindowT_co]):
    """The next batch, fetched beside the one that trains."""

    batch: FetchedBatch[WindowT_co]
    shared: FutureLike[Overlap]
    """rows of both"""


class LookaheadIterator:
    """An iterator that can be asked what comes next without taking it."""

    def __init__(self, batches: Iterator[Batch], most: int | None = None) -> None:
        """most: batches that will be taken; those beyond are not looked at. None: all."""
        self._batches = batches
        self._left = most
        self._ahead: deque[Batch] = deque()

    def __iter__(self) -> "LookaheadIterator":
        return self

    def __next__(self) -> Batch:
        batch = self.peek(1)
        if batch is None:
            raise StopIteration
        return self._ahead.popleft()

    def peek(self, ahead: int) -> Batch | None:
        """The batch that the `ahead`-th call of next from now on will give, or none beyond the end."""
        while len(self._ahead) < ahead:
            batch = None if self._left == 0 else next(self._batches, None)
            if batch is None:
                return None
            self._left = None if self._left is None else self._left - 1
            self._ahead.append(batch)
        return self._ahead[ahead - 1]

    def close(self) -> None:
        """End what makes the batches."""
        if isinstance(self._batches, Generator):
            self._batches.close()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LearningRates:
    """Learning rates of one step; they travel with the batch, however late its update is applied."""

    dense: float
    tables: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStep:
    """A batch and what its update needs."""

    number: int
    """from 1"""
    batch: Batch
    rates: LearningRates
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
class StepTotals:
    """Sums over all ranks of one step, still on the device."""

    loss: torch.Tensor
    """loss of the global batch"""
    gradient_norm: torch.Tensor
    """of the dense gradients"""
    wants_stop: torch.Tensor
    """number of ranks that were told to stop"""
    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """for each table 0, or NaN where a row that was updated before this step, or beside it, is not finite"""


class ModelCompute(Protocol):
    """Forward and backward of one micro-batch; dense gradients add up in the parameters.

    A sample's loss may depend on the other samples of its micro-batch (in-batch negatives, logit sharing), never on
    those of another: schedules are then equal at equal partition (coupled samples). A loss defined over the whole batch
    says so, and every schedule refuses to cut its batches.
    """

    @property
    def couples_samples(self) -> Coupling:
        """How far the loss of a sample reaches."""

    def transfer(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch with its tensors on the device."""

    def forward_backward(
        self,
        micro_batch: MicroBatch,
        rows: Mapping[str, torch.Tensor],
        index: Mapping[str, torch.Tensor],
        weight: float,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """(its share of the global loss, gradients of the rows); `micro_batch` is on the device."""


class DenseSide(Protocol):
    """The dense side of an update, in two halves so that the sums can travel while rows are updated."""

    def early_sums(self, submit: Callable[[Callable[[], None]], None]) -> AbstractContextManager[None]:
        """Around the last micro-batch of a step: inside it, or when it ends, `submit` is given collectives that sum
        gradients which are complete. The same ones in the same order on every rank; they are run before `reduce`. Who
        does not ask finds all of it in `reduce`."""

    def reduce(self, loss: torch.Tensor, wants_stop: bool) -> torch.Tensor:
        """Sum what is left of the gradients, loss and wish over ranks. Collective; returns (loss, number of wishes)."""

    def apply(self, sums: torch.Tensor, learning_rate: float) -> StepTotals:
        """Update the dense weights and clear their gradients. Local."""


class Schedule(Protocol):
    """Arranges the stages of steps in time."""

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        """Train on the batch of `step`, which was the last one taken from `feed`; may begin with those after it."""

    def issue(self, collective: Callable[[], T]) -> T:
        """Run a collective of the caller's in its place in the order of collectives, and wait for it."""

    def close(self) -> None:
        """End the threads; only after a step that was a fence is anything saved from here on right."""

    def abandon(self, error: BaseException) -> None:
        """The run has failed: end the threads soon. A process that ends beside a running one may be aborted."""


def check_can_cache(num_micro_batches: int | Literal["auto"]) -> None:
    """With the window cache each row names the micro-batch that uses it last, and that number has bounds."""
    if num_micro_batches != "auto" and num_micro_batches > MOST_MICRO_BATCHES:
        raise UserError(
            "is more than the window cache can tell apart",
            option="batch.micro_batches",
            value=num_micro_batches,
            remedy=f"give at most {MOST_MICRO_BATCHES}, or set --pipeline.window_cache false",
        )


def check_can_cut(couples: Coupling, num_micro_batches: int | Literal["auto"]) -> None:
    """Micro-batches are computed one by one, so a loss over the whole batch has no sum over them (coupled samples)."""
    require(
        couples != "batch" or num_micro_batches == 1,
        "the loss couples the samples of the whole batch, which may not be cut",
        option="batch.micro_batches",
        value=num_micro_batches,
        remedy="give 1 (every schedule takes it; dual_buffer and nested still hide the lookup), or confine the loss to "
        "a micro-batch: task.negatives.reach=micro_batch, or couples_samples of a task of your own",
    )
