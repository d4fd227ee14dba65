"""The gateway over instances that listen on sockets: whom it asks, how long it waits, and what it answers itself."""

import asyncio
import contextlib
import re
import socket
import time

import httpx
import pytest
from listening_app import listening as listening_as

from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.fleet.gateway import Gateway
from nestrec.serving.fleet.readiness_probes import held_port
from nestrec.serving.history_store.history_store import HistoryStoreConfig
from nestrec.serving.history_store.memory_store import MemoryHistoryStore
from nestrec.serving.http.http_app import App
from nestrec.serving.http.serve_config import ServeConfig
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
LIMITS = LimitsConfig(default_timeout_ms=10_000)
IMPATIENT = LimitsConfig(default_timeout_ms=1000)
"""where an instance hangs, which is waited for"""
LENIENT_MS = 1e6
"""to rank: nobody is at risk, however slow the machine was when the engine learned what requests cost"""
UNUSUAL = "application/json; charset=utf-8"
EVENTS = {"items": ["1", "2"], "times_ms": [1, 2]}


def listening(app):
    return listening_as(app, ServeConfig(limits=LIMITS))


@pytest.fixture(scope="module")
def service():
    cfg = ServiceConfig(engine=EngineConfig(trigger=TriggerConfig(budget_ms=LENIENT_MS)))
    service = Service({"retrieval": random_retrieval(ENCODER, num_items=50)}, cfg)
    yield service
    service.close()


