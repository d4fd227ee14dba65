"""Histories in a store that instances share: a real server, which is also killed, paused and filled."""

import asyncio
import random
from dataclasses import replace

import httpx
import pytest
from redis_server import running_redis

from nestrec.base.errors import UserError
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.history_store.history_store import HistoryStoreConfig, HistoryStoreUnavailableError
from nestrec.serving.history_store.memory_store import MemoryHistoryStore, make_store
from nestrec.serving.history_store.redis_store import CircuitBreaker, RedisHistoryStore
from nestrec.serving.http.http_app import App
from nestrec_bench.harness.clocks import ManualClock

PATIENCE_S = 60.0
LIMITS = LimitsConfig(default_timeout_ms=10_000)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def cfg(server):
    server.command("FLUSHALL")
    return HistoryStoreConfig(url=server.url, timeout_ms=1000.0 * PATIENCE_S)


def events(*times):
    return {"items": [str(t) for t in times], "times_ms": list(times)}


def using(*configs, use):
    """What `use(stores...)` gives, inside of an event loop."""

    async def run():
        stores = [make_store(cfg) for cfg in configs]
        try:
            return await use(*stores)
        finally:
            for store in stores:
                await store.close()

    return asyncio.run(run())


def answered(service, stores, ask):
    """What `ask(client, client, ...)` gives, with an instance over each store."""

    async def run():
        apps = [App(service, LIMITS, store) for store in stores]
        clients = [httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") for app in apps]
        try:
            return await ask(*clients)
        finally:
            for client, store in zip(clients, stores, strict=True):
                await client.aclose()
                await store.close()

    return asyncio.run(run())


@pytest.mark.parametrize("is_shared", [False, True])
def test_stores_keep_the_same(cfg, is_shared):
    """Additions of random sizes, one in five of them late, against a list."""
    cfg = cfg if is_shared else replace(cfg, url="")

    async def use(store):
        rng = random.Random(3)
        kept = []
        for number in range(120):
            times = [max(0, number - (rng.randrange(50) if rng.random() < 0.2 else 0))] * rng.choice([1, 1, 2, 5])
            rows = [
                (f"{number}-{i}", t, rng.choice([0, "click", ["a"], None]), rng.choice(["x", None]))
                for i, t in enumerate(times)
            ]
            items, times, actions, tabs = (list(column) for column in zip(*rows, strict=True))
            await store.append(
                "a", {"items": items, "times_ms": times, "actions": actions, "features": {"tab": tabs}}, PATIENCE_S
            )
            kept = sorted([*kept, *rows], key=lambda row: row[1])
        found = await store.get("a", PATIENCE_S)
        columns = (found["items"], found["times_ms"], found["actions"], found["features"]["tab"])
        assert list(zip(*columns, strict=True)) == kept
        await store.forget("a", PATIENCE_S)
        assert await store.get("a", PATIENCE_S) is None

    using(cfg, use=use)


def test_several_writers_lose_nothing(cfg, server):
    """Each appends through a store of its own while parts are put together under them."""

    async def use(*stores):
        async def write(number, store):
            for turn in range(150):
                await store.append("a", {"items": [f"{number}-{turn}-{'x' * 60}"], "times_ms": [turn]}, PATIENCE_S)

        await asyncio.gather(*(write(number, store) for number, store in enumerate(stores)))
        found = await stores[0].get("a", PATIENCE_S)
        assert sorted(found["items"]) == sorted(f"{n}-{t}-{'x' * 60}" for n in range(3) for t in range(150))
        assert found["times_ms"] == sorted(found["times_ms"])
        assert sum(store.counts["tidied"] for store in stores) > 0

    using(cfg, cfg, cfg, use=use)


def test_bytes_events_and_life_of_a_user_are_bounded(cfg, server):
    cfg = replace(cfg, max_user_bytes=3000, max_events=40, ttl_s=1000.0)

    async def use(store):
        for number in range(80):
            await store.append("a", {"items": ["x" * 100 + str(number)], "times_ms": [number]}, PATIENCE_S)
            if number % 7 == 0:
                assert server.command("STRLEN", "nestrec:events:a") <= 3000
        times = (await store.get("a", PATIENCE_S))["times_ms"]
        assert times == list(range(80 - len(times), 80))
        assert 10 <= len(times) <= 40
        assert 990_000 < server.command("PTTL", "nestrec:events:a") <= 1_000_000

    using(cfg, use=use)


def test_reads_are_one_trip_for_all_who_wait_and_never_two_for_a_user(cfg):
    async def use(store, other):
        for user in range(40):
            await store.append(str(user), events(user), PATIENCE_S)
        before = store.counts["round_trips"]
        found = await asyncio.gather(*(store.get(str(user % 40), PATIENCE_S) for user in range(400)))
        assert [history["times_ms"] for history in found] == [[user % 40] for user in range(400)]
        assert store.counts["round_trips"] - before <= 11
        assert store.counts["reads"] <= 80, "who asked while a trip was under way shares one more"
        # Whoever asks after a write sees it, though an older trip may still be under way.
        for turn in range(100, 150):
            early = asyncio.create_task(store.get("0", PATIENCE_S))
            await asyncio.sleep(0)
            await other.append("0", events(turn), PATIENCE_S)
            assert (await store.get("0", PATIENCE_S))["times_ms"][-1] == turn
            await early

    using(cfg, cfg, use=use)


def test_a_history_of_another_user_is_refused(cfg, server):
    async def use(store):
        await store.append("a", events(1), PATIENCE_S)
        server.command("COPY", "nestrec:events:a", "nestrec:events:b")
        with pytest.raises(HistoryStoreUnavailableError, match="cannot be read"):
            await store.get("b", PATIENCE_S)

    using(cfg, use=use)


def test_instances_share_what_they_are_told_and_an_id_is_enough(cfg, service):
    history = events(1, 2, 3)

    async def ask(one, other):
        for client, part in ((one, events(2, 3)), (other, events(1))):
            assert (await client.post("/v1/events", json={"user": 7, "history": part})).status_code == 202
        asked = {"candidates": ["4", "5"], "now_ms": 9}
        expected = (await one.post("/v1/rank", json={"user": 8, "history": history, **asked})).json()
        for client in (one, other):
            assert (await client.post("/v1/preinfer", json={"user": "7"})).status_code == 202
            assert (await client.post("/v1/rank", json={"user": "7", **asked})).json() == expected
            recommended = await client.post("/v1/recommend", json={"user": 7, "k": 3})
            assert (recommended.status_code, len(recommended.json()["items"])) == (200, 3)
        assert (await other.delete("/v1/users/7/events")).status_code == 204
        assert (await one.post("/v1/recommend", json={"user": 7})).status_code == 400, "it is forgotten everywhere"

    answered(service, [RedisHistoryStore(cfg), RedisHistoryStore(cfg)], ask)


@pytest.mark.parametrize("end", ["kill", "pause"])
def test_requests_without_the_store_are_rejected_in_time(cfg, server, service, end):
    # The clock stands still, so that no pause of the circuit breaker ends by itself: a store that is paused executes
    # later what it was sent.
    clock = ManualClock()
    stores = [RedisHistoryStore(each, clock) for each in (cfg, replace(cfg, timeout_ms=100.0))]
    short = {"candidates": ["4", "5"], "now_ms": 9}

    async def ask(patient, client):
        await patient.post("/v1/events", json={"user": 1, "history": events(1, 2, 3)})
        before = (await patient.post("/v1/rank", json={"user": 1, **short})).json()["scores"]
        getattr(server, end)()
        brought = (await client.post("/v1/rank", json={"user": 2, "history": events(3), **short})).json()["scores"]
        before_end = stores[1].counts["round_trips"]
        for path, body in (
            ("/v1/rank", short),
            ("/v1/recommend", {}),
            ("/v1/preinfer", {}),
            ("/v1/events", {"history": events(4)}),
        ) * 5:
            refused = await client.post(path, json={"user": 1, **body})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), path
            assert "store of histories" in refused.json()["error"]["message"]
        assert (await client.delete("/v1/users/1/events")).status_code == 503
        round_trips = stores[1].counts["round_trips"] - before_end
        assert round_trips == (1 if end == "kill" else 3), "all others are refused without waiting"
        fallen = {"user": 1, "history": events(3), "prefer_kept": True, **short}
        assert (await client.post("/v1/rank", json=fallen)).json()["scores"] == brought
        server.start() if end == "kill" else server.resume()
        for instance in (client, patient):
            while (await instance.post("/v1/rank", json={"user": 1, "candidates": ["4"]})).status_code == 503:
                clock.sleep(1.0)
        assert (await patient.post("/v1/rank", json={"user": 1, **short})).json()["scores"] == before

    answered(service, stores, ask)


