"""History stores: a Redis server shared by instances, which tests also kill, pause and fill."""

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

LONG_TIMEOUT_S = 60.0
LIMITS = LimitsConfig(default_timeout_ms=10_000)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def cfg(server):
    server.command("FLUSHALL")
    return HistoryStoreConfig(url=server.url, timeout_ms=1000.0 * LONG_TIMEOUT_S)


def events(*times):
    return {"items": [str(t) for t in times], "times_ms": list(times)}


def use_stores(*configs, use):
    """Run `use(store, store, ...)` with one store per config, and return its result."""

    async def run():
        stores = [make_store(cfg) for cfg in configs]
        try:
            return await use(*stores)
        finally:
            for store in stores:
                await store.close()

    return asyncio.run(run())


def use_instances(service, stores, use):
    """Run `use(client, client, ...)` with one instance per store, and return its result."""

    async def run():
        apps = [App(service, LIMITS, store) for store in stores]
        clients = [httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") for app in apps]
        try:
            return await use(*clients)
        finally:
            for client, store in zip(clients, stores, strict=True):
                await client.aclose()
                await store.close()

    return asyncio.run(run())


@pytest.mark.parametrize("is_shared", [False, True])
def test_history_stores_equal_reference_list(cfg, is_shared):
    """Appends have random sizes, and one in five is late; the reference is a sorted list."""
    cfg = cfg if is_shared else replace(cfg, url="")

    async def use(store):
        rng = random.Random(3)
        expected = []
        for number in range(120):
            times = [max(0, number - (rng.randrange(50) if rng.random() < 0.2 else 0))] * rng.choice([1, 1, 2, 5])
            rows = [
                (f"{number}-{i}", t, rng.choice([0, "click", ["a"], None]), rng.choice(["x", None]))
                for i, t in enumerate(times)
            ]
            items, times, actions, tabs = (list(column) for column in zip(*rows, strict=True))
            await store.append(
                "a", {"items": items, "times_ms": times, "actions": actions, "features": {"tab": tabs}}, LONG_TIMEOUT_S
            )
            expected = sorted([*expected, *rows], key=lambda row: row[1])
        found = await store.get("a", LONG_TIMEOUT_S)
        columns = (found["items"], found["times_ms"], found["actions"], found["features"]["tab"])
        assert list(zip(*columns, strict=True)) == expected
        await store.forget("a", LONG_TIMEOUT_S)
        assert await store.get("a", LONG_TIMEOUT_S) is None

    use_stores(cfg, use=use)


def test_history_store_concurrent_writers_lose_nothing(cfg, server):
    """Each writer has its own store object, and the history is compacted meanwhile."""

    async def use(*stores):
        async def write(number, store):
            for index in range(150):
                await store.append(
                    "a", {"items": [f"{number}-{index}-{'x' * 60}"], "times_ms": [index]}, LONG_TIMEOUT_S
                )

        await asyncio.gather(*(write(number, store) for number, store in enumerate(stores)))
        found = await stores[0].get("a", LONG_TIMEOUT_S)
        assert sorted(found["items"]) == sorted(f"{n}-{t}-{'x' * 60}" for n in range(3) for t in range(150))
        assert found["times_ms"] == sorted(found["times_ms"])
        assert sum(store.counts["compacted"] for store in stores) > 0

    use_stores(cfg, cfg, cfg, use=use)


def test_history_store_limits_bytes_events_and_ttl(cfg, server):
    cfg = replace(cfg, max_user_bytes=3000, max_events=40, ttl_s=1000.0)

    async def use(store):
        for number in range(80):
            await store.append("a", {"items": ["x" * 100 + str(number)], "times_ms": [number]}, LONG_TIMEOUT_S)
            if number % 7 == 0:
                assert server.command("STRLEN", "nestrec:events:a") <= 3000
        times = (await store.get("a", LONG_TIMEOUT_S))["times_ms"]
        assert times == list(range(80 - len(times), 80))
        assert 10 <= len(times) <= 40
        assert 990_000 < server.command("PTTL", "nestrec:events:a") <= 1_000_000

    use_stores(cfg, use=use)


def test_history_store_reads_share_one_round_trip(cfg):
    async def use(store, other):
        for user in range(40):
            await store.append(str(user), events(user), LONG_TIMEOUT_S)
        before = store.counts["round_trips"]
        found = await asyncio.gather(*(store.get(str(user % 40), LONG_TIMEOUT_S) for user in range(400)))
        assert [history["times_ms"] for history in found] == [[user % 40] for user in range(400)]
        assert store.counts["round_trips"] - before <= 11
        assert store.counts["reads"] <= 80, "reads that arrive during a round trip share one more read"
        # A read after an acknowledged write returns it, even if an older round trip is still in flight.
        for time in range(100, 150):
            earlier = asyncio.create_task(store.get("0", LONG_TIMEOUT_S))
            await asyncio.sleep(0)
            await other.append("0", events(time), LONG_TIMEOUT_S)
            assert (await store.get("0", LONG_TIMEOUT_S))["times_ms"][-1] == time
            await earlier

    use_stores(cfg, cfg, use=use)


def test_history_store_rejects_history_of_other_user(cfg, server):
    async def use(store):
        await store.append("a", events(1), LONG_TIMEOUT_S)
        server.command("COPY", "nestrec:events:a", "nestrec:events:b")
        with pytest.raises(HistoryStoreUnavailableError, match="cannot be read"):
            await store.get("b", LONG_TIMEOUT_S)

    use_stores(cfg, use=use)


def test_history_store_is_shared_between_instances(cfg, service):
    history = events(1, 2, 3)

    async def use(one, other):
        for client, part in ((one, events(2, 3)), (other, events(1))):
            assert (await client.post("/v1/events", json={"user": 7, "history": part})).status_code == 202
        body = {"candidates": ["4", "5"], "now_ms": 9}
        expected = (await one.post("/v1/rank", json={"user": 8, "history": history, **body})).json()
        for client in (one, other):
            assert (await client.post("/v1/preinfer", json={"user": "7"})).status_code == 202
            assert (await client.post("/v1/rank", json={"user": "7", **body})).json() == expected
            recommended = await client.post("/v1/recommend", json={"user": 7, "k": 3})
            assert (recommended.status_code, len(recommended.json()["items"])) == (200, 3)
        assert (await other.delete("/v1/users/7/events")).status_code == 204
        assert (await one.post("/v1/recommend", json={"user": 7})).status_code == 400, "no instance has the events"

    use_instances(service, [RedisHistoryStore(cfg), RedisHistoryStore(cfg)], use)


@pytest.mark.parametrize("end", ["kill", "pause"])
def test_history_store_outage_rejects_requests_in_time(cfg, server, service, end):
    # The clock is stopped, so that the circuit breaker stays open: a paused server executes later the commands that it
    # was sent.
    clock = ManualClock()
    stores = [RedisHistoryStore(each, clock) for each in (cfg, replace(cfg, timeout_ms=100.0))]
    short = {"candidates": ["4", "5"], "now_ms": 9}

    async def use(patient_client, client):
        await patient_client.post("/v1/events", json={"user": 1, "history": events(1, 2, 3)})
        before = (await patient_client.post("/v1/rank", json={"user": 1, **short})).json()["scores"]
        getattr(server, end)()
        with_history = (await client.post("/v1/rank", json={"user": 2, "history": events(3), **short})).json()["scores"]
        before_end = stores[1].counts["round_trips"]
        for path, body in (
            ("/v1/rank", short),
            ("/v1/recommend", {}),
            ("/v1/preinfer", {}),
            ("/v1/events", {"history": events(4)}),
        ) * 5:
            rejected = await client.post(path, json={"user": 1, **body})
            assert (rejected.status_code, rejected.headers["retry-after"]) == (503, "1"), path
            assert "history store" in rejected.json()["error"]["message"]
        assert (await client.delete("/v1/users/1/events")).status_code == 503
        round_trips = stores[1].counts["round_trips"] - before_end
        assert round_trips == (1 if end == "kill" else 3), "later requests are rejected without waiting"
        fallback = {"user": 1, "history": events(3), "prefer_stored_history": True, **short}
        assert (await client.post("/v1/rank", json=fallback)).json()["scores"] == with_history
        server.start() if end == "kill" else server.resume()
        for instance in (client, patient_client):
            while (await instance.post("/v1/rank", json={"user": 1, "candidates": ["4"]})).status_code == 503:
                clock.sleep(1.0)
        assert (await patient_client.post("/v1/rank", json={"user": 1, **short})).json()["scores"] == before

    use_instances(service, stores, use)


def test_history_store_late_reply_is_discarded(cfg, server):
    async def use(store):
        for user in ("a", "b"):
            await store.append(user, events(ord(user)), LONG_TIMEOUT_S)
        for _ in range(2):  # too few failures to open the circuit breaker
            server.pause()
            store._timeout_s = 0.1
            with pytest.raises(HistoryStoreUnavailableError, match="in time"):
                await store.get("a", LONG_TIMEOUT_S)
            store._timeout_s = LONG_TIMEOUT_S
            reading = asyncio.create_task(store.get("b", LONG_TIMEOUT_S))
            await asyncio.sleep(0)
            server.resume()
            assert (await reading)["times_ms"] == [ord("b")]

    use_stores(cfg, use=use)


@pytest.mark.parametrize("ttl_s", [100.0, None])
def test_history_store_full_store_stays_readable(cfg, server, service, ttl_s, caplog):
    async def use(client):
        await client.post("/v1/events", json={"user": 1, "history": events(1, 2)})
        before = (await client.post("/v1/rank", json={"user": 1, "candidates": ["4"], "now_ms": 9})).json()
        server.fill()
        try:
            rejected = await client.post("/v1/events", json={"user": 1, "history": events(3)})
            assert (rejected.status_code, rejected.headers["retry-after"]) == (503, "5")
            found = await client.post("/v1/rank", json={"user": 1, "candidates": ["4"], "now_ms": 9})
            assert found.json() == before
            assert (await client.delete("/v1/users/1/events")).status_code == 204, "deletion needs no memory"
        finally:
            server.empty()
        assert (await client.post("/v1/events", json={"user": 1, "history": events(3)})).status_code == 202

    use_instances(service, [RedisHistoryStore(replace(cfg, ttl_s=ttl_s))], use)
    assert "OutOfMemoryError" in caplog.text, "the log contains the cause"


@pytest.mark.parametrize("ttl_s", [100.0, None])
def test_history_store_key_of_other_type_is_rejected(cfg, server, service, ttl_s, caplog):
    server.command("LPUSH", "nestrec:events:1", "x")
    body = {"candidates": ["4"], "now_ms": 9}

    async def use(client):
        assert (await client.post("/v1/events", json={"user": 2, "history": events(1, 2)})).status_code == 202
        users = (1, 2, 1, 2, 3)
        found = await asyncio.gather(*(client.post("/v1/rank", json={"user": user, **body}) for user in users))
        without_events = found.pop()
        statuses = [response.status_code for response in found]
        assert statuses == [503, 200, 503, 200], "reads in the same round trip are not affected"
        assert without_events.status_code in (200, 400)
        assert "cannot be read; delete it" in found[0].json()["error"]["message"]
        rejected = await client.post("/v1/events", json={"user": 1, "history": events(3)})
        assert rejected.status_code == 503
        assert "cannot be read; delete it" in rejected.json()["error"]["message"]
        with_history = {"user": 1, "history": events(1, 2), "prefer_stored_history": True, **body}
        assert (await client.post("/v1/rank", json=with_history)).status_code == 200
        assert (await client.delete("/v1/users/1/events")).status_code == 204
        assert (await client.post("/v1/events", json={"user": 1, "history": events(3)})).status_code == 202
        assert (await client.post("/v1/rank", json={"user": 1, **body})).status_code == 200

    use_instances(service, [RedisHistoryStore(replace(cfg, ttl_s=ttl_s))], use)
    assert "WRONGTYPE" in caplog.text, "the log contains the cause"


@pytest.mark.parametrize("ttl_s", [100.0, None])
def test_history_store_rejected_write_logs_cause(cfg, server, ttl_s, caplog):
    """The server rejects all writes; the log contains neither the user nor the events."""

    async def use(store):
        server.command("CONFIG", "SET", "min-replicas-to-write", "1")
        try:
            with pytest.raises(HistoryStoreUnavailableError, match="rejects commands"):
                await store.append("secret-user", events(1), LONG_TIMEOUT_S)
        finally:
            server.command("CONFIG", "SET", "min-replicas-to-write", "0")
        await store.append("secret-user", events(2), LONG_TIMEOUT_S)
        assert (await store.get("secret-user", LONG_TIMEOUT_S))["times_ms"] == [2]

    use_stores(replace(cfg, ttl_s=ttl_s), use=use)
    assert "rejected a command: NOREPLICAS" in caplog.text
    assert "secret-user" not in caplog.text


def test_redis_connections_are_bounded_and_released(cfg, server):
    """Writes that are cancelled while the server is paused must release their connections, and close them."""

    async def use(store):
        await asyncio.gather(*(store.append("a", events(n), LONG_TIMEOUT_S) for n in range(10)))
        server.pause()
        writes = [asyncio.create_task(store.append("b", events(n), LONG_TIMEOUT_S)) for n in range(10)]
        await asyncio.sleep(0)
        for write in writes:
            write.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*writes, return_exceptions=True)
        )
        server.resume()
        await asyncio.gather(*(store.append("c", events(n), LONG_TIMEOUT_S) for n in range(10)))
        assert (await store.get("c", LONG_TIMEOUT_S))["times_ms"] == list(range(10))
        clients = server.command("CLIENT", "LIST").splitlines()
        assert len(clients) <= 1 + 2, "the connection of this command, and those of the pool"

    use_stores(replace(cfg, max_connections=2), use=use)


