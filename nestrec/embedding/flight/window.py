"""What a rank holds of a batch while it computes: vectors that have come, gradients that wait to go.

    receive(i)       collective    the vectors of micro-batch i come
    rows(i)          local         vectors of its distinct keys, in the order of its index
    keep(i, grads)   local         their gradients
    send(i)          collective    gradients go to the owners, which add them up

Without the window cache each micro-batch stands alone. With it, vectors stay for the later micro-batches that
use them too, and gradients are summed here, in order of micro-batch, until the last use of their key.
"""

from collections.abc import Mapping

import torch

from nestrec.base.transfer import used_here
from nestrec.embedding.engine import EmbeddingEngine
from nestrec.embedding.flight.routing import Routed
from nestrec.embedding.flight.working_set import WorkingSet
from nestrec.ops.rows.gather import take_rows
from nestrec.ops.rows.sum import add_distinct

Rows = dict[str, torch.Tensor]


class Window:
    """The exchanges of one batch: `receive` and `send` in order of micro-batch, `send(i)` after `keep(i)`."""

    def __init__(self, engine: EmbeddingEngine, routed: Routed, working: WorkingSet) -> None:
        self._engine, self.routed, self.working = engine, routed, working
        self._cache = _Cache(engine, routed) if routed.cache_rows else None
        self._rows: dict[int, Rows] = {}
        self._gradients: dict[int, Mapping[str, torch.Tensor]] = {}

    def receive(self, part: int) -> None:
        """Collective."""
        self.accept(part, self._engine.exchange_vectors(self.routed, self.working, part))

    def accept(self, part: int, rows: Rows) -> None:
        """Vectors that have come for a part."""
        if self._cache is None:
            self._rows[part] = rows
        else:
            self._cache.fill(rows)

    def rows(self, part: int) -> Rows:
        """Table to (U, dim) vectors of the part's distinct keys; once a part, after `receive(part)`."""
        if self._cache is not None:
            return self._cache.rows(part)
        rows = self._rows.pop(part)
        used_here(rows.values())
        return rows

    def keep(self, part: int, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of `rows(part)`; they are given away."""
        self._gradients[part] = gradients if self._cache is None else self._cache.add(part, gradients)

    def send(self, part: int) -> None:
        """Collective."""
        gradients = self._gradients.pop(part)
        used_here(gradients.values())
        received = self._engine.exchange_gradients(self.routed, gradients, part)
        self._engine.add_gradients(self.routed, self.working, received, part)


class _Cache:
    """Vectors and gradient sums of the distinct keys of a rank's batch."""

    def __init__(self, engine: EmbeddingEngine, routed: Routed) -> None:
        self._parts = routed.parts
        self._filled = dict.fromkeys(routed.cache_rows, 0)
        self._vectors: Rows = {}
        self._sums: Rows = {}
        for name, num_rows in routed.cache_rows.items():
            table = engine.tables[name]
            self._vectors[name] = torch.empty(num_rows, table.dim, dtype=table.weight_dtype, device=engine.device)
            self._sums[name] = torch.zeros(num_rows, table.dim, dtype=table.state_dtype, device=engine.device)
        held = [*self._vectors.values(), *self._sums.values()]
        used = sum(tensor.numel() * tensor.element_size() for tensor in held)
        engine.statistics.window_bytes = max(engine.statistics.window_bytes, used)

    def fill(self, rows: Rows) -> None:
        used_here(self._vectors.values())
        for name, values in rows.items():
            start = self._filled[name]
            self._filled[name] = start + len(values)
            self._vectors[name][start : start + len(values)] = values

    def rows(self, part: int) -> Rows:
        used_here(self._vectors.values())
        return {name: take_rows(self._vectors[name], places) for name, places in self._parts[part].places.items()}

    def add(self, part: int, gradients: Mapping[str, torch.Tensor]) -> Rows:
        """Add the gradients of a part; the sums that are complete with it."""
        for name, places in self._parts[part].places.items():
            sums, grad = self._sums[name], gradients[name].detach()
            add_distinct(sums, places, grad.to(sums.dtype))
        used_here(self._sums.values())
        complete = {name: take_rows(self._sums[name], places) for name, places in self._parts[part].leaving.items()}
        if part == len(self._parts) - 1:  # the batch itself is kept for some steps more, its largest part need not be
            self._vectors, self._sums = {}, {}
        return complete
