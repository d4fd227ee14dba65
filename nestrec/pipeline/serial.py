"""The definition of a step: every stage waits for the one before it. Other schedules are this one rearranged in time.

stage        what happens
route        keys deduplicated, sent to their owners
fetch        owners gather rows and optimiser state into the working set
for each micro-batch in order:
  vectors    owners send rows to those who asked
  compute    forward and backward
  gradients  gradients go back to the owners, who sum them
dense        dense gradients are summed over ranks; dense weights are updated
update       owners run the row optimiser once on the working set
write back   rows and state return to the store
"""

import torch

from nestrec.data.batches import Batch, MicroBatch
from nestrec.embedding import EmbeddingEngine, Routed, WorkingSet
from nestrec.pipeline.stages import Compute, Dense, Rates, Totals
from nestrec.trace import Kind, OpenSpan, Tracer


class Serial:
    """One step at a time, nothing overlapped."""

    def __init__(self, engine: EmbeddingEngine, compute: Compute, dense: Dense, tracer: Tracer):
        self._engine, self._compute, self._dense, self._tracer = engine, compute, dense, tracer

    def advance(self, batch: Batch, step: int, rates: Rates, wants_stop: bool) -> Totals:
        """Train on one batch; returns the loss of the global batch, not yet read from the device."""
        engine = self._engine
        with self._tracer.context(lane="compute", step=step), self._span("train.step", "step"):
            with self._span("train.embedding.route", "lookup", is_collective=True):
                routed = engine.route(*[part.keys for part in batch.micro_batches])
            with self._span("train.embedding.fetch", "lookup"):
                working = engine.fetch(routed, step=step)
            loss = torch.zeros((), device=engine.device)
            for i, part in enumerate(batch.micro_batches):
                with self._tracer.context(micro_batch=i):
                    loss = loss + self._micro_batch(batch, part, i, routed, working)
            with self._span("train.dense.update", "communication", is_collective=True):
                totals = self._dense.update(loss, wants_stop, rates.dense)
            with self._span("train.embedding.update", "compute"):
                engine.update(working, learning_rate=rates.tables)
            with self._span("train.embedding.write_back", "lookup"):
                engine.write_back(working)
        return totals

    def _micro_batch(self, batch: Batch, part: MicroBatch, i: int, routed: Routed, working: WorkingSet) -> torch.Tensor:
        with self._span("train.embedding.vectors", "communication", is_collective=True):
            rows = self._engine.exchange_vectors(routed, working, part=i)
        with self._span("train.compute", "compute"):
            loss, gradients = self._compute.forward_backward(part, rows, routed.parts[i].index, batch.weight)
        with self._span("train.embedding.gradients", "communication", is_collective=True):
            self._engine.accumulate(routed, working, gradients, part=i)
        return loss

    def _span(self, name: str, kind: Kind, is_collective: bool = False) -> OpenSpan:
        return self._tracer.span(name, kind=kind, is_collective=is_collective)
