"""Gateway with instances on sockets: routing, deadlines, failover, and its own responses."""

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
from nestrec.serving.fleet.readiness_probes import reserve_port
from nestrec.serving.history_store.history_store import HistoryStoreConfig
from nestrec.serving.history_store.memory_store import MemoryHistoryStore
from nestrec.serving.http.http_app import App
from nestrec.serving.http.serve_config import ServeConfig
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
LIMITS = LimitsConfig(default_timeout_ms=10_000)
SHORT_TIMEOUT = LimitsConfig(default_timeout_ms=1000)
"""Limits of tests in which the gateway waits for a hanging instance."""
LARGE_BUDGET_MS = 1e6
"""Latency budget that no ranking request exceeds, however slow the machine was during the warm-up."""
ASGI_ONLY = "application/json; charset=utf-8"
"""Content type that the fast path without ASGI does not handle."""
EVENTS = {"items": ["1", "2"], "times_ms": [1, 2]}


def listening(app):
    return listening_as(app, ServeConfig(limits=LIMITS))


@pytest.fixture(scope="module")
def service():
    cfg = ServiceConfig(engine=EngineConfig(preinfer=TriggerConfig(latency_budget_ms=LARGE_BUDGET_MS)))
    service = Service({"retrieval": random_retrieval(ENCODER, num_items=50)}, cfg)
    yield service
    service.close()


