"""nginx before two instances, as it is shipped: affinity, equal scores, and a kill without errors."""

import asyncio
import json
import os
import shutil
import signal
import sys
import time

import httpx
import numpy as np
import psutil
import pytest

from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.serving_engine import Engine
from nestrec.serving.fleet.readiness_probes import free_port
from nestrec.serving.model.model_adapter import make_form
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec_bench.harness.random_model import random_retrieval
from support.command_runner import start

PATIENCE_S = 200.0
"""for processes to start, on a machine that others share"""
pytestmark = [
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
    pytest.mark.timeout(2 * PATIENCE_S),
]
ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
NUM_USERS, GAP_S = 40, 0.02
SECRET = "carla-s-id"
BODY = {"history": {"items": ["1", "2"], "times_ms": [1, 2]}, "now_ms": 5, "timeout_ms": 10_000}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(model, url, process) of two instances behind nginx."""
    folder, port = tmp_path_factory.mktemp("model") / "model", free_port()
    model = random_retrieval(ENCODER, num_items=50)
    write_servable(model, folder)
    command = [sys.executable, "-m", "nestrec", "serve", "--model", str(folder), "--port", str(port)]
    command += ["--instances", "2", "--front", "nginx", "--service.engine.trigger.policy", "all"]
    command += ["--limits.default_timeout_ms", "4000", "--service.engine.max_queue_s", "1000"]  # where nobody says
    log = folder.parent / "log"
    log.touch()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = start(command, is_forked=True, env=environment, cwd=None, output=log)
    end_s = time.monotonic() + PATIENCE_S
    while b"serving on" not in log.read_bytes():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end_s, f"it does not start: {log.read_text()}"
        time.sleep(0.05)  # other processes start: there is no clock to inject
    yield model, f"http://127.0.0.1:{port}", process
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, "neither instances nor nginx outlive their front"
    assert SECRET not in log.read_text()


async def post(client, path, user):
    body = {**BODY, "user": f"u{user}", **({} if path == "/v1/preinfer" else {"candidates": ["3", "4"]})}
    headers = {"x-nestrec-user": f"u{user}", "x-nestrec-timeout-ms": str(BODY["timeout_ms"])}
    response = await client.post(path, content=json.dumps(body), headers=headers)
    return response.status_code, response.headers["x-nestrec-instance"].split(", ")[-1], response.content


def on_client(url, use):
    async def run():
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=url, timeout=20.0, limits=limits, headers={"content-type": "application/json"}
        ) as client:
            return await use(client)

    return asyncio.run(run())


def test_ranking_lands_where_its_signal_went_and_scores_are_those_of_an_engine(served):
    model, url, _ = served

    async def pairs(client):
        return [[await post(client, path, user) for path in ("/v1/preinfer", "/v1/rank")] for user in range(NUM_USERS)]

    found = on_client(url, pairs)
    assert all(signalled[1] == ranked[1] for signalled, ranked in found)
    assert len({ranked[1] for _, ranked in found}) == 2, "both instances have users"
    engine = Engine(make_form(model), EngineConfig())
    history = History(items=np.array([1, 2]), times_ms=np.array([1, 2]), actions=np.zeros(2, np.int64))
    work = engine.rank("a", history, Candidates(items=np.array([3, 4]), now_ms=5), timeout_s=10.0)
    expected = work.future.result(10.0).scores[:, 0]
    engine.close()
    for _, (status, _, content) in found:
        assert status == 200
        assert np.abs(np.array(json.loads(content)["scores"]["score"]) - expected).max() <= 1e-5


def test_no_request_fails_when_an_instance_is_killed(served):
    _, url, process = served

    async def run(client):
        before = {user: (await post(client, "/v1/rank", user))[1] for user in range(NUM_USERS)}
        lost, tasks, start_s = before[0], [], time.monotonic()
        children = psutil.Process(process.pid).children()
        victim = next(c for c in children if lost.rpartition(":")[2] in c.cmdline())
        for number in range(100):
            await asyncio.sleep(max(0.0, start_s + number * GAP_S - time.monotonic()))
            tasks.append(asyncio.create_task(post(client, "/v1/rank", number % NUM_USERS)))
            if number == 25:
                victim.send_signal(signal.SIGKILL)
        seen = await asyncio.gather(*tasks)
        return before, lost, seen

    before, lost, seen = on_client(url, run)
    assert [status for status, _, _ in seen] == [200] * 100
    users = [number % NUM_USERS for number in range(100)]
    kept = [(user, place) for user, (_, place, _) in zip(users, seen, strict=True) if before[user] != lost]
    assert all(place == before[user] for user, place in kept), "only the lost instance's users have moved"
    assert any(place != lost for user, (_, place, _) in zip(users, seen, strict=True) if before[user] == lost)


def instance_at(process, address):
    """The process that listens there."""
    port = address.rpartition(":")[2]
    return next(c for c in psutil.Process(process.pid).children() if port in c.cmdline())


def wait_for_all(client):
    """Until those that were killed are back."""
    end_s = time.monotonic() + PATIENCE_S
    while (found := client.get("/health/ready").json()) != {"slots": [True, True]}:
        assert time.monotonic() < end_s, f"they are not back: {found}"
        time.sleep(0.05)  # other processes start: there is no clock to inject


def write_events(client, user):
    body = {"user": user, "history": {"items": ["1"], "times_ms": [1]}}
    return client.post("/v1/events", json=body, headers={"x-nestrec-user": user})


def test_events_are_erased_on_every_instance_whatever_the_id_and_without_the_header(served):
    _, url, _ = served
    with httpx.Client(base_url=url, timeout=20.0) as client:
        wait_for_all(client)
        for user in (f"{SECRET}/{number}" for number in range(8)):
            for _ in range(2):
                assert write_events(client, user).json() == {"events": 1}
                erased = client.build_request("DELETE", "/")
                target = f"/v1/users/{user.replace('/', '%2F')}/events"
                erased.url = erased.url.copy_with(raw_path=target.encode())
                assert client.send(erased).status_code == 204
        nobody = client.post("/v1/events", json={"user": "a", "history": {"items": ["1"], "times_ms": [1]}})
        assert nobody.status_code == 400
        assert "X-Nestrec-User" in nobody.json()["error"]["message"]


def test_a_stopped_instance_keeps_no_deadline_waiting_and_no_erasure_counts(served):
    _, url, process = served
    with httpx.Client(base_url=url, timeout=20.0) as client:
        wait_for_all(client)
        body, headers = {"user": SECRET, **BODY, "candidates": ["3"]}, {"x-nestrec-user": SECRET}
        found = client.post("/v1/rank", json=body, headers=headers)
        stopped = instance_at(process, found.headers["x-nestrec-instance"])
        stopped.suspend()
        try:
            start_s = time.monotonic()
            late = client.post(
                "/v1/rank", json={**body, "timeout_ms": 500}, headers={**headers, "x-nestrec-timeout-ms": "500"}
            )
            took_s = time.monotonic() - start_s
            erased = client.delete(f"/v1/users/{SECRET}/events")
        finally:
            stopped.resume()
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert "in time" in late.json()["error"]["message"]
        assert 0.5 <= took_s < 15.0, "the client would wait for 20"
        assert (erased.status_code, erased.headers["retry-after"]) == (503, "1")


def test_what_nginx_refuses_by_itself_is_told_as_the_instances_tell_it(served):
    _, url, _ = served
    with httpx.Client(base_url=url, timeout=20.0) as client:
        large = client.post("/v1/rank", content=b"x" * (2 << 20))
        long = client.get("/" + "a" * 40_000)
        hidden = client.get("/nestrec-wait/500")
        # Its line in the log of nginx would hold the id; the end of these tests looks for it there.
        named = client.request("DELETE", f"/v1/users/{SECRET}/events", content=b"x" * (2 << 20))
        for response, status in ((large, 413), (long, 414), (hidden, 404), (named, 413)):
            assert response.status_code == status
            assert response.headers["content-type"] == "application/json"
            assert response.json()["error"]["message"]
