"""The prefix cache under random schedules: bounds, pins and identity of prefixes."""

import random
from hashlib import blake2b

import pytest

from nestrec.serving.core.slot_router import KeyedHash
from nestrec.serving.inputs.engine_request import CacheKey
from nestrec.serving.kv_cache.prefix_cache import PrefixCache
from nestrec_bench.harness.clocks import ManualClock

PAGE = 4


def digest(user, length):
    return blake2b(f"{user}/{length}".encode(), digest_size=8).digest()


def make(num_pages=12, bits=64, ttl_s=50.0):
    clock = ManualClock()
    keyed = KeyedHash(b"secret")

    def bucket_of(key):
        return (keyed.number("slot", key.user, key.version, key.config) % (1 << bits)).to_bytes(8, "little")

    return PrefixCache(num_pages=num_pages, page_tokens=PAGE, bucket_of=bucket_of, clock=clock, ttl_s=ttl_s), clock


def key_of(user, version="1"):
    return CacheKey(str(user), version, "config")


def put(cache, user, length):
    entry = cache.create(key_of(user))
    assert entry is not None
    assert cache.grow(entry, length)
    cache.commit(entry, length, digest(user, length))
    return entry


def find(cache, user, length=1 << 30):
    return cache.find(key_of(user), lambda n: digest(user, n) if n <= length else None)


def test_prefix_cache_returns_prefix_of_user_and_model():
    cache, _ = make()
    cache.unpin(put(cache, "a", 5))
    assert find(cache, "a").length == 5
    assert find(cache, "b") is None
    assert cache.find(key_of("a", "2"), lambda n: digest("a", n)) is None


def test_prefix_cache_invalidates_changed_history():
    cache, _ = make()
    cache.unpin(put(cache, "a", 5))
    assert find(cache, "a", length=4) is None
    assert cache.num_free_pages == 12
    cache.unpin(put(cache, "a", 5))
    assert cache.find(key_of("a"), lambda n: b"another") is None
    assert find(cache, "a") is None


def test_prefix_cache_entry_grows_in_place():
    cache, _ = make()
    entry = put(cache, "a", 5)
    before = list(entry.pages)
    assert cache.grow(entry, 11)
    cache.commit(entry, 11, digest("a", 11))
    assert entry.pages[:2] == before
    assert len(entry.pages) == 3


def test_prefix_cache_evicts_lru_except_pinned():
    cache, clock = make(num_pages=4)
    entries = {user: put(cache, user, PAGE) for user in "abcd"}
    for user in "acd":
        cache.unpin(entries[user])
    cache.reserve_until(entries["a"], until_s=10.0)
    assert find(cache, "c") is not None
    cache.unpin(put(cache, "e", PAGE))
    assert find(cache, "d") is None
    assert all(find(cache, user) is not None for user in "abce")
    assert not cache.grow(cache.create(key_of("f")), 3 * PAGE)
    assert all(find(cache, user) is not None for user in "abce")
    clock.sleep(10.0)
    entry = cache.create(key_of("g"))
    assert cache.grow(entry, 3 * PAGE)
    assert find(cache, "b") is not None


def test_prefix_cache_entry_expires():
    cache, clock = make(ttl_s=5.0)
    cache.unpin(put(cache, "a", 3))
    clock.sleep(5.0)
    assert find(cache, "a") is None
    cache.check()


class Schedule:
    """Random operations, compared with an oracle that records the owner of every page."""

    def __init__(self, seed, bits):
        self.rng = random.Random(seed)
        self.cache, self.clock = make(num_pages=self.rng.randint(2, 20), bits=bits)
        self.page_owner = {}
        self.pinned = []
        self.num_reads = 0

    def run(self, num_operations):
        for _ in range(num_operations):
            self.rng.choice(
                [self.write, self.write, self.read, self.read, self.read, self.unpin, self.drop, self.wait]
            )()
            self.cache.check()
            for entry in self.pinned:
                assert self.holds(entry), "a pinned entry must not lose its pages"
            if self.rng.random() < 0.02:
                self.cache.drop_all(lambda key: key.user == "1")

    def holds(self, entry):
        used = -(-entry.length // PAGE)
        return all(self.page_owner[page] == entry.key.user for page in entry.pages[:used])

    def write(self):
        user = self.rng.randrange(8)
        length = self.rng.randint(1, 30)
        entry = find(self.cache, user) if self.rng.random() < 0.5 else None
        if entry is None:
            entry = self.cache.create(key_of(user))
            if entry is None:
                return
        else:
            self.cache.pin(entry)
            length += entry.length
        if self.grow(entry, length):
            for page in entry.pages:
                self.page_owner[page] = str(user)
            self.cache.commit(entry, length, digest(user, length))
            if self.rng.random() < 0.2:
                self.cache.reserve_until(entry, self.clock.now_s() + self.rng.random() * 5)
        self.keep_or_unpin(entry)

    def grow(self, entry, length):
        """Grow an entry, and check that it evicts the least recently used unpinned entries, or none if it fails."""
        now_s = self.clock.now_s()
        before = self.cache.entries()
        protected = [other for other in before if other is entry or other.pins or other.reserved_until_s > now_s]
        has_room = self.cache.grow(entry, length)
        assert not any(other.is_dropped for other in protected)
        evicted = [other.is_dropped for other in before if other not in protected]
        assert evicted == sorted(evicted, reverse=True), "the least recently used entries must be evicted first"
        assert has_room or not any(evicted)
        return has_room

    def read(self):
        user = self.rng.randrange(8)
        entry = find(self.cache, user)
        if entry is None:
            return
        self.num_reads += 1
        assert entry.key.user == str(user)
        assert entry.content == digest(user, entry.length)
        assert self.holds(entry), "the pages must belong to the user"
        self.cache.pin(entry)
        self.keep_or_unpin(entry)

    def keep_or_unpin(self, entry):
        if len(self.pinned) < 3 and self.rng.random() < 0.3:
            self.pinned.append(entry)
        else:
            self.cache.unpin(entry)

    def unpin(self):
        if self.pinned:
            self.cache.unpin(self.pinned.pop(self.rng.randrange(len(self.pinned))))

    def drop(self):
        self.cache.evict(key_of(self.rng.randrange(8)))

    def wait(self):
        self.clock.sleep(self.rng.random() * 10)


@pytest.mark.parametrize("num_schedules", [10_000, pytest.param(40_000, marks=pytest.mark.slow)])
def test_prefix_cache_random_operations_keep_invariants(num_schedules):
    """Schedules of 25 operations each; buckets have two bits, so that most keys collide."""
    num_reads = 0
    for seed in range(num_schedules):
        schedule = Schedule(seed, bits=2)
        schedule.run(25)
        num_reads += schedule.num_reads
    assert num_reads > 5_000


def test_prefix_cache_without_pins_frees_all_pages():
    schedule = Schedule(1, bits=64)
    schedule.run(2_000)
    while schedule.pinned:
        schedule.unpin()
    schedule.cache.drop_all(lambda key: True)
    assert schedule.cache.num_free_pages == schedule.cache.num_pages
