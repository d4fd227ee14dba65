"""Number of micro-batches of a run: as configured, or chosen automatically from measured step times."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from nestrec.data.batch_loader import BatchConfig
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json
from nestrec.pipeline import PipelineConfig
from nestrec.pipeline.schedule_spec import MAX_BATCHES_AHEAD, SCHEDULES
from nestrec.pipeline.window_cost_model import (
    MeasuredWindow,
    MicroBatchChange,
    MicroBatchHistory,
    WindowTime,
    choose_num_micro_batches,
    fit_window,
)
from nestrec.trace import Span, Timeline

FEW, MANY = 2, 8
"""Numbers of micro-batches that are measured before the choice."""
CANDIDATES = (1, 2, 4, 8, 16, 32)
STEPS_TO_MEASURE = 8
_STEPS_TO_WARM_UP = 3


class MicroBatchTuner:
    """Chooses the number of micro-batches for `batch.num_micro_batches=auto`.

    It measures steps with few and with many micro-batches, and then chooses the number with the shortest modeled step.
    All ranks must call `decide` at the same steps; it is collective until the choice is made.
    """

    def __init__(self, batch: BatchConfig, pipeline: PipelineConfig, topology: Topology) -> None:
        self._is_auto = batch.num_micro_batches == "auto"
        self._window_ms = _window_time(pipeline.schedule) if self._is_auto else None
        self._replay = pipeline.replay_changes
        self._topology = topology
        self._delay = batch.prefetch_batches + 1 + MAX_BATCHES_AHEAD
        self._times: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._num_seen = 0
        first = FEW if batch.num_micro_batches == "auto" else batch.num_micro_batches
        self.schedule = MicroBatchHistory(first, pipeline.replay_changes)

    def resume(self, changes: Iterable[MicroBatchChange], step: int) -> tuple[MicroBatchChange, ...]:
        """Restore the changes of a run that is resumed at `step`, and return the changes that apply.

        The changes of the run apply only if the number is still `auto`; a configured number or `replay_changes` takes
        precedence.
        """
        applied = tuple(change for change in changes if change.step <= step) if self._is_auto else ()
        self.schedule.restore(self._replay or applied)
        return self.schedule.changes

    def decide(
        self, spans: Sequence[Span], step: int, position: BatchPosition, after: Callable[[BatchPosition], BatchPosition]
    ) -> MicroBatchChange | None:
        """Return a change of the number of micro-batches, or None.

        Args:
            spans: Trace spans of the steps since the last call.
            step: Number of completed steps.
            position: Position of the next batch.
            after: Function that returns the position after another one.
        """
        if not self._is_auto or self._replay or len(self.schedule.changes) == 2:
            return None
        self._record_times(spans)
        current = MANY if self.schedule.changes else FEW
        all_times = all_gather_json(self._topology.control, {str(n): times for n, times in self._times.items()})
        if min(len(rank.get(str(current), [])) for rank in all_times) < STEPS_TO_MEASURE:
            return None
        chosen = MANY
        before_ms = None
        few = _measured(FEW, all_times)
        if current == FEW:
            before_ms = few.compute_ms, few.communication_ms
        else:
            if (known_ms := self.schedule.changes[0].before_ms) is not None:
                few = MeasuredWindow(FEW, *known_ms)
            assert self._window_ms is not None
            chosen = choose_num_micro_batches(fit_window(few, _measured(MANY, all_times)), CANDIDATES, self._window_ms)
        for _ in range(self._delay):
            position = after(position)
        change = MicroBatchChange(step=step, first=position, micro_batches=chosen, before_ms=before_ms)
        self.schedule.add(change)
        return change

    def _record_times(self, spans: Sequence[Span]) -> None:
        """Record the raw times of this rank's steps by number of micro-batches."""
        timeline = Timeline(spans)
        micro_batches: dict[int, int] = defaultdict(int)
        for span in spans:
            if span.name == "train.forward_backward" and span.step is not None and span.micro_batch is not None:
                micro_batches[span.step] = max(micro_batches[span.step], span.micro_batch + 1)
        for step in sorted(micro_batches):
            self._num_seen += 1
            if self._num_seen > _STEPS_TO_WARM_UP:
                raw = timeline.raw(step, self._topology.rank)
                self._times[micro_batches[step]].append((raw.compute_ns * 1e-6, raw.communication_ns * 1e-6))


def _window_time(schedule: str) -> WindowTime:
    """Return the time model of a schedule.

    Raises:
        UserError: The spec of the schedule does not define `window_ms`.
    """
    window_ms = SCHEDULES.find(schedule, field="pipeline.schedule").window_ms
    if window_ms is None:
        problem = "the best number of micro-batches is unknown, so batch.num_micro_batches must be a number"
        raise SCHEDULES.missing_field_error(schedule, "window_ms", problem)
    return window_ms


def _measured(num_micro_batches: int, all_times: Sequence[dict[str, list[tuple[float, float]]]]) -> MeasuredWindow:
    """Return median times: computation of the slowest rank, and communication of the rank that waited least in it."""
    rank_times = [rank.get(str(num_micro_batches), []) for rank in all_times]
    compute = max(statistics.median(c for c, _ in times) if times else 0.0 for times in rank_times)
    communication = min(statistics.median(c for _, c in times) if times else 0.0 for times in rank_times)
    return MeasuredWindow(num_micro_batches, compute, communication)
