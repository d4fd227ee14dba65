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
from nestrec.ops.rows.gather import take_rows
from nestrec.ops.rows.sum import add_distinct

Vectors = dict[str, torch.Tensor]


class Window:
    """The exchanges of one batch: `receive` and `send` in order of micro-batch, `send(i)` after `keep(i)`."""

    def __init__(self, engine: EmbeddingEngine, routed: Routed, working: WorkingSet) -> None:
        self._engine, self.routed, self.working = engine, routed, working
        self._cache = _Cache(engine, routed) if routed.cache_rows else None
        self._rows: dict[int, Vectors] = {}
        self._gradients: dict[int, Mapping[str, torch.Tensor]] = {}

    def receive(self, micro_batch: int) -> None:
        """Collective."""
        self.accept(micro_batch, self._engine.exchange_vectors(self.routed, self.working, micro_batch))

    def accept(self, micro_batch: int, rows: Vectors) -> None:
        """Vectors that have come for a micro-batch."""
        if self._cache is None:
            self._rows[micro_batch] = rows
        else:
            self._cache.fill(rows)

    def vectors(self, micro_batch: int) -> Vectors:
        """Table to (U, dim) vectors of the micro-batch's distinct keys; once a micro-batch, after `receive(micro-
        batch)`."""
        if self._cache is not None:
            return self._cache.vectors_of(micro_batch)
        rows = self._rows.pop(micro_batch)
        used_here(rows.values())
        return rows

    def keep(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of `vectors(micro-batch)`; they are given away."""
        self._gradients[micro_batch] = gradients if self._cache is None else self._cache.add(micro_batch, gradients)

    def send(self, micro_batch: int) -> None:
        """Collective."""
        gradients = self._gradients.pop(micro_batch)
        used_here(gradients.values())
        self._engine.send_gradients(self.routed, self.working, gradients, micro_batch)


class _Cache:
    """Vectors and gradient sums of the distinct keys of a rank's batch."""

    def __init__(self, engine: EmbeddingEngine, routed: Routed) -> None:
        self._micro_batches = routed.micro_batches
        self._filled = dict.fromkeys(routed.cache_rows, 0)
        self._vectors: Vectors = {}
        self._sums: Vectors = {}
        for name, num_rows in routed.cache_rows.items():
            table = engine.tables[name]
            self._vectors[name] = torch.empty(num_rows, table.dim, dtype=table.weight_dtype, device=engine.device)
            self._sums[name] = torch.zeros(num_rows, table.dim, dtype=table.state_dtype, device=engine.device)
        held = [*self._vectors.values(), *self._sums.values()]
        used = sum(tensor.numel() * tensor.element_size() for tensor in held)
        engine.statistics.window_bytes = max(engine.statistics.window_bytes, used)

    def fill(self, rows: Vectors) -> None:
        used_here(self._vectors.values())
        for name, values in rows.items():
            start = self._filled[name]
            self._filled[name] = start + len(values)
            self._vectors[name][start : start + len(values)] = values

    def vectors_of(self, micro_batch: int) -> Vectors:
        used_here(self._vectors.values())
        return {
            name: take_rows(self._vectors[name], places)
            for name, places in self._micro_batches[micro_batch].places.items()
        }

    def add(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> Vectors:
        """Add the gradients of a micro-batch; the sums that are complete with it."""
        for name, places in self._micro_batches[micro_batch].places.items():
            sums, grad = self._sums[name], gradients[name].detach()
            add_distinct(sums, places, grad.to(sums.dtype))
        used_here(self._sums.values())
        complete = {
            name: take_rows(self._sums[name], places)
            for name, places in self._micro_batches[micro_batch].leaving.items()
        }
        if (
            micro_batch == len(self._micro_batches) - 1
        ):  # the batch itself is kept for some steps more, its largest micro-batch need not be
            self._vectors, self._sums = {}, {}
        return complete
