"""The store of histories is killed, paused and filled while a server answers: nothing wrong, nothing late."""

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
"""grace: what this process and the machine may add"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    encoder = HSTUConfig(dim=16, num_layers=2, num_heads=2, head_dim=8, max_length=64)
    write_servable(random_retrieval(encoder, num_items=NUM_ITEMS), folder)
    return folder


class Load:
    """Users whose history is known ask by their id alone; one of them writes as well."""

    def __init__(self, client, expected, histories):
        self._client = client
        self._expected = expected
        self._histories = histories
        self.counts = dict.fromkeys(
            ("answered", "refused", "wrong", "failed", "late", "fell_back", "refused_events"), 0
        )
        self.slowest_s = 0.0
        self.most_different = 0.0
        self.acknowledged = []
        self.is_over = False

    async def ask(self, user):
        rng = random.Random(user)
        while not self.is_over:
            body = {"user": user, "candidates": ["1", "2", "3"], "now_ms": 10**6, "timeout_ms": int(1000 * TIMEOUT_S)}
            if brings := rng.random() < 0.2:
                body |= {"history": self._histories[user], "prefer_kept": True}
            start_s = time.monotonic()
            try:
                answer = await self._client.post("/v1/rank", json=body)
            except httpx.HTTPError:
                self.counts["failed"] += 1
                continue
            took_s = time.monotonic() - start_s
            self.slowest_s = max(self.slowest_s, took_s)
            self.counts["late"] += took_s > TIMEOUT_S + GRACE_S
            if answer.status_code == 200:
                self.counts["answered"] += 1
                self._compare(user, answer.json()["scores"])
                self.counts["fell_back"] += brings
            elif answer.status_code in (429, 503) and "retry-after" in answer.headers and not brings:
                self.counts["refused"] += 1
                await asyncio.sleep(0.02)
            else:
                self.counts["failed"] += 1

    def _compare(self, user, scores):
        """Batches of other sizes and a prefix that was kept round otherwise; another history gives other scores."""
        (found,) = scores.values()
        (expected,) = self._expected[user].values()
        difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        self.most_different = max(self.most_different, difference)
        self.counts["wrong"] += difference > EPSILON

    async def write(self):
        for number in range(10**9):
            if self.is_over:
                return
            event = {"items": [str(1 + number % NUM_ITEMS)], "times_ms": [number]}
            answer = await self._client.post("/v1/events", json={"user": "writer", "history": event})
            if answer.status_code == 202:
                self.acknowledged.append(number)
            self.counts["refused_events"] += answer.status_code == 503
            await asyncio.sleep(0.02)


def history_of(user):
    rng = random.Random(user)
    times = sorted(rng.randrange(10**6) for _ in range(rng.randrange(5, 40)))
    return {"items": [str(rng.randrange(1, NUM_ITEMS + 1)) for _ in times], "times_ms": times}


async def under_load(port, redis, disturb, kind, times):
    histories = {str(user): history_of(user) for user in range(NUM_USERS)}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20.0) as client:
        expected = {}
        for user, history in histories.items():
            body = {"candidates": ["1", "2", "3"], "now_ms": 10**6}
            asked = await client.post("/v1/rank", json={"user": f"{user}x", "history": history, **body})
            expected[user] = asked.json()["scores"]
            assert (await client.post("/v1/events", json={"user": user, "history": history})).status_code == 202
        kinds = sorted(next(iter(scores.values())) for scores in expected.values())
        assert (
            min(max(abs(a - b) for a, b in zip(*two, strict=True)) for two in itertools.pairwise(kinds)) > 10 * EPSILON
        )
        load = Load(client, expected, histories)
        tasks = [asyncio.create_task(load.ask(user)) for user in histories] + [asyncio.create_task(load.write())]
        for _ in range(times):
            answered = load.counts["answered"]
            while load.counts["answered"] < answered + 50:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(getattr(redis, disturb[0]))
            refused = load.counts["refused"]
            end_s = time.monotonic() + 5.0
            refused_events = load.counts["refused_events"]
            while (
                time.monotonic() < end_s
                and load.counts["refused_events"] == refused_events
                and (load.counts["refused"] < refused + 20)
            ):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(getattr(redis, disturb[1]))
        answered = load.counts["answered"]
        while load.counts["answered"] < answered + 100:
            await asyncio.sleep(0.01)
        load.is_over = True
        await asyncio.gather(*tasks)
        assert (await client.get("/health/live")).status_code == 200
    store = RedisHistoryStore(HistoryStoreConfig(url=redis.url, timeout_ms=5000.0))
    kept = (await store.get("writer", 5.0))["times_ms"]
    await store.close()
    assert kept == sorted(kept)
    assert set(load.acknowledged) <= set(kept), "what was acknowledged is there"
    assert len(load.acknowledged) > 10
    return load


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "disturb", "times"),
    [("kill", ("kill", "start"), 20), ("pause", ("pause", "resume"), 20), ("full", ("fill", "empty"), 20)],
)
def test_a_store_that_is_lost_time_and_again_makes_nothing_wrong_and_nothing_late(
    model, tmp_path, kind, disturb, times
):
    with running_redis(tmp_path) as redis, running_server(model, "--histories", redis.url) as (port, process):
        load = asyncio.run(under_load(port, redis, disturb, kind, times))
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
