"""Pipeline stages of the priority schedule: rows are split into shared (colliding) and exclusive ones.

A row of a batch is shared if the adjacent batch uses it, too (a collision), and exclusive otherwise.
"""

from dataclasses import dataclass
from typing import Literal

from nestrec.base.thread_team import FutureLike
from nestrec.embedding.routing.batch_overlap import Collisions, Overlap, Portion, Portions, find_collisions
from nestrec.pipeline.exchange_window import SplitExchangeWindow
from nestrec.pipeline.lanes import Future, Label
from nestrec.pipeline.schedule_types import FetchedBatch, LearningRates, NextBatch
from nestrec.pipeline.stage_runner import StageRunner, count_exchange
from nestrec.trace import OpenSpan

Which = Literal["exclusive", "shared"]


@dataclass(frozen=True, slots=True)
class AdjacentBatches:
    """Two consecutive batches and their collisions (rows that both use)."""

    older: FetchedBatch[SplitExchangeWindow]
    following: NextBatch[SplitExchangeWindow]
    collisions: FutureLike[Collisions]
    """Collisions, sent to all ranks that use the rows."""

    @property
    def newer(self) -> FetchedBatch[SplitExchangeWindow]:
        return self.following.batch


class CollisionStages:
    """Submits the stages of adjacent batches to the lanes of a `StageRunner`."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self._engine = runner.engine

    def find(
        self, older: FetchedBatch[SplitExchangeWindow], following: NextBatch[SplitExchangeWindow]
    ) -> AdjacentBatches:
        """Submit the search for shared rows: owners of rows find the collisions and send them to the source ranks."""
        label = self._runner.label("train.embedding.collisions", "lookup", older.number, is_collective=True)
        routed = (older.keys.routed, following.batch.keys.routed)
        engine = self._engine
        collisions = self._runner.lanes.communication.submit(
            lambda span: find_collisions(routed[0].result(), routed[1].result(), engine.topology, engine.shapes),
            label,
            after=routed,
        )
        return AdjacentBatches(older, following, collisions)

    def exchange_vectors(self, pair: AdjacentBatches, micro_batch: int, which: Which) -> Future[None]:
        """Submit the embedding exchange of a micro-batch of the newer batch, for one portion of its rows."""
        newer = pair.newer

        def receive(span: OpenSpan) -> None:
            with count_exchange(span, self._engine.statistics.vectors):
                newer.window.receive_portion(micro_batch, _portion(pair.collisions.result().vectors, which))

        label = self._label("exchange_vectors", newer, micro_batch)
        return self._runner.lanes.communication.submit(receive, label, after=[newer.rows, pair.collisions])

    def exchange_gradients(self, pair: AdjacentBatches, micro_batch: int, which: Which) -> Future[None]:
        """Submit the gradient exchange of a micro-batch of the older batch, for one portion of its rows.

        The owners of the rows sum the gradients.
        """
        window = pair.older.window
        collisions = pair.collisions

        def send(span: OpenSpan) -> None:
            with count_exchange(span, self._engine.statistics.gradients):
                window.send_portion(micro_batch, _portion(collisions.result().gradients, which))

        label = self._label("exchange_gradients", pair.older, micro_batch)
        sent = self._runner.lanes.communication.submit(send, label, after=[collisions])
        if not window.routed.micro_batches[micro_batch].replica_rows:
            return sent

        def sync_replicas(span: OpenSpan) -> None:
            with count_exchange(span, self._engine.statistics.replicas):
                portion = _portion(collisions.result().gradients, which)
                self._engine.all_reduce_replica_gradients(portion.routed, window.working, micro_batch)

        label = self._label("sync_replicas", pair.older, micro_batch)
        return self._runner.lanes.communication.submit(sync_replicas, label)

    def update_shared(self, pair: AdjacentBatches, rates: LearningRates) -> None:
        """Run one optimizer step on the rows that the next batch shares, on the compute lane."""
        with self._runner.span("train.embedding.update", "compute"):
            self._update(pair, "shared", rates)

    def finish(self, pair: AdjacentBatches, rates: LearningRates, shared: Overlap) -> None:
        """Submit the deferred work: send gradients of exclusive rows, update the rows and write them to the store."""
        older = pair.older
        for i in range(older.num_micro_batches):
            sent = self.exchange_gradients(pair, i, "exclusive")
        label = self._runner.label("train.embedding.update", "lookup", older.number)
        self._runner.lanes.lookup.submit(lambda span: self._update(pair, "exclusive", rates), label, after=[sent])
        self._runner.write_back(older, shared)

    def _update(self, pair: AdjacentBatches, which: Which, rates: LearningRates) -> None:
        selections = _portion(pair.collisions.result().gradients, which).owned
        self._engine.update_rows(pair.older.window.working, learning_rate=rates.tables, selections=selections)

    def _label(self, what: str, batch: FetchedBatch[SplitExchangeWindow], micro_batch: int) -> Label:
        name = f"train.embedding.{what}"
        return self._runner.label(name, "communication", batch.number, micro_batch, is_collective=True)


def _portion(portions: Portions, which: Which) -> Portion:
    return portions.shared if which == "shared" else portions.exclusive
