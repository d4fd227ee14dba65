"""A gateway and its instances under signals and engine failures: they change models together and stop together."""

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
from nestrec.serving.http.sockets import bind_sockets
from nestrec.serving.model.servable import Servable
from nestrec_bench.harness.random_model import random_retrieval
from support.command_runner import start_piped
from support.fail_points import fail_variables

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
TIMEOUT_S = 200.0
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)  # three processes load torch, possibly on a busy machine
BODY = {"history": {"items": ["1", "2"], "times_ms": [1, 2]}, "candidates": ["3"], "timeout_ms": 10_000}


@pytest.fixture
def link(tmp_path):
    """Return a symbolic link to the first of two exported models in the same folder."""
    for seed in (1, 2):
        write_servable(random_retrieval(ENCODER, num_items=20, seed=seed), tmp_path / str(seed))
    (tmp_path / "current").symlink_to(tmp_path / "1")
    return tmp_path / "current"


@pytest.fixture
def start(link):
    """Return a function that starts a gateway with instances and returns its port and process.

    The gateway is forked from a process that has loaded torch.
    """
    gateways = []

    def start(num_instances, *options, **environment):
        port = free_port()
        command = [sys.executable, "-m", "nestrec", "serve", "--model", str(link), "--port", str(port)]
        command += ["--num_instances", str(num_instances), "--load_balancer", "gateway", *options]
        process = start_piped(command, {**os.environ, "OMP_NUM_THREADS": "1", **environment})
        gateways.append(process)
        return port, process

    yield start
    for process in gateways:
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


def wait_until(is_done, message):
    end_s = time.monotonic() + TIMEOUT_S
    while not is_done():
        assert time.monotonic() < end_s, message
        time.sleep(0.05)  # other processes act, so no clock can be injected


def wait_for_line(process, text):
    """Return all lines up to the first one that contains a text."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"the process exited without the line {text}")


def send_rank_request(port, user):
    """Send a ranking request and return its status and the version of the model."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    connection.request("POST", "/v1/rank", json.dumps({**BODY, "user": user}), {"content-type": "application/json"})
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body.get("model")


def roll_back(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    connection.request("POST", "/v1/admin/rollback", b"{}", {"content-type": "application/json"})
    assert connection.getresponse().status == http.client.OK
    connection.close()


def check_log(lines):
    """Check that lines name their process, and that requests have a line of the gateway and one of the instance."""
    assert {line["process"] for line in lines} == {"gateway", "instance-0", "instance-1"}
    accesses = [line for line in lines if line["logger"] == "nestrec.access"]
    assert not [line for line in accesses if line["route"].startswith("/health")]
    ranked = {}
    for line in accesses:
        if line["route"] == "/v1/rank":
            ranked.setdefault(line["request_id"], []).append(line["process"])
    first = [sorted(processes) for processes in list(ranked.values())[:20]]  # the last lines may not have been read yet
    assert {(len(processes), processes[0]) for processes in first} == {(2, "gateway")}


def versions(port):
    """Return the model versions that users of all instances get."""
    results = {send_rank_request(port, f"u{number}") for number in range(12)}
    assert {status for status, _ in results} == {200}
    return {version for _, version in results}


def test_gateway_sighup_rolls_all_instances(start, link):
    port, process = start(2, "--log.format", "json", "--log.access_log", "true")
    lines = wait_for_line(process, b"serving on")
    first, second = (Servable.load(link.parent / name).version[:12] for name in ("1", "2"))
    assert versions(port) == {first}
    before = {child.pid for child in children(process)}
    link.unlink()
    link.symlink_to(link.parent / "2")
    process.send_signal(signal.SIGHUP)
    lines += wait_for_line(process, b"reload: all 2 instances serve")
    assert versions(port) == {second}
    assert {child.pid for child in children(process)} == before, (
        "models are reloaded in place, without a restart of instances"
    )
    (link.parent / "2" / "weights.safetensors").write_bytes(b"damaged")
    process.send_signal(signal.SIGHUP)
    lines += wait_for_line(process, b"reload: instance 0 rejected the models")
    assert versions(port) == {second}
    roll_back(port)
    lines += wait_for_line(process, b"rollback: all 2 instances serve")
    assert versions(port) == {first}
    check_log([json.loads(line) for line in lines])
    instances = children(process)
    process.kill()
    _, alive = psutil.wait_procs(instances, timeout=TIMEOUT_S)
    assert not alive


def test_gateway_sigterm_during_start_stops_instances(start):
    _, process = start(2)
    wait_until(lambda: len(children(process)) == 2, "the instances do not start")
    instances = children(process)
    process.send_signal(signal.SIGTERM)
    output = process.stdout.read()
    assert process.wait(TIMEOUT_S) == 0
    assert b"serving on" not in output
    assert not any(child.is_running() for child in instances)


def test_gateway_replaces_instance_with_failed_engine(start, tmp_path):
    """In each process, the second batch fails, and then the recovery of the engine fails."""
    log = tmp_path / "fired"
    points = "serving.plan@2=raise,serving.recover=raise"
    port, process = start(1, **fail_variables(points, log))
    wait_for_line(process, b"serving on")
    (before,) = children(process)
    command = before.cmdline()
    instance_port = int(command[command.index("--port") + 1])
    assert send_rank_request(port, "u")[0] == 200
    assert send_rank_request(port, "u")[0] == 503
    before.wait(2.0)
    wait_for_line(process, b"instance 0 exited with code 77")
    with pytest.raises(UserError, match="in use"):  # the port stays reserved for the next process
        bind_sockets("127.0.0.1", instance_port)
    wait_until(lambda: send_rank_request(port, "u")[0] == 200, "the instance is not replaced")
    assert log.read_text() == "serving.plan\nserving.recover\n"
