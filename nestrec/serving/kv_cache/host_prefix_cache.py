"""Host-memory tier of the prefix cache (the expander of RelayGR): prefixes evicted from device memory.

`HostPrefixCache` holds prefixes until the user's next request or until they expire. It does bookkeeping only: the
engine performs the copies, and the clock is injected. At most one copy per user is in flight, copies of a user finish
in the order in which they started, and an entry dropped during its copy is discarded when the copy ends. Memory is
bounded in bytes; pinned entries are never evicted.

`HostPages` is the memory: pages of the same size as on the device, allocated in slabs. PyTorch allocates pinned memory
in powers of two, so a tensor per prefix could take twice its size; a slab is at most one page smaller than a power of
two. Allocating pinned memory stalls the GPU, so all of it is allocated at the start; unpinned memory is allocated on
demand. Copies are split into small chunks with two in flight, because the indices and scores of batches use the same
link and wait for the chunks before them.

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
from nestrec.serving.kv_cache.kv_page_pool import PagePool, name_memory_option
from nestrec.serving.kv_cache.prefix_cache import ContentOf

Payload = TypeVar("Payload")


@dataclass(eq=False, slots=True)
class HostCacheEntry(Generic[Payload]):
    """Prefix in host memory."""

    key: CacheKey
    length: int
    content: bytes
    num_bytes: int
    payload: Payload | None
    """Location of the data; None while it is copied from the device."""
    expires_s: float
    pins: int = 0
    is_dropped: bool = False


class HostPrefixCache(Generic[Payload]):
    """Host-memory tier of the prefix cache, bounded in bytes, with LRU eviction. Not thread-safe."""

    def __init__(
        self, *, max_bytes: int, ttl_s: float, clock: Clock, release: Callable[[Payload], None] = lambda _: None
    ):
        """Create an empty cache.

        Args:
            max_bytes: Maximum size of all entries.
            ttl_s: Lifetime of an entry in seconds.
            clock: Source of time.
            release: Called with the payload of a removed entry, to release it.
        """
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._release_payload = release
        self._entries: OrderedDict[CacheKey, HostCacheEntry[Payload]] = OrderedDict()  # least recently used first
        self._in_flight: set[CacheKey] = set()
        self.num_bytes = 0

    def start_offload(
        self, key: CacheKey, *, length: int, content: bytes, num_bytes: int
    ) -> HostCacheEntry[Payload] | None:
        """Reserve an entry for a copy from the device.

        Returns:
            The pinned entry, or None if a copy of the user is in flight, the prefix is already cached, or it does not
            fit.
        """
        known = self._entries.get(key)
        if key in self._in_flight or (known is not None and known.content == content and known.length == length):
            return None
        if known is not None:
            self._remove(key)
        if not self._evict_for(num_bytes):
            return None
        entry: HostCacheEntry[Payload] = HostCacheEntry(
            key, length, content, num_bytes, None, self._clock.now_s() + self._ttl_s
        )
        self._entries[key] = entry
        self.num_bytes += num_bytes
        self._in_flight.add(key)
        entry.pins += 1
        return entry

    def finish_offload(self, entry: HostCacheEntry[Payload], payload: Payload) -> None:
        """Store the payload of a copy that has ended."""
        self._in_flight.discard(entry.key)
        entry.payload = payload
        self._unpin(entry)

    def find(self, key: CacheKey, content_of: ContentOf) -> HostCacheEntry[Payload] | None:
        """Return the cached prefix of a request unless it is being copied; drop an entry that no longer matches."""
        entry = self._entries.get(key)
        if entry is None or key in self._in_flight:
            return None
        if self._clock.now_s() >= entry.expires_s or content_of(entry.length) != entry.content:
            self._remove(key)
            return None
        self._entries.move_to_end(key)
        return entry

    def start_reload(self, entry: HostCacheEntry[Payload]) -> None:
        """Pin an entry for a copy to the device; `find` does not return it until the copy ends."""
        assert entry.key not in self._in_flight
        self._in_flight.add(entry.key)
        entry.pins += 1

    def finish_reload(self, entry: HostCacheEntry[Payload]) -> bool:
        """Unpin an entry after its copy to the device; return False if it was dropped during the copy."""
        self._in_flight.discard(entry.key)
        is_valid = not entry.is_dropped
        self._unpin(entry)
        return is_valid

    def drop(self, key: CacheKey) -> bool:
        """Drop the entry of a key; return whether there was one."""
        if key not in self._entries:
            return False
        self._remove(key)
        return True

    def clear(self) -> None:
        """Drop all entries without releasing their payloads."""
        self._entries.clear()
        self._in_flight.clear()
        self.num_bytes = 0

    def drop_entry(self, entry: HostCacheEntry[Payload]) -> None:
        """Drop this entry if it is still cached."""
        if self._entries.get(entry.key) is entry:
            self._remove(entry.key)

    def drop_oldest(self, is_stale: Callable[[CacheKey], bool], limit: int) -> int:
        """Drop at most `limit` stale entries in LRU order, up to the first that is not stale; return their number."""
        keys: list[CacheKey] = []
        for key in self._entries:
            if len(keys) == limit or not is_stale(key):
                break
            keys.append(key)
        for key in keys:
            self._remove(key)
        return len(keys)

    def entries(self) -> list[HostCacheEntry[Payload]]:
        return list(self._entries.values())

    def _evict_for(self, num_bytes: int) -> bool:
        victims = []
        available = self.max_bytes - self.num_bytes
        for key, entry in self._entries.items():
            if available >= num_bytes:
                break
            if entry.pins == 0:
                victims.append(key)
                available += entry.num_bytes
        if available < num_bytes:
            return False
        for key in victims:
            self._remove(key)
        return True

    def _remove(self, key: CacheKey) -> None:
        entry = self._entries.pop(key)
        entry.is_dropped = True
        if entry.pins == 0:
            self._release(entry)

    def _unpin(self, entry: HostCacheEntry[Payload]) -> None:
        entry.pins -= 1
        if entry.pins == 0 and entry.is_dropped:
            self._release(entry)

    def _release(self, entry: HostCacheEntry[Payload]) -> None:
        self.num_bytes -= entry.num_bytes
        if entry.payload is not None:
            self._release_payload(entry.payload)
        entry.payload = None


_SLAB_BYTES = 1 << 27
_CHUNK_BYTES = 1 << 22


class HostPages:
    """Page pool in host memory. Pages are allocated and released on one thread; copies may run on other threads."""

    def __init__(self, pool: PagePool, *, max_bytes: int):
        """Create a pool of at most `max_bytes` with pages of the same size as those of the device pool."""
        self._pool = pool
        self.page_bytes = pool.page_bytes
        self.num_pages = max_bytes // self.page_bytes
        self._slab_pages, self._chunk_pages = (max(1, size // self.page_bytes) for size in (_SLAB_BYTES, _CHUNK_BYTES))
        self._slabs = pool.host_slabs
        self._free: list[int] = []  # a heap: the lowest index first, so that allocated pages stay contiguous
        self._num_used = 0
        if pool.tensor.is_cuda:
            remedy = "set a smaller value, or 0 for no host tier"
            with name_memory_option("service.engine.prefix_cache.host_bytes", max_bytes, remedy):
                self._allocate()

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes of the pages for `num_tokens` tokens."""
        return -(-num_tokens // self._pool.page_tokens) * self.page_bytes

    def allocate(self, num_bytes: int) -> list[int]:
        """Allocate pages for `num_bytes`, in ascending order.

        Enough pages must be free, which holds if the bytes of all entries are computed by `bytes_of`.
        """
        count = num_bytes // self.page_bytes
        num_new = max(0, count - len(self._free))
        assert self._num_used + num_new <= self.num_pages
        host_pages = [heapq.heappop(self._free) for _ in range(count - num_new)]
        host_pages += range(self._num_used, self._num_used + num_new)
        self._num_used += num_new
        return host_pages

    def release(self, host_pages: Sequence[int]) -> None:
        """Release pages."""
        for page in host_pages:
            heapq.heappush(self._free, page)

    def clear(self) -> None:
        """Release all pages."""
        self._free = list(range(self._num_used))

    def copy_out(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy pages from the device to host memory; synchronizes the current stream only."""
        blocks = self._pool.gather(pages[: len(host_pages)])
        with _CopyThrottle(blocks.is_cuda) as throttle:
            for first, memory in self._chunks(host_pages):
                memory.copy_(blocks[first : first + len(memory)], non_blocking=True)
                throttle.next()

    def copy_in(self, pages: Sequence[int], host_pages: Sequence[int]) -> None:
        """Copy pages from host memory to the device; synchronizes the current stream only."""
        blocks = self._pool.empty_blocks(len(host_pages))
        with _CopyThrottle(blocks.is_cuda) as throttle:
            for first, memory in self._chunks(host_pages):
                blocks[first : first + len(memory)].copy_(memory, non_blocking=True)
                throttle.next()
            self._pool.scatter(pages[: len(host_pages)], blocks)

    def _chunks(self, host_pages: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Split pages into chunks of contiguous memory.

        Yields:
            The index of the first page of the chunk in `host_pages`, and the memory of its pages.
        """
        runs = itertools.groupby(enumerate(host_pages), lambda p: (p[1] - p[0], p[1] // self._slab_pages))
        for (_, slab), run in runs:
            indexed_pages = list(run)
            start = indexed_pages[0][1] % self._slab_pages
            memory = self._slab(slab)[start : start + len(indexed_pages)]
            for first in range(0, len(indexed_pages), self._chunk_pages):
                yield indexed_pages[first][0], memory[first : first + self._chunk_pages]

    def _allocate(self) -> None:
        for number in range(-(-self.num_pages // self._slab_pages)):
            self._slab(number)

    def _slab(self, number: int) -> torch.Tensor:
        key = (number, min(self._slab_pages, self.num_pages - number * self._slab_pages))
        if key not in self._slabs:
            like = self._pool.empty_blocks(0)
            self._slabs[key] = pinned_empty((key[1], *like.shape[1:]), like.dtype, self._pool.tensor.device)
        return self._slabs[key]


class _CopyThrottle:
    """Limits the chunks in flight on the current CUDA stream to two, and waits for all of them on exit."""

    def __init__(self, is_cuda: bool):
        self._events = [torch.cuda.Event() for _ in range(2)] if is_cuda else []

    def next(self) -> None:
        """Record the launch of a chunk and wait for the previous one."""
        if self._events:
            self._events.reverse()
            self._events[0].record()
            self._events[1].synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._events:
            torch.cuda.current_stream().synchronize()
