"""The number of micro-batches in a run: as configured, or chosen from what two of them were measured to take."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from nestrec.data.batch_loader import BatchConfig
from nestrec.data.batch_order import BatchPosition
from nestrec.distributed import Topology
from nestrec.distributed.collectives import all_gather_json
from nestrec.pipeline import PipelineConfig
from nestrec.pipeline.schedule_spec import MOST_AHEAD, SCHEDULES
from nestrec.pipeline.window_cost_model import (
    MeasuredWindow,
    MicroBatchChange,
    MicroBatchHistory,
    WindowTime,
    choose_window,
    fit_window,
)
from nestrec.trace import Span, Timeline

FEW, MANY = 2, 8
"""What is tried before the choice."""
CANDIDATES = (1, 2, 4, 8, 16, 32)
STEPS_TO_MEASURE = 8
_STEPS_TO_WARM_UP = 3


class MicroBatchTuner:
    """`decide` is called by all ranks at the same steps, and collective while there is something to choose."""

    def __init__(self, batch: BatchConfig, pipeline: PipelineConfig, topology: Topology) -> None:
        self._is_auto = batch.micro_batches == "auto"
        self._window_ms = _window_time(pipeline.schedule) if self._is_auto else None
        self._replay = pipeline.replay
        self._topology = topology
        self._delay = batch.prefetch + 1 + MOST_AHEAD
        self._times: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._num_seen = 0
        first = FEW if batch.micro_batches == "auto" else batch.micro_batches
        self.schedule = MicroBatchHistory(first, pipeline.replay)

    def resume(self, changes: Iterable[MicroBatchChange], step: int) -> tuple[MicroBatchChange, ...]:
        """Cut as a run that stands at `step` with these changes did and would have done; the changes that it knows.

        What the run chose binds it only while the choice is left open: a number or a replay that is given now counts.
        """
        taken = tuple(change for change in changes if change.step <= step) if self._is_auto else ()
        self.schedule.restore(self._replay or taken)
        return self.schedule.changes

    def decide(
        self, spans: Sequence[Span], step: int, position: BatchPosition, after: Callable[[BatchPosition], BatchPosition]
    ) -> MicroBatchChange | None:
        """What the steps since the last call have shown. `position`: the next batch; `after`: what follows."""
        if not self._is_auto or self._replay or len(self.schedule.changes) == 2:
            return None
        self._watch(spans)
        tried = MANY if self.schedule.changes else FEW
        everyone = all_gather_json(self._topology.control, {str(n): times for n, times in self._times.items()})
        if min(len(rank.get(str(tried), [])) for rank in everyone) < STEPS_TO_MEASURE:
            return None
        chosen = MANY
        before_ms = None
        few = _measured(FEW, everyone)
        if tried == FEW:
            before_ms = few.compute_ms, few.communication_ms
        else:
            if (known_ms := self.schedule.changes[0].before_ms) is not None:
                few = MeasuredWindow(FEW, *known_ms)
            assert self._window_ms is not None
            chosen = choose_window(fit_window(few, _measured(MANY, everyone)), CANDIDATES, self._window_ms)
        for _ in range(self._delay):
            position = after(position)
        change = MicroBatchChange(step=step, first=position, micro_batches=chosen, before_ms=before_ms)
        self.schedule.add(change)
        return change

    def _watch(self, spans: Sequence[Span]) -> None:
        """Raw times of this rank's steps, by their number of micro-batches."""
        timeline = Timeline(spans)
        micro_batches: dict[int, int] = defaultdict(int)
        for span in spans:
            if span.name == "train.compute" and span.step is not None and span.micro_batch is not None:
                micro_batches[span.step] = max(micro_batches[span.step], span.micro_batch + 1)
        for step in sorted(micro_batches):
            self._num_seen += 1
            if self._num_seen > _STEPS_TO_WARM_UP:
                raw = timeline.raw(step, self._topology.rank)
                self._times[micro_batches[step]].append((raw.compute_ns * 1e-6, raw.communication_ns * 1e-6))


def _window_time(schedule: str) -> WindowTime:
    """How the schedule that runs shares the time of a step."""
    window_ms = SCHEDULES.find(schedule, field="pipeline.schedule").window_ms
    if window_ms is None:
        problem = "how many micro-batches are worth it is not known, so give batch.micro_batches a number"
        raise SCHEDULES.unanswered(schedule, "window_ms", problem)
    return window_ms


def _measured(num_micro_batches: int, everyone: Sequence[dict[str, list[tuple[float, float]]]]) -> MeasuredWindow:
    """Medians of steps: of computation on the slowest rank, of communication on the rank that waited least in it."""
    of_ranks = [rank.get(str(num_micro_batches), []) for rank in everyone]
    compute = max(statistics.median(c for c, _ in times) if times else 0.0 for times in of_ranks)
    communication = min(statistics.median(c for _, c in times) if times else 0.0 for times in of_ranks)
    return MeasuredWindow(num_micro_batches, compute, communication)
