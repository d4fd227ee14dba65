"""A front and its instances under signals and dying engines: they change models together, and they end together."""

import http.client
import json
import os
import signal
import sys
import time

import psutil
import pytest

from nestrec.base.errors import UserError
from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.fleet.readiness_probes import free_port
from nestrec.serving.http.sockets import bound_sockets
from nestrec.serving.model.servable import Servable
from nestrec_bench.harness.random_model import random_retrieval
from support.command_runner import piped
from support.fail_points import fail_variables

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
PATIENCE_S = 200.0
pytestmark = pytest.mark.timeout(3 * PATIENCE_S)  # three processes load torch, on a machine that others share
BODY = {"history": {"items": ["1", "2"], "times_ms": [1, 2]}, "candidates": ["3"], "timeout_ms": 10_000}


@pytest.fixture
def link(tmp_path):
    """A link to the first of two exported models beside it."""
    for seed in (1, 2):
        write_servable(random_retrieval(ENCODER, num_items=20, seed=seed), tmp_path / str(seed))
    (tmp_path / "current").symlink_to(tmp_path / "1")
    return tmp_path / "current"


@pytest.fixture
def start(link):
    """Starts a gateway and its instances: (port, process). The gateway is forked from one that has loaded torch."""
    started = []

    def start(num_instances, *options, **environment):
        port = free_port()
        command = [sys.executable, "-m", "nestrec", "serve", "--model", str(link), "--port", str(port)]
        command += ["--instances", str(num_instances), "--front", "gateway", *options]
        process = piped(command, {**os.environ, "OMP_NUM_THREADS": "1", **environment})
        started.append(process)
        return port, process

    yield start
    for process in started:
        for child in children(process):
            child.kill()
        process.kill()
        process.wait()
        process.stdout.close()


def children(process):
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_until(is_so, what):
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, what
        time.sleep(0.05)  # other processes act: there is no clock to inject


def wait_for_line(process, text):
    """Return all lines up to the first one that contains a text."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"it ended without {text}")


def ask(port, user):
    """(status, version) of a ranking request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    connection.request("POST", "/v1/rank", json.dumps({**BODY, "user": user}), {"content-type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer.get("model")


def roll_back(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    connection.request("POST", "/v1/admin/rollback", b"{}", {"content-type": "application/json"})
    assert connection.getresponse().status == http.client.OK
    connection.close()


def check_log(lines):
    """Each line names its process, and each request has a line of the gateway and one of its instance."""
    assert {line["process"] for line in lines} == {"gateway", "instance-0", "instance-1"}
    answers = [line for line in lines if line["logger"] == "nestrec.requests"]
    assert not [line for line in answers if line["route"].startswith("/health")]
    ranked = {}
    for line in answers:
        if line["route"] == "/v1/rank":
            ranked.setdefault(line["request_id"], []).append(line["process"])
    first = [sorted(processes) for processes in list(ranked.values())[:20]]  # the last ones may not be read yet
    assert {(len(processes), processes[0]) for processes in first} == {(2, "gateway")}


def versions(port):
    """Over users of all instances."""
    found = {ask(port, f"u{number}") for number in range(12)}
    assert {status for status, _ in found} == {200}
    return {version for _, version in found}


def test_sighup_rolls_every_instance_and_none_outlives_its_front(start, link):
    port, process = start(2, "--log.format", "json", "--log.requests", "true")
    lines = wait_for_line(process, b"serving on")
    first, second = (Servable.load(link.parent / name).version[:12] for name in ("1", "2"))
    assert versions(port) == {first}
    before = {child.pid for child in children(process)}
    link.unlink()
    link.symlink_to(link.parent / "2")
    process.send_signal(signal.SIGHUP)
    lines += wait_for_line(process, b"reload: all 2 instances serve")
    assert versions(port) == {second}
    assert {child.pid for child in children(process)} == before, "in place: what instances keep of users stays"
    (link.parent / "2" / "weights.safetensors").write_bytes(b"damaged")
    process.send_signal(signal.SIGHUP)
    lines += wait_for_line(process, b"reload: instance 0 does not take the models")
    assert versions(port) == {second}
    roll_back(port)
    lines += wait_for_line(process, b"rollback: all 2 instances serve")
    assert versions(port) == {first}
    check_log([json.loads(line) for line in lines])
    instances = children(process)
    process.kill()
    _, alive = psutil.wait_procs(instances, timeout=PATIENCE_S)
    assert not alive


def test_sigterm_while_instances_start_ends_all_of_them(start):
    _, process = start(2)
    wait_until(lambda: len(children(process)) == 2, "instances begin")
    instances = children(process)
    process.send_signal(signal.SIGTERM)
    output = process.stdout.read()
    assert process.wait(PATIENCE_S) == 0
    assert b"serving on" not in output
    assert not any(child.is_running() for child in instances)


def test_instance_is_replaced_if_its_engine_is_lost(start, tmp_path):
    """The second batch of each process fails, and then the recovery from that."""
    log = tmp_path / "fired"
    points = "serving.plan@2=raise,serving.recover=raise"
    port, process = start(1, **fail_variables(points, log))
    wait_for_line(process, b"serving on")
    (before,) = children(process)
    words = before.cmdline()
    own_port = int(words[words.index("--port") + 1])
    assert ask(port, "u")[0] == 200
    assert ask(port, "u")[0] == 503
    before.wait(2.0)
    wait_for_line(process, b"instance 0 ended with code 77")
    with pytest.raises(UserError, match="in use"):  # nobody else gets its port before the next process has it
        bound_sockets("127.0.0.1", own_port)
    wait_until(lambda: ask(port, "u")[0] == 200, "another one has taken its place")
    assert log.read_text() == "serving.plan\nserving.recover\n"
