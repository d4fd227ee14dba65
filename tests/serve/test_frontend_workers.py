"""Frontend workers: their responses equal those of a single process, also during kills, reloads and shutdown."""

import asyncio
import contextlib
import http.client
import itertools
import json
import random
import re
import signal
from dataclasses import replace

import httpx
import psutil
import pytest
from frontend_processes import NUM_WORKERS, children_of, is_connected, wait_for, workers_of
from rolling_load import RANK_BODY, Load
from server_process import post, running_server, status_once_sent

from nestrec.base.cuda import resolve_device
from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.http.http_app import App
from nestrec.serving.kv_cache.preinfer_trigger import TriggerConfig
from nestrec.serving.model.servable import Servable
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=64)
# Without chunks, since the scores of chunked requests are rounded differently, and a slow machine forms more chunks.
OPTIONS = (
    "--frontend_workers", str(NUM_WORKERS), "--keep_awake_ms", "1",
    "--limits.default_timeout_ms", "10000", "--limits.expose_cache_source", "true",
    "--service.engine.preinfer.policy", "never", "--service.engine.max_queue_delay_s", "1000",
    "--service.engine.preinfer_chunk_ms", "0",
)  # fmt: skip
HISTORY = {"items": ["1", "2"], "times_ms": [1, 2], "actions": [1, 1], "features": {"tab": ["home", "home"]}}
VALID = {"user": "ann", "history": HISTORY, "candidates": ["3"], "now_ms": 9, "context": {"tab": "home"}}
COMPARED_HEADERS = ("content-type", "allow", "retry-after", "content-security-policy", "x-content-type-options")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Write a retrieval model and two versions of a ranking model, and return their folder.

    The versions have the same items in another order; the symbolic link `ranking` points to the first one.
    """
    root = tmp_path_factory.mktemp("models")
    write_servable(random_ranking(ENCODER, num_items=60, seed=1), root / "ranking1")
    other = random_ranking(ENCODER, num_items=60, seed=2)
    write_servable(replace(other, item_keys=other.item_keys[::-1]), root / "ranking2")
    write_servable(random_retrieval(ENCODER, num_items=60, seed=1), root / "retrieval")
    (root / "ranking").symlink_to(root / "ranking1")
    return root


@pytest.fixture(scope="module")
def served(models):
    """Start a server with frontend workers and return (port, process).

    The tests run in the order of this file, and the last one stops the server.
    """
    with running_server(models / "ranking", "--model", str(models / "retrieval"), *OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def one_process(models):
    """Return an application with the same models, without frontend workers."""
    engine = EngineConfig(max_queue_delay_s=1000.0, preinfer_chunk_ms=0.0, preinfer=TriggerConfig(policy="never"))
    folders = [models / "ranking1", models / "retrieval"]
    service = Service.load(folders, ServiceConfig(engine=engine), resolve_device("auto"))
    yield App(service, LimitsConfig(default_timeout_ms=10_000, expose_cache_source=True))
    service.close()


def random_rank_body(rng):
    count = rng.choice([0, 1, 5, 40, 300])
    items = [rng.choice([rng.randrange(80), str(rng.randrange(80))]) for _ in range(count)]
    if rng.random() < 0.5:
        items = [*map(str, items)]
    history = {
        "items": items,
        "times_ms": sorted(rng.randrange(10**12) for _ in range(count)),
        "actions": [rng.choice(["click", "like", 3, None] if rng.random() < 0.2 else ["click"]) for _ in range(count)],
        "features": {"tab": [rng.choice(["home", "search", None, "nowhere"]) for _ in range(count)]},
    }
    candidates = [str(rng.randrange(1, 90)) for _ in range(rng.choice([1, 7, 500]))]
    body = {"user": f"u{rng.randrange(6)}", "history": history, "now_ms": 10**12, "context": {"tab": "home"}}
    return {**body, "candidates": candidates, "on_unknown": rng.choice(["last", "score", "drop", "reject"])}


def random_requests(rng, count):
    """Return (method, path, body) of valid and invalid requests, `count` of them random."""
    body = random_rank_body(random.Random(0))
    events = {"items": ["1", "2"], "times_ms": [5, 9], "actions": [1, 1], "features": {"tab": ["home", None]}}
    stored = {"user": "stored", "now_ms": 10**12, "context": {"tab": "home"}, "timeout_ms": 9000}
    requests = [
        ("POST", "/v1/events", {"user": "stored", "history": events}),
        ("POST", "/v1/rank", {**stored, "candidates": ["3", "4"]}),
        ("POST", "/v1/rank", {**body, "user": "stored", "prefer_stored_history": True}),
        ("POST", "/v1/preinfer", {"user": "stored", "num_events": 2}),
        ("POST", "/v1/preinfer", {"user": "stored", "history": None, "num_events": 2}),
        ("DELETE", "/v1/users/stored/events", None),
        ("POST", "/v1/rank", {**stored, "candidates": ["3"]}),
        ("POST", "/v1/events", {"user": "stored", "history": {"items": 3}}),
        ("DELETE", "/v1/users/a%2Fb/cache", None),
        ("POST", "/v1/titles", {"items": ["1"]}),
        ("GET", "/v1/models", None),
        ("GET", "/health/ready", None),
        ("HEAD", "/health/live", None),
        ("GET", "/docs", None),
        ("GET", "/openapi.json", None),
        ("GET", "/v1/rank", None),
        ("PUT", "/v1/rank", None),
        ("POST", "/health/live", {}),
        ("GET", "/nowhere?a=1", None),
        ("POST", "/v1/rank", b"{"),
        ("POST", "/v1/rank", b"[1]"),
        ("POST", "/v1/rank", b'{"user": [' + b"1," * 3000 + b"1]}"),
        ("POST", "/v1/recommend", b"\xff"),
        ("POST", "/v1/rank", {**body, "history": {**body["history"], "times_ms": [1]}}),
        ("POST", "/v1/rank", {**body, "candidates": []}),
        ("POST", "/v1/rank", {**body, "what": 1}),
        ("POST", "/v1/rank", {**body, "context": {"tab": "home", "shop": "a"}}),
        ("POST", "/v1/recommend", {**stored, "history": {"items": []}}),
    ]
    for _ in range(count):
        path = rng.choice(["/v1/rank", "/v1/rank", "/v1/recommend", "/v1/preinfer"])
        body = random_rank_body(rng)
        if path != "/v1/rank":
            del body["candidates"]
        if path == "/v1/preinfer":
            del body["context"]
        elif path == "/v1/recommend" and rng.random() < 0.5:
            body |= {"k": 7, "exclude": ["3", 999], rng.choice(["allow", "exclude"]): [*map(str, range(1, 70))]}
        requests.append(("POST", path, body))
    return requests


def test_frontend_worker_responses_equal_single_process(served, one_process):
    port, _ = served
    requests = random_requests(random.Random(5), 80)

    async def run():
        limits = httpx.Limits(max_keepalive_connections=0)  # a new connection may reach any of the workers
        remote = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0, limits=limits)
        local = httpx.AsyncClient(transport=httpx.ASGITransport(one_process), base_url="http://127.0.0.1", timeout=60.0)
        statuses = set()
        async with remote, local:
            for method, path, body in requests:
                content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
                headers = {} if content is None else {"content-type": "application/json"}
                found = []
                for client in (local, remote):
                    response = await client.request(method, path, content=content, headers=headers)
                    compared = {name: response.headers.get(name) for name in COMPARED_HEADERS}
                    found.append((response.status_code, response.content, compared))
                statuses.add(found[0][0])
                if path == "/health/ready":  # its body contains the load
                    found = [status for status, _, _ in found]
                assert found[1] == found[0], (method, path, body)
        assert {200, 202, 204, 400, 404, 405} <= statuses

    asyncio.run(run())


def test_frontend_workers_share_one_metrics_exposition(served):
    port, process = served

    def request_counts():
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        found = re.findall(r'nestrec_http_requests_total\{route="(/v1/rank|malformed)",status="(\d+)"\} (\S+)', text)
        return {(route, int(status)): float(count) for route, status, count in found}

    request_counts()  # a late report of a worker is contained in the next exposition
    before = request_counts()
    bodies = [VALID, {"user": "u"}, {**VALID, "candidates": 3}, {**VALID, "prefer_stored_history": True}]
    for i in range(40):
        rank_status(port, bodies[i % 4])
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/v1/rank", headers={"host": "elsewhere.example"})
        assert connection.getresponse().status == 421
    expected = {("/v1/rank", 200): 20.0, ("/v1/rank", 400): 20.0, ("malformed", 421): 1.0}

    def have_grown():  # an exposition does not wait for workers that take a second to report their counters
        found = {key: count - before.get(key, 0.0) for key, count in request_counts().items()}
        return {key: count for key, count in found.items() if count} == expected

    wait_for(have_grown)
    assert len(workers_of(process)) == NUM_WORKERS


def rank_status(port, body):
    """Send a ranking request on a new connection and return its status."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", "/v1/rank", json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse().status


