"""The history store is killed, paused and filled under load: no response is wrong or late."""

import asyncio
import itertools
import random
import time

import httpx
import pytest
from operator_results import record
from redis_server import running_redis
from server_process import running_server

from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.history_store.history_store import HistoryStoreConfig
from nestrec.serving.history_store.redis_store import RedisHistoryStore
from nestrec_bench.harness.random_model import random_retrieval

NUM_USERS, NUM_ITEMS = 24, 200
EPSILON = 1e-5
TIMEOUT_S, GRACE_S = 2.0, 5.0
"""Timeout of a request, and the additional time that this process and a busy machine may need."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    encoder = HSTUConfig(dim=16, num_layers=2, num_heads=2, head_dim=8, max_length=64)
    write_servable(random_retrieval(encoder, num_items=NUM_ITEMS), folder)
    return folder


class Load:
    """Load generator: users with a stored history request by their id, and one user also writes events."""

    def __init__(self, client, expected, histories):
        self._client = client
        self._expected = expected
        self._histories = histories
        self.counts = dict.fromkeys(
            # Names of columns in docs/results/operator.json.
            ("answered", "refused", "wrong", "failed", "late", "fell_back", "refused_events"),
            0,
        )
        self.slowest_s = 0.0
        self.most_different = 0.0
        self.acknowledged = []
        self.is_over = False

    async def send_requests(self, user):
        rng = random.Random(user)
        while not self.is_over:
            body = {"user": user, "candidates": ["1", "2", "3"], "now_ms": 10**6, "timeout_ms": int(1000 * TIMEOUT_S)}
            if has_history := rng.random() < 0.2:
                body |= {"history": self._histories[user], "prefer_stored_history": True}
            start_s = time.monotonic()
            try:
                response = await self._client.post("/v1/rank", json=body)
            except httpx.HTTPError:
                self.counts["failed"] += 1
                continue
            took_s = time.monotonic() - start_s
            self.slowest_s = max(self.slowest_s, took_s)
            self.counts["late"] += took_s > TIMEOUT_S + GRACE_S
            if response.status_code == 200:
                self.counts["answered"] += 1
                self._compare(user, response.json()["scores"])
                self.counts["fell_back"] += has_history
            elif response.status_code in (429, 503) and "retry-after" in response.headers and not has_history:
                self.counts["refused"] += 1
                await asyncio.sleep(0.02)
            else:
                self.counts["failed"] += 1

    def _compare(self, user, scores):
        """Compare scores with the expected ones.

        Different batch sizes and a cached prefix change the rounding. A different history changes the scores by more.
        """
        (actual,) = scores.values()
        (expected,) = self._expected[user].values()
        difference = max(abs(a - b) for a, b in zip(actual, expected, strict=True))
        self.most_different = max(self.most_different, difference)
        self.counts["wrong"] += difference > EPSILON

    async def write_events(self):
        for number in range(10**9):
            if self.is_over:
                return
            event = {"items": [str(1 + number % NUM_ITEMS)], "times_ms": [number]}
            response = await self._client.post("/v1/events", json={"user": "writer", "history": event})
            if response.status_code == 202:
                self.acknowledged.append(number)
            self.counts["refused_events"] += response.status_code == 503
            await asyncio.sleep(0.02)


def history_of(user):
    rng = random.Random(user)
    times = sorted(rng.randrange(10**6) for _ in range(rng.randrange(5, 40)))
    return {"items": [str(rng.randrange(1, NUM_ITEMS + 1)) for _ in times], "times_ms": times}


async def cause_outages_under_load(port, redis, outage, times):
    """Cause an outage of the store several times under load.

    Args:
        port: Port of the server.
        redis: The store.
        outage: Names of the methods of `redis` that start and end the outage.
        times: Number of outages.

    Returns:
        The load generator with its counts.
    """
    histories = {str(user): history_of(user) for user in range(NUM_USERS)}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20.0) as client:
        expected = {}
        for user, history in histories.items():
            body = {"candidates": ["1", "2", "3"], "now_ms": 10**6}
            response = await client.post("/v1/rank", json={"user": f"{user}x", "history": history, **body})
            expected[user] = response.json()["scores"]
            assert (await client.post("/v1/events", json={"user": user, "history": history})).status_code == 202
        ordered = sorted(next(iter(scores.values())) for scores in expected.values())
        differences = [max(abs(a - b) for a, b in zip(*two, strict=True)) for two in itertools.pairwise(ordered)]
        assert min(differences) > 10 * EPSILON
        load = Load(client, expected, histories)
        tasks = [asyncio.create_task(load.send_requests(user)) for user in histories]
        tasks.append(asyncio.create_task(load.write_events()))
        for _ in range(times):
            answered = load.counts["answered"]
            while load.counts["answered"] < answered + 50:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(getattr(redis, outage[0]))
            refused = load.counts["refused"]
            end_s = time.monotonic() + 5.0
            refused_events = load.counts["refused_events"]
            while (
                time.monotonic() < end_s
                and load.counts["refused_events"] == refused_events
                and (load.counts["refused"] < refused + 20)
            ):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(getattr(redis, outage[1]))
        answered = load.counts["answered"]
        while load.counts["answered"] < answered + 100:
            await asyncio.sleep(0.01)
        load.is_over = True
        await asyncio.gather(*tasks)
        assert (await client.get("/health/live")).status_code == 200
    store = RedisHistoryStore(HistoryStoreConfig(url=redis.url, timeout_ms=5000.0))
    stored = (await store.get("writer", 5.0))["times_ms"]
    await store.close()
    assert stored == sorted(stored)
    assert set(load.acknowledged) <= set(stored), "acknowledged events are stored"
    assert len(load.acknowledged) > 10
    return load


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "outage", "times"),
    [("kill", ("kill", "start"), 20), ("pause", ("pause", "resume"), 20), ("full", ("fill", "empty"), 20)],
)
def test_history_store_outages_cause_no_wrong_or_late_response(model, tmp_path, kind, outage, times):
    with running_redis(tmp_path) as redis, running_server(model, "--history_store", redis.url) as (port, process):
        load = asyncio.run(cause_outages_under_load(port, redis, outage, times))
        assert process.poll() is None
    record(
        f"store under {kind}",
        times=times,
        **load.counts,
        slowest_ms=round(1000 * load.slowest_s, 1),
        deadline_ms=int(1000 * TIMEOUT_S),
        acknowledged_events=len(load.acknowledged),
        most_different=load.most_different,
    )
    assert load.counts["wrong"] == load.counts["failed"] == load.counts["late"] == 0
    assert load.counts["refused_events" if kind == "full" else "refused"] > 0