def test_an_answer_that_comes_late_is_not_taken_for_that_of_another(cfg, server):
    async def use(store):
        for user in ("a", "b"):
            await store.append(user, events(ord(user)), PATIENCE_S)
        for _ in range(2):  # fewer than make the store seem gone
            server.pause()
            store._timeout_s = 0.1
            with pytest.raises(HistoryStoreUnavailableError, match="in time"):
                await store.get("a", PATIENCE_S)
            store._timeout_s = PATIENCE_S
            reading = asyncio.create_task(store.get("b", PATIENCE_S))
            await asyncio.sleep(0)
            server.resume()
            assert (await reading)["times_ms"] == [ord("b")]

    using(cfg, use=use)


@pytest.mark.parametrize("ttl_s", [100.0, None])
def test_a_full_store_takes_no_events_and_is_read_all_the_same(cfg, server, service, ttl_s, caplog):
    async def ask(client):
        await client.post("/v1/events", json={"user": 1, "history": events(1, 2)})
        before = (await client.post("/v1/rank", json={"user": 1, "candidates": ["4"], "now_ms": 9})).json()
        server.fill()
        try:
            refused = await client.post("/v1/events", json={"user": 1, "history": events(3)})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            found = await client.post("/v1/rank", json={"user": 1, "candidates": ["4"], "now_ms": 9})
            assert found.json() == before
            assert (await client.delete("/v1/users/1/events")).status_code == 204, "there is always room to forget"
        finally:
            server.empty()
        assert (await client.post("/v1/events", json={"user": 1, "history": events(3)})).status_code == 202

    answered(service, [RedisHistoryStore(replace(cfg, ttl_s=ttl_s))], ask)
    assert "OutOfMemoryError" in caplog.text, "why, to the operator"


