"""Shares of the device's time, and what is expected of them."""

import random
from types import SimpleNamespace

import pytest

from nestrec.serving.engine.admission import QueueEstimate
from nestrec.serving.engine.fair_queue import FairQueue


def work(client, user, seconds, number=0):
    return SimpleNamespace(client=client, key=SimpleNamespace(user=user), seconds=seconds, number=number)


def make():
    return FairQueue(lambda asked: asked.seconds)


def serve(queue, count):
    """(client, user) of the next, each computed at once; who is popped comes back with as much as before."""
    served = []
    for _ in range(count):
        asked = queue.pop()
        queue.charge(asked, asked.seconds)
        queue.settle(asked, is_left=True)
        served.append((asked.client, asked.key.user))
    return served


def test_clients_share_the_device_by_seconds_and_not_by_requests_or_users():
    queue = make()
    for user in range(10):
        queue.push(work("many", str(user), 1.0))
    queue.push(work("one", "0", 5.0))
    served = serve(queue, 600)
    given = {
        name: sum((1.0 if client == "many" else 5.0) for client, _ in served if client == name)
        for name in ("many", "one")
    }
    assert abs(given["many"] - given["one"]) <= 10.0
    users = [user for client, user in served if client == "many"]
    assert max(map(users.count, set(users))) - min(map(users.count, set(users))) <= 1


def test_whoever_asks_for_less_goes_first_and_nobody_waits_for_ever():
    queue = make()
    for user in range(4):
        queue.push(work("c", f"long{user}", 10.0))
    order = []
    for number in range(200):  # a stream of users who ask for little, once
        queue.push(work("c", f"short{number}", 1.0))
        asked = queue.pop()
        queue.charge(asked, asked.seconds)
        queue.settle(asked, is_left=asked.seconds == 10.0)
        order.append(asked.key.user)
    assert order[:3] == ["short0", "short1", "short2"]
    for user in range(4):
        assert f"long{user}" in order


def test_a_request_in_pieces_goes_on_before_equal_ones_and_behind_shorter_ones():
    """Taking turns piece by piece, all of them would end late."""
    queue = FairQueue(lambda asked: min(asked.seconds, 1.0), lambda asked: asked.seconds)
    left = {"a": 4.0, "b": 4.0, "short": 0.5}
    queue.push(work("c", "a", 4.0))
    order = []
    while left:
        asked = queue.pop()
        user = asked.key.user
        queue.charge(asked, min(1.0, left[user]))
        left[user] -= min(1.0, left[user])
        if not left[user]:
            del left[user]
        queue.settle(asked, is_left=user in left)
        order.append(user)
        if len(order) == 1:
            queue.push(work("c", "b", 4.0))
        if len(order) == 2:
            queue.push(work("c", "short", 0.5))
    assert order == ["a", "a", "short", "a", "a", "b", "b", "b", "b"]


def test_requests_of_a_user_keep_their_order_and_none_is_lost_over_random_schedules():
    for seed in range(30):
        rng = random.Random(seed)
        queue = make()
        waiting = 0
        last = {}
        num_pushed = 0
        num_served = 0
        for _ in range(300):
            if rng.random() < 0.5:
                num_pushed += 1
                queue.push(work(rng.choice("ab"), rng.choice("xyz"), rng.random(), num_pushed))
            taken = []
            while queue and rng.random() < 0.6:
                taken.append(queue.pop())
                queue.charge(taken[-1], rng.choice([0.0, rng.random()]))
            assert len({(asked.client, asked.key.user) for asked in taken}) == len(taken), "a user once in a batch"
            for asked in taken:
                is_left = rng.random() < 0.3
                queue.settle(asked, is_left=is_left)
                if not is_left:
                    name = (asked.client, asked.key.user)
                    assert last.get(name, 0) < asked.number
                    last[name], num_served = asked.number, num_served + 1
            waiting = num_pushed - num_served
            assert len(queue) == len(list(queue)) == waiting
            assert bool(queue) == (waiting > 0)


def test_what_a_request_waits_for_is_its_share_or_all_there_is():
    backlog = QueueEstimate()
    assert backlog.expected_s("a", "u", 2.0) == 2.0
    backlog.add("a", "u", 10.0)
    assert backlog.expected_s("b", "v", 1.0) == 2.0, "half of the device until it is done"
    assert backlog.expected_s("b", "v", 30.0) == 40.0, "all there is"
    assert backlog.expected_s("a", "w", 1.0) == backlog.expected_s("a", None, 1.0) == 2.0, "as of another client"
    assert backlog.expected_s("a", "u", 1.0) == 11.0, "behind its own"
    backlog.add("b", "v", 1.0)
    assert backlog.expected_s("a", "w", 1.0) == pytest.approx(4.0)
    backlog.remove("a", "u", 10.0)
    backlog.remove("b", "v", 1.0)
    assert (backlog.seconds, backlog.num_works, backlog.expected_s("b", "v", 1.0)) == (0.0, 0, 1.0)


def test_signals_are_no_reason_to_refuse_a_request_that_goes_before_them():
    backlog = QueueEstimate(most_signals_s=0.5)
    for _ in range(100):
        backlog.add_signal(0.2)
    assert backlog.expected_s("a", "u", 1.0) == pytest.approx(1.5), "what a batch may have of them"
    assert backlog.before_request_s == pytest.approx(0.5)
    backlog.add("a", "u", 2.0)
    assert backlog.expected_s("b", "v", 3.0) == pytest.approx(5.5)
    assert (backlog.seconds, backlog.num_works) == (pytest.approx(22.0), 101)
    for _ in range(100):
        backlog.remove_signal(0.2)
    assert (backlog.signals_s, backlog.num_works) == (0.0, 1)
    backlog.remove("a", "u", 2.0)
    assert (backlog.seconds, backlog.num_works) == (0.0, 0)
