"""Schedules and stages that break one rule of correctness each, to see that the comparisons with `serial` notice."""

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
    """Rows of its own for a batch whose buffer will be filled anew before it is done with."""
    for table in batch.rows.wait().tables.values():
        table.fetched.rows = table.fetched.rows.clone()


class NoCopy(StageRunner):
    """Shared-row copy is left out."""

    def copy_shared(self, older, following):
        return following.shared.wait()


class WeightsOnlyCopy(StageRunner):
    """Shared-row copy without the state of the optimiser."""

    def copy_shared(self, older, following):
        working = older.rows.wait()
        newer = following.batch.rows.wait()
        shared = following.shared.wait()
        for name, table in shared.tables.items():
            source = working.tables[name]
            target = newer.tables[name]
            weight = source.layout.view(source.fetched.rows, "weight")
            target.layout.view(target.fetched.rows, "weight")[table.newer] = weight[table.older]
        return shared


class UpdateAfterEach(StageRunner):
    """The optimiser runs after every micro-batch instead of once a step."""

    @contextlib.contextmanager
    def step(self, step) -> Iterator[None]:
        self._rates = step.rates
        with super().step(step):
            yield

    def gradients(self, batch, micro_batch):
        super().gradients(batch, micro_batch)
        window = batch.window
        rates = self._rates
        label = self.label("train.embedding.update", "compute", batch.number, micro_batch)
        return self.lanes.communication.submit(
            lambda span: self.engine.update_rows(window.working, learning_rate=rates.tables), label
        )


class LastFirst(ExchangeWindow):
    """The order of sums is turned round: owners add the gradients of the last micro-batch first."""

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
        return self.fetch_for(LastFirst, keys, buffers)


class WriteBackAfterGather(RowPrefetcher):
    """A batch is written back only after the rows of the batch after the next were read."""

    def __init__(self, machine) -> None:
        super().__init__(machine)
        self._late: list[Callable[[], object]] = []

    def look_ahead(self, now, step, feed) -> None:
        super().look_ahead(now, step, feed)
        _run_all(self._late)

    def write_back(self, now, shared: Overlap) -> None:
        keep_rows(now)
        self._late.append(lambda: self.machine.write_back(now, shared))


class UnorderedWriteBack(RowPrefetcher):
    """Rows that the next batch holds are written back too, and after those of that batch."""

    def __init__(self, machine) -> None:
        super().__init__(machine)
        self._late: list[Callable[[], object]] = []

    def write_back(self, now, shared: Overlap) -> None:
        self.machine.write_back(now, shared)
        _run_all(self._late)
        keep_rows(now)
        self._late.append(lambda: self.machine.write_back(now, None))


class ReadBeforeDeferred(PrioritySchedule):
    """Deferred gradients are applied after the rows of the next batch were read."""

    def look_beside(self, now, step, feed):
        if self._deferred is None:
            return super().look_beside(now, step, feed)
        keep_rows(self._deferred.pair.older)
        pair = self._read_ahead(now, step, feed)
        self._finish_deferred()
        return pair


class NeverSent(SemiAsyncSchedule):
    """Gradients stay where they are, so that rows miss more and more updates."""

    def _send_deferred(self) -> None:
        pass


MACHINES = {
    "shared-row copy": NoCopy,
    "shared-row copy of state": WeightsOnlyCopy,
    "one update a step": UpdateAfterEach,
    "order of sums": AddLastFirst,
}
LOOKUPS = {"write-back before gather": WriteBackAfterGather, "ordered write-back": UnorderedWriteBack}
SCHEDULES_OF_THEIR_OWN = {"deferred gradients": ReadBeforeDeferred, "one step late": NeverSent}


def broken(rule: str, schedule: str) -> ScheduleSpec:
    """A schedule that breaks this rule and no other."""
    if rule in MACHINES:
        build = type("Broken", (CLASSES[schedule],), {"machine_type": MACHINES[rule]})
    elif rule in LOOKUPS:
        build = type("Broken", (CLASSES[schedule],), {"lookup_type": LOOKUPS[rule]})
    else:
        build = SCHEDULES_OF_THEIR_OWN[rule]
    return ScheduleSpec(name=schedule, build=build, is_exact=False, splits=SCHEDULES.find(schedule).splits)


def _run_all(tasks: list[Callable[[], object]]) -> None:
    for task in tasks:
        task()
    tasks.clear()