@pytest.mark.parametrize("ttl_s", [100.0, None])
def test_store_key_of_another_type_is_an_error(cfg, server, service, ttl_s, caplog):
    server.command("LPUSH", "nestrec:events:1", "x")
    asked = {"candidates": ["4"], "now_ms": 9}

    async def ask(client):
        assert (await client.post("/v1/events", json={"user": 2, "history": events(1, 2)})).status_code == 202
        bodies = [{"user": user, **asked} for user in (1, 2, 1, 2, 3)]
        found = await asyncio.gather(*(client.post("/v1/rank", json=body) for body in bodies))
        nobody = found.pop()
        assert [answer.status_code for answer in found] == [503, 200, 503, 200], "others are read in the same trip"
        assert nobody.status_code in (200, 400)
        assert "cannot be read; erase it" in found[0].json()["error"]["message"]
        refused = await client.post("/v1/events", json={"user": 1, "history": events(3)})
        assert refused.status_code == 503
        assert "cannot be read; erase it" in refused.json()["error"]["message"]
        brought = {"user": 1, "history": events(1, 2), "prefer_kept": True, **asked}
        assert (await client.post("/v1/rank", json=brought)).status_code == 200
        assert (await client.delete("/v1/users/1/events")).status_code == 204
        assert (await client.post("/v1/events", json={"user": 1, "history": events(3)})).status_code == 202
        assert (await client.post("/v1/rank", json={"user": 1, **asked})).status_code == 200

    answered(service, [RedisHistoryStore(replace(cfg, ttl_s=ttl_s))], ask)
    assert "WRONGTYPE" in caplog.text, "why, to the operator"


@pytest.mark.parametrize("ttl_s", [100.0, None])
def test_store_refusal_is_logged_with_its_reason(cfg, server, ttl_s, caplog):
    """The server refuses all writes; neither the user nor the events are in the log."""

    async def use(store):
        server.command("CONFIG", "SET", "min-replicas-to-write", "1")
        try:
            with pytest.raises(HistoryStoreUnavailableError, match="takes nothing now"):
                await store.append("somebody", events(1), PATIENCE_S)
        finally:
            server.command("CONFIG", "SET", "min-replicas-to-write", "0")
        await store.append("somebody", events(2), PATIENCE_S)
        assert (await store.get("somebody", PATIENCE_S))["times_ms"] == [2]

    using(replace(cfg, ttl_s=ttl_s), use=use)
    assert "refuses: NOREPLICAS" in caplog.text
    assert "somebody" not in caplog.text


