"""Start and stop of `nestrec serve`: its output, errors and reaction to signals at any time."""

import json
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from server_process import exchange, post, running_server, started, starting_server, status_of

from nestrec.base import errors
from nestrec.base.errors import UserError
from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.fleet.readiness_probes import free_port
from nestrec.serving.http.serve_config import ServeConfig
from nestrec.serving.http.signals import SignalHandler
from nestrec.serving.http.sockets import bind_sockets, close_all, port_of, run_server
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.server import serve
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader
from nestrec_bench.harness.random_model import random_ranking, random_retrieval
from support.command_runner import start_piped
from support.fail_points import fail_variables

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
BODY = {"user": "u", "history": {"items": ["1", "2"], "times_ms": [1, 2]}, "candidates": ["3"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    write_servable(random_retrieval(ENCODER, num_items=20), folder)
    return folder


def wait_until_loading(process):
    """Wait until the process has started to load its libraries, which takes a while."""
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)  # another process starts: there is no clock to inject


def test_sighup_during_start_is_handled_afterwards(folder):
    with starting_server(folder, "--port", "0") as process:
        wait_until_loading(process)
        process.send_signal(signal.SIGHUP)
        output = b""
        while b"serving on" not in output or b"already" not in output:  # the reload finds the same model
            line = process.stdout.readline()
            assert line, output
            output += line
        port = int(re.search(rb"serving on http://127.0.0.1:(\d+) ", output)[1])
        assert status_of(exchange(port, post("/v1/rank", BODY))) == 200
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().endswith(b"stopped\n")
        assert process.wait(timeout=100) == 0


def test_server_exit_code_after_engine_failure(folder, tmp_path):
    points = fail_variables("serving.plan=raise,serving.recover=raise", tmp_path / "fired")
    with running_server(folder, **points) as (port, process):
        assert status_of(exchange(port, post("/v1/rank", BODY))) == 503
        assert process.wait(2.0) == errors.ENGINE_LOST
        output = process.stdout.read()
    assert b"an engine step failed" in output
    assert b"an engine failed and cannot continue" in output
    assert output.count(b"RuntimeError: a fail point fired") >= 2, "both errors are logged with their tracebacks"


def test_sigterm_during_start_stops_server(folder):
    with starting_server(folder, "--port", "0") as process:
        wait_until_loading(process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        assert b"serving on" not in output


def test_port_in_use_is_one_error(folder):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        messages = []
        with pytest.raises(UserError, match=f"port={port}: the port is in use"):
            serve([folder], ServeConfig(port=port), SignalHandler(), messages.append)
        with pytest.raises(UserError, match=r"host=192\.0\.2\.1: cannot listen on this address"):
            serve([folder], ServeConfig(host="192.0.2.1", port=0, insecure=True), SignalHandler(), messages.append)
    assert messages == []


def test_missing_model_is_reported_before_serving(tmp_path):
    messages = []
    port = free_port()
    with pytest.raises(UserError, match="does not contain an exported model"):
        serve([tmp_path], ServeConfig(port=port), SignalHandler(), messages.append)
    assert messages == []
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))  # the port is free again


def test_json_log_contains_fatal_error(tmp_path):
    with started(start_piped, tmp_path, "--port", "0", "--log.format", "json") as process:
        lines = [json.loads(line) for line in process.stdout]
        assert process.wait(100) == errors.USER_ERROR
    assert (lines[-1]["level"], "does not contain an exported model" in lines[-1]["message"]) == ("error", True)


def test_port_bound_twice_fails_at_listen():
    first = bind_sockets("127.0.0.1", 0)
    second = []
    port = port_of(first)
    try:
        second = bind_sockets("127.0.0.1", port)
        first[0].listen()
        with pytest.raises(UserError, match=f"port={port}: the port is in use"):
            run_server(
                uvicorn.Config(None, lifespan="off", log_level="critical"), second, SignalHandler(), lambda: None
            )
    finally:
        close_all([*first, *second])


def test_reload_last_request_wins(tmp_path, folder, monkeypatch):
    write_servable(random_retrieval(ENCODER, num_items=20, seed=2), tmp_path / "2")
    write_servable(random_retrieval(ENCODER, num_items=20, seed=3), tmp_path / "3")
    current = tmp_path / "current"
    current.symlink_to(folder)
    service = Service.load([current], ServiceConfig())
    is_started = threading.Event()
    may_finish = threading.Event()
    load = Servable.load

    def slow_load(path, *arguments):
        servable = load(path, *arguments)
        if path.name == "2":
            is_started.set()
            assert may_finish.wait(30)
        return servable

    monkeypatch.setattr(Servable, "load", staticmethod(slow_load))
    reloader = Reloader(service, "cpu", TablesConfig())
    for name in ("2", "3"):
        current.unlink()
        current.symlink_to(tmp_path / name)
        reloader.request_reload()
        assert is_started.wait(30)
    last = load(tmp_path / "3").version
    end_s = time.monotonic() + 0.3
    while time.monotonic() < end_s and service.deployment("retrieval").servable.version != last:
        time.sleep(0.01)  # without serialization, the second load would finish now and be replaced by the first
    may_finish.set()
    while service.reloads.num_done < 2:
        time.sleep(0.01)  # another thread loads: there is no clock to inject
    assert service.deployment("retrieval").servable.version == last
    assert not service.reloads.has_failed
    reloader.close()
    service.close()


@pytest.mark.parametrize("has_both", [False, True])
def test_reload_rejects_model_of_other_role(tmp_path, folder, has_both):
    """The reload is rejected even if the server also has a model of that role, which has its own folder."""
    current = tmp_path / "current"
    current.symlink_to(folder)
    for seed in (1, 2):
        write_servable(random_ranking(ENCODER, num_items=20, seed=seed), tmp_path / f"ranking{seed}")
    service = Service.load([current, *([tmp_path / "ranking1"] if has_both else [])], ServiceConfig())
    before = service.deployments
    current.unlink()
    current.symlink_to(tmp_path / "ranking2")
    reloader = Reloader(service, "cpu", TablesConfig())
    reloader.request_reload()
    while not service.reloads.num_done:
        time.sleep(0.01)  # another thread loads: there is no clock to inject
    assert service.reloads.has_failed
    assert service.deployments is before
    reloader.close()
    service.close()
