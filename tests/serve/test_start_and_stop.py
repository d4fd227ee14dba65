"""`nestrec serve` as an operator sees it: what it says when it starts, and what signals do at any time."""

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
from nestrec.serving.http.sockets import bound_sockets, close_all, port_of, run_server
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.served_tables import TablesConfig
from nestrec.serving.server import serve
from nestrec.serving.service.inference_service import Service, ServiceConfig
from nestrec.serving.service.model_reloader import Reloader
from nestrec_bench.harness.random_model import random_ranking, random_retrieval
from support.command_runner import piped
from support.fail_points import fail_variables

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
BODY = {"user": "u", "history": {"items": ["1", "2"], "times_ms": [1, 2]}, "candidates": ["3"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    write_servable(random_retrieval(ENCODER, num_items=20), folder)
    return folder


def wait_until_it_loads(process):
    """Until it has begun to load what it needs, which takes a while."""
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)  # another process starts: there is no clock to inject


def test_sighup_during_the_start_is_heeded_after_it_and_the_port_and_the_stop_are_told(folder):
    with starting_server(folder, "--port", "0") as process:
        wait_until_it_loads(process)
        process.send_signal(signal.SIGHUP)
        said = b""
        while b"serving on" not in said or b"already" not in said:  # it has loaded its model once more, as it was asked
            line = process.stdout.readline()
            assert line, said
            said += line
        port = int(re.search(rb"serving on http://127.0.0.1:(\d+) ", said)[1])
        assert status_of(exchange(port, post("/v1/rank", BODY))) == 200
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().endswith(b"stopped\n")
        assert process.wait(timeout=100) == 0


def test_server_exits_with_a_code_if_its_engine_is_lost(folder, tmp_path):
    points = fail_variables("serving.plan=raise,serving.recover=raise", tmp_path / "fired")
    with running_server(folder, **points) as (port, process):
        assert status_of(exchange(port, post("/v1/rank", BODY))) == 503
        assert process.wait(2.0) == errors.ENGINE_LOST
        output = process.stdout.read()
    assert b"a turn of an engine failed" in output
    assert b"an engine cannot continue" in output
    assert output.count(b"RuntimeError: a fail point fired") >= 2, "with their tracebacks"


def test_sigterm_during_the_start_is_not_lost(folder):
    with starting_server(folder, "--port", "0") as process:
        wait_until_it_loads(process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        assert b"serving on" not in output


def test_a_port_in_use_is_one_clear_error_before_anything_is_said_to_serve(folder):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = []
        with pytest.raises(UserError, match=f"port={port}: is in use"):
            serve([folder], ServeConfig(port=port), SignalHandler(), said.append)
        with pytest.raises(UserError, match=r"host = '192\.0\.2\.1'"):
            serve([folder], ServeConfig(host="192.0.2.1", port=0, insecure=True), SignalHandler(), said.append)
    assert said == []


def test_nothing_is_said_to_serve_where_the_model_is_not_there(tmp_path):
    said = []
    port = free_port()
    with pytest.raises(UserError, match="holds no exported model"):
        serve([tmp_path], ServeConfig(port=port), SignalHandler(), said.append)
    assert said == []
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))  # nobody holds it any longer


def test_json_log_contains_the_error_that_ends_a_server(tmp_path):
    with started(piped, tmp_path, "--port", "0", "--log.format", "json") as process:
        lines = [json.loads(line) for line in process.stdout]
        assert process.wait(100) == errors.USER_ERROR
    assert (lines[-1]["level"], "holds no exported model" in lines[-1]["message"]) == ("error", True)


def test_two_that_bind_at_once_are_told_apart_when_they_listen():
    first = bound_sockets("127.0.0.1", 0)
    second = []
    port = port_of(first)
    try:
        second = bound_sockets("127.0.0.1", port)
        first[0].listen()
        with pytest.raises(UserError, match=f"port={port}: is in use"):
            run_server(
                uvicorn.Config(None, lifespan="off", log_level="critical"), second, SignalHandler(), lambda: None
            )
    finally:
        close_all([*first, *second])


def test_the_last_reload_asked_for_wins_though_an_earlier_one_takes_longer(tmp_path, folder, monkeypatch):
    write_servable(random_retrieval(ENCODER, num_items=20, seed=2), tmp_path / "2")
    write_servable(random_retrieval(ENCODER, num_items=20, seed=3), tmp_path / "3")
    current = tmp_path / "current"
    current.symlink_to(folder)
    service = Service.load([current], ServiceConfig())
    begun = threading.Event()
    may_end = threading.Event()
    load = Servable.load

    def slow_load(path, *arguments):
        servable = load(path, *arguments)
        if path.name == "2":
            begun.set()
            assert may_end.wait(30)
        return servable

    monkeypatch.setattr(Servable, "load", staticmethod(slow_load))
    reloader = Reloader(service, "cpu", TablesConfig())
    for name in ("2", "3"):
        current.unlink()
        current.symlink_to(tmp_path / name)
        reloader.ask()
        assert begun.wait(30)
    last = load(tmp_path / "3").version
    end_s = time.monotonic() + 0.3
    while time.monotonic() < end_s and service.fleet("retrieval").servable.version != last:
        time.sleep(0.01)  # a second load that did not wait for the first would take over now, and then lose
    may_end.set()
    while service.reloads.done < 2:
        time.sleep(0.01)  # another thread loads: there is no clock to inject
    assert service.fleet("retrieval").servable.version == last
    assert not service.reloads.is_refused
    reloader.close()
    service.close()


@pytest.mark.parametrize("has_both", [False, True])
def test_a_folder_that_holds_a_model_of_another_role_leaves_the_models_as_they_are(tmp_path, folder, has_both):
    """Also where that role is served: its own folder names its model."""
    current = tmp_path / "current"
    current.symlink_to(folder)
    for seed in (1, 2):
        write_servable(random_ranking(ENCODER, num_items=20, seed=seed), tmp_path / f"ranking{seed}")
    service = Service.load([current, *([tmp_path / "ranking1"] if has_both else [])], ServiceConfig())
    before = service.fleets
    current.unlink()
    current.symlink_to(tmp_path / "ranking2")
    reloader = Reloader(service, "cpu", TablesConfig())
    reloader.ask()
    while not service.reloads.done:
        time.sleep(0.01)  # another thread loads: there is no clock to inject
    assert service.reloads.is_refused
    assert service.fleets is before
    reloader.close()
    service.close()