def test_redis_connections_are_bounded_and_released(cfg, server):
    """Writes that are cancelled while the server is paused must release their connections, and close them."""

    async def use(store):
        await asyncio.gather(*(store.append("a", events(n), PATIENCE_S) for n in range(10)))
        server.pause()
        writes = [asyncio.create_task(store.append("b", events(n), PATIENCE_S)) for n in range(10)]
        await asyncio.sleep(0)
        for write in writes:
            write.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*writes, return_exceptions=True)
        )
        server.resume()
        await asyncio.gather(*(store.append("c", events(n), PATIENCE_S) for n in range(10)))
        assert (await store.get("c", PATIENCE_S))["times_ms"] == list(range(10))
        clients = server.command("CLIENT", "LIST").splitlines()
        assert len(clients) <= 1 + 2, "the one that asks, and those of the pool"

    using(replace(cfg, max_connections=2), use=use)


def test_redis_store_closes_while_requests_are_in_flight(cfg, server):
    async def use(store):
        await store.append("a", events(1), PATIENCE_S)
        server.pause()
        requests = [
            asyncio.create_task(request)
            for request in (store.get("a", PATIENCE_S), store.append("a", events(2), PATIENCE_S))
        ]
        await asyncio.sleep(0.01)
        await store.close()
        server.resume()
        ends = await asyncio.gather(*requests, return_exceptions=True)
        assert isinstance(ends[0], asyncio.CancelledError)
        assert isinstance(ends[1], HistoryStoreUnavailableError)

    using(cfg, use=use)


def test_circuit_breaker_opens_probes_and_closes():
    clock = ManualClock()
    breaker = CircuitBreaker(clock, probe_timeout_s=5.0)

    def is_rejected():
        try:
            breaker.check()
        except HistoryStoreUnavailableError:
            return True
        return False

    for _ in range(2):  # not yet three in a row
        breaker.record_failure(is_timeout=True)
        breaker.record_failure(is_timeout=True)
        assert not is_rejected()
        breaker.record_success()
    breaker.record_failure(is_timeout=False)
    for pause_s in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert is_rejected()
        clock.sleep(pause_s - 0.01)
        assert is_rejected()
        clock.sleep(0.02)
        assert not is_rejected(), "the probe passes"
        assert is_rejected(), "others wait for its result"
        breaker.record_failure(is_timeout=True)
    clock.sleep(1.01)
    assert not is_rejected()
    clock.sleep(5.01)
    assert not is_rejected(), "a probe without a result, for example a cancelled one, is followed by another"
    breaker.record_success()
    assert not any(is_rejected() for _ in range(3))


def test_the_time_of_the_store_is_taken_off_the_deadline(service):
    given_s = []

    class Slow(MemoryHistoryStore):
        async def get(self, user, timeout_s=0.0):
            given_s.append(timeout_s)
            await asyncio.sleep(0.2)
            return await super().get(user)

    async def ask(client):
        await client.post("/v1/events", json={"user": 1, "history": events(1)})
        late = await client.post("/v1/rank", json={"user": 1, "candidates": ["4"], "timeout_ms": 150})
        assert late.status_code == 503
        for timeout_ms in (9000, None):
            in_time = await client.post("/v1/rank", json={"user": 1, "candidates": ["4"], "timeout_ms": timeout_ms})
            assert in_time.status_code == 200
        assert given_s == [0.15, 9.0, 10.0], "who names no deadline has that of the server"

    answered(service, [Slow(HistoryStoreConfig())], ask)


def test_an_address_is_checked_and_may_come_from_the_environment(monkeypatch):
    with pytest.raises(UserError, match="is no address"):
        HistoryStoreConfig(url="http://localhost")
    with pytest.raises(UserError, match="is not a valid address") as caught:
        make_store(HistoryStoreConfig(url="redis://:secret/@localhost"))
    assert "secret" not in str(caught.value)
    cfg = HistoryStoreConfig(url="env:NESTREC_TEST_STORE")
    with pytest.raises(UserError, match="set NESTREC_TEST_STORE"):
        make_store(cfg)
    monkeypatch.setenv("NESTREC_TEST_STORE", "redis://:secret@localhost/3")
    assert cfg.address() == "redis://:secret@localhost/3"
    assert isinstance(make_store(cfg), RedisHistoryStore)
