"""Fronts in processes of their own: the answers of one process, whatever is asked and whatever happens to them."""

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
from front_processes import NUM_FRONTS, children_of, fronts_of, is_asked, wait_for
from rolling_load import ASKED, Load
from server_process import post, running_server, status_once_sent

from nestrec.base.cuda import chosen_device
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
OPTIONS = (
    "--front_processes", str(NUM_FRONTS), "--front_awake_ms", "1",
    "--limits.default_timeout_ms", "10000", "--limits.tells_prefix", "true",
    "--service.engine.trigger.policy", "never", "--service.engine.max_queue_s", "1000",
    "--service.engine.chunk_ms", "0",
)  # fmt: skip
HISTORY = {"items": ["1", "2"], "times_ms": [1, 2], "actions": [1, 1], "features": {"tab": ["home", "home"]}}
GOOD = {"user": "ann", "history": HISTORY, "candidates": ["3"], "now_ms": 9, "context": {"tab": "home"}}
"""nothing is cut in pieces, whose scores are rounded otherwise, where the machine is slow"""
TOLD = ("content-type", "allow", "retry-after", "content-security-policy", "x-content-type-options")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two versions of a ranking model behind a link, with the same items in another order, and a retrieval model."""
    root = tmp_path_factory.mktemp("models")
    write_servable(random_ranking(ENCODER, num_items=60, seed=1), root / "ranking1")
    other = random_ranking(ENCODER, num_items=60, seed=2)
    write_servable(replace(other, item_keys=other.item_keys[::-1]), root / "ranking2")
    write_servable(random_retrieval(ENCODER, num_items=60, seed=1), root / "retrieval")
    (root / "ranking").symlink_to(root / "ranking1")
    return root


@pytest.fixture(scope="module")
def served(models):
    """(port, process) of a server with fronts; the tests run in the order of this file, and the last one stops it."""
    with running_server(models / "ranking", "--model", str(models / "retrieval"), *OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def one_process(models):
    """The application of a server of the same models, without any process."""
    engine = EngineConfig(max_queue_s=1000.0, chunk_ms=0.0, trigger=TriggerConfig(policy="never"))
    folders = [models / "ranking1", models / "retrieval"]
    service = Service.load(folders, ServiceConfig(engine=engine), chosen_device("auto"))
    yield App(service, LimitsConfig(default_timeout_ms=10_000, tells_prefix=True))
    service.close()


def ranked(rng, **changed):
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
    return {**body, "candidates": candidates, "unknown": rng.choice(["last", "score", "drop", "refuse"]), **changed}


def requests_of(rng, count):
    """(method, path, body) of good and bad requests."""
    body = ranked(random.Random(0))
    events = {"items": ["1", "2"], "times_ms": [5, 9], "actions": [1, 1], "features": {"tab": ["home", None]}}
    kept = {"user": "kept", "now_ms": 10**12, "context": {"tab": "home"}, "timeout_ms": 9000}
    asked = [
        ("POST", "/v1/events", {"user": "kept", "history": events}),
        ("POST", "/v1/rank", {**kept, "candidates": ["3", "4"]}),
        ("POST", "/v1/rank", {**body, "user": "kept", "prefer_kept": True}),
        ("POST", "/v1/preinfer", {"user": "kept", "events": 2}),
        ("POST", "/v1/preinfer", {"user": "kept", "history": None, "events": 2}),
        ("DELETE", "/v1/users/kept/events", None),
        ("POST", "/v1/rank", {**kept, "candidates": ["3"]}),
        ("POST", "/v1/events", {"user": "kept", "history": {"items": 3}}),
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
        ("POST", "/v1/recommend", {**kept, "history": {"items": []}}),
    ]
    for _ in range(count):
        path = rng.choice(["/v1/rank", "/v1/rank", "/v1/recommend", "/v1/preinfer"])
        body = ranked(rng)
        if path != "/v1/rank":
            del body["candidates"]
        if path == "/v1/preinfer":
            del body["context"]
        elif path == "/v1/recommend" and rng.random() < 0.5:
            body |= {"k": 7, "exclude": ["3", 999], rng.choice(["allow", "exclude"]): [*map(str, range(1, 70))]}
        asked.append(("POST", path, body))
    return asked


def test_answers_are_those_of_one_process_byte_by_byte(served, one_process):
    port, _ = served
    asked = requests_of(random.Random(5), 80)

    async def run():
        limits = httpx.Limits(max_keepalive_connections=0)  # each request to whichever front its connection goes to
        there = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0, limits=limits)
        here = httpx.AsyncClient(transport=httpx.ASGITransport(one_process), base_url="http://127.0.0.1", timeout=60.0)
        statuses = set()
        async with there, here:
            for method, path, body in asked:
                content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
                headers = {} if content is None else {"content-type": "application/json"}
                told = []
                for client in (here, there):
                    answer = await client.request(method, path, content=content, headers=headers)
                    told.append((answer.status_code, answer.content, {n: answer.headers.get(n) for n in TOLD}))
                statuses.add(told[0][0])
                if path == "/health/ready":  # tells of the load
                    told = [one[0] for one in told]
                assert told[1] == told[0], (method, path, body)
        assert {200, 202, 204, 400, 404, 405} <= statuses

    asyncio.run(run())


def test_one_exposition_counts_what_all_fronts_answered(served):
    port, process = served

    def counted():
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        found = re.findall(r'nestrec_requests_total\{route="(/v1/rank|malformed)",status="(\d+)"\} (\S+)', text)
        return {(route, int(status)): float(count) for route, status, count in found}

    counted()  # what a front was late to tell is in the next one
    before = counted()
    asked = [GOOD, {"user": "u"}, {**GOOD, "candidates": 3}, {**GOOD, "prefer_kept": True}]
    for i in range(40):
        ask(port, asked[i % 4])
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/v1/rank", headers={"host": "elsewhere.example"})
        assert connection.getresponse().status == 421
    wanted = {("/v1/rank", 200): 20.0, ("/v1/rank", 400): 20.0, ("malformed", 421): 1.0}

    def have_grown():  # a front that takes a second to tell its counts is not waited for
        found = {key: count - before.get(key, 0.0) for key, count in counted().items()}
        return {key: count for key, count in found.items() if count} == wanted

    wait_for(have_grown)
    assert len(fronts_of(process)) == NUM_FRONTS


def ask(port, body):
    """The status of a request on a connection of its own."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", "/v1/rank", json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse().status


