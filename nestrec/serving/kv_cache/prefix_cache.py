"""Book-keeping of the prefixes kept on the device: which pages hold whose keys and values.

Pure: no tensor is touched here, and time comes from the clock given. A prefix lives in pages of `page_tokens` tokens.
An entry is found by a hash, but read only where its whole identity matches, so that a collision is a miss and never
another user's prefix. Pinned entries keep their pages; so do entries held for a ranking request that is on its way,
until the hold ends. Everything else may be evicted, least recently used first.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from nestrec.base.clock import Clock
from nestrec.serving.inputs.engine_request import CacheKey


@dataclass(eq=False, slots=True)
class Entry:
    """A prefix, or the beginning of one."""

    key: CacheKey
    length: int = 0
    """tokens whose keys and values are in the pages"""
    content: bytes = b""
    """everything about those tokens that enters the model"""
    pages: list[int] = field(default_factory=list)
    pins: int = 0
    held_until_s: float = float("-inf")
    expires_s: float = float("inf")
    is_dropped: bool = False
    """no longer to be found; its pages are free once nobody pins it"""
    is_reloaded: bool = False
    """came back from DRAM, and no request has read it since"""


ContentOf = Callable[[int], bytes | None]
"""Content of a request's first tokens, or none where it has fewer. It is compared and not hashed: comparing takes a
twentieth of the time, and nothing collides."""


class PrefixCache:
    """Entries over a fixed number of pages. One thread uses it."""

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
        self._lingering: set[Entry] = set()
        self.num_evicted = 0

    def find(self, key: CacheKey, content_of: ContentOf) -> Entry | None:
        """The entry whose tokens are the first ones of the request; one that no longer matches is dropped. One that
        there was no room for has none."""
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
        """Tokens that are kept of a user, matching or not. Any thread may ask."""
        entry = self._entries.get(self._bucket_of(key))
        return entry.length if entry is not None and entry.key == key else 0

    def create(self, key: CacheKey) -> Entry | None:
        """A new, empty, pinned entry in place of any older one of this key; none where a pinned one is in the way."""
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
        """Give the entry pages for so many tokens; False, and nothing changed for it, where there is no room."""
        missing = -(-num_tokens // self.page_tokens) - len(entry.pages)
        if missing > 0 and not self._make_room(missing, entry):
            return False
        entry.pages += [self._free.pop() for _ in range(missing)]
        return True

    def commit(self, entry: Entry, length: int, content: bytes) -> None:
        """The first `length` tokens are in the pages now."""
        assert length <= len(entry.pages) * self.page_tokens
        entry.length = length
        entry.content = content
        entry.expires_s = self._clock.now_s() + self._ttl_s

    def hold(self, entry: Entry, until_s: float) -> None:
        """Do not evict before `until_s`: a ranking request is on its way."""
        entry.held_until_s = until_s

    def pin(self, entry: Entry) -> None:
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        assert entry.pins > 0
        entry.pins -= 1
        if entry.pins == 0 and entry.is_dropped:
            self._release(entry)

    def drop(self, key: CacheKey) -> bool:
        """Forget a key; whether there was something to forget."""
        bucket = self._bucket_of(key)
        entry = self._entries.get(bucket)
        if entry is None or entry.key != key:
            return False
        self._remove(bucket)
        return True

    def clear(self) -> None:
        """Forget every entry, also the pinned ones, whatever state they are in; all pages are free afterwards."""
        for entry in (*self._entries.values(), *self._lingering):
            entry.is_dropped = True
            entry.length = 0
            entry.pages = []
        self._entries.clear()
        self._lingering.clear()
        self._free = list(range(self.num_pages - 1, -1, -1))

    def drop_all(self, is_doomed: Callable[[CacheKey], bool]) -> int:
        """Forget every key that `is_doomed` names, such as those of an old model; how many."""
        buckets = [bucket for bucket, entry in self._entries.items() if is_doomed(entry.key)]
        for bucket in buckets:
            self._remove(bucket)
        return len(buckets)

    def drop_oldest(self, is_doomed: Callable[[CacheKey], bool], most: int) -> int:
        """Forget keys that `is_doomed` names, the longest unused first, up to one that it does not name; how many."""
        slots: list[bytes] = []
        for slot, entry in self._entries.items():
            if len(slots) == most or not is_doomed(entry.key):
                break
            slots.append(slot)
        for slot in slots:
            self._remove(slot)
        return len(slots)

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def entries(self) -> list[Entry]:
        """Those that can be found, least recently used first."""
        return list(self._entries.values())

    def _make_room(self, num_pages: int, for_entry: Entry) -> bool:
        if len(self._free) >= num_pages:
            return True
        now_s = self._clock.now_s()
        victims = []
        gained = len(self._free)
        for bucket, entry in self._entries.items():
            if gained >= num_pages:
                break
            if entry is not for_entry and entry.pins == 0 and entry.held_until_s <= now_s:
                victims.append(bucket)
                gained += len(entry.pages)
        if gained < num_pages:
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
            self._lingering.add(entry)

    def _release(self, entry: Entry) -> None:
        self._lingering.discard(entry)
        self._free += entry.pages
        entry.pages = []
        entry.length = 0
        entry.content = b""

    def check(self) -> None:
        """Every page is free or belongs to exactly one entry."""
        used = [page for entry in (*self._entries.values(), *self._lingering) for page in entry.pages]
        assert sorted([*used, *self._free]) == list(range(self.num_pages))
