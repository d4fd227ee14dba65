"""Three replicas on Ray Serve with HAProxy: session affinity, equal scores, and users moved by a replacement."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter

import numpy as np
import psutil
import pytest

from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.serving_engine import Engine
from nestrec.serving.fleet.readiness_probes import free_port
from nestrec.serving.model.model_adapter import make_adapter
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec_bench.harness.random_model import random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
NUM_USERS = 120
BODY = {"history": {"items": ["1", "2"], "times_ms": [1, 2]}, "now_ms": 5}


def send(url, path, user):
    """Send a request of a user; return (status, slot, misrouted, body), with slot -1 if there is no response."""
    body = {**BODY, "user": f"u{user}", **({} if path == "/v1/preinfer" else {"candidates": ["3", "4"]})}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20.0) as response:
            headers = response.headers
            return response.status, int(headers["x-nestrec-slot"]), int(headers["x-nestrec-misrouted"]), response.read()
    except (urllib.error.HTTPError, OSError):
        return 0, -1, 0, b""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Yield (model, url, process) of a server with three replicas."""
    folder = tmp_path_factory.mktemp("model") / "model"
    model = random_retrieval(ENCODER, num_items=50)
    write_servable(model, folder)
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "nestrec", "serve", "--model", str(folder), "--port", str(port)]
    command += ["--num_instances", "3", "--load_balancer", "ray", "--service.engine.preinfer.policy", "all"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    while send(url, "/v1/rank", 0)[0] != 200:
        assert process.poll() is None
        time.sleep(0.5)  # other processes start: there is no clock to inject
    yield model, url, process
    process.terminate()
    process.wait(120)


@pytest.mark.timeout(600)
def test_ray_ranking_request_follows_preinfer(served):
    model, url, _ = served
    # Until the router knows all replicas, it sends some users to other replicas than their own.
    first = [send(url, "/v1/rank", user) for user in range(NUM_USERS)]
    misrouted = {slot: max(response[2] for response in first if response[1] == slot) for slot in range(3)}
    pairs = [[send(url, path, user) for path in ("/v1/preinfer", "/v1/rank")] for user in range(NUM_USERS)]
    num_together = sum(preinferred[1] == ranked[1] for preinferred, ranked in pairs)
    print(
        f"{num_together} of {NUM_USERS} pairs on one replica, misrouted before and after by slot: {misrouted},"
        f" {[max(ranked[2] for _, ranked in pairs if ranked[1] == slot) for slot in range(3)]}"
    )
    assert num_together >= 0.99 * NUM_USERS
    assert {ranked[1] for _, ranked in pairs} == {0, 1, 2}
    assert all(ranked[2] == misrouted[ranked[1]] for _, ranked in pairs), (
        "no replica was full, so no request was misrouted"
    )
    engine = Engine(make_adapter(model), EngineConfig())
    history = History(items=np.array([1, 2]), times_ms=np.array([1, 2]), actions=np.zeros(2, np.int64))
    request = engine.submit_rank("a", history, Candidates(items=np.array([3, 4]), now_ms=5), timeout_s=10.0)
    expected = request.future.result(10.0).scores[:, 0]
    engine.close()
    for _, (status, _, _, content) in pairs:
        assert status == 200
        assert np.abs(np.array(json.loads(content)["scores"]["score"]) - expected).max() <= 1e-5


@pytest.mark.timeout(600)
def test_ray_replica_replacement_moves_only_its_users(served):
    _, url, process = served
    before = {user: send(url, "/v1/rank", user)[1] for user in range(NUM_USERS)}
    replicas = [p for p in psutil.Process(process.pid).children(recursive=True) if "Instance" in " ".join(p.cmdline())]
    assert len(replicas) == 3
    replicas[0].send_signal(signal.SIGKILL)
    moved = set()
    end_s = time.monotonic() + 120
    while True:
        now = {user: send(url, "/v1/rank", user)[1] for user in range(NUM_USERS)}
        moved |= {user for user in now if now[user] not in (-1, before[user])}
        if moved and now == before:
            break
        assert time.monotonic() < end_s, "the users of the killed replica return to its replacement"
    print(f"{len(moved)} of {NUM_USERS} users moved and returned; users by former slot: {Counter(before.values())}")
    assert len({before[user] for user in moved}) == 1, "only users of the killed replica move"