def test_a_front_that_is_killed_is_replaced_and_costs_what_it_was_answering(served):
    port, process = served
    for _ in range(2):
        before = fronts_of(process)
        held = []
        while not all(is_asked(front) for front in before):  # where a connection goes is the system's choice
            held.append(http.client.HTTPConnection("127.0.0.1", port, timeout=60))
            held[-1].request("GET", "/health/live")
            assert held[-1].getresponse().read() == b'{"status":"live"}'
        before[0].kill()
        psutil.wait_procs([before[0]], timeout=60)
        assert [ask(port, GOOD) for _ in range(20)] == [200] * 20, "the others have the port to themselves"
        kept = 0
        for connection in held:
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                connection.request("GET", "/health/live")
                kept += connection.getresponse().status == 200
        assert 0 < kept < len(held), "connections of the others go on"
        wait_for(lambda: len(fronts_of(process)) == NUM_FRONTS)
        assert before[0].pid not in [one.pid for one in fronts_of(process)]
        assert process.poll() is None


def test_models_are_loaded_anew_under_load_and_no_answer_is_of_two_versions(served, models):
    port, process = served
    old, new = (Servable.load(models / f"ranking{seed}").version[:12] for seed in (1, 2))

    async def run():
        load = Load(port, asked={**ASKED, "history": HISTORY, "context": {"tab": "home"}})
        asking = [asyncio.create_task(load.ask(f"r{i}")) for i in range(6)]
        for number in (2, 1):
            before = load.num_requests
            (models / "link").symlink_to(models / f"ranking{number}")
            (models / "link").rename(models / "ranking")
            process.send_signal(signal.SIGHUP)
            wanted = new if number == 2 else old
            while {met[-1][0] for met in load.answers.values() if met} != {wanted} or load.num_requests < before + 60:
                await asyncio.sleep(0.01)  # until everybody has met it
                assert all(not task.done() for task in asking)
        load.is_over = True
        await asyncio.gather(*asking)
        await load.close()
        return load

    load = asyncio.run(asyncio.wait_for(run(), 240))
    assert (load.num_failed, load.num_split) == (0, 0)
    scores = {}
    for met in load.answers.values():
        assert [version for version, _ in itertools.groupby(version for version, _ in met)] == [old, new, old]
        for version, found in met:
            scores.setdefault(version, set()).add(found)
    assert {version: len(found) for version, found in scores.items()} == {old: 1, new: 1}


def test_the_trigger_hears_how_long_requests_are_on_their_way_through_fronts(served):
    """A server that was asked by nobody else may have measured none before."""
    port, _ = served

    async def run():
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            for number in range(16):
                assert (await client.post("/v1/rank", json={**GOOD, "user": f"w{number}"})).status_code == 200
            return (await client.get("/v1/status")).json()["models"]["ranking"]

    status = asyncio.run(run())
    assert status["way_s"] > 0
    assert status["host_s"] > 0


def test_sigterm_loses_nothing_and_leaves_nobody(served):
    port, process = served
    count = 200
    fronts = fronts_of(process)
    template = children_of(process)

    def request(number):
        return post("/v1/rank", {**GOOD, "user": f"s{number}"})

    async def run():
        sent = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(status_once_sent(port, request(i), sent)) for i in range(count)]
        for _ in range(count):
            await sent.acquire()
        while sum(task.done() for task in tasks) < 0.8 * count:  # more than one front can have: both have accepted
            await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
        process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == [200] * count
    assert process.wait(timeout=120) == 0
    assert not psutil.wait_procs([*fronts, *template], timeout=60)[1]
    assert process.stdout.read().endswith(b"stopped\n")


@pytest.mark.slow
def test_fronts_end_with_the_process_that_computes(models):
    with running_server(models / "retrieval", "--front_processes", str(NUM_FRONTS)) as (_, process):
        children = [*fronts_of(process), *children_of(process)]
        assert len(children) == NUM_FRONTS + 1
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL
        assert not psutil.wait_procs(children, timeout=60)[1]
