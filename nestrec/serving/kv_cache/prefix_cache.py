"""Prefix cache, device tier: the index from user and model version to pages of the KV cache.

Bookkeeping only: no tensor is accessed here, and the clock is injected. A prefix is stored in pages of `page_tokens`
tokens. An entry is found by a hash, but used only if its complete identity matches, so a hash collision is a cache miss
and never returns another user's prefix. Pinned entries are not evicted, and neither are entries reserved for an
expected ranking request until the reservation ends. All others are evicted in LRU order.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from nestrec.base.clock import Clock
from nestrec.serving.inputs.engine_request import CacheKey


@dataclass(eq=False, slots=True)
class Entry:
    """Cached prefix of a user, or the first tokens of one."""

    key: CacheKey
    length: int = 0
    """Number of tokens whose keys and values are in the pages."""
    content: bytes = b""
    """All model inputs of those tokens, for comparison with a request."""
    pages: list[int] = field(default_factory=list)
    pins: int = 0
    reserved_until_s: float = float("-inf")
    expires_s: float = float("inf")
    is_dropped: bool = False
    """Whether it was removed from the index; its pages are released when it is unpinned."""
    is_reloaded: bool = False
    """Whether it was reloaded from host memory and no ranking request has used it since."""


ContentOf = Callable[[int], bytes | None]
"""Returns the content of a request's first N tokens, or None if it has fewer. The content is compared, not hashed:
comparing takes a twentieth of the time and has no collisions."""


class PrefixCache:
    """Device tier of the prefix cache, over a fixed number of pages, with LRU eviction. Not thread-safe."""

    def __init__(
        self, *, num_pages: int, page_tokens: int, bucket_of: Callable[[CacheKey], bytes], clock: Clock, ttl_s: float
    ):
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._bucket_of = bucket_of
        self._clock = clock
        self._ttl_s = ttl_s
        self._free = list(range(num_pages - 1, -1, -1))
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first
        self._dropped_pinned: set[Entry] = set()
        self.num_evicted = 0

    def find(self, key: CacheKey, content_of: ContentOf) -> Entry | None:
        """Return the entry whose tokens are the first tokens of the request; drop an entry that no longer matches.

        An entry without tokens, because it got no pages, is not returned.
        """
        entry = self._entries.get(self._bucket_of(key))
        if entry is None or entry.key != key or entry.length == 0:
            return None
        if self._clock.now_s() >= entry.expires_s or content_of(entry.length) != entry.content:
            if entry.pins == 0:
                self._remove(self._bucket_of(key))
            return None
        self._entries.move_to_end(self._bucket_of(key))
        return entry

    def length_of(self, key: CacheKey) -> int:
        """Return the number of cached tokens of a user, without checking their content. Callable from any thread."""
        entry = self._entries.get(self._bucket_of(key))
        return entry.length if entry is not None and entry.key == key else 0

    def create(self, key: CacheKey) -> Entry | None:
        """Create an empty, pinned entry that replaces an older one of the key.

        Returns:
            The entry, or None if a pinned entry of another key occupies the bucket.
        """
        bucket = self._bucket_of(key)
        old = self._entries.get(bucket)
        if old is not None:
            if old.pins and old.key != key:
                return None
            self._remove(bucket)
        entry = Entry(key, pins=1, expires_s=self._clock.now_s() + self._ttl_s)
        self._entries[bucket] = entry
        return entry

    def grow(self, entry: Entry, num_tokens: int) -> bool:
        """Allocate pages for `num_tokens` tokens of the entry; return False and change nothing if there are too few."""
        missing = -(-num_tokens // self.page_tokens) - len(entry.pages)
        if missing > 0 and not self._evict_for(missing, entry):
            return False
        entry.pages += [self._free.pop() for _ in range(missing)]
        return True

    def commit(self, entry: Entry, length: int, content: bytes) -> None:
        """Set the number of tokens whose keys and values are in the pages, and the content of these tokens."""
        assert length <= len(entry.pages) * self.page_tokens
        entry.length = length
        entry.content = content
        entry.expires_s = self._clock.now_s() + self._ttl_s

    def reserve_until(self, entry: Entry, until_s: float) -> None:
        """Protect the entry from eviction until `until_s`, because a ranking request is expected."""
        entry.reserved_until_s = until_s

    def pin(self, entry: Entry) -> None:
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        assert entry.pins > 0
        entry.pins -= 1
        if entry.pins == 0 and entry.is_dropped:
            self._release(entry)

    def evict(self, key: CacheKey) -> bool:
        """Drop the entry of a key; return whether there was one."""
        bucket = self._bucket_of(key)
        entry = self._entries.get(bucket)
        if entry is None or entry.key != key:
            return False
        self._remove(bucket)
        return True

    def clear(self) -> None:
        """Drop all entries, including pinned and inconsistent ones, and release all pages."""
        for entry in (*self._entries.values(), *self._dropped_pinned):
            entry.is_dropped = True
            entry.length = 0
            entry.pages = []
        self._entries.clear()
        self._dropped_pinned.clear()
        self._free = list(range(self.num_pages - 1, -1, -1))

    def drop_all(self, is_stale: Callable[[CacheKey], bool]) -> int:
        """Drop all stale entries, such as those of an old model; return their number."""
        buckets = [bucket for bucket, entry in self._entries.items() if is_stale(entry.key)]
        for bucket in buckets:
            self._remove(bucket)
        return len(buckets)

    def drop_oldest(self, is_stale: Callable[[CacheKey], bool], limit: int) -> int:
        """Drop at most `limit` stale entries in LRU order, up to the first that is not stale; return their number."""
        buckets: list[bytes] = []
        for bucket, entry in self._entries.items():
            if len(buckets) == limit or not is_stale(entry.key):
                break
            buckets.append(bucket)
        for bucket in buckets:
            self._remove(bucket)
        return len(buckets)

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def entries(self) -> list[Entry]:
        """Return all entries of the index, least recently used first."""
        return list(self._entries.values())

    def _evict_for(self, num_pages: int, for_entry: Entry) -> bool:
        if len(self._free) >= num_pages:
            return True
        now_s = self._clock.now_s()
        victims = []
        available = len(self._free)
        for bucket, entry in self._entries.items():
            if available >= num_pages:
                break
            if entry is not for_entry and entry.pins == 0 and entry.reserved_until_s <= now_s:
                victims.append(bucket)
                available += len(entry.pages)
        if available < num_pages:
            return False
        for bucket in victims:
            self._remove(bucket)
            self.num_evicted += 1
        return True

    def _remove(self, bucket: bytes) -> None:
        entry = self._entries.pop(bucket)
        entry.is_dropped = True
        if entry.pins == 0:
            self._release(entry)
        else:
            self._dropped_pinned.add(entry)

    def _release(self, entry: Entry) -> None:
        self._dropped_pinned.discard(entry)
        self._free += entry.pages
        entry.pages = []
        entry.length = 0
        entry.content = b""

    def check(self) -> None:
        """Assert that every page is free or belongs to exactly one entry."""
        used = [page for entry in (*self._entries.values(), *self._dropped_pinned) for page in entry.pages]
        assert sorted([*used, *self._free]) == list(range(self.num_pages))
