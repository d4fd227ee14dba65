"""Device memory for working sets, used by turns: one batch trains in one buffer, the next is read into another."""

import torch

from nestrec.embedding.layout import RowLayout

_SPARE = 1.25


class RowBuffers:
    """For each table as many buffers as there are batches in flight; a buffer is enlarged only by a larger batch.

    The caller sees to it that a buffer is no longer in use when its turn comes again: with two of them, that the
    write-back of batch t-1 comes before the fetch of batch t+1, which "write-back before gather" asks for anyway.
    """

    def __init__(self, turns: int = 2) -> None:
        self._turns = turns
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def take(self, table: str, step: int, num_rows: int, layout: RowLayout, device: torch.device) -> torch.Tensor:
        """(num_rows, num_words) memory for the rows of a table in the batch of a step."""
        place = table, step % self._turns
        buffer = self._buffers.get(place)
        if buffer is None or len(buffer) < num_rows:
            size = int(num_rows * _SPARE)
            buffer = torch.empty(size, layout.num_words, dtype=torch.int32, device=device)
            self._buffers[place] = buffer
        return buffer[:num_rows]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
