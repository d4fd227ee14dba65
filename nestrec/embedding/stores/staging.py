"""Host rows to and from a GPU through two pinned buffers: the copy of a chunk overlaps the loop over the next."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

_CHUNK_BYTES = 64 << 20
HostLoop = Callable[[slice, NDArray[np.int32]], None]


class PinnedStaging:
    """Two pinned buffers, each with the event that says when its last copy was done."""

    def __init__(self, num_words: int) -> None:
        self._chunk_rows = max(1, _CHUNK_BYTES // (4 * num_words))
        self._buffers = [torch.empty(self._chunk_rows, num_words, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]

    def to_device(self, out: torch.Tensor, fill: HostLoop) -> None:
        """Let `fill` write chunk after chunk of host rows; each is sent to `out` while the next is written."""
        for turn, part in enumerate(self._parts(len(out))):
            self._events[turn % 2].synchronize()
            buffer = self._buffers[turn % 2][: part.stop - part.start]
            fill(part, buffer.numpy())
            out[part].copy_(buffer, non_blocking=True)
            self._events[turn % 2].record()

    def to_host(self, rows: torch.Tensor, take: HostLoop) -> None:
        """Bring rows to the host chunk by chunk; `take` reads one chunk while the next is on its way."""
        waiting: tuple[slice, int] | None = None
        for turn, part in enumerate(self._parts(len(rows))):
            self._buffers[turn % 2][: part.stop - part.start].copy_(rows[part], non_blocking=True)
            self._events[turn % 2].record()
            self._finish(waiting, take)
            waiting = (part, turn % 2)
        self._finish(waiting, take)

    def _finish(self, waiting: tuple[slice, int] | None, take: HostLoop) -> None:
        if waiting is not None:
            part, turn = waiting
            self._events[turn].synchronize()
            take(part, self._buffers[turn][: part.stop - part.start].numpy())

    def _parts(self, num_rows: int) -> list[slice]:
        return [slice(a, min(a + self._chunk_rows, num_rows)) for a in range(0, num_rows, self._chunk_rows)]
