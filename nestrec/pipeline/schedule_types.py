"""Types of pipeline schedules: steps, batches in each phase, learning rates, and protocols of the components.

A batch in flight has one type per phase:

    LoadedBatch     is being copied to the device; its keys are deduplicated
    RoutedBatch     its keys are exchanged, and the exchange plan of each micro-batch is built
    FetchedBatch    its rows are in a buffer on their owners; its window exchanges embeddings and gradients

An object is created when its phase starts, so its results are futures (`FutureLike`).

A schedule (`Schedule`) trains on a `TrainingStep` and returns `StepTotals`. It calls a `ModelCompute` for forward and
backward passes, and a `DenseSide` for the dense weights.
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
from nestrec.embedding.routing.window_cache_plan import MAX_MICRO_BATCHES
from nestrec.embedding.routing.working_set import WorkingSet
from nestrec.pipeline.exchange_window import Coupling, ExchangeWindow

WindowT_co = TypeVar("WindowT_co", bound=ExchangeWindow, covariant=True)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of the first phase."""

    micro_batches: tuple[MicroBatch, ...]
    """Micro-batches on the device."""
    source: DeduplicatedKeys
    """Unique keys of the batch on this rank."""


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A batch that is being loaded."""

    number: int
    """Number of its step."""
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

    def has_batch_error(self) -> bool:
        """Return whether the batch has invalid keys, an error that its step will raise.

        The result is the same on every rank. Waits for the keys.
        """
        try:
            self.routed.result()
        except BatchError:
            return True
        return False


class FetchedBatch(Generic[WindowT_co]):
    """A batch whose rows are being read from the store.

    Args:
        keys: The batch in its previous phase.
        rows: Future of the rows.
        open_window: Function that creates the exchange window of the batch.
    """

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
        """Exchange window of the batch; the first access waits for the rows."""
        if self._window is None:
            self._window = self._open(self)
        return self._window


@dataclass(frozen=True, slots=True)
class NextBatch(Generic[WindowT_co]):
    """The next batch, which is fetched while the current batch trains."""

    batch: FetchedBatch[WindowT_co]
    shared: FutureLike[Overlap]
    """Rows that both batches use."""


class LookaheadIterator:
    """Iterator of batches with lookahead.

    Args:
        batches: Iterator to wrap.
        limit: Maximum number of batches to take from it. None: all.
    """

    def __init__(self, batches: Iterator[Batch], limit: int | None = None) -> None:
        self._batches = batches
        self._left = limit
        self._ahead: deque[Batch] = deque()

    def __iter__(self) -> "LookaheadIterator":
        return self

    def __next__(self) -> Batch:
        batch = self.peek(1)
        if batch is None:
            raise StopIteration
        return self._ahead.popleft()

    def peek(self, ahead: int) -> Batch | None:
        """Return the batch that the `ahead`-th next call of `next` will return, or None after the end."""
        while len(self._ahead) < ahead:
            batch = None if self._left == 0 else next(self._batches, None)
            if batch is None:
                return None
            self._left = None if self._left is None else self._left - 1
            self._ahead.append(batch)
        return self._ahead[ahead - 1]

    def close(self) -> None:
        """Close the generator of the batches."""
        if isinstance(self._batches, Generator):
            self._batches.close()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LearningRates:
    """Learning rates of one step. They are stored with the step, because schedules can apply its update later."""

    dense: float
    """Learning rate of the dense weights."""
    tables: float
    """Learning rate of the embedding tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStep:
    """One training step: a batch, its number and its learning rates."""

    number: int
    """Number of the step, from 1."""
    batch: Batch
    """Batch of this rank."""
    rates: LearningRates
    """Learning rates of the update."""
    stop_requested: bool = False
    """Whether this rank has received a request to stop."""
    is_fence: bool = False
    """Whether the tables must be complete after this step, for an evaluation, a checkpoint or the end of training: no
    later batch has changed them, all rows are written back, and all lanes are idle. The same on every rank."""
    is_stop: bool = False
    """Whether the step is a fence only because of a stop request; a resumed run continues as if there were no fence."""

    @property
    def must_read_updated_rows(self) -> bool:
        """Whether later batches must read rows with the update of this step, so that prefetched rows are dropped."""
        return self.is_fence and not self.is_stop


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Results of one step, summed over all ranks; the tensors are on the device."""

    loss: torch.Tensor
    """Loss of the global batch."""
    gradient_norm: torch.Tensor
    """Norm of the dense gradients."""
    stop_requested: torch.Tensor
    """Number of ranks that have received a request to stop."""
    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """Per table: NaN if a row that was updated before or during this step is not finite, otherwise 0."""


class ModelCompute(Protocol):
    """Protocol of the forward and backward pass of one micro-batch; gradients of dense weights accumulate.

    The loss of a sample may depend on the other samples of its micro-batch (in-batch negatives, logit sharing), but not
    on those of other micro-batches: then all schedules give the same result for the same partition. A loss over the
    full batch declares this with `couples_samples`, and schedules do not split its batches.
    """

    @property
    def couples_samples(self) -> Coupling:
        """Samples on which the loss of a sample may depend."""

    def transfer(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch with its tensors on the device."""

    def forward_backward(
        self,
        micro_batch: MicroBatch,
        rows: Mapping[str, torch.Tensor],
        index: Mapping[str, torch.Tensor],
        weight: float,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Run the forward and backward pass.

        Args:
            micro_batch: Micro-batch on the device.
            rows: (U, D) unique rows, by table.
            index: Indices of a feature's keys in the rows of its table, by feature.
            weight: Weight of the global batch, by which the sum of the losses is divided.

        Returns:
            The addend of this micro-batch to the global loss, and the gradients of the rows, by table.
        """


class DenseSide(Protocol):
    """Protocol of the optimizer of dense weights.

    All-reduce and update are separate calls, so that the all-reduce can overlap with the update of table rows.
    """

    def overlap_backward(self, submit: Callable[[Callable[[], None]], None]) -> AbstractContextManager[None]:
        """Return a context for the last micro-batch of a step that overlaps gradient all-reduce with its backward pass.

        Inside or at the end of the context, `submit` is called with collectives that sum completed gradients: the same
        ones in the same order on every rank. They run before `reduce`. Without this context, `reduce` sums everything.
        """

    def reduce(self, loss: torch.Tensor, stop_requested: bool) -> torch.Tensor:
        """Sum the remaining gradients, the loss and the stop requests over ranks; returns the sums. Collective."""

    def apply(self, sums: torch.Tensor, learning_rate: float) -> StepTotals:
        """Update the dense weights and clear their gradients. Local."""


class Schedule(Protocol):
    """Protocol of pipeline schedules: runs the stages of steps in a certain order, overlapped or not."""

    def advance(self, step: TrainingStep, feed: LookaheadIterator) -> StepTotals:
        """Train on the batch of `step`, the last one taken from `feed`; may start stages of the following batches."""

    def submit_collective(self, collective: Callable[[], T]) -> T:
        """Run a collective of the caller, ordered with those of the schedule, and wait for it."""

    def close(self) -> None:
        """End the threads. State that is saved afterwards is only correct if the last step was a fence."""

    def abort(self, error: BaseException) -> None:
        """End the threads of a failed run soon: a process that exits while a thread runs can crash."""


def check_can_cache(num_micro_batches: int | Literal["auto"]) -> None:
    """Raise a UserError if there are too many micro-batches for the window cache.

    Its plan stores the last micro-batch that uses a row in a few bits.
    """
    if num_micro_batches != "auto" and num_micro_batches > MAX_MICRO_BATCHES:
        raise UserError(
            f"the window cache supports at most {MAX_MICRO_BATCHES} micro-batches",
            option="batch.num_micro_batches",
            value=num_micro_batches,
            remedy="use fewer micro-batches, or set --pipeline.window_cache false",
        )


def check_can_split(couples: Coupling, num_micro_batches: int | Literal["auto"]) -> None:
    """Raise a UserError if batches are split although the loss depends on the full batch.

    Micro-batches are computed one by one, so such a loss is not a sum over micro-batches.
    """
    require(
        couples != "batch" or num_micro_batches == 1,
        "the loss depends on all samples of a batch, so the batch cannot be split",
        option="batch.num_micro_batches",
        value=num_micro_batches,
        remedy="use 1 (every schedule supports it; dual_buffer and nested still hide the lookup), or limit the loss to "
        "a micro-batch with task.negatives.scope=micro_batch, or with couples_samples of your own task",
    )
