"""The DRAM tier under random schedules: single flight, order, bounds, pins."""

import random

from nestrec.serving.inputs.engine_request import CacheKey
from nestrec.serving.kv_cache.host_prefix_cache import HostPrefixCache
from nestrec_bench.harness.clocks import ManualClock


def key_of(user):
    return CacheKey(str(user), "1", "config")


def make(max_bytes=100, ttl_s=10.0, give=lambda _: None):
    clock = ManualClock()
    return HostPrefixCache(max_bytes=max_bytes, ttl_s=ttl_s, clock=clock, give=give), clock


def spill(expander, user, version=0, num_bytes=40):
    kept = expander.begin_spill(key_of(user), length=version, content=b"%d" % version, num_bytes=num_bytes)
    if kept is not None:
        expander.finish_spill(kept, (user, version))
    return kept


def find(expander, user, version=0):
    return expander.find(key_of(user), lambda n: b"%d" % n if n <= version else None)


def test_one_copy_of_a_user_at_a_time():
    expander, _ = make()
    kept = expander.begin_spill(key_of(1), length=3, content=b"3", num_bytes=40)
    assert expander.begin_spill(key_of(1), length=4, content=b"4", num_bytes=40) is None
    assert find(expander, 1, 3) is None, "half a copy is not given out"
    expander.finish_spill(kept, "payload")
    assert find(expander, 1, 3).payload == "payload"
    expander.begin_reload(kept)
    assert find(expander, 1, 3) is None
    assert expander.finish_reload(kept)


def test_what_is_there_already_is_not_copied_again():
    expander, _ = make()
    assert spill(expander, 1, 3) is not None
    assert spill(expander, 1, 3) is None
    assert spill(expander, 1, 4) is not None
    assert expander.num_bytes == 40


def test_forgetting_during_a_copy_wins():
    expander, _ = make()
    spill(expander, 1)
    kept = find(expander, 1)
    expander.begin_reload(kept)
    expander.drop(key_of(1))
    assert not expander.finish_reload(kept)
    assert expander.num_bytes == 0
    assert kept.payload is None


def test_eviction_spares_what_is_being_read():
    expander, _ = make(max_bytes=100)
    spill(expander, 1)
    spill(expander, 2)
    expander.begin_reload(find(expander, 1))
    assert spill(expander, 3) is not None
    assert find(expander, 2) is None
    assert spill(expander, 4, num_bytes=70) is None, "no room without the pinned one"


def test_time_ends_an_entry():
    expander, clock = make(ttl_s=10.0)
    spill(expander, 1)
    spill(expander, 2)
    clock.sleep(10.0)
    assert find(expander, 1) is None
    assert find(expander, 2) is None
    assert expander.num_bytes == 0


def test_random_schedules_keep_bytes_order_and_single_flight():  # noqa: PLR0912
    for seed in range(10_000):
        rng = random.Random(seed)
        payloads, given = [], []
        expander, clock = make(max_bytes=rng.randint(30, 200), ttl_s=rng.uniform(1, 20), give=given.append)
        version = [0] * 5
        spilling, reloading = {}, {}
        for _ in range(25):
            user = rng.randrange(5)
            action = rng.randrange(6)
            if action == 0 and user not in reloading:
                version[user] += rng.random() < 0.5
                kept = expander.begin_spill(
                    key_of(user), length=version[user], content=b"%d" % version[user], num_bytes=rng.randint(10, 60)
                )
                assert not (kept is not None and user in spilling), "two copies of a user at once"
                if kept is not None:
                    spilling[user] = kept
            elif action == 1 and user in spilling:
                kept = spilling.pop(user)
                payloads.append((user, kept.length))
                expander.finish_spill(kept, payloads[-1])
            elif action == 2:
                kept = find(expander, user, version[user])
                if kept is not None:
                    assert user not in spilling
                    assert user not in reloading
                    assert kept.payload == (user, kept.length), "another user's or a half copied prefix"
                    expander.begin_reload(kept)
                    reloading[user] = kept
            elif action == 3 and user in reloading:
                kept = reloading.pop(user)
                was_dropped = kept.is_dropped
                assert kept.payload is not None, "evicted while it was read"
                assert expander.finish_reload(kept) != was_dropped
            elif action == 4:
                expander.drop(key_of(user))
            else:
                clock.sleep(rng.random() * 3)
            assert expander.num_bytes <= expander.max_bytes
        for user, kept in spilling.items():
            payloads.append((user, kept.length))
            expander.finish_spill(kept, payloads[-1])
        for kept in reloading.values():
            expander.finish_reload(kept)
        for kept in expander.entries():
            expander.drop(kept.key)
        assert expander.num_bytes == 0
        assert sorted(given) == sorted(payloads), "memory is given back once"
