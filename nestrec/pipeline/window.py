"""What a rank holds of a batch while it computes: vectors that have come, gradients that wait to go.

    receive(i)       collective    the vectors of micro-batch i come
    vectors(i)       local         vectors of its distinct keys, in the order of its index
    keep(i, grads)   local         their gradients
    send(i)          collective    gradients go to the owners, which add them up

Without the window cache each micro-batch stands alone. With it, vectors stay for the later micro-batches that
use them too, and gradients are summed here, in order of micro-batch, until the last use of their key.
"""

from collections.abc import Mapping

import torch

from nestrec.base.transfer import used_here
from nestrec.embedding import EmbeddingEngine, Routed, WorkingSet
from nestrec.embedding.flight.legs import RowRun, gradient_run, joined_gradients, vector_run, vectors_of
from nestrec.embedding.flight.routing import RoutedMicroBatch
from nestrec.ops.rows.spans import add_spans, gather_spans

Vectors = dict[str, torch.Tensor]
Gradients = Mapping[str, torch.Tensor] | Mapping[torch.dtype, RowRun]
"""By table, or the sums of the window cache by type."""


class Window:
    """The exchanges of one batch: `receive` and `send` in order of micro-batch, `send(i)` after `keep(i)`."""

    def __init__(self, engine: EmbeddingEngine, routed: Routed, working: WorkingSet) -> None:
        self._engine, self.routed, self.working = engine, routed, working
        self._cache = _Cache(engine, routed) if routed.cache_rows is not None else None
        self._rows: dict[int, Vectors] = {}
        self._gradients: dict[int, Gradients] = {}

    def receive(self, micro_batch: int) -> None:
        """Collective."""
        into = None if self._cache is None else self._cache.vectors
        found = self._engine.exchange_vectors(self.routed, self.working, micro_batch, into)
        if into is None:
            self._rows[micro_batch] = found

    def vectors(self, micro_batch: int) -> Vectors:
        """Table to (U, dim) vectors of the micro-batch's distinct keys; once a micro-batch, after `receive(micro-
        batch)`."""
        if self._cache is not None:
            return self._cache.vectors_of(self.routed.micro_batches[micro_batch])
        rows = self._rows.pop(micro_batch)
        if self._engine.device.type != "cpu":
            used_here(rows.values())
        return rows

    def keep(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of `vectors(micro-batch)`; they are given away."""
        part = self.routed.micro_batches[micro_batch]
        self._gradients[micro_batch] = gradients if self._cache is None else self._cache.add(part, gradients)

    def send(self, micro_batch: int) -> None:
        """Collective."""
        gradients = self._gradients.pop(micro_batch)
        if self._engine.device.type != "cpu":
            used_for_sending(gradients)
        self._engine.send_gradients(self.routed, self.working, gradients, micro_batch)
        if micro_batch == len(self.routed.micro_batches) - 1:
            self._cache = None  # the batch itself is kept for some steps more, its largest part need not be


def used_for_sending(gradients: Gradients) -> None:
    """Gradients that one lane has made are read by another."""
    used_here(given.elements if isinstance(given, RowRun) else given for given in gradients.values())


class _Cache:
    """Vectors and gradient sums of the distinct keys of a rank's batch."""

    def __init__(self, engine: EmbeddingEngine, routed: Routed) -> None:
        assert routed.cache_rows is not None
        self._engine = engine
        self.vectors = vector_run(routed.cache_rows, engine.shapes, engine.device)
        self._sums = {
            dtype: gradient_run(dtype, routed.cache_rows, engine.shapes, engine.device)
            for dtype in engine.shapes.gradient_types
        }
        held = [self.vectors, *self._sums.values()]
        used = sum(run.elements.numel() * run.elements.element_size() for run in held)
        engine.statistics.window_bytes = max(engine.statistics.window_bytes, used)

    def vectors_of(self, part: RoutedMicroBatch) -> Vectors:
        assert part.used is not None
        used_here([self.vectors.elements])
        run = vector_run(part.num_rows, self._engine.shapes, self._engine.device)
        copy_rows(self.vectors, part, run)
        return vectors_of(run, self._engine.shapes, list(self._engine.tables))

    def add(self, part: RoutedMicroBatch, gradients: Mapping[str, torch.Tensor]) -> Mapping[torch.dtype, RowRun]:
        """Add the gradients of a micro-batch; the sums, of which those that leave are complete with it."""
        assert part.used is not None
        joined = joined_gradients(gradients, part.num_rows, self._engine.shapes, self._engine.device)
        for dtype, run in joined.items():
            sums, rows = self._sums[dtype], part.used[1][dtype]
            add_spans(run.elements, rows, sums.elements, sums.spans)
        used_here(run.elements for run in self._sums.values())
        return self._sums


def copy_rows(source: RowRun, part: RoutedMicroBatch, target: RowRun) -> None:
    """The distinct keys of a micro-batch out of the cache, table behind table."""
    assert part.used is not None
    packed = target.elements
    if part.used[0].num_elements != len(packed):  # tables are aligned, rows that lie packed are not
        packed = packed.new_empty(part.used[0].num_elements)
    gather_spans(source.elements, source.spans, part.used[0], packed)
    if packed is not target.elements:
        at = 0
        for t, rows in enumerate(part.num_rows.tolist()):
            size = rows * int(target.spans.widths[t])
            start = int(target.spans.starts[t])
            target.elements[start : start + size] = packed[at : at + size]
            at += size
