"""Chooses the number of micro-batches from measured times, and logs its changes.

How many micro-batches each batch has: changed only at logged steps, and the same when replayed (agreed choices).

How many micro-batches: a model of the frozen window, fitted to two measured partitions.

Computation of a step is c + a N and communication r + l N: what the samples cost, and what each micro-batch costs
beside its samples (kernels that do not fill the device, latencies, rows sent again). Both are known from a step with
few and one with many micro-batches. The time of a window of any N then follows from the order in which the schedule
that runs has its exchanges.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nestrec.base.config import config
from nestrec.data.batch_order import BatchPosition


@config
class MicroBatchChange:
    """A decision of a run, logged and saved in its checkpoints."""

    step: int
    """steps made when it was taken"""
    first: BatchPosition
    """the first batch that is cut so; those before it may have been cut already"""
    micro_batches: int
    """micro-batches from then on"""
    before_ms: tuple[float, float] | None = None
    """computation and communication of a step as it was cut before, where a choice between the two is still to come: a
    run that is started again before it has no measurements of its own of them"""


class MicroBatchHistory:
    """The number of micro-batches of each batch. Data threads ask for it while the loop adds changes."""

    def __init__(self, micro_batches: int, changes: Iterable[MicroBatchChange] = ()) -> None:
        self._micro_batches = micro_batches
        self.changes = tuple(changes)

    @property
    def newest(self) -> int:
        """That of the batches that have not been cut."""
        return self.changes[-1].micro_batches if self.changes else self._micro_batches

    def at(self, position: BatchPosition) -> int:
        """That of the batch of this position."""
        found = self._micro_batches
        for change in self.changes:
            if change.first <= position:
                found = change.micro_batches
        return found

    def restore(self, changes: Iterable[MicroBatchChange]) -> None:
        """Go on where a run stood that had made these changes."""
        self.changes = tuple(changes)

    def add(self, change: MicroBatchChange) -> None:
        assert not self.changes or change.first > self.changes[-1].first
        self.changes = (*self.changes, change)


WindowTime = Callable[[Sequence[float], Sequence[float], Sequence[float]], float]
"""(computation, vectors, gradients) of each micro-batch, in milliseconds, to when the last of them is done."""
WORTH = 0.02
"""A larger number of micro-batches must save this part of the time."""


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """Mean milliseconds of the steps of one partition."""

    num_micro_batches: int
    compute_ms: float
    communication_ms: float


@dataclass(frozen=True, slots=True)
class WindowModel:
    """Milliseconds of a step as functions of the number of micro-batches."""

    compute_ms: float
    compute_part_ms: float
    """for each micro-batch"""
    communication_ms: float
    communication_part_ms: float
    """for each micro-batch"""

    def step_ms(self, num_micro_batches: int, window_ms: WindowTime) -> float:
        """Time of the window of a schedule."""
        compute = (self.compute_ms + self.compute_part_ms * num_micro_batches) / num_micro_batches
        exchange = (self.communication_ms + self.communication_part_ms * num_micro_batches) / (2 * num_micro_batches)
        return window_ms([compute] * num_micro_batches, [exchange] * num_micro_batches, [exchange] * num_micro_batches)


def fit_window(few: MeasuredWindow, many: MeasuredWindow) -> WindowModel:
    """The model that explains two partitions; no coefficient is negative."""
    assert few.num_micro_batches < many.num_micro_batches
    compute = _line(few.num_micro_batches, few.compute_ms, many.num_micro_batches, many.compute_ms)
    communication = _line(few.num_micro_batches, few.communication_ms, many.num_micro_batches, many.communication_ms)
    return WindowModel(*compute, *communication)


def choose_window(model: WindowModel, candidates: Sequence[int], window_ms: WindowTime) -> int:
    """The number of micro-batches that is worth it: each larger one must save `WORTH` over the best before it."""
    best = min(candidates)
    for num_micro_batches in sorted(candidates):
        if model.step_ms(num_micro_batches, window_ms) < (1 - WORTH) * model.step_ms(best, window_ms):
            best = num_micro_batches
    return best


def in_turn_ms(compute: Sequence[float], vectors: Sequence[float], gradients: Sequence[float]) -> float:
    """E1 F1 G1 E2 F2 G2 ...: each is waited for, so cutting a batch can only cost."""
    return sum(compute) + sum(vectors) + sum(gradients)


def vectors_first_ms(compute: Sequence[float], vectors: Sequence[float], gradients: Sequence[float]) -> float:
    """When the last gradients have arrived, with exchanges in the order E1 E2 ... G1 G2 ... on one lane."""
    arrived = 0.0
    computed = 0.0
    lane = sum(vectors)
    for computing, coming, going in zip(compute, vectors, gradients, strict=True):
        arrived += coming
        computed = max(computed, arrived) + computing
        lane = max(lane, computed) + going
    return lane


def apart_ms(compute: Sequence[float], vectors: Sequence[float], gradients: Sequence[float]) -> float:
    """Exchanges are those of other steps: whichever lane has more to do."""
    return max(sum(compute), sum(vectors) + sum(gradients))


def overlapped_ms(compute: Sequence[float], vectors: Sequence[float], gradients: Sequence[float]) -> float:
    """When the last gradients have arrived, with exchanges in the order E1 E2 G1 E3 G2 ... on one lane."""
    num_micro_batches = len(compute)
    arrived = [0.0] * num_micro_batches
    lane = 0.0
    computed = 0.0
    for i in range(min(2, num_micro_batches)):
        lane = arrived[i] = lane + vectors[i]
    for i in range(num_micro_batches):
        computed = max(computed, arrived[i]) + compute[i]
        lane = max(lane, computed) + gradients[i]
        if i + 2 < num_micro_batches:
            lane = arrived[i + 2] = lane + vectors[i + 2]
    return lane


def _line(x1: int, y1: float, x2: int, y2: float) -> tuple[float, float]:
    slope = max(0.0, (y2 - y1) / (x2 - x1))
    return max(0.0, y1 - slope * x1), slope
