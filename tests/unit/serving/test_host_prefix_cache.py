"""The host prefix cache under random schedules: one copy per user in flight, order, bounds and pins."""

import random

from nestrec.serving.inputs.engine_request import CacheKey
from nestrec.serving.kv_cache.host_prefix_cache import HostPrefixCache
from nestrec_bench.harness.clocks import ManualClock


def key_of(user):
    return CacheKey(str(user), "1", "config")


def make(max_bytes=100, ttl_s=10.0, give=lambda _: None):
    clock = ManualClock()
    return HostPrefixCache(max_bytes=max_bytes, ttl_s=ttl_s, clock=clock, release=give), clock


def offload(cache, user, version=0, num_bytes=40):
    entry = cache.start_offload(key_of(user), length=version, content=b"%d" % version, num_bytes=num_bytes)
    if entry is not None:
        cache.finish_offload(entry, (user, version))
    return entry


def find(cache, user, version=0):
    return cache.find(key_of(user), lambda n: b"%d" % n if n <= version else None)


def test_host_prefix_cache_has_one_copy_per_user_in_flight():
    cache, _ = make()
    entry = cache.start_offload(key_of(1), length=3, content=b"3", num_bytes=40)
    assert cache.start_offload(key_of(1), length=4, content=b"4", num_bytes=40) is None
    assert find(cache, 1, 3) is None, "an incomplete copy must not be returned"
    cache.finish_offload(entry, "payload")
    assert find(cache, 1, 3).payload == "payload"
    cache.start_reload(entry)
    assert find(cache, 1, 3) is None
    assert cache.finish_reload(entry)


def test_host_prefix_cache_does_not_copy_twice():
    cache, _ = make()
    assert offload(cache, 1, 3) is not None
    assert offload(cache, 1, 3) is None
    assert offload(cache, 1, 4) is not None
    assert cache.num_bytes == 40


def test_host_prefix_cache_drop_during_reload_discards_copy():
    cache, _ = make()
    offload(cache, 1)
    entry = find(cache, 1)
    cache.start_reload(entry)
    cache.drop(key_of(1))
    assert not cache.finish_reload(entry)
    assert cache.num_bytes == 0
    assert entry.payload is None


def test_host_prefix_cache_eviction_skips_reloading_entries():
    cache, _ = make(max_bytes=100)
    offload(cache, 1)
    offload(cache, 2)
    cache.start_reload(find(cache, 1))
    assert offload(cache, 3) is not None
    assert find(cache, 2) is None
    assert offload(cache, 4, num_bytes=70) is None, "only evicting the pinned entry would make room"


def test_host_prefix_cache_entries_expire():
    cache, clock = make(ttl_s=10.0)
    offload(cache, 1)
    offload(cache, 2)
    clock.sleep(10.0)
    assert find(cache, 1) is None
    assert find(cache, 2) is None
    assert cache.num_bytes == 0


def test_host_prefix_cache_random_schedules_keep_invariants():  # noqa: PLR0912
    for seed in range(10_000):
        rng = random.Random(seed)
        payloads, released = [], []
        cache, clock = make(max_bytes=rng.randint(30, 200), ttl_s=rng.uniform(1, 20), give=released.append)
        version = [0] * 5
        offloading, reloading = {}, {}
        for _ in range(25):
            user = rng.randrange(5)
            action = rng.randrange(6)
            if action == 0 and user not in reloading:
                version[user] += rng.random() < 0.5
                entry = cache.start_offload(
                    key_of(user), length=version[user], content=b"%d" % version[user], num_bytes=rng.randint(10, 60)
                )
                assert not (entry is not None and user in offloading), "only one copy per user may be in flight"
                if entry is not None:
                    offloading[user] = entry
            elif action == 1 and user in offloading:
                entry = offloading.pop(user)
                payloads.append((user, entry.length))
                cache.finish_offload(entry, payloads[-1])
            elif action == 2:
                entry = find(cache, user, version[user])
                if entry is not None:
                    assert user not in offloading
                    assert user not in reloading
                    assert entry.payload == (user, entry.length), "the prefix must be complete and belong to the user"
                    cache.start_reload(entry)
                    reloading[user] = entry
            elif action == 3 and user in reloading:
                entry = reloading.pop(user)
                was_dropped = entry.is_dropped
                assert entry.payload is not None, "an entry must not be evicted during its reload"
                assert cache.finish_reload(entry) != was_dropped
            elif action == 4:
                cache.drop(key_of(user))
            else:
                clock.sleep(rng.random() * 3)
            assert cache.num_bytes <= cache.max_bytes
        for user, entry in offloading.items():
            payloads.append((user, entry.length))
            cache.finish_offload(entry, payloads[-1])
        for entry in reloading.values():
            cache.finish_reload(entry)
        for entry in cache.entries():
            cache.drop(entry.key)
        assert cache.num_bytes == 0
        assert sorted(released) == sorted(payloads), "memory must be released exactly once"
