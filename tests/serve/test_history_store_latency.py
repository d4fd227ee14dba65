"""Histories of many users in the history store: read latency, and scores equal to those of full requests."""

import asyncio
import gc
import random
import time

import httpx
import numpy as np
import pytest
from operator_results import record
from redis_server import running_redis

from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.history_store.history_store import HistoryStoreConfig
from nestrec.serving.history_store.redis_store import RedisHistoryStore
from nestrec.serving.http.http_app import App
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_ranking

NUM_USERS = 10_000
NUM_EVENTS = 1_000
NUM_ITEMS = 1_000
EPSILON = 1e-5


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_redis(tmp_path_factory.mktemp("redis"), "--appendonly", "no") as server:
        yield server


def history_of(user, count):
    """Generate a history of `count` events; the result depends on the user only."""
    rng = np.random.default_rng(user)
    times = np.sort(rng.integers(1_600_000_000_000, 1_630_000_000_000, count)).tolist()
    items = rng.integers(1, NUM_ITEMS + 1, count)
    actions = rng.integers(0, 4, count)
    tabs = [("home", "search")[i] for i in rng.integers(0, 2, count)]
    return {"items": [*map(str, items)], "times_ms": times, "actions": actions.tolist(), "features": {"tab": tabs}}


def slice_of(history, part):
    """Return a slice of the events of a history."""
    plain = {name: history[name][part] for name in ("items", "times_ms", "actions")}
    return {**plain, "features": {"tab": history["features"]["tab"][part]}}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_history_store_reads_long_histories_quickly(server):
    cfg = HistoryStoreConfig(url=server.url, timeout_ms=5000.0)
    server.command("FLUSHALL")

    async def run():
        store = RedisHistoryStore(cfg)
        quarter = NUM_EVENTS // 4

        async def fill(first):
            for user in range(first, NUM_USERS, 4):
                history = history_of(user, NUM_EVENTS)
                for start in (0, 2 * quarter, quarter, 3 * quarter):  # the third append is of earlier events
                    await store.append(str(user), slice_of(history, slice(start, start + quarter)), 5.0)

        await asyncio.gather(*(fill(first) for first in range(4)))
        gc.collect()
        gc.freeze()  # as in a server: modules and models are never garbage
        rng = random.Random(1)
        latencies_s = []
        for number in range(20_000):
            user = rng.randrange(NUM_USERS)
            start_s = time.perf_counter()
            found = await store.get(str(user), 5.0)
            latencies_s.append(time.perf_counter() - start_s)
            if number % 1000 == 0:
                assert found == history_of(user, NUM_EVENTS)
        concurrent_latencies_s = []

        async def read(seed):
            rng = random.Random(seed)
            for _ in range(2_000):
                start_s = time.perf_counter()
                await store.get(str(rng.randrange(NUM_USERS)), 5.0)
                concurrent_latencies_s.append(time.perf_counter() - start_s)

        start_s = time.perf_counter()
        await asyncio.gather(*(read(seed) for seed in range(4)))
        rate = len(concurrent_latencies_s) / (time.perf_counter() - start_s)
        await store.close()
        gc.unfreeze()
        return latencies_s, concurrent_latencies_s, rate

    latencies_s, concurrent_latencies_s, rate = asyncio.run(run())
    stored_bytes = sum(int(server.command("STRLEN", f"nestrec:events:{user}")) for user in range(0, NUM_USERS, 100))
    p50, p99 = (float(np.quantile(latencies_s, q) * 1e3) for q in (0.5, 0.99))
    record(
        "reads of 10 million events",
        users=NUM_USERS,
        events=NUM_USERS * NUM_EVENTS,
        reads=len(latencies_s),
        p50_ms=round(p50, 3),
        p99_ms=round(p99, 3),
        p99_ms_of_four_at_once=round(float(np.quantile(concurrent_latencies_s, 0.99) * 1e3), 3),
        reads_a_second_of_four_at_once=round(rate),
        bytes_an_event=round(stored_bytes / (NUM_USERS // 100) / NUM_EVENTS, 2),
        store_mib=round(server.command("INFO", "memory")["used_memory"] / 2**20, 1),
    )
    assert p99 < 3.0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_history_store_scores_equal_those_of_sent_histories(server):
    server.command("FLUSHALL")
    encoder = HSTUConfig(dim=16, num_layers=2, num_heads=2, head_dim=8, max_length=128, time_bias=True)
    service = Service(
        {"ranking": random_ranking(encoder, num_items=NUM_ITEMS)},
        ServiceConfig(engine=EngineConfig(max_queue_delay_s=1e9)),
    )
    store = RedisHistoryStore(HistoryStoreConfig(url=server.url, timeout_ms=5000.0))
    app = App(service, LimitsConfig(default_timeout_ms=10_000), store)

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:

            async def compare(first):
                worst = 0.0
                spread = 0.0
                for user in range(first, NUM_USERS, 8):
                    history = history_of(user, 1 + user % 100)
                    cut = len(history["items"]) // 2
                    for part in (slice(cut, None), slice(cut)):  # the older half arrives last
                        if (events := slice_of(history, part))["items"]:
                            stored = await client.post("/v1/events", json={"user": user, "history": events})
                            assert stored.status_code == 202
                    query = {"candidates": ["1", "2", "3"], "context": {"tab": "home"}, "now_ms": 1_640_000_000_000}
                    if user % 2:
                        assert (await client.post("/v1/preinfer", json={"user": user})).status_code == 202
                    by_id = (await client.post("/v1/rank", json={"user": user, **query})).json()
                    full_request = {"user": f"{user}x", "history": history, **query}
                    by_history = (await client.post("/v1/rank", json=full_request)).json()
                    difference = [
                        np.abs(np.subtract(by_id["scores"][name], by_history["scores"][name])).max()
                        for name in by_history["scores"]
                    ]
                    worst = max(worst, *map(float, difference))
                    spread = max(spread, *(float(np.ptp(values)) for values in by_history["scores"].values()))
                return worst, spread

            found = await asyncio.gather(*(compare(first) for first in range(8)))
        await store.close()
        return max(worst for worst, _ in found), max(spread for _, spread in found)

    worst, spread = asyncio.run(run())
    service.close()
    record("scores by id", users=NUM_USERS, most_different=worst, spread_of_scores=spread)
    assert worst <= EPSILON
    assert spread > 100 * EPSILON