@contextlib.contextmanager
def hung():
    """The port of a process that has stopped: the kernel takes connections for it, and nobody answers."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(64)
        yield deaf.getsockname()[1]


def through_gateway(service, use, *, num_instances=2, num_hung=0, store=None):
    """What `use(client, gateway)` gives, with instances that share a service and have a history store each, or one."""

    async def run():
        async with contextlib.AsyncExitStack() as made:
            ports = [
                await made.enter_async_context(listening(App(service, LIMITS, store))) for _ in range(num_instances)
            ]
            ports += [made.enter_context(hung()) for _ in range(num_hung)]
            gateway = Gateway(ports, IMPATIENT if num_hung else LIMITS, shares_histories=store is not None)
            made.push_async_callback(gateway.close)
            port = await made.enter_async_context(listening(gateway))
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20.0)
            return await use(await made.enter_async_context(client), gateway)

    return asyncio.run(run())


def user_of_slot(gateway, slot):
    """A user whose own slot it is."""
    for number in range(1000):
        route = gateway.router.begin(str(number))
        gateway.router.end(route.slot)
        gateway.router._chosen.clear()  # as after a while
        if route.slot == slot:
            return str(number)
    raise AssertionError("the slot has no users")


def signals_of(service):
    counts = service.fleets["retrieval"].engines[0].counts
    return {name: count for name, count in counts.items() if name.startswith("signal_")}


def test_requests_that_arrive_whole_are_asked_without_asgi_and_answered_alike(service):
    bodies = [
        ("/v1/recommend", {"user": "7", "history": EVENTS, "k": 3, "now_ms": 5}),
        ("/v1/rank", {"user": "7", "history": EVENTS, "candidates": ["3", "nobody"], "now_ms": 5}),
        ("/v1/rank", {"user": "7", "history": EVENTS}),
        ("/v1/recommend", ["no request"]),
    ]

    async def use(client, gateway):
        usual = gateway._answer
        asked = []

        async def counted(scope, body):
            asked.append(scope["path"])
            return await usual(scope, body)

        gateway._answer = counted
        found = []
        for path, body in bodies:
            plain = await client.post(path, json=body)
            assert not asked
            other = await client.post(path, content=plain.request.content, headers={"content-type": UNUSUAL})
            assert asked.pop() == path
            found += [(one.status_code, one.json(), one.headers.get("x-nestrec-slot")) for one in (plain, other)]
        return found

    found = through_gateway(service, use)
    assert found[::2] == found[1::2]
    assert [status for status, _, _ in found[::2]] == [200, 200, 400, 400]


@pytest.mark.parametrize("budget_ms", [LENIENT_MS, 0.0])
def test_users_with_short_histories_are_never_signalled_and_nothing_of_them_is_shipped(budget_ms):
    """With no time at all to rank, nobody is short: the signals go out and are admitted, however little they gain."""
    trigger = TriggerConfig(budget_ms=budget_ms, compute_share=100.0, burst_s=100.0, least_gain=0.0)
    cfg = ServiceConfig(engine=EngineConfig(trigger=trigger))
    service = Service({"retrieval": random_retrieval(ENCODER, num_items=50)}, cfg)
    signal = {"user": "7", "history": EVENTS, "num_candidates": 8}

    async def use(client, gateway):
        assert all([await gateway._probes.is_ready(slot) for slot in range(2)])
        wrong = await client.post("/v1/preinfer", json={"user": "7", "events": -2})
        assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "events"), "an instance refuses it"
        told = (await client.post("/v1/preinfer", json={"user": "7", "events": 2})).json()
        sent = await client.post("/v1/preinfer", json=signal)
        return told["reason"], sent.status_code, sent.json(), gateway.status()["short_signals"]

    try:
        told, status, sent, num_short = through_gateway(service, use)
        assert status == 202
        if budget_ms:
            assert (told, sent["reason"], num_short, signals_of(service)) == ("short", "short", 2, {})
            assert sent["model"] == "", "the front does not know for sure"
        else:
            assert (told, sent["reason"], num_short) == ("wanted", "admitted", 0)
            assert sent["model"] == service.fleets["retrieval"].servable.version[:12]
            assert signals_of(service)["signal_admitted"] == 1
    finally:
        service.close()


def test_a_signal_that_tells_a_length_fetches_kept_events_only_where_they_are_of_use(service):
    class Counted(MemoryHistoryStore):
        fetched = 0

        async def get(self, user, timeout_s):
            self.fetched += 1
            return await super().get(user, timeout_s)

    store = Counted(HistoryStoreConfig())

    async def use(client, gateway):
        await client.post("/v1/events", json={"user": "7", "history": EVENTS})
        return (await client.post("/v1/preinfer", json={"user": "7", "events": 2})).json()["reason"]

    assert through_gateway(service, use, num_instances=1, store=store) in {"short", "safe"}
    assert store.fetched == 0


def test_head_is_answered_at_once_and_without_a_body(service):
    async def use(client, gateway):
        head = await client.head("/v1/status")
        full = await client.get("/v1/status")
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 0
        assert full.status_code == 200
        assert gateway.status()["alive"] == [True, True], "nobody was lost over it"

    through_gateway(service, use)


def test_an_instance_is_told_whose_request_it_is(service, monkeypatch):
    """It sees the gateway's address alone, and shares its time among clients."""
    seen = []
    answer = App.serve

    def recorded(app, route, client, body, reply):
        seen.append(client)
        return answer(app, route, client, body, reply)

    monkeypatch.setattr(App, "serve", recorded)

    async def use(client, _):
        body = {"user": "a", "history": EVENTS, "candidates": ["1"]}
        for name in ("10.0.0.1", "10.0.0.2"):  # as a front before this one would name them
            response = await client.post("/v1/rank", json=body, headers={"x-nestrec-client": name})
            assert response.status_code == 200
        return seen

    assert through_gateway(service, use) == ["10.0.0.1", "10.0.0.2"]


def test_a_number_and_its_text_are_one_user(service):
    async def use(client, gateway):
        users = [int(user_of_slot(gateway, slot)) for slot in range(2)]
        for user in users:
            written = await client.post("/v1/events", json={"user": user, "history": EVENTS})
            assert (written.status_code, written.json()["events"]) == (202, 2)
            again = {"items": ["3"], "times_ms": [3]}
            written = await client.post("/v1/events", json={"user": str(user), "history": again})
            assert written.json()["events"] == 3, "it has found the events that were written by number"
            assert (await client.post("/v1/recommend", json={"user": user, "k": 2})).status_code == 200
        return [
            (await client.post("/v1/rank", json={"user": user, "candidates": ["1"]})).headers["x-nestrec-slot"]
            for user in users
        ]

    assert through_gateway(service, use) == ["0", "1"]


def test_events_are_written_and_read_at_home_though_it_is_at_its_bound(service):
    async def use(client, gateway):
        user = user_of_slot(gateway, 0)
        gateway.router.loads[0] += 100
        diverted = await client.post("/v1/rank", json={"user": user, "history": EVENTS, "candidates": ["1"]})
        assert diverted.headers["x-nestrec-slot"] == "1", "a request with its history may go elsewhere"
        written = await client.post("/v1/events", json={"user": user, "history": EVENTS})
        read = await client.post("/v1/recommend", json={"user": user, "k": 2})
        assert (written.status_code, read.status_code) == (202, 200)
        assert written.headers["x-nestrec-slot"] == read.headers["x-nestrec-slot"] == "0"
        gateway.router.set_alive(0, False)
        for path, body in (("/v1/events", {"history": EVENTS}), ("/v1/recommend", {"k": 2})):
            away = await client.post(path, json={"user": user, **body})
            assert (away.status_code, away.headers["retry-after"]) == (503, "1"), "no second history elsewhere"

    through_gateway(service, use)


