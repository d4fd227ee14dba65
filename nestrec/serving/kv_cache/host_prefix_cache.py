"""The DRAM tier: prefixes that left the device, kept a while for the user's next request.

Pure book-keeping under a given clock; the copies themselves are the engine's business. At most one copy of a user is
under way at a time (single flight), copies of a user end in the order in which they began, and what was forgotten while
it was being copied is dropped at its end. Bytes are bounded; an entry that is being read is never evicted.

Host memory of prefixes that left the device: pages like the device's, in slabs.

Pinned memory is given out by torch in powers of two, so a tensor for each prefix could take twice its size; slabs are a
power of two less at most a page. Getting it stalls the GPU, so it is taken at once; other memory as it is needed.
Copies go in small pieces of which two are on their way: the indices and scores of batches travel by the same link, and
wait for the pieces before them.

Legend: N pages, L layers, H heads, P tokens of a page, D head dimension.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import torch

from nestrec.base.clock import Clock
from nestrec.base.cuda import pinned_empty
from nestrec.serving.inputs.engine_request import CacheKey
from nestrec.serving.kv_cache.kv_page_pool import PagePool, naming_memory
from nestrec.serving.kv_cache.prefix_cache import ContentOf

Payload = TypeVar("Payload")


@dataclass(eq=False, slots=True)
class HostCacheEntry(Generic[Payload]):
    """A prefix in DRAM."""

    key: CacheKey
    length: int
    content: bytes
    num_bytes: int
    payload: Payload | None
    """none while the copy is under way"""
    expires_s: float
    pins: int = 0
    is_dropped: bool = False


class HostPrefixCache(Generic[Payload]):
    """Entries within a bound of bytes. One thread uses it."""

    def __init__(self, *, max_bytes: int, ttl_s: float, clock: Clock, give: Callable[[Payload], None] = lambda _: None):
        """give: is handed the payload of an entry that is gone."""
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._give = give
        self._kept: OrderedDict[CacheKey, HostCacheEntry[Payload]] = OrderedDict()  # least recently used first
        self._in_flight: set[CacheKey] = set()
        self.num_bytes = 0

    def begin_spill(
        self, key: CacheKey, *, length: int, content: bytes, num_bytes: int
    ) -> HostCacheEntry[Payload] | None:
        """Room for a copy from the device; none where the user has one under way, has it already, or nothing fits."""
        known = self._kept.get(key)
        if key in self._in_flight or (known is not None and known.content == content and known.length == length):
            return None
        if known is not None:
            self._remove(key)
        if not self._make_room(num_bytes):
            return None
        kept: HostCacheEntry[Payload] = HostCacheEntry(
            key, length, content, num_bytes, None, self._clock.now_s() + self._ttl_s
        )
        self._kept[key] = kept
        self.num_bytes += num_bytes
        self._in_flight.add(key)
        kept.pins += 1
        return kept

    def finish_spill(self, kept: HostCacheEntry[Payload], payload: Payload) -> None:
        self._in_flight.discard(kept.key)
        kept.payload = payload
        self._unpin(kept)

    def find(self, key: CacheKey, content_of: ContentOf) -> HostCacheEntry[Payload] | None:
        """What is kept of the request's first tokens and not being copied; what no longer matches is forgotten."""
        kept = self._kept.get(key)
        if kept is None or key in self._in_flight:
            return None
        if self._clock.now_s() >= kept.expires_s or content_of(kept.length) != kept.content:
            self._remove(key)
            return None
        self._kept.move_to_end(key)
        return kept

    def begin_reload(self, kept: HostCacheEntry[Payload]) -> None:
        """A copy to the device begins; `find` does not give the entry out again before its end."""
        assert kept.key not in self._in_flight
        self._in_flight.add(kept.key)
        kept.pins += 1

    def finish_reload(self, kept: HostCacheEntry[Payload]) -> bool:
        """Whether the copy may be used: not where it was forgotten meanwhile."""
        self._in_flight.discard(kept.key)
        is_good = not kept.is_dropped
        self._unpin(kept)
        return is_good

    def drop(self, key: CacheKey) -> bool:
        if key not in self._kept:
            return False
        self._remove(key)
        return True

    def clear(self) -> None:
        """Forget every entry without handing its payload on."""
        self._kept.clear()
        self._in_flight.clear()
        self.num_bytes = 0

    def drop_entry(self, kept: HostCacheEntry[Payload]) -> None:
        """Forget this very entry, where it is still there."""
        if self._kept.get(kept.key) is kept:
            self._remove(kept.key)

    def drop_oldest(self, is_doomed: Callable[[CacheKey], bool], most: int) -> int:
        """Forget keys that `is_doomed` names, the longest unused first, up to one that it does not name; how many."""
        keys: list[CacheKey] = []
        for key in self._kept:
            if len(keys) == most or not is_doomed(key):
                break
            keys.append(key)
        for key in keys:
            self._remove(key)
        return len(keys)

    def entries(self) -> list[HostCacheEntry[Payload]]:
        return list(self._kept.values())

    def _make_room(self, num_bytes: int) -> bool:
        victims = []
        gained = self.max_bytes - self.num_bytes
        for key, kept in self._kept.items():
            if gained >= num_bytes:
                break
            if kept.pins == 0:
                victims.append(key)
                gained += kept.num_bytes
        if gained < num_bytes:
            return False
        for key in victims:
            self._remove(key)
        return True

    def _remove(self, key: CacheKey) -> None:
        kept = self._kept.pop(key)
        kept.is_dropped = True
        if kept.pins == 0:
            self._release(kept)

    def _unpin(self, kept: HostCacheEntry[Payload]) -> None:
        kept.pins -= 1
        if kept.pins == 0 and kept.is_dropped:
            self._release(kept)

    def _release(self, kept: HostCacheEntry[Payload]) -> None:
        self.num_bytes -= kept.num_bytes
        if kept.payload is not None:
            self._give(kept.payload)
        kept.payload = None


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
            like = self._pool.empty_blocks(0)
            self._slabs[key] = pinned_empty((key[1], *like.shape[1:]), like.dtype, self._pool.tensor.device)
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
