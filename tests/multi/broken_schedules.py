"""Schedules and stages that each violate one rule of correctness, to test that comparisons with `serial` fail."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from nestrec.embedding.routing.batch_overlap import Overlap
from nestrec.pipeline import SCHEDULES, ScheduleSpec
from nestrec.pipeline.exchange_window import ExchangeWindow
from nestrec.pipeline.schedule_types import FetchedBatch
from nestrec.pipeline.schedules.dual_buffer import DualBufferSchedule
from nestrec.pipeline.schedules.frozen_window import FrozenWindowSchedule
from nestrec.pipeline.schedules.nested import NestedSchedule
from nestrec.pipeline.schedules.priority import PrioritySchedule
from nestrec.pipeline.schedules.semi_async import SemiAsyncSchedule
from nestrec.pipeline.stage_runner import RowPrefetcher, StageRunner

CLASSES = {"dual_buffer": DualBufferSchedule, "frozen_window": FrozenWindowSchedule, "nested": NestedSchedule}


def keep_rows(batch: FetchedBatch[Any]) -> None:
    """Copy the rows of a batch, because its buffer will be reused before the rows are written back."""
    for table in batch.rows.result().tables.values():
        table.fetched.rows = table.fetched.rows.clone()


class NoCopy(StageRunner):
    """A stage runner that does not copy shared rows."""

    def copy_shared(self, older, following):
        return following.shared.result()


class WeightsOnlyCopy(StageRunner):
    """A stage runner that copies the weights of shared rows but not their optimizer state."""

    def copy_shared(self, older, following):
        working = older.rows.result()
        newer = following.batch.rows.result()
        shared = following.shared.result()
        for name, table in shared.tables.items():
            source = working.tables[name]
            target = newer.tables[name]
            weight = source.layout.view(source.fetched.rows, "weight")
            target.layout.view(target.fetched.rows, "weight")[table.newer] = weight[table.older]
        return shared


class UpdateAfterEach(StageRunner):
    """A stage runner that updates rows after every micro-batch instead of once per step."""

    @contextlib.contextmanager
    def step(self, step) -> Iterator[None]:
        self._rates = step.rates
        with super().step(step):
            yield

    def exchange_gradients(self, batch, micro_batch):
        super().exchange_gradients(batch, micro_batch)
        window = batch.window
        rates = self._rates
        label = self.label("train.embedding.update", "compute", batch.number, micro_batch)
        return self.lanes.communication.submit(
            lambda span: self.engine.update_rows(window.working, learning_rate=rates.tables), label
        )


class LastFirst(ExchangeWindow):
    """An exchange window with the reverse order of sums: owners add the gradients of the last micro-batch first."""

    def __init__(self, engine, routed, working) -> None:
        super().__init__(engine, routed, working)
        self._late: list[tuple[int, dict[str, list[Any]]]] = []

    def send(self, micro_batch):
        received = self._engine.exchange_gradients(self.routed, self._gradients.pop(micro_batch), micro_batch)
        self._late.append((micro_batch, {name: [p.clone() for p in pieces] for name, pieces in received.items()}))
        if micro_batch == len(self.routed.micro_batches) - 1:
            for number, late in reversed(self._late):
                self._engine.add_gradients(self.routed, self.working, late, number)


class AddLastFirst(StageRunner):
    def fetch(self, keys, buffers=None):
        return self.fetch_with_window(LastFirst, keys, buffers)


class WriteBackAfterGather(RowPrefetcher):
    """A row prefetcher that writes a batch back after it has read the rows of the second next batch."""

    def __init__(self, runner) -> None:
        super().__init__(runner)
        self._late: list[Callable[[], object]] = []

    def look_ahead(self, now, step, feed) -> None:
        super().look_ahead(now, step, feed)
        _run_all(self._late)

    def write_back(self, now, shared: Overlap) -> None:
        keep_rows(now)
        self._late.append(lambda: self.runner.write_back(now, shared))


class UnorderedWriteBack(RowPrefetcher):
    """A row prefetcher that also writes back rows shared with the next batch, and after the rows of that batch."""

    def __init__(self, runner) -> None:
        super().__init__(runner)
        self._late: list[Callable[[], object]] = []

    def write_back(self, now, shared: Overlap) -> None:
        self.runner.write_back(now, shared)
        _run_all(self._late)
        keep_rows(now)
        self._late.append(lambda: self.runner.write_back(now, None))


class ReadBeforeDeferred(PrioritySchedule):
    """A schedule that applies deferred gradients after it has read the rows of the next batch."""

    def start_next_batch(self, now, step, feed):
        if self._deferred is None:
            return super().start_next_batch(now, step, feed)
        keep_rows(self._deferred.pair.older)
        pair = self._read_ahead(now, step, feed)
        self._finish_deferred()
        return pair


class NeverSent(SemiAsyncSchedule):
    """A schedule that never sends deferred gradients, so that rows miss more and more updates."""

    def _send_deferred(self) -> None:
        pass


STAGE_RUNNERS = {
    "shared-row copy": NoCopy,
    "shared-row copy of state": WeightsOnlyCopy,
    "one update per step": UpdateAfterEach,
    "order of sums": AddLastFirst,
}
ROW_PREFETCHERS = {"write-back before gather": WriteBackAfterGather, "ordered write-back": UnorderedWriteBack}
BROKEN_SCHEDULES = {"deferred gradients": ReadBeforeDeferred, "one step late": NeverSent}


def broken(rule: str, schedule: str) -> ScheduleSpec:
    """Return a variant of a schedule that violates this rule and no other."""
    if rule in STAGE_RUNNERS:
        build = type("Broken", (CLASSES[schedule],), {"runner_type": STAGE_RUNNERS[rule]})
    elif rule in ROW_PREFETCHERS:
        build = type("Broken", (CLASSES[schedule],), {"lookup_type": ROW_PREFETCHERS[rule]})
    else:
        build = BROKEN_SCHEDULES[rule]
    return ScheduleSpec(name=schedule, build=build, is_exact=False, splits=SCHEDULES.find(schedule).splits)


def _run_all(tasks: list[Callable[[], object]]) -> None:
    for task in tasks:
        task()
    tasks.clear()
