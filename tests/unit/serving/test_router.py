"""Routing: session affinity, bounded loads, and users that move when an instance dies."""

import math
import random

import pytest

from nestrec.serving.core.slot_router import KeyedHash, Ring, Route, Router, slot_for
from nestrec_bench.harness.clocks import ManualClock

KEYED = KeyedHash(b"secret")


def home_slot(ring, user, alive):
    return slot_for(ring, KEYED.number("user", user), [0] * len(alive), alive, bound=10.0).slot


def test_router_moves_only_users_of_lost_slot():
    ring = Ring.make(5, KEYED)
    users = [f"user {i}" for i in range(2_000)]
    before = {user: home_slot(ring, user, [True] * 5) for user in users}
    after = {user: home_slot(ring, user, [True, True, False, True, True]) for user in users}
    assert all(after[user] == before[user] for user in users if before[user] != 2)
    assert len({after[user] for user in users if before[user] == 2}) == 4, (
        "the users must be spread over all other slots"
    )
    counts = [list(before.values()).count(slot) for slot in range(5)]
    assert max(counts) < 1.6 * 400


@pytest.mark.parametrize("num_schedules", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_router_bounded_load_holds_in_random_schedules(num_schedules):
    rings = {n: Ring.make(n, KEYED) for n in range(1, 7)}
    for seed in range(num_schedules):
        rng = random.Random(seed)
        num_slots = rng.randint(1, 6)
        bound = rng.choice([1.1, 1.25, 2.0])
        free_load = rng.choice([1, 1, 4])
        clock = ManualClock()
        router = Router(rings[num_slots], KEYED, clock, bound=bound, free_load=free_load, sticky_s=0.0)
        active = []
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
                active.append(slot)
                alive_load = sum(load for load, alive in zip(router.loads, router.is_alive, strict=True) if alive)
                limit = max(free_load, math.ceil(bound * alive_load / sum(router.is_alive)))
                assert router.loads[slot] <= limit
            elif action < 0.9 and active:
                router.end(active.pop(rng.randrange(len(active))))
            else:
                router.set_alive(rng.randrange(num_slots), rng.random() < 0.6)
        for slot in active:
            router.end(slot)
        assert router.loads == [0] * num_slots


def test_router_preinfer_and_request_use_same_slot():
    clock = ManualClock()
    router = Router(Ring.make(3, KEYED), KEYED, clock, bound=1.25, sticky_s=1.0)
    first = router.begin("a").slot
    router.loads[first] += 50
    assert router.begin("a") == Route(first, False)
    clock.sleep(1.0)
    diverted = router.begin("a")
    assert diverted.is_diverted
    assert diverted.slot != first
    assert router.begin("a") == diverted, "the route must be marked as diverted while it is used"
    assert router.num_diverted == 1


def test_router_diverted_users_return():
    clock = ManualClock()
    router = Router(Ring.make(3, KEYED), KEYED, clock, bound=1.25, free_load=2, sticky_s=1.0)
    home = router.begin("a").slot
    router.end(home)
    clock.sleep(1.0)
    busy = [home] * 4
    for slot in busy:
        router.loads[slot] += 1
    assert router.begin("a").slot != home
    assert (router.num_diverted, router.num_spilled) == (1, 0)
    for slot in busy:
        router.end(slot)
    clock.sleep(1.0)
    assert router.begin("a") == Route(home, False)
    assert router.num_diverted == 1


def test_router_leaves_dead_slot_at_once():
    clock = ManualClock()
    router = Router(Ring.make(3, KEYED), KEYED, clock, sticky_s=10.0)
    first = router.begin("a").slot
    router.set_alive(first, False)
    assert router.begin("a").slot != first
    assert router.num_spilled == 1
    for slot in range(3):
        router.set_alive(slot, False)
    assert router.begin("a") is None


def test_router_mixed_versions_keep_user_on_own_slot():
    """For any loads, a user that was routed to the new version is never routed to the old one again."""
    rng = random.Random(4)
    clock = ManualClock()
    router = Router(Ring.make(4, KEYED), KEYED, clock, bound=1.1, free_load=1, sticky_s=1.0)
    users = [f"user {i}" for i in range(40)]
    last_version = dict.fromkeys(users, "old")
    num_diverted = 0
    router.versions[:] = ["old"] * 4
    for version in [*(f"rolling {slot}" for slot in range(4)), "none"]:
        for turn in range(300):
            user = rng.choice(users)
            route = router.begin(user)
            num_diverted += route.is_diverted
            routed_version = router.versions[route.slot]
            is_new = routed_version == "new" or (
                routed_version.startswith("rolling") and turn >= 150
            )  # an instance may have the new version before the router knows it
            assert is_new or last_version[user] == "old"
            last_version[user] = "new" if is_new else "old"
            if rng.random() < 0.7:
                router.end(route.slot)
            if turn == 10 and version != "none":
                router.versions[int(version[-1])] = version
            clock.sleep(0.01)
        if version != "none":
            router.versions[int(version[-1])] = "new"
        router.loads[:] = [0] * 4
    assert set(last_version.values()) == {"new"}
    assert num_diverted > 20
    router.set_alive(0, False)
    router.versions[:] = ["new", "old", "old", "old"]
    assert router.begin(next(u for u in users if home_slot(Ring.make(4, KEYED), u, [True] * 4) == 0)) is not None


def test_router_resize_moves_few_users():
    router = Router(Ring.make(3, KEYED), KEYED, ManualClock(), free_load=1000)
    users = [f"user {i}" for i in range(2_000)]

    def slots():
        router._chosen.clear()
        routed_version = {}
        for user in users:
            route = router.begin(user)
            router.end(route.slot)
            routed_version[user] = route.slot
        return routed_version

    slots_of_three = slots()
    router.resize(4)
    assert slots() == slots_of_three, "a slot that is not ready must not get users"
    router.set_alive(3, True)
    slots_of_four = slots()
    moved = [user for user in users if slots_of_four[user] != slots_of_three[user]]
    assert {slots_of_four[user] for user in moved} == {3}
    assert 0.1 * len(users) < len(moved) < 0.4 * len(users)
    router.resize(3)
    assert slots() == slots_of_three


def test_router_removed_slot_gets_no_users():
    router = Router(Ring.make(3, KEYED), KEYED, ManualClock())
    users = [str(number) for number in range(60)]
    last = [user for user in users if router.begin(user).slot == 2]
    assert last
    router.resize(2)
    router.set_alive(2, True)  # a response to an earlier probe
    assert all(router.begin(user).slot < 2 for user in last), "cached routes to the removed slot must not be used"
    router.resize(3)
    router.set_alive(2, True)
    assert router.is_alive == [True] * 3
