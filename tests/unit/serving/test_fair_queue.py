"""Weighted fair queuing of device time, and the estimated queue delay."""

import random
from types import SimpleNamespace

import pytest

from nestrec.serving.engine.admission import QueueEstimate
from nestrec.serving.engine.fair_queue import FairQueue


def work(client, user, seconds, number=0):
    return SimpleNamespace(client=client, key=SimpleNamespace(user=user), seconds=seconds, number=number)


def make():
    return FairQueue(lambda request: request.seconds)


def serve(queue, count):
    """Return (client, user) of the next requests; each is computed at once and then requeued with the same cost."""
    served = []
    for _ in range(count):
        request = queue.pop()
        queue.charge(request, request.seconds)
        queue.requeue(request, is_unfinished=True)
        served.append((request.client, request.key.user))
    return served


def test_fair_queue_shares_device_time_between_clients():
    queue = make()
    for user in range(10):
        queue.push(work("many", str(user), 1.0))
    queue.push(work("one", "0", 5.0))
    served = serve(queue, 600)
    device_s = {
        name: sum((1.0 if client == "many" else 5.0) for client, _ in served if client == name)
        for name in ("many", "one")
    }
    assert abs(device_s["many"] - device_s["one"]) <= 10.0
    users = [user for client, user in served if client == "many"]
    assert max(map(users.count, set(users))) - min(map(users.count, set(users))) <= 1


def test_fair_queue_favors_light_clients_without_starvation():
    queue = make()
    for user in range(4):
        queue.push(work("c", f"long{user}", 10.0))
    order = []
    for number in range(200):  # a stream of users with one short request each
        queue.push(work("c", f"short{number}", 1.0))
        request = queue.pop()
        queue.charge(request, request.seconds)
        queue.requeue(request, is_unfinished=request.seconds == 10.0)
        order.append(request.key.user)
    assert order[:3] == ["short0", "short1", "short2"]
    for user in range(4):
        assert f"long{user}" in order


def test_fair_queue_order_of_chunked_requests():
    """If chunks of the requests alternated, all of them would end late."""
    queue = FairQueue(lambda request: min(request.seconds, 1.0), lambda request: request.seconds)
    remaining_s = {"a": 4.0, "b": 4.0, "short": 0.5}
    queue.push(work("c", "a", 4.0))
    order = []
    while remaining_s:
        request = queue.pop()
        user = request.key.user
        queue.charge(request, min(1.0, remaining_s[user]))
        remaining_s[user] -= min(1.0, remaining_s[user])
        if not remaining_s[user]:
            del remaining_s[user]
        queue.requeue(request, is_unfinished=user in remaining_s)
        order.append(user)
        if len(order) == 1:
            queue.push(work("c", "b", 4.0))
        if len(order) == 2:
            queue.push(work("c", "short", 0.5))
    assert order == ["a", "a", "short", "a", "a", "b", "b", "b", "b"]


def test_fair_queue_keeps_order_per_user():
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
            batch = []
            while queue and rng.random() < 0.6:
                batch.append(queue.pop())
                queue.charge(batch[-1], rng.choice([0.0, rng.random()]))
            assert len({(request.client, request.key.user) for request in batch}) == len(batch), (
                "a batch may contain only one request per user"
            )
            for request in batch:
                is_unfinished = rng.random() < 0.3
                queue.requeue(request, is_unfinished=is_unfinished)
                if not is_unfinished:
                    name = (request.client, request.key.user)
                    assert last.get(name, 0) < request.number
                    last[name], num_served = request.number, num_served + 1
            waiting = num_pushed - num_served
            assert len(queue) == len(list(queue)) == waiting
            assert bool(queue) == (waiting > 0)


def test_fair_queue_wait_estimate_is_bounded():
    estimate = QueueEstimate()
    assert estimate.completion_s("a", "u", 2.0) == 2.0
    estimate.add("a", "u", 10.0)
    assert estimate.completion_s("b", "v", 1.0) == 2.0, "the client gets half of the device until its request is done"
    assert estimate.completion_s("b", "v", 30.0) == 40.0, "all queued work is computed before a long request ends"
    assert estimate.completion_s("a", "w", 1.0) == estimate.completion_s("a", None, 1.0) == 2.0, (
        "other users of the client have the same delay as other clients"
    )
    assert estimate.completion_s("a", "u", 1.0) == 11.0, "requests of one user are computed in order"
    estimate.add("b", "v", 1.0)
    assert estimate.completion_s("a", "w", 1.0) == pytest.approx(4.0)
    estimate.remove("a", "u", 10.0)
    estimate.remove("b", "v", 1.0)
    assert (estimate.seconds, estimate.num_requests, estimate.completion_s("b", "v", 1.0)) == (0.0, 0, 1.0)


def test_fair_queue_wait_estimate_limits_preinfer_requests():
    estimate = QueueEstimate(max_preinfer_s=0.5)
    for _ in range(100):
        estimate.add_preinfer(0.2)
    assert estimate.completion_s("a", "u", 1.0) == pytest.approx(1.5), (
        "only the pre-infer time that a batch may contain counts"
    )
    assert estimate.queue_delay_s == pytest.approx(0.5)
    estimate.add("a", "u", 2.0)
    assert estimate.completion_s("b", "v", 3.0) == pytest.approx(5.5)
    assert (estimate.seconds, estimate.num_requests) == (pytest.approx(22.0), 101)
    for _ in range(100):
        estimate.remove_preinfer(0.2)
    assert (estimate.preinfer_s, estimate.num_requests) == (0.0, 1)
    estimate.remove("a", "u", 2.0)
    assert (estimate.seconds, estimate.num_requests) == (0.0, 0)
