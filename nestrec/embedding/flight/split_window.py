"""A window whose exchanges come in two halves, of exclusive and of shared rows (see collisions)."""

from collections.abc import Mapping

import torch

from nestrec.base.transfer import used_here
from nestrec.embedding.engine import EmbeddingEngine
from nestrec.embedding.flight.collisions import Half
from nestrec.embedding.flight.routing import Routed
from nestrec.embedding.flight.window import Rows, Window
from nestrec.embedding.flight.working_set import WorkingSet
from nestrec.ops.rows.gather import take_rows


class SplitWindow(Window):
    """As Window; `receive_half` and `send_half` each take part in both halves before `rows` and after `keep`."""

    def __init__(self, engine: EmbeddingEngine, routed: Routed, working: WorkingSet) -> None:
        super().__init__(engine, routed, working)
        self._arrived: dict[int, list[tuple[Rows, Mapping[str, torch.Tensor]]]] = {}

    def receive_half(self, part: int, half: Half) -> None:
        """Collective."""
        rows = self._engine.exchange_vectors(half.routed, self.working, part)
        self._arrived.setdefault(part, []).append((rows, half.rows[part]))

    def rows(self, part: int) -> Rows:
        """Where halves have come, both of them put together."""
        if part in self._arrived:
            self.accept(part, _merged(self._arrived.pop(part)))
        return super().rows(part)

    def send_half(self, part: int, half: Half) -> None:
        """Collective; the gradients stay until the window is dropped."""
        used_here(self._gradients[part].values())
        mine = {name: take_rows(grad, half.rows[part][name]) for name, grad in self._gradients[part].items()}
        received = self._engine.exchange_gradients(half.routed, mine, part)
        self._engine.add_gradients(half.routed, self.working, received, part)


def _merged(halves: list[tuple[Rows, Mapping[str, torch.Tensor]]]) -> Rows:
    first, _ = halves[0]
    merged = {}
    for name in first:
        num_rows = sum(len(rows[name]) for rows, _ in halves)
        merged[name] = first[name].new_empty(num_rows, *first[name].shape[1:])
        for rows, places in halves:
            used_here([rows[name]])
            merged[name].index_copy_(0, places[name], rows[name])
    return merged
