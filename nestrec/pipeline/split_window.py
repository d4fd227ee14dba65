"""A window whose exchanges come in two portions, of exclusive and of shared rows (see collisions)."""

from collections.abc import Mapping

import torch

from nestrec.base.transfer import used_here
from nestrec.embedding.engine import EmbeddingEngine
from nestrec.embedding.flight.collisions import Portion
from nestrec.embedding.flight.routing import Routed
from nestrec.embedding.flight.working_set import WorkingSet
from nestrec.ops.rows.gather import take_rows
from nestrec.pipeline.window import Vectors, Window


class SplitWindow(Window):
    """As Window; `receive_portion` and `send_portion` each take part in both portions before `vectors` and after
    `keep`."""

    def __init__(self, engine: EmbeddingEngine, routed: Routed, working: WorkingSet) -> None:
        super().__init__(engine, routed, working)
        self._arrived: dict[int, list[tuple[Vectors, Mapping[str, torch.Tensor]]]] = {}

    def receive_portion(self, micro_batch: int, portion: Portion) -> None:
        """Collective."""
        rows = self._engine.exchange_vectors(portion.routed, self.working, micro_batch)
        self._arrived.setdefault(micro_batch, []).append((rows, portion.rows[micro_batch]))

    def vectors(self, micro_batch: int) -> Vectors:
        """Where portions have come, both of them put together."""
        if micro_batch in self._arrived:
            self.accept(micro_batch, _merged(self._arrived.pop(micro_batch)))
        return super().vectors(micro_batch)

    def send_portion(self, micro_batch: int, portion: Portion) -> None:
        """Collective; the gradients stay until the window is dropped."""
        used_here(self._gradients[micro_batch].values())
        mine = {
            name: take_rows(grad, portion.rows[micro_batch][name])
            for name, grad in self._gradients[micro_batch].items()
        }
        self._engine.send_gradients(portion.routed, self.working, mine, micro_batch)


def _merged(portions: list[tuple[Vectors, Mapping[str, torch.Tensor]]]) -> Vectors:
    first, _ = portions[0]
    merged = {}
    for name in first:
        num_rows = sum(len(rows[name]) for rows, _ in portions)
        merged[name] = first[name].new_empty(num_rows, *first[name].shape[1:])
        for rows, places in portions:
            used_here([rows[name]])
            merged[name].index_copy_(0, places[name], rows[name])
    return merged
