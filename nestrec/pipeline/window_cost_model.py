"""Cost model of the exchange window, from which the number of micro-batches is chosen, and the history of changes.

With N micro-batches, the computation of a step takes c + a N and its communication r + l N: the cost of the samples,
plus an overhead per micro-batch (kernels that do not fill the device, latencies, rows that are sent again). Both lines
are fitted to steps with few and with many micro-batches. The time of a window with any N then follows from the order of
exchanges of the schedule (`WindowTime`).

`MicroBatchHistory` holds the number of micro-batches of each batch. It changes only at logged steps, so that a replay
makes the same changes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nestrec.base.config import config
from nestrec.data.batch_order import BatchPosition


@config
class MicroBatchChange:
    """A change of the number of micro-batches, logged and saved in checkpoints."""

    step: int
    """Number of completed steps at the time of the decision."""
    first: BatchPosition
    """Position of the first batch with the new number; earlier batches may already be split."""
    micro_batches: int
    """Number of micro-batches from that batch on."""
    before_ms: tuple[float, float] | None = None
    """Computation and communication time of a step with the previous number, in milliseconds, if the final choice is
    still to be made: a run that is resumed before it does not have these measurements."""


class MicroBatchHistory:
    """Number of micro-batches of each batch. Thread-safe: data threads read it while the training loop adds changes."""

    def __init__(self, micro_batches: int, changes: Iterable[MicroBatchChange] = ()) -> None:
        self._micro_batches = micro_batches
        self.changes = tuple(changes)

    @property
    def newest(self) -> int:
        """Number of micro-batches of batches that are not split yet."""
        return self.changes[-1].micro_batches if self.changes else self._micro_batches

    def at(self, position: BatchPosition) -> int:
        """Return the number of micro-batches of the batch at this position."""
        micro_batches = self._micro_batches
        for change in self.changes:
            if change.first <= position:
                micro_batches = change.micro_batches
        return micro_batches

    def restore(self, changes: Iterable[MicroBatchChange]) -> None:
        """Restore the changes of a resumed run."""
        self.changes = tuple(changes)

    def add(self, change: MicroBatchChange) -> None:
        assert not self.changes or change.first > self.changes[-1].first
        self.changes = (*self.changes, change)


WindowTime = Callable[[Sequence[float], Sequence[float], Sequence[float]], float]
"""Function from the times of each micro-batch (computation, embedding exchange, gradient exchange) to the end of the
last stage, in milliseconds."""
MIN_SAVING = 0.02
"""Minimum fraction of the time that a larger number of micro-batches must save."""


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """Measured times of steps with one number of micro-batches, in milliseconds."""

    num_micro_batches: int
    compute_ms: float
    communication_ms: float


@dataclass(frozen=True, slots=True)
class WindowModel:
    """Times of a step as linear functions of the number of micro-batches, in milliseconds."""

    compute_ms: float
    """Computation time of the samples."""
    compute_part_ms: float
    """Additional computation time per micro-batch."""
    communication_ms: float
    """Communication time of the samples."""
    communication_part_ms: float
    """Additional communication time per micro-batch."""

    def step_ms(self, num_micro_batches: int, window_ms: WindowTime) -> float:
        """Return the time of the exchange window of a schedule."""
        compute = (self.compute_ms + self.compute_part_ms * num_micro_batches) / num_micro_batches
        exchange = (self.communication_ms + self.communication_part_ms * num_micro_batches) / (2 * num_micro_batches)
        return window_ms([compute] * num_micro_batches, [exchange] * num_micro_batches, [exchange] * num_micro_batches)


def fit_window(few: MeasuredWindow, many: MeasuredWindow) -> WindowModel:
    """Fit a model to the measurements of two numbers of micro-batches; coefficients are not negative."""
    assert few.num_micro_batches < many.num_micro_batches
    compute = _line(few.num_micro_batches, few.compute_ms, many.num_micro_batches, many.compute_ms)
    communication = _line(few.num_micro_batches, few.communication_ms, many.num_micro_batches, many.communication_ms)
    return WindowModel(*compute, *communication)


def choose_num_micro_batches(model: WindowModel, candidates: Sequence[int], window_ms: WindowTime) -> int:
    """Return the best number of micro-batches; each larger one must save `MIN_SAVING` over the best smaller one."""
    best = min(candidates)
    for num_micro_batches in sorted(candidates):
        if model.step_ms(num_micro_batches, window_ms) < (1 - MIN_SAVING) * model.step_ms(best, window_ms):
            best = num_micro_batches
    return best


def sequential_ms(compute: Sequence[float], vectors: Sequence[float], gradients: Sequence[float]) -> float:
    """Return the time of the order E1 F1 G1 E2 F2 G2 ... without overlap, in which micro-batches only add overhead."""
    return sum(compute) + sum(vectors) + sum(gradients)


def vectors_first_ms(compute: Sequence[float], vectors: Sequence[float], gradients: Sequence[float]) -> float:
    """Return the end of the last gradient exchange, with exchanges in the order E1 E2 ... G1 G2 ... on one lane."""
    arrived = 0.0
    computed = 0.0
    lane = sum(vectors)
    for compute_ms, vectors_ms, gradients_ms in zip(compute, vectors, gradients, strict=True):
        arrived += vectors_ms
        computed = max(computed, arrived) + compute_ms
        lane = max(lane, computed) + gradients_ms
    return lane


def independent_ms(compute: Sequence[float], vectors: Sequence[float], gradients: Sequence[float]) -> float:
    """Return the time of the busier lane, if a step only exchanges data of other steps."""
    return max(sum(compute), sum(vectors) + sum(gradients))


def overlapped_ms(compute: Sequence[float], vectors: Sequence[float], gradients: Sequence[float]) -> float:
    """Return the end of the last gradient exchange, with exchanges in the order E1 E2 G1 E3 G2 ... on one lane."""
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
