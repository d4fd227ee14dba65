"""A window whose exchanges come in two portions, of exclusive and of shared rows (see collisions)."""

from nestrec.base.transfer import used_here
from nestrec.embedding.engine import EmbeddingEngine
from nestrec.embedding.flight.collisions import Portion
from nestrec.embedding.flight.legs import RowRun, vector_run, vectors_of
from nestrec.embedding.flight.routing import Routed
from nestrec.embedding.flight.working_set import WorkingSet
from nestrec.pipeline.window import Vectors, Window, used_for_sending


class SplitWindow(Window):
    """As Window; `receive_portion` and `send_portion` each take part in both portions before `vectors` and after
    `keep`."""

    def __init__(self, engine: EmbeddingEngine, routed: Routed, working: WorkingSet) -> None:
        super().__init__(engine, routed, working)
        self._arrived: dict[int, RowRun] = {}

    def receive_portion(self, micro_batch: int, portion: Portion) -> None:
        """Collective."""
        into = None if self._cache is None else self._cache.vectors
        if into is None and micro_batch not in self._arrived:
            num_rows = self.routed.micro_batches[micro_batch].num_rows
            self._arrived[micro_batch] = vector_run(num_rows, self._engine.shapes, self._engine.device)
        self._engine.exchange_vectors(portion.routed, self.working, micro_batch, into or self._arrived[micro_batch])

    def vectors(self, micro_batch: int) -> Vectors:
        """Where portions have come, both of them put together."""
        if micro_batch not in self._arrived:
            return super().vectors(micro_batch)
        run = self._arrived.pop(micro_batch)
        used_here([run.elements])
        return vectors_of(run, self._engine.shapes, list(self._engine.tables))

    def send_portion(self, micro_batch: int, portion: Portion) -> None:
        """Collective; the gradients stay until the window is dropped."""
        gradients = self._gradients[micro_batch]
        used_for_sending(gradients)
        self._engine.send_gradients(portion.routed, self.working, gradients, micro_batch)
