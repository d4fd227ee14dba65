"""Host memory of prefixes that left the device: pages like the device's, in slabs that are taken as they are needed.

Pinned memory is given out by torch in powers of two, so a tensor for each prefix could take twice its size; slabs are a
power of two less at most a page.

Legend: N pages, L layers, H heads, P tokens of a page, D head dimension.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence

import torch

from nestrec.serving.page_pool import PagePool

_SLAB_BYTES = 1 << 27


class HostPages:
    """Pages are taken and given back on one thread; copies may run on others."""

    def __init__(self, pool: PagePool, *, max_bytes: int):
        """Pages for as many tokens as those of the pool."""
        self._pool = pool
        self.page_bytes = pool.page_bytes
        self.num_pages = max_bytes // self.page_bytes
        self._slab_pages = max(1, _SLAB_BYTES // self.page_bytes)
        self._slabs: dict[int, torch.Tensor] = {}
        self._free: list[int] = []  # a heap: the lowest first, so that neighbours stay together
        self._num_seen = 0

    def bytes_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.page_tokens) * self.page_bytes

    def take(self, num_bytes: int) -> list[int]:
        """Pages for so many bytes, in ascending order. There must be enough: `bytes_of` what is kept adds up."""
        count = num_bytes // self.page_bytes
        new = max(0, count - len(self._free))
        assert self._num_seen + new <= self.num_pages
        held = [heapq.heappop(self._free) for _ in range(count - new)]
        held += range(self._num_seen, self._num_seen + new)
        self._num_seen += new
        return held

    def give(self, held: Sequence[int]) -> None:
        for page in held:
            heapq.heappush(self._free, page)

    def copy_out(self, pages: Sequence[int], held: Sequence[int]) -> None:
        """From pages of the device. Waits on the current stream only."""
        blocks = self._pool.gather(pages[: len(held)])
        for first, memory in self._runs(held):
            memory.copy_(blocks[first : first + len(memory)], non_blocking=True)
        _wait(blocks)

    def copy_in(self, pages: Sequence[int], held: Sequence[int]) -> None:
        """Back into pages of the device. Waits on the current stream only."""
        blocks = self._pool.empty_blocks(len(held))
        for first, memory in self._runs(held):
            blocks[first : first + len(memory)].copy_(memory, non_blocking=True)
        self._pool.scatter(pages[: len(held)], blocks)
        _wait(blocks)

    def get_memory(self) -> None:
        """All slabs at once."""
        for number in range(-(-self.num_pages // self._slab_pages)):
            self._slab(number)

    def _runs(self, held: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """(place of its first page, (N, L, 2, H, P, D) memory) of pages that lie one after the other."""
        places = itertools.groupby(enumerate(held), lambda p: (p[1] - p[0], p[1] // self._slab_pages))
        for (_, slab), run in places:
            first, page = next(run)
            start = page % self._slab_pages
            yield first, self._slab(slab)[start : start + 1 + sum(1 for _ in run)]

    def _slab(self, number: int) -> torch.Tensor:
        if number not in self._slabs:
            count = min(self._slab_pages, self.num_pages - number * self._slab_pages)
            on_gpu = self._pool.tensor.is_cuda
            like = self._pool.empty_blocks(0)
            self._slabs[number] = torch.empty((count, *like.shape[1:]), dtype=like.dtype, pin_memory=on_gpu)
        return self._slabs[number]


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