def test_redis_store_closes_while_requests_are_in_flight(cfg, server):
    async def use(store):
        await store.append("a", events(1), LONG_TIMEOUT_S)
        server.pause()
        requests = [
            asyncio.create_task(request)
            for request in (store.get("a", LONG_TIMEOUT_S), store.append("a", events(2), LONG_TIMEOUT_S))
        ]
        await asyncio.sleep(0.01)
        await store.close()
        server.resume()
        ends = await asyncio.gather(*requests, return_exceptions=True)
        assert isinstance(ends[0], asyncio.CancelledError)
        assert isinstance(ends[1], HistoryStoreUnavailableError)

    use_stores(cfg, use=use)


def test_circuit_breaker_opens_probes_and_closes():
    clock = ManualClock()
    breaker = CircuitBreaker(clock, probe_timeout_s=5.0)

    def is_rejected():
        try:
            breaker.raise_if_open()
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


def test_history_store_time_counts_against_deadline(service):
    timeouts_s = []

    class SlowStore(MemoryHistoryStore):
        async def get(self, user, timeout_s=0.0):
            timeouts_s.append(timeout_s)
            await asyncio.sleep(0.2)
            return await super().get(user)

    async def use(client):
        await client.post("/v1/events", json={"user": 1, "history": events(1)})
        late = await client.post("/v1/rank", json={"user": 1, "candidates": ["4"], "timeout_ms": 150})
        assert late.status_code == 503
        for timeout_ms in (9000, None):
            in_time = await client.post("/v1/rank", json={"user": 1, "candidates": ["4"], "timeout_ms": timeout_ms})
            assert in_time.status_code == 200
        assert timeouts_s == [0.15, 9.0, 10.0], "a request without a deadline has the default deadline"

    use_instances(service, [SlowStore(HistoryStoreConfig())], use)


def test_history_store_url_is_validated(monkeypatch):
    with pytest.raises(UserError, match="unsupported URL"):
        HistoryStoreConfig(url="http://localhost")
    with pytest.raises(UserError, match="invalid URL") as caught:
        make_store(HistoryStoreConfig(url="redis://:secret/@localhost"))
    assert "secret" not in str(caught.value)
    cfg = HistoryStoreConfig(url="env:NESTREC_TEST_STORE")
    with pytest.raises(UserError, match="Set NESTREC_TEST_STORE"):
        make_store(cfg)
    monkeypatch.setenv("NESTREC_TEST_STORE", "redis://:secret@localhost/3")
    assert cfg.address() == "redis://:secret@localhost/3"
    assert isinstance(make_store(cfg), RedisHistoryStore)
