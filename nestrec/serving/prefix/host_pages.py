"""Host memory of prefixes that left the device: pages like the device's, in slabs.

Pinned memory is given out by torch in powers of two, so a tensor for each prefix could take twice its size; slabs are a
power of two less at most a page. Getting it stalls the GPU, so it is taken at once; other memory as it is needed.
Copies go in small pieces of which two are on their way: the indices and scores of batches travel by the same link, and
wait for the pieces before them.

Legend: N pages, L layers, H heads, P tokens of a page, D head dimension.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Self

import torch

from nestrec.serving.prefix.page_pool import PagePool, naming_memory

_SLAB_BYTES = 1 << 27
_PIECE_BYTES = 1 << 22


class HostPages:
    """Pages are taken and given back on one thread; copies may run on others."""

    def __init__(self, pool: PagePool, *, max_bytes: int):
        """Pages for as many tokens as those of the pool."""
        self._pool = pool
        self.page_bytes = pool.page_bytes
        self.num_pages = max_bytes // self.page_bytes
        self._slab_pages, self._piece_pages = (max(1, size // self.page_bytes) for size in (_SLAB_BYTES, _PIECE_BYTES))
        self._slabs = pool.host_slabs
        self._free: list[int] = []  # a heap: the lowest first, so that neighbours stay together
        self._num_seen = 0
        if pool.tensor.is_cuda:
            with naming_memory("tiers.dram_bytes", max_bytes, "give less, or 0 for none; it is pinned"):
                self._get_memory()

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

    def clear(self) -> None:
        """All pages are free again."""
        self._free = list(range(self._num_seen))

    def copy_out(self, pages: Sequence[int], held: Sequence[int]) -> None:
        """From pages of the device. Waits on the current stream only."""
        blocks = self._pool.gather(pages[: len(held)])
        with _Paced(blocks.is_cuda) as paced:
            for first, memory in self._pieces(held):
                memory.copy_(blocks[first : first + len(memory)], non_blocking=True)
                paced.next()

    def copy_in(self, pages: Sequence[int], held: Sequence[int]) -> None:
        """Back into pages of the device. Waits on the current stream only."""
        blocks = self._pool.empty_blocks(len(held))
        with _Paced(blocks.is_cuda) as paced:
            for first, memory in self._pieces(held):
                blocks[first : first + len(memory)].copy_(memory, non_blocking=True)
                paced.next()
            self._pool.scatter(pages[: len(held)], blocks)

    def _pieces(self, held: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """(place of its first page, (N, L, 2, H, P, D) memory) of a few pages that lie one after the other."""
        runs = itertools.groupby(enumerate(held), lambda p: (p[1] - p[0], p[1] // self._slab_pages))
        for (_, slab), run in runs:
            places = list(run)
            start = places[0][1] % self._slab_pages
            memory = self._slab(slab)[start : start + len(places)]
            for first in range(0, len(places), self._piece_pages):
                yield places[first][0], memory[first : first + self._piece_pages]

    def _get_memory(self) -> None:
        for number in range(-(-self.num_pages // self._slab_pages)):
            self._slab(number)

    def _slab(self, number: int) -> torch.Tensor:
        key = (number, min(self._slab_pages, self.num_pages - number * self._slab_pages))
        if key not in self._slabs:
            on_gpu, like = self._pool.tensor.is_cuda, self._pool.empty_blocks(0)
            self._slabs[key] = torch.empty((key[1], *like.shape[1:]), dtype=like.dtype, pin_memory=on_gpu)
        return self._slabs[key]


class _Paced:
    """Two pieces on their way on the current stream of a GPU; none at the end."""

    def __init__(self, is_cuda: bool):
        self._events = [torch.cuda.Event() for _ in range(2)] if is_cuda else []

    def next(self) -> None:
        """A piece has been launched: wait for the one before."""
        if self._events:
            self._events.reverse()
            self._events[0].record()
            self._events[1].synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._events:
            torch.cuda.current_stream().synchronize()
