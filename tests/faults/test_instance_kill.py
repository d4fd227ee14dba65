"""Instances behind a gateway are killed under load: failed requests, moved users, and their return."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil
import pytest

from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.fleet.readiness_probes import free_port, is_listening
from nestrec.serving.fleet.upstream_connection import Upstream
from nestrec_bench.harness.random_model import random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
NUM_INSTANCES = 3
NUM_USERS = 48
GAP_S = 0.02
START_TIMEOUT_S = 200.0
"""Time limit for the start of processes, long enough for a busy machine."""
pytestmark = pytest.mark.timeout(3 * START_TIMEOUT_S)
BURST, UNBOUNDED_LOAD = 6, 8
"""Number of requests in a burst, and number of requests that a slot accepts regardless of the load of others."""


@dataclass(frozen=True)
class RankResult:
    """Times, status and route of a ranking request."""

    sent_s: float
    ended_s: float
    user: int
    status: int
    slot: int
    is_diverted: bool


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """Yield the port and the process of a gateway with three instances."""
    folder = tmp_path_factory.mktemp("model") / "model"
    port = free_port()
    write_servable(random_retrieval(ENCODER, num_items=50), folder)
    command = [sys.executable, "-m", "nestrec", "serve", "--model", str(folder), "--port", str(port)]
    command += ["--num_instances", str(NUM_INSTANCES), "--load_balancer", "gateway"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    end_s = time.monotonic() + START_TIMEOUT_S
    while not is_listening(port):
        assert process.poll() is None
        assert time.monotonic() < end_s, "the gateway does not listen"
        time.sleep(0.05)  # other processes start, so no clock can be injected
    yield port, process
    process.terminate()
    assert process.wait(60) == 0


def instance_of(process, slot):
    for child in psutil.Process(process.pid).children():
        if child.environ().get("NESTREC_SLOT") == str(slot):
            return child
    raise AssertionError(f"slot {slot} has no process")


async def send_rank_request(upstream, user):
    """Send a ranking request; the slot of the result is -1 if the request failed."""
    history = {"items": ["1", "2"], "times_ms": [1, 2]}
    body = {"user": f"u{user}", "history": history, "candidates": ["3", "4"], "timeout_ms": 10_000}
    sent_s = time.monotonic()
    response = await upstream.send("POST", b"/v1/rank", json.dumps(body).encode())
    slot = int(response.headers.get(b"x-nestrec-slot", b"-1"))
    is_diverted = response.headers.get(b"x-nestrec-diverted") == b"1"
    return RankResult(sent_s, time.monotonic(), user, response.status, slot, is_diverted)


async def home_slots(upstream):
    """Return the slot of each user."""
    return {user: (await send_rank_request(upstream, user)).slot for user in range(NUM_USERS)}


async def gateway_status(upstream):
    return json.loads((await upstream.send("GET", b"/v1/gateway")).body)


async def kill_one_under_load(upstream, process, slot, users):
    """Send requests of all users at a constant rate, and kill the instance of `slot` after half a second.

    Immediately before the kill, some of its `users` send a burst of requests.

    Returns:
        Time of the kill, and the results of all requests.
    """
    killed_s = 0.0
    tasks = []
    start_s = time.monotonic()
    for number in range(int(2.5 / GAP_S)):
        await asyncio.sleep(max(0.0, start_s + number * GAP_S - time.monotonic()))
        tasks.append(asyncio.create_task(send_rank_request(upstream, number % NUM_USERS)))
        if not killed_s and number * GAP_S > 0.5:
            tasks += [asyncio.create_task(send_rank_request(upstream, user)) for user in users[:BURST]]
            await asyncio.sleep(0.002)  # the requests are sent to the instance during this time
            instance_of(process, slot).send_signal(signal.SIGKILL)
            killed_s = time.monotonic()
    return killed_s, await asyncio.gather(*tasks)


def max_in_flight(results):
    """Return the maximum number of concurrent requests of the client, which is an upper bound of the gateway's."""
    changes = sorted([(r.sent_s, 1) for r in results] + [(r.ended_s, -1) for r in results])
    return max(itertools.accumulate(change for _, change in changes))


async def wait_until_all_alive(upstream):
    """Wait for all instances, because users have no home slot on an instance that is not ready on a busy machine."""
    end_s = time.monotonic() + START_TIMEOUT_S
    while not all(alive := (await gateway_status(upstream))["alive"]):
        assert time.monotonic() < end_s, f"instances do not start: {alive}"
        await asyncio.sleep(0.1)


async def check_kill(upstream, process, slot):
    """Kill an instance under load, check the results, and return its measurements."""
    await wait_until_all_alive(upstream)
    before = await home_slots(upstream)
    counts = await gateway_status(upstream)
    users = [user for user, home in before.items() if home == slot]
    killed_s, results = await kill_one_under_load(upstream, process, slot, users)
    in_flight = [r for r in results if r.sent_s <= killed_s <= r.ended_s and before[r.user] == slot]
    failed = [r for r in results if r.status != 200]
    assert len(failed) <= len(in_flight)
    assert all(r.status == 200 for r in results if r.sent_s > killed_s + 1.0), "routing has recovered within a second"
    after = [r for r in results if r.sent_s > killed_s and r.status == 200]
    others = [r for r in after if before[r.user] != slot]
    assert all(r.slot == before[r.user] or r.is_diverted for r in others), "other users have not moved"
    moved = [r for r in after if before[r.user] == slot]
    assert moved
    assert all(r.slot != slot for r in moved if r.ended_s < killed_s + 0.5), "the instance was not running"
    now = await gateway_status(upstream)
    assert any(r.is_diverted for r in results) <= (now["diverted"] > counts["diverted"]), "diversions are counted"
    if max_in_flight(results) <= UNBOUNDED_LOAD:
        assert now["diverted"] == counts["diverted"], "below the bound, no request is diverted"
    assert now["failed_over"] > counts["failed_over"] or now["spilled"] > counts["spilled"]
    await wait_until_all_alive(upstream)
    end_s = time.monotonic() + START_TIMEOUT_S
    while await home_slots(upstream) != before:  # users return when their temporary routes expire
        assert time.monotonic() < end_s, "users have not returned"
        await asyncio.sleep(0.2)
    return {
        "requests": len(results),
        "in_flight": len(in_flight),
        "failed": len(failed),
        "max_in_flight": max_in_flight(results),
        "diverted": now["diverted"] - counts["diverted"],
        "moved": len({r.user for r in moved}),
        "slowest_s": max(r.ended_s - r.sent_s for r in results),
        "home_after_s": time.monotonic() - killed_s,
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [1, 20])
def test_instance_kill_loses_only_requests_in_flight(gateway, count, capsys):
    port, process = gateway

    async def run():
        upstream = Upstream(port)
        rounds = [await check_kill(upstream, process, number % NUM_INSTANCES) for number in range(count)]
        await upstream.close()
        return rounds

    rounds = asyncio.run(run())
    sums = {name: sum(r[name] for r in rounds) for name in ("requests", "in_flight", "failed", "diverted", "moved")}
    maxima = {name: round(max(r[name] for r in rounds), 2) for name in ("max_in_flight", "slowest_s", "home_after_s")}
    with capsys.disabled():
        print(f"\n{count} kills: total {sums}; maximum {maxima}")