@contextlib.contextmanager
def hanging_instance():
    """Yield the port of an instance that hangs: the kernel accepts its connections, but no response is sent."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


def use_gateway(service, use, *, num_instances=2, num_hanging=0, store=None):
    """Run `use(client, gateway)` with a gateway over several instances, and return its result.

    Args:
        service: Service that all instances share.
        use: Coroutine function.
        num_instances: Number of instances that respond.
        num_hanging: Number of instances that hang.
        store: History store that the instances share; None gives each its own.
    """

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            ports = [
                await stack.enter_async_context(listening(App(service, LIMITS, store))) for _ in range(num_instances)
            ]
            ports += [stack.enter_context(hanging_instance()) for _ in range(num_hanging)]
            gateway = Gateway(ports, SHORT_TIMEOUT if num_hanging else LIMITS, shares_histories=store is not None)
            stack.push_async_callback(gateway.close)
            port = await stack.enter_async_context(listening(gateway))
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20.0)
            return await use(await stack.enter_async_context(client), gateway)

    return asyncio.run(run())


def user_of_slot(gateway, slot):
    """Return a user whose requests are routed to a slot."""
    for number in range(1000):
        route = gateway.router.begin(str(number))
        gateway.router.end(route.slot)
        gateway.router._chosen.clear()  # routes are remembered for a while
        if route.slot == slot:
            return str(number)
    raise AssertionError("the slot has no users")


def preinfer_counts(service):
    counts = service.deployments["retrieval"].engines[0].counts
    return {name: count for name, count in counts.items() if name.startswith("preinfer_")}


def test_gateway_fast_path_equals_asgi_path(service):
    bodies = [
        ("/v1/recommend", {"user": "7", "history": EVENTS, "k": 3, "now_ms": 5}),
        ("/v1/rank", {"user": "7", "history": EVENTS, "candidates": ["3", "missing"], "now_ms": 5}),
        ("/v1/rank", {"user": "7", "history": EVENTS}),
        ("/v1/recommend", ["no request"]),
    ]

    async def use(client, gateway):
        answer = gateway._respond
        asgi_paths = []

        async def record_and_answer(scope, body):
            asgi_paths.append(scope["path"])
            return await answer(scope, body)

        gateway._respond = record_and_answer
        found = []
        for path, body in bodies:
            fast = await client.post(path, json=body)
            assert not asgi_paths
            slow = await client.post(path, content=fast.request.content, headers={"content-type": ASGI_ONLY})
            assert asgi_paths.pop() == path
            found += [(one.status_code, one.json(), one.headers.get("x-nestrec-slot")) for one in (fast, slow)]
        return found

    found = use_gateway(service, use)
    assert found[::2] == found[1::2]
    assert [status for status, _, _ in found[::2]] == [200, 200, 400, 400]


@pytest.mark.parametrize("budget_ms", [LARGE_BUDGET_MS, 0.0])
def test_gateway_skips_preinfer_of_short_histories(budget_ms):
    """With a latency budget of zero, no history is short: pre-infer requests are forwarded and admitted."""
    trigger = TriggerConfig(latency_budget_ms=budget_ms, max_compute_fraction=100.0, burst_s=100.0, min_gain=0.0)
    cfg = ServiceConfig(engine=EngineConfig(preinfer=trigger))
    service = Service({"retrieval": random_retrieval(ENCODER, num_items=50)}, cfg)
    preinfer = {"user": "7", "history": EVENTS, "num_candidates": 8}

    async def use(client, gateway):
        assert all([await gateway._probes.is_ready(slot) for slot in range(2)])
        wrong = await client.post("/v1/preinfer", json={"user": "7", "num_events": -2})
        assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "num_events"), "an instance rejects it"
        by_count = (await client.post("/v1/preinfer", json={"user": "7", "num_events": 2})).json()
        by_history = await client.post("/v1/preinfer", json=preinfer)
        return by_count["reason"], by_history.status_code, by_history.json(), gateway.status()["preinfer_skipped"]

    try:
        reason, status, by_history, num_short = use_gateway(service, use)
        assert status == 202
        if budget_ms:
            assert (reason, by_history["reason"], num_short, preinfer_counts(service)) == ("short", "short", 2, {})
            assert by_history["model"] == "", "the gateway does not know the model version for sure"
        else:
            assert (reason, by_history["reason"], num_short) == ("history_required", "admitted", 0)
            assert by_history["model"] == service.deployments["retrieval"].servable.version[:12]
            assert preinfer_counts(service)["preinfer_admitted"] == 1
    finally:
        service.close()


def test_gateway_preinfer_of_short_history_skips_store(service):
    class CountingStore(MemoryHistoryStore):
        num_reads = 0

        async def get(self, user, timeout_s):
            self.num_reads += 1
            return await super().get(user, timeout_s)

    store = CountingStore(HistoryStoreConfig())

    async def use(client, gateway):
        await client.post("/v1/events", json={"user": "7", "history": EVENTS})
        return (await client.post("/v1/preinfer", json={"user": "7", "num_events": 2})).json()["reason"]

    assert use_gateway(service, use, num_instances=1, store=store) in {"short", "safe"}
    assert store.num_reads == 0


def test_gateway_head_response_has_no_body(service):
    async def use(client, gateway):
        head = await client.head("/v1/status")
        full = await client.get("/v1/status")
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) > 0
        assert full.status_code == 200
        assert gateway.status()["alive"] == [True, True], "no instance was lost"

    use_gateway(service, use)


def test_gateway_forwards_client_address(service, monkeypatch):
    """An instance shares its time fairly among clients, but the peer of its connections is always the gateway."""
    clients = []
    serve = App.serve

    def record_and_serve(app, route, client, body, reply):
        clients.append(client)
        return serve(app, route, client, body, reply)

    monkeypatch.setattr(App, "serve", record_and_serve)

    async def use(client, _):
        body = {"user": "a", "history": EVENTS, "candidates": ["1"]}
        for address in ("10.0.0.1", "10.0.0.2"):  # the header of another gateway in front of this one
            response = await client.post("/v1/rank", json=body, headers={"x-nestrec-client": address})
            assert response.status_code == 200
        return clients

    assert use_gateway(service, use) == ["10.0.0.1", "10.0.0.2"]


def test_gateway_routes_number_and_text_user_id_alike(service):
    async def use(client, gateway):
        users = [int(user_of_slot(gateway, slot)) for slot in range(2)]
        for user in users:
            written = await client.post("/v1/events", json={"user": user, "history": EVENTS})
            assert (written.status_code, written.json()["events"]) == (202, 2)
            more = {"items": ["3"], "times_ms": [3]}
            written = await client.post("/v1/events", json={"user": str(user), "history": more})
            assert written.json()["events"] == 3, "the events written with a number as user id were found"
            assert (await client.post("/v1/recommend", json={"user": user, "k": 2})).status_code == 200
        return [
            (await client.post("/v1/rank", json={"user": user, "candidates": ["1"]})).headers["x-nestrec-slot"]
            for user in users
        ]

    assert use_gateway(service, use) == ["0", "1"]


def test_gateway_routes_events_to_own_slot_despite_load(service):
    async def use(client, gateway):
        user = user_of_slot(gateway, 0)
        gateway.router.loads[0] += 100
        diverted = await client.post("/v1/rank", json={"user": user, "history": EVENTS, "candidates": ["1"]})
        assert diverted.headers["x-nestrec-slot"] == "1", "a request with its history may go to any slot"
        written = await client.post("/v1/events", json={"user": user, "history": EVENTS})
        read = await client.post("/v1/recommend", json={"user": user, "k": 2})
        assert (written.status_code, read.status_code) == (202, 200)
        assert written.headers["x-nestrec-slot"] == read.headers["x-nestrec-slot"] == "0"
        gateway.router.set_alive(0, False)
        for path, body in (("/v1/events", {"history": EVENTS}), ("/v1/recommend", {"k": 2})):
            rejected = await client.post(path, json={"user": user, **body})
            assert (rejected.status_code, rejected.headers["retry-after"]) == (503, "1"), "no second history is created"

    use_gateway(service, use)


def test_gateway_routes_events_anywhere_if_store_is_shared(service):
    store = MemoryHistoryStore(HistoryStoreConfig())

    async def use(client, gateway):
        user = user_of_slot(gateway, 0)
        gateway.router.set_alive(0, False)
        for path, body in (("/v1/events", {"history": EVENTS}), ("/v1/recommend", {"k": 2})):
            response = await client.post(path, json={"user": user, **body})
            assert (response.status_code // 100, response.headers["x-nestrec-slot"]) == (2, "1")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            gateway._upstreams[0].port = probe.getsockname()[1]  # bound without listen: connections are refused
            gateway.router.set_alive(0, True)
            gateway.router._chosen.clear()
            response = await client.post("/v1/events", json={"user": user, "history": EVENTS})
            assert response.json() == {"events": 4}, "exactly one other instance stored the events"

    use_gateway(service, use, store=store)


def test_gateway_deadline_holds_if_instance_hangs(service, monkeypatch):
    monkeypatch.setattr("nestrec.serving.fleet.readiness_probes._TIMEOUT_S", 0.3)

    async def use(client, gateway):
        body = {"history": EVENTS, "candidates": ["1"], "timeout_ms": 500}
        start_s = time.monotonic()
        late = await client.post("/v1/rank", json={"user": user_of_slot(gateway, 1), **body})
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert 0.5 <= time.monotonic() - start_s < 15.0, "the client's own timeout is 20 seconds"
        while gateway.router.is_alive[1]:
            await asyncio.sleep(0.05)  # until the probe of the hanging instance has timed out as well
        found = await client.post("/v1/rank", json={"user": user_of_slot(gateway, 0), **body, "timeout_ms": 5000})
        assert (found.status_code, found.headers["x-nestrec-slot"]) == (200, "0")

    use_gateway(service, use, num_instances=1, num_hanging=1)


def test_gateway_erasure_requires_all_instances(service):
    async def use(client, gateway):
        erased = await client.delete("/v1/users/ann/events")
        assert (erased.status_code, erased.headers["retry-after"]) == (503, "1"), "the hanging instance may have events"
        return gateway

    use_gateway(service, use, num_instances=2, num_hanging=1)

    async def use_all(client, gateway):
        user = user_of_slot(gateway, 1)
        await client.post("/v1/events", json={"user": user, "history": EVENTS})
        assert (await client.delete(f"/v1/users/{user}/events")).status_code == 204
        written = await client.post("/v1/events", json={"user": user, "history": EVENTS})
        assert written.json()["events"] == 2
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            gateway._upstreams[0].drop()
            gateway._upstreams[0].port = probe.getsockname()[1]  # bound without listen: connections are refused
            assert (await client.delete(f"/v1/users/{user}/events")).status_code == 204, "a dead process has no events"

    use_gateway(service, use_all)


def without_instance(gateway, slot):
    """Point a slot to a reserved port without a listener, so that connections are refused; return the socket."""
    reserved = reserve_port()
    gateway._upstreams[slot].drop()
    gateway._upstreams[slot].port = reserved.getsockname()[1]
    return reserved


def test_gateway_erasure_in_shared_store(service):
    store = MemoryHistoryStore(HistoryStoreConfig())

    async def use(client, gateway):
        for user in ("ann", "bob", "a/b"):
            assert (await client.post("/v1/events", json={"user": user, "history": EVENTS})).status_code == 202
        with without_instance(gateway, 0):
            for user in ("ann", "a%2Fb"):
                assert (await client.delete(f"/v1/users/{user}/events")).status_code == 204
            assert await store.get("ann") is await store.get("a/b") is None
            with without_instance(gateway, 1):
                erased = await client.delete("/v1/users/bob/events")
                assert (erased.status_code, erased.headers["retry-after"]) == (503, "1"), "no instance can delete them"
                assert await store.get("bob") is not None

    use_gateway(service, use, store=store)


def test_gateway_admin_calls_skip_stopped_instances(service):
    async def use(client, gateway):
        with without_instance(gateway, 0):
            assert (await client.delete("/v1/users/ann/events")).status_code == 204
            assert (await client.delete("/v1/users/ann/cache")).status_code == 204
            added = await client.post("/v1/items", json={"items": [{"id": "fresh"}]})
            assert (added.status_code, added.headers["retry-after"]) == (503, "1")
            assert gateway.status()["alive"] == [False, True]

    use_gateway(service, use)


@pytest.mark.parametrize("num_hanging", [0, 1])
def test_gateway_adds_new_items_on_every_instance(num_hanging):
    services = [Service({"ranking": random_ranking(ENCODER, num_items=50)}, ServiceConfig()) for _ in range(2)]

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            ports = [await stack.enter_async_context(listening(App(service, LIMITS))) for service in services]
            ports += [stack.enter_context(hanging_instance()) for _ in range(num_hanging)]
            gateway = Gateway(ports, LIMITS, insert_timeout_s=1.0 if num_hanging else 60.0)
            stack.push_async_callback(gateway.close)
            port = await stack.enter_async_context(listening(gateway))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
                return await client.post("/v1/items", json={"items": [{"id": "fresh"}]})

    try:
        response = asyncio.run(run())
        ids = [service.deployment("ranking").servable.ids_of(["fresh"])[0] for service in services]
    finally:
        for service in services:
            service.close()
    assert response.status_code == (503 if num_hanging else 200), response.text
    assert num_hanging or ids == [51, 51]


def test_gateway_erasure_decodes_any_user_id(service):
    ids = {"a/b": "a%2Fb", "..": "%2E%2E", "\u00e4?#% &": "%C3%A4%3F%23%25%20%26", "a/events": "a%2fevents"}

    async def use(client, _):
        for user, path in ids.items():
            for _ in range(2):
                written = await client.post("/v1/events", json={"user": user, "history": EVENTS})
                assert written.json() == {"events": 2}, user
                request = client.build_request("DELETE", "/")
                request.url = request.url.copy_with(raw_path=f"/v1/users/{path}/events".encode())
                assert (await client.send(request)).status_code == 204

    use_gateway(service, use)


def test_gateway_skips_instance_that_is_not_ready(service):
    """An instance with a dead engine still listens, and responds to everything with 503."""
    broken = Service({"retrieval": random_retrieval(ENCODER, num_items=50)}, ServiceConfig())
    broken.deployment("retrieval").engines[0].close()

    async def use(client, gateway):
        async with listening(App(broken, LIMITS)) as port:
            live = await client.get(f"http://127.0.0.1:{port}/health/live")
            gateway._upstreams[1].port = port
            body = {"user": user_of_slot(gateway, 1), "history": EVENTS, "candidates": ["1"]}
            responses = [await client.post("/v1/rank", json=body) for _ in range(2)]
            assert [response.status_code for response in responses] == [200, 200]
            assert gateway.status()["alive"] == [True, False]
        return live.status_code, live.json()

    assert use_gateway(service, use) == (503, {"status": "dead"}), "supervisors check the status code"


def test_gateway_metrics_cover_instances_and_gateway(service):
    async def use(client, gateway):
        await client.post("/v1/rank", json={"user": "u", "history": EVENTS, "candidates": ["1"]})
        gateway.set_auth_failures({"unknown": 3})
        text = (await client.get("/metrics")).text
        for slot in (0, 1):
            assert f'nestrec_ready{{slot="{slot}"}} 1.0' in text
            assert f'nestrec_instance_up{{slot="{slot}"}} 1.0' in text
        assert text.count("# TYPE nestrec_ready gauge") == 1, "each metric family occurs once"
        assert 'nestrec_auth_failures_total{reason="unknown"} 3.0' in text
        assert re.search(r'nestrec_http_request_duration_seconds_bucket{le="\+Inf",outcome="ok",route="/v1/rank"', text)
        for slot in (0, 1):
            live = await client.get(f"/v1/live?slot={slot}")
            assert (live.status_code, live.headers["x-nestrec-slot"]) == (200, str(slot))
            assert set(live.json()) == {"status", "timeline", "relay"}
        assert (await client.get("/v1/live?slot=7")).status_code == 503

    use_gateway(service, use)
