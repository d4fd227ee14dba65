"""Stages of batches whose rows are split into those that the neighbouring batch shares and the others."""

from dataclasses import dataclass
from typing import Literal

from nestrec.base.thread_team import FutureLike
from nestrec.embedding.routing.batch_overlap import Collisions, Overlap, Portion, Portions, find_collisions
from nestrec.pipeline.exchange_window import SplitExchangeWindow
from nestrec.pipeline.lanes import Future, Label
from nestrec.pipeline.schedule_types import FetchedBatch, LearningRates, NextBatch
from nestrec.pipeline.stage_runner import StageRunner, counted
from nestrec.trace import OpenSpan

Which = Literal["exclusive", "shared"]


@dataclass(frozen=True, slots=True)
class AdjacentBatches:
    """Two consecutive batches, and which of their rows collide."""

    older: FetchedBatch[SplitExchangeWindow]
    following: NextBatch[SplitExchangeWindow]
    collisions: FutureLike[Collisions]
    """told to all who use the rows"""

    @property
    def newer(self) -> FetchedBatch[SplitExchangeWindow]:
        return self.following.batch


class CollisionStages:
    """Submits them to the lanes of a machine."""

    def __init__(self, machine: StageRunner) -> None:
        self._machine = machine
        self._engine = machine.engine

    def find(
        self, older: FetchedBatch[SplitExchangeWindow], following: NextBatch[SplitExchangeWindow]
    ) -> AdjacentBatches:
        """Which rows two batches share: found on the owner, told to the sources."""
        label = self._machine.label("train.embedding.collisions", "lookup", older.number, is_collective=True)
        routed = (older.keys.routed, following.batch.keys.routed)
        engine = self._engine
        found = self._machine.lanes.communication.submit(
            lambda span: find_collisions(routed[0].wait(), routed[1].wait(), engine.topology, engine.shapes),
            label,
            after=routed,
        )
        return AdjacentBatches(older, following, found)

    def vectors(self, pair: AdjacentBatches, micro_batch: int, which: Which) -> Future[None]:
        """Exchange E of a micro-batch of the newer batch, of one portion of its rows."""
        newer = pair.newer

        def receive(span: OpenSpan) -> None:
            with counted(span, self._engine.statistics.vectors):
                newer.window.receive_portion(micro_batch, _portion(pair.collisions.wait().vectors, which))

        label = self._label("vectors", newer, micro_batch)
        return self._machine.lanes.communication.submit(receive, label, after=[newer.rows, pair.collisions])

    def gradients(self, pair: AdjacentBatches, micro_batch: int, which: Which) -> Future[None]:
        """Exchange G of a micro-batch of the older batch, of one portion of its rows; owners add up."""
        window = pair.older.window
        found = pair.collisions

        def send(span: OpenSpan) -> None:
            with counted(span, self._engine.statistics.gradients):
                window.send_portion(micro_batch, _portion(found.wait().gradients, which))

        label = self._label("gradients", pair.older, micro_batch)
        sent = self._machine.lanes.communication.submit(send, label, after=[found])
        if not window.routed.micro_batches[micro_batch].crossing:
            return sent

        def cross(span: OpenSpan) -> None:
            with counted(span, self._engine.statistics.replicas):
                portion = _portion(found.wait().gradients, which)
                self._engine.sum_over_holders(portion.routed, window.working, micro_batch)

        label = self._label("replicas", pair.older, micro_batch)
        return self._machine.lanes.communication.submit(cross, label)

    def update_shared(self, pair: AdjacentBatches, rates: LearningRates) -> None:
        """One optimiser step on the rows that the next batch shares, on the compute lane."""
        with self._machine.span("train.embedding.update", "compute"):
            self._update(pair, "shared", rates)

    def finish(self, pair: AdjacentBatches, rates: LearningRates, shared: Overlap) -> None:
        """What was deferred: gradients of exclusive rows go, the rows are updated and written to the store."""
        older = pair.older
        for i in range(older.num_micro_batches):
            gone = self.gradients(pair, i, "exclusive")
        label = self._machine.label("train.embedding.update", "lookup", older.number)
        self._machine.lanes.lookup.submit(lambda span: self._update(pair, "exclusive", rates), label, after=[gone])
        self._machine.write_back(older, shared)

    def _update(self, pair: AdjacentBatches, which: Which, rates: LearningRates) -> None:
        places = _portion(pair.collisions.wait().gradients, which).owned
        self._engine.update_rows(pair.older.window.working, learning_rate=rates.tables, places=places)

    def _label(self, what: str, batch: FetchedBatch[SplitExchangeWindow], micro_batch: int) -> Label:
        name = f"train.embedding.{what}"
        return self._machine.label(name, "communication", batch.number, micro_batch, is_collective=True)


def _portion(portions: Portions, which: Which) -> Portion:
    return portions.shared if which == "shared" else portions.exclusive