def test_frontend_worker_kill_loses_only_its_requests(served):
    port, process = served
    for _ in range(2):
        before = workers_of(process)
        connections = []
        while not all(is_connected(worker) for worker in before):  # the kernel chooses the worker of a connection
            connections.append(http.client.HTTPConnection("127.0.0.1", port, timeout=60))
            connections[-1].request("GET", "/health/live")
            assert connections[-1].getresponse().read() == b'{"status":"live"}'
        before[0].kill()
        psutil.wait_procs([before[0]], timeout=60)
        assert [rank_status(port, VALID) for _ in range(20)] == [200] * 20, "the other worker accepts all connections"
        num_alive = 0
        for connection in connections:
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                connection.request("GET", "/health/live")
                num_alive += connection.getresponse().status == 200
        assert 0 < num_alive < len(connections), "connections of the other worker stay open"
        wait_for(lambda: len(workers_of(process)) == NUM_WORKERS)
        assert before[0].pid not in [worker.pid for worker in workers_of(process)]
        assert process.poll() is None


def test_frontend_workers_reload_under_load_is_atomic(served, models):
    port, process = served
    old, new = (Servable.load(models / f"ranking{seed}").version[:12] for seed in (1, 2))

    async def run():
        load = Load(port, rank_body={**RANK_BODY, "history": HISTORY, "context": {"tab": "home"}})
        tasks = [asyncio.create_task(load.send_requests(f"r{i}")) for i in range(6)]
        while sum(1 for responses in load.responses.values() if responses) < len(tasks):
            await asyncio.sleep(0.01)  # until every user has a response of the old version
            assert all(not task.done() for task in tasks)
        for number in (2, 1):
            before = load.num_requests
            (models / "link").symlink_to(models / f"ranking{number}")
            (models / "link").rename(models / "ranking")
            process.send_signal(signal.SIGHUP)
            expected = new if number == 2 else old

            def latest_versions():
                return {responses[-1][0] for responses in load.responses.values() if responses}

            while latest_versions() != {expected} or load.num_requests < before + 60:
                await asyncio.sleep(0.01)  # until all users get the new version
                assert all(not task.done() for task in tasks)
        load.is_over = True
        await asyncio.gather(*tasks)
        await load.close()
        return load

    load = asyncio.run(asyncio.wait_for(run(), 240))
    assert (load.num_failed, load.num_split) == (0, 0)
    scores = {}
    for responses in load.responses.values():
        assert [version for version, _ in itertools.groupby(version for version, _ in responses)] == [old, new, old]
        for version, found in responses:
            scores.setdefault(version, set()).add(found)
    assert {version: len(found) for version, found in scores.items()} == {old: 1, new: 1}


