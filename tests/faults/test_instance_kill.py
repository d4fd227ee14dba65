"""Instances that are killed under load: who fails, who moves, and who comes back."""

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
from nestrec.serving.fleet.readiness_probes import free_port, listens
from nestrec.serving.fleet.upstream_connection import Upstream
from nestrec_bench.harness.random_model import random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
NUM_INSTANCES = 3
NUM_USERS = 48
GAP_S = 0.02
PATIENCE_S = 200.0
"""for processes to start, on a machine that others share"""
pytestmark = pytest.mark.timeout(3 * PATIENCE_S)
BURST, FREE_LOAD = 6, 8
"""requests that a slot takes whatever the others do (router.py)"""


@dataclass(frozen=True)
class Seen:
    sent_s: float
    ended_s: float
    user: int
    status: int
    slot: int
    is_diverted: bool


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    """(port, process) of three instances behind the gateway."""
    folder = tmp_path_factory.mktemp("model") / "model"
    port = free_port()
    write_servable(random_retrieval(ENCODER, num_items=50), folder)
    command = [sys.executable, "-m", "nestrec", "serve", "--model", str(folder), "--port", str(port)]
    command += ["--instances", str(NUM_INSTANCES), "--front", "gateway"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    end_s = time.monotonic() + PATIENCE_S
    while not listens(port):
        assert process.poll() is None
        assert time.monotonic() < end_s, "the gateway does not listen"
        time.sleep(0.05)  # other processes start: there is no clock to inject
    yield port, process
    process.terminate()
    assert process.wait(60) == 0


def instance_of(process, slot):
    for child in psutil.Process(process.pid).children():
        if child.environ().get("NESTREC_SLOT") == str(slot):
            return child
    raise AssertionError(f"slot {slot} has no process")


async def ask(upstream, user):
    """A ranking request; its slot is -1 where it failed."""
    history = {"items": ["1", "2"], "times_ms": [1, 2]}
    body = {"user": f"u{user}", "history": history, "candidates": ["3", "4"], "timeout_ms": 10_000}
    sent_s = time.monotonic()
    response = await upstream.send("POST", b"/v1/rank", json.dumps(body).encode())
    slot = int(response.headers.get(b"x-nestrec-slot", b"-1"))
    is_diverted = response.headers.get(b"x-nestrec-diverted") == b"1"
    return Seen(sent_s, time.monotonic(), user, response.status, slot, is_diverted)


async def homes(upstream):
    return {user: (await ask(upstream, user)).slot for user in range(NUM_USERS)}


async def status(upstream):
    return json.loads((await upstream.send("GET", b"/v1/gateway")).body)


async def kill_one_under_load(upstream, process, slot, users):
    """Requests of all users at a steady rate; after half a second the instance of `slot`, which a few of its `users`
    have just asked at once, is gone."""
    killed_s = 0.0
    tasks = []
    start_s = time.monotonic()
    for number in range(int(2.5 / GAP_S)):
        await asyncio.sleep(max(0.0, start_s + number * GAP_S - time.monotonic()))
        tasks.append(asyncio.create_task(ask(upstream, number % NUM_USERS)))
        if not killed_s and number * GAP_S > 0.5:
            tasks += [asyncio.create_task(ask(upstream, user)) for user in users[:BURST]]
            await asyncio.sleep(0.002)  # they are on their way to it now
            instance_of(process, slot).send_signal(signal.SIGKILL)
            killed_s = time.monotonic()
    return killed_s, await asyncio.gather(*tasks)


def most_under_way(seen):
    """Requests at a time, as the client sees them: the gateway never has more."""
    moments = sorted([(s.sent_s, 1) for s in seen] + [(s.ended_s, -1) for s in seen])
    return max(itertools.accumulate(change for _, change in moments))


async def all_alive(upstream):
    """On a busy machine an instance may be late for the first questions: its users would have no home there."""
    end_s = time.monotonic() + PATIENCE_S
    while not all(alive := (await status(upstream))["alive"]):
        assert time.monotonic() < end_s, f"instances do not come: {alive}"
        await asyncio.sleep(0.1)


async def one_round(upstream, process, slot):
    await all_alive(upstream)
    before = await homes(upstream)
    counts = await status(upstream)
    users = [user for user, home in before.items() if home == slot]
    killed_s, seen = await kill_one_under_load(upstream, process, slot, users)
    in_flight = [s for s in seen if s.sent_s <= killed_s <= s.ended_s and before[s.user] == slot]
    failed = [s for s in seen if s.status != 200]
    assert len(failed) <= len(in_flight)
    assert all(s.status == 200 for s in seen if s.sent_s > killed_s + 1.0), "routing has recovered within a second"
    after = [s for s in seen if s.sent_s > killed_s and s.status == 200]
    assert all(s.slot == before[s.user] or s.is_diverted for s in after if before[s.user] != slot), "nobody else moved"
    moved = [s for s in after if before[s.user] == slot]
    assert moved
    assert all(s.slot != slot for s in moved if s.ended_s < killed_s + 0.5), "there was nobody to answer"
    now = await status(upstream)
    assert any(s.is_diverted for s in seen) <= (now["diverted"] > counts["diverted"]), "diversions are counted apart"
    if most_under_way(seen) <= FREE_LOAD:
        assert now["diverted"] == counts["diverted"], "below the bound nobody is diverted"
    assert now["failed_over"] > counts["failed_over"] or now["leaked"] > counts["leaked"]
    await all_alive(upstream)
    end_s = time.monotonic() + PATIENCE_S
    while await homes(upstream) != before:  # they return when their routes of the meantime expire
        assert time.monotonic() < end_s, "users have not come home"
        await asyncio.sleep(0.2)
    return {
        "requests": len(seen),
        "in_flight": len(in_flight),
        "failed": len(failed),
        "most_under_way": most_under_way(seen),
        "diverted": now["diverted"] - counts["diverted"],
        "moved": len({s.user for s in moved}),
        "slowest_s": max(s.ended_s - s.sent_s for s in seen),
        "home_after_s": time.monotonic() - killed_s,
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [1, 20])
def test_a_killed_instance_costs_at_most_its_requests_in_flight_and_only_its_users_move(gateway, count, capsys):
    port, process = gateway

    async def run():
        upstream = Upstream(port)
        rounds = [await one_round(upstream, process, number % NUM_INSTANCES) for number in range(count)]
        await upstream.close()
        return rounds

    rounds = asyncio.run(run())
    sums = {name: sum(r[name] for r in rounds) for name in ("requests", "in_flight", "failed", "diverted", "moved")}
    most = {name: round(max(r[name] for r in rounds), 2) for name in ("most_under_way", "slowest_s", "home_after_s")}
    with capsys.disabled():
        print(f"\n{count} kills: in all {sums}; at most {most}")
