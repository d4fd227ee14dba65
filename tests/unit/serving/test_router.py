"""Routing: affinity, bounded loads, and who moves when an instance dies."""

import math
import random

import pytest

from nestrec.serving.core.slot_router import KeyedHash, Ring, Route, Router, slot_for
from nestrec_bench.harness.clocks import ManualClock

KEYED = KeyedHash(b"secret")


def home(ring, user, alive):
    return slot_for(ring, KEYED.number("user", user), [0] * len(alive), alive, bound=10.0).slot


def test_only_the_lost_slots_users_move_and_they_return():
    ring = Ring.make(5, KEYED)
    users = [f"user {i}" for i in range(2_000)]
    before = {user: home(ring, user, [True] * 5) for user in users}
    after = {user: home(ring, user, [True, True, False, True, True]) for user in users}
    assert all(after[user] == before[user] for user in users if before[user] != 2)
    assert len({after[user] for user in users if before[user] == 2}) == 4, "they spread over the others"
    counts = [list(before.values()).count(slot) for slot in range(5)]
    assert max(counts) < 1.6 * 400


@pytest.mark.parametrize("num_schedules", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_no_slot_exceeds_its_bound_in_random_schedules(num_schedules):
    rings = {n: Ring.make(n, KEYED) for n in range(1, 7)}
    for seed in range(num_schedules):
        rng = random.Random(seed)
        num_slots = rng.randint(1, 6)
        bound = rng.choice([1.1, 1.25, 2.0])
        free_load = rng.choice([1, 1, 4])
        clock = ManualClock()
        router = Router(rings[num_slots], KEYED, clock, bound=bound, free_load=free_load, sticky_s=0.0)
        under_way = []
        for _ in range(25):
            clock.sleep(rng.random())
            action = rng.random()
            if action < 0.6:
                route = router.begin(str(rng.randrange(4)))
                if route is None:
                    assert not any(router.is_alive)
                    continue
                slot = route.slot
                assert router.is_alive[slot]
                under_way.append(slot)
                alive_load = sum(load for load, alive in zip(router.loads, router.is_alive, strict=True) if alive)
                most = max(free_load, math.ceil(bound * alive_load / sum(router.is_alive)))
                assert router.loads[slot] <= most
            elif action < 0.9 and under_way:
                router.end(under_way.pop(rng.randrange(len(under_way))))
            else:
                router.set_alive(rng.randrange(num_slots), rng.random() < 0.6)
        for slot in under_way:
            router.end(slot)
        assert router.loads == [0] * num_slots


def test_signal_and_request_take_the_same_way_though_loads_change():
    clock = ManualClock()
    router = Router(Ring.make(3, KEYED), KEYED, clock, bound=1.25, sticky_s=1.0)
    first = router.begin("a").slot
    router.loads[first] += 50
    assert router.begin("a") == Route(first, False)
    clock.sleep(1.0)
    diverted = router.begin("a")
    assert diverted.is_diverted
    assert diverted.slot != first
    assert router.begin("a") == diverted, "and says so as long as it takes that way"
    assert router.num_diverted == 1


def test_whoever_was_diverted_returns_once_the_load_is_gone():
    clock = ManualClock()
    router = Router(Ring.make(3, KEYED), KEYED, clock, bound=1.25, free_load=2, sticky_s=1.0)
    own = router.begin("a").slot
    router.end(own)
    clock.sleep(1.0)
    busy = [own] * 4
    for slot in busy:
        router.loads[slot] += 1
    assert router.begin("a").slot != own
    assert (router.num_diverted, router.num_leaked) == (1, 0)
    for slot in busy:
        router.end(slot)
    clock.sleep(1.0)
    assert router.begin("a") == Route(own, False)
    assert router.num_diverted == 1


def test_a_dead_slot_is_left_at_once_and_counted():
    clock = ManualClock()
    router = Router(Ring.make(3, KEYED), KEYED, clock, sticky_s=10.0)
    first = router.begin("a").slot
    router.set_alive(first, False)
    assert router.begin("a").slot != first
    assert router.num_leaked == 1
    for slot in range(3):
        router.set_alive(slot, False)
    assert router.begin("a") is None


def test_while_versions_differ_a_user_meets_that_of_its_own_slot_alone():
    """Whatever the loads: and once it has met the new one, it meets the old one never again."""
    rng = random.Random(4)
    clock = ManualClock()
    router = Router(Ring.make(4, KEYED), KEYED, clock, bound=1.1, free_load=1, sticky_s=1.0)
    users = [f"user {i}" for i in range(40)]
    seen = dict.fromkeys(users, "old")
    num_diverted = 0
    router.versions[:] = ["old"] * 4
    for version in [*(f"rolling {slot}" for slot in range(4)), "none"]:
        for turn in range(300):
            user = rng.choice(users)
            route = router.begin(user)
            num_diverted += route.is_diverted
            found = router.versions[route.slot]
            is_new = found == "new" or (found.startswith("rolling") and turn >= 150)  # it has it before it is known
            assert is_new or seen[user] == "old"
            seen[user] = "new" if is_new else "old"
            if rng.random() < 0.7:
                router.end(route.slot)
            if turn == 10 and version != "none":
                router.versions[int(version[-1])] = version
            clock.sleep(0.01)
        if version != "none":
            router.versions[int(version[-1])] = "new"
        router.loads[:] = [0] * 4
    assert set(seen.values()) == {"new"}
    assert num_diverted > 20
    router.set_alive(0, False)
    router.versions[:] = ["new", "old", "old", "old"]
    assert router.begin(next(u for u in users if home(Ring.make(4, KEYED), u, [True] * 4) == 0)) is not None


def test_users_keep_their_slots_when_there_are_more_or_fewer():
    router = Router(Ring.make(3, KEYED), KEYED, ManualClock(), free_load=1000)
    users = [f"user {i}" for i in range(2_000)]

    def slots():
        router._chosen.clear()
        found = {}
        for user in users:
            route = router.begin(user)
            router.end(route.slot)
            found[user] = route.slot
        return found

    three = slots()
    router.resize(4)
    assert slots() == three, "nobody is sent to one that is not ready"
    router.set_alive(3, True)
    four = slots()
    moved = [user for user in users if four[user] != three[user]]
    assert {four[user] for user in moved} == {3}
    assert 0.1 * len(users) < len(moved) < 0.4 * len(users)
    router.resize(3)
    assert slots() == three


def test_a_slot_that_was_taken_away_gets_nobody_though_its_instance_still_answers():
    router = Router(Ring.make(3, KEYED), KEYED, ManualClock())
    users = [str(number) for number in range(60)]
    last = [user for user in users if router.begin(user).slot == 2]
    assert last
    router.resize(2)
    router.set_alive(2, True)  # a probe of before is answered
    assert all(router.begin(user).slot < 2 for user in last), "their ways of before are remembered"
    router.resize(3)
    router.set_alive(2, True)
    assert router.is_alive == [True] * 3
