"""Three replicas on Ray Serve behind HAProxy: affinity, equal scores, and who moves when one is replaced."""

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
from nestrec.serving.model.model_adapter import make_form
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec_bench.harness.random_model import random_retrieval

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
NUM_USERS = 120
BODY = {"history": {"items": ["1", "2"], "times_ms": [1, 2]}, "now_ms": 5}


def ask(url, path, user):
    """(status, slot, leaked, body); slot -1 where nobody has answered."""
    body = {**BODY, "user": f"u{user}", **({} if path == "/v1/preinfer" else {"candidates": ["3", "4"]})}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20.0) as response:
            headers = response.headers
            return response.status, int(headers["x-nestrec-slot"]), int(headers["x-nestrec-leaked"]), response.read()
    except (urllib.error.HTTPError, OSError):
        return 0, -1, 0, b""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(model, url, process)"""
    folder = tmp_path_factory.mktemp("model") / "model"
    model = random_retrieval(ENCODER, num_items=50)
    write_servable(model, folder)
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "nestrec", "serve", "--model", str(folder), "--port", str(port)]
    command += ["--instances", "3", "--front", "ray", "--service.engine.trigger.policy", "all"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    while ask(url, "/v1/rank", 0)[0] != 200:
        assert process.poll() is None
        time.sleep(0.5)  # other processes start: there is no clock to inject
    yield model, url, process
    process.terminate()
    process.wait(120)


@pytest.mark.timeout(600)
def test_a_ranking_request_lands_where_its_signal_ran_with_the_scores_of_an_engine(served):
    model, url, _ = served
    first = [ask(url, "/v1/rank", user) for user in range(NUM_USERS)]  # until the router knows all replicas, some leak
    leaked = {slot: max(seen[2] for seen in first if seen[1] == slot) for slot in range(3)}
    pairs = [[ask(url, path, user) for path in ("/v1/preinfer", "/v1/rank")] for user in range(NUM_USERS)]
    together = sum(signalled[1] == ranked[1] for signalled, ranked in pairs)
    print(
        f"{together} of {NUM_USERS} pairs together, leaked before and after by slot: {leaked},"
        f" {[max(ranked[2] for _, ranked in pairs if ranked[1] == slot) for slot in range(3)]}"
    )
    assert together >= 0.99 * NUM_USERS
    assert {ranked[1] for _, ranked in pairs} == {0, 1, 2}
    assert all(ranked[2] == leaked[ranked[1]] for _, ranked in pairs), "nobody was full, so nothing has leaked"
    engine = Engine(make_form(model), EngineConfig())
    history = History(items=np.array([1, 2]), times_ms=np.array([1, 2]), actions=np.zeros(2, np.int64))
    work = engine.rank("a", history, Candidates(items=np.array([3, 4]), now_ms=5), timeout_s=10.0)
    expected = work.future.result(10.0).scores[:, 0]
    engine.close()
    for _, (status, _, _, content) in pairs:
        assert status == 200
        assert np.abs(np.array(json.loads(content)["scores"]["score"]) - expected).max() <= 1e-5


@pytest.mark.timeout(600)
def test_after_a_replica_is_replaced_only_its_users_have_moved_and_they_return(served):
    _, url, process = served
    before = {user: ask(url, "/v1/rank", user)[1] for user in range(NUM_USERS)}
    replicas = [p for p in psutil.Process(process.pid).children(recursive=True) if "Instance" in " ".join(p.cmdline())]
    assert len(replicas) == 3
    replicas[0].send_signal(signal.SIGKILL)
    moved = set()
    end_s = time.monotonic() + 120
    while True:
        now = {user: ask(url, "/v1/rank", user)[1] for user in range(NUM_USERS)}
        moved |= {user for user in now if now[user] not in (-1, before[user])}
        if moved and now == before:
            break
        assert time.monotonic() < end_s, "the replacement takes its users back"
    print(f"{len(moved)} of {NUM_USERS} users have moved, and returned; by slot before: {Counter(before.values())}")
    assert len({before[user] for user in moved}) == 1, "nobody else has moved"