def test_with_a_shared_store_any_instance_takes_and_reads_events(service):
    store = MemoryHistoryStore(HistoryStoreConfig())

    async def use(client, gateway):
        user = user_of_slot(gateway, 0)
        gateway.router.set_alive(0, False)
        for path, body in (("/v1/events", {"history": EVENTS}), ("/v1/recommend", {"k": 2})):
            answer = await client.post(path, json={"user": user, **body})
            assert (answer.status_code // 100, answer.headers["x-nestrec-slot"]) == (2, "1")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            gateway._upstreams[0].port = probe.getsockname()[1]  # bound and deaf: refused, as where no process is
            gateway.router.set_alive(0, True)
            gateway.router._chosen.clear()
            answer = await client.post("/v1/events", json={"user": user, "history": EVENTS})
            assert answer.json() == {"events": 4}, "it has reached nobody there, and one of the others once"

    through_gateway(service, use, store=store)


def test_a_deadline_holds_where_the_instance_hangs(service, monkeypatch):
    monkeypatch.setattr("nestrec.serving.fleet.readiness_probes._TIMEOUT_S", 0.3)

    async def use(client, gateway):
        body = {"history": EVENTS, "candidates": ["1"], "timeout_ms": 500}
        start_s = time.monotonic()
        late = await client.post("/v1/rank", json={"user": user_of_slot(gateway, 1), **body})
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert 0.5 <= time.monotonic() - start_s < 15.0, "the client would wait for 20"
        while gateway.router.is_alive[1]:
            await asyncio.sleep(0.05)  # until the probe that it began has given up as well
        found = await client.post("/v1/rank", json={"user": user_of_slot(gateway, 0), **body, "timeout_ms": 5000})
        assert (found.status_code, found.headers["x-nestrec-slot"]) == (200, "0")

    through_gateway(service, use, num_instances=1, num_hung=1)


def test_an_erasure_counts_only_when_every_instance_has_confirmed_it(service):
    async def use(client, gateway):
        erased = await client.delete("/v1/users/ann/events")
        assert (erased.status_code, erased.headers["retry-after"]) == (503, "1"), "one of them may remember"
        return gateway

    through_gateway(service, use, num_instances=2, num_hung=1)

    async def use_all(client, gateway):
        user = user_of_slot(gateway, 1)
        await client.post("/v1/events", json={"user": user, "history": EVENTS})
        assert (await client.delete(f"/v1/users/{user}/events")).status_code == 204
        written = await client.post("/v1/events", json={"user": user, "history": EVENTS})
        assert written.json()["events"] == 2
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            gateway._upstreams[0].drop()
            gateway._upstreams[0].port = probe.getsockname()[1]  # bound and deaf: refused, as where no process is
            assert (await client.delete(f"/v1/users/{user}/events")).status_code == 204, "who is gone has forgotten"

    through_gateway(service, use_all)


def no_process(gateway, slot):
    """Where the instance was, a port is held and nobody listens: refused."""
    held = held_port()
    gateway._upstreams[slot].drop()
    gateway._upstreams[slot].port = held.getsockname()[1]
    return held


def test_events_in_a_shared_store_are_erased_by_any_living_instance_and_by_no_dead_one(service):
    store = MemoryHistoryStore(HistoryStoreConfig())

    async def use(client, gateway):
        for user in ("ann", "bob", "a/b"):
            assert (await client.post("/v1/events", json={"user": user, "history": EVENTS})).status_code == 202
        with no_process(gateway, 0):
            for user in ("ann", "a%2Fb"):
                assert (await client.delete(f"/v1/users/{user}/events")).status_code == 204
            assert await store.get("ann") is await store.get("a/b") is None
            with no_process(gateway, 1):
                erased = await client.delete("/v1/users/bob/events")
                assert (erased.status_code, erased.headers["retry-after"]) == (503, "1"), "nobody has asked the store"
                assert await store.get("bob") is not None

    through_gateway(service, use, store=store)


def test_an_instance_without_a_process_has_forgotten_users_but_knows_no_new_items(service):
    async def use(client, gateway):
        with no_process(gateway, 0):
            assert (await client.delete("/v1/users/ann/events")).status_code == 204
            assert (await client.delete("/v1/users/ann/cache")).status_code == 204
            told = await client.post("/v1/items", json={"items": [{"id": "fresh"}]})
            assert (told.status_code, told.headers["retry-after"]) == (503, "1")
            assert gateway.status()["alive"] == [False, True]

    through_gateway(service, use)


@pytest.mark.parametrize("num_hung", [0, 1])
def test_new_items_are_told_to_every_instance(num_hung):
    services = [Service({"ranking": random_ranking(ENCODER, num_items=50)}, ServiceConfig()) for _ in range(2)]

    async def run():
        async with contextlib.AsyncExitStack() as made:
            ports = [await made.enter_async_context(listening(App(service, LIMITS))) for service in services]
            ports += [made.enter_context(hung()) for _ in range(num_hung)]
            gateway = Gateway(ports, LIMITS, adding_s=1.0 if num_hung else 60.0)
            made.push_async_callback(gateway.close)
            port = await made.enter_async_context(listening(gateway))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
                return await client.post("/v1/items", json={"items": [{"id": "fresh"}]})

    try:
        answer = asyncio.run(run())
        known = [service.fleet("ranking").servable.ids_of(["fresh"])[0] for service in services]
    finally:
        for service in services:
            service.close()
    assert answer.status_code == (503 if num_hung else 200), answer.text
    assert num_hung or known == [51, 51]


def test_ids_of_any_characters_can_be_erased(service):
    ids = {"a/b": "a%2Fb", "..": "%2E%2E", "ä?#% &": "%C3%A4%3F%23%25%20%26", "a/events": "a%2fevents"}

    async def use(client, _):
        for user, path in ids.items():
            for _ in range(2):
                written = await client.post("/v1/events", json={"user": user, "history": EVENTS})
                assert written.json() == {"events": 2}, user
                request = client.build_request("DELETE", "/")
                request.url = request.url.copy_with(raw_path=f"/v1/users/{path}/events".encode())
                assert (await client.send(request)).status_code == 204

    through_gateway(service, use)


def test_an_instance_that_is_not_ready_is_left_out_and_its_request_answered_elsewhere(service):
    """Its engine has died: it still listens and answers everything with 503."""
    broken = Service({"retrieval": random_retrieval(ENCODER, num_items=50)}, ServiceConfig())
    broken.fleet("retrieval").engines[0].close()

    async def use(client, gateway):
        async with listening(App(broken, LIMITS)) as port:
            live = await client.get(f"http://127.0.0.1:{port}/health/live")
            gateway._upstreams[1].port = port
            body = {"user": user_of_slot(gateway, 1), "history": EVENTS, "candidates": ["1"]}
            answers = [await client.post("/v1/rank", json=body) for _ in range(2)]
            assert [a.status_code for a in answers] == [200, 200]
            assert gateway.status()["alive"] == [True, False]
        return live.status_code, live.json()

    assert through_gateway(service, use) == (503, {"status": "dead"}), "supervisors look at the status"


def test_metrics_of_a_front_have_every_instance_and_its_own_counts(service):
    async def use(client, gateway):
        await client.post("/v1/rank", json={"user": "u", "history": EVENTS, "candidates": ["1"]})
        gateway.count_refusals_of({"unknown": 3})
        text = (await client.get("/metrics")).text
        for slot in (0, 1):
            assert f'nestrec_ready{{slot="{slot}"}} 1.0' in text
            assert f'nestrec_slot_alive{{slot="{slot}"}} 1.0' in text
        assert text.count("# TYPE nestrec_ready gauge") == 1, "one family of a name"
        assert 'nestrec_refused_credentials_total{reason="unknown"} 3.0' in text
        assert re.search(
            r'nestrec_request_duration_seconds_bucket{le="\+Inf",outcome="answered",route="/v1/rank"', text
        )
        for slot in (0, 1):
            live = await client.get(f"/v1/live?slot={slot}")
            assert (live.status_code, live.headers["x-nestrec-slot"]) == (200, str(slot))
            assert set(live.json()) == {"status", "timeline", "relay"}
        assert (await client.get("/v1/live?slot=7")).status_code == 503

    through_gateway(service, use)