def test_frontend_workers_report_transit_time_to_trigger(served):
    """The test sends its own requests, since none may have been measured before."""
    port, _ = served

    async def run():
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            for number in range(16):
                assert (await client.post("/v1/rank", json={**VALID, "user": f"w{number}"})).status_code == 200
            return (await client.get("/v1/status")).json()["models"]["ranking"]

    status = asyncio.run(run())
    assert status["transit_s"] > 0
    assert status["host_s"] > 0


def test_frontend_workers_sigterm_drains_and_exits(served):
    port, process = served
    count = 200
    workers = workers_of(process)
    template = children_of(process)

    def request(number):
        return post("/v1/rank", {**VALID, "user": f"s{number}"})

    async def run():
        sent = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(status_once_sent(port, request(i), sent)) for i in range(count)]
        for _ in range(count):
            await sent.acquire()
        while sum(task.done() for task in tasks) < 0.8 * count:  # more than one worker gets, so both have accepted
            await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
        process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == [200] * count
    assert process.wait(timeout=120) == 0
    assert not psutil.wait_procs([*workers, *template], timeout=60)[1]
    assert process.stdout.read().endswith(b"stopped\n")


@pytest.mark.slow
def test_frontend_workers_exit_with_engine_process(models):
    with running_server(models / "retrieval", "--frontend_workers", str(NUM_WORKERS)) as (_, process):
        children = [*workers_of(process), *children_of(process)]
        assert len(children) == NUM_WORKERS + 1
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL
        assert not psutil.wait_procs(children, timeout=60)[1]
