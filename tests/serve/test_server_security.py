"""Security of a server over real sockets: API keys, roles, rate limits, certificates, request ids, access log."""

import asyncio
import contextlib
import io
import itertools
import json
import logging
import random
import re
import shutil
import socket
import ssl
import subprocess
import time
from dataclasses import replace

import httpx
import pytest
import uvloop
from certificates import make_certificate
from listening_app import listening
from server_process import exchange, status_of

from nestrec.base.config_overrides import apply_overrides
from nestrec.base.errors import UserError
from nestrec.cli.fleet_output import check_health
from nestrec.serving.core.asgi import HttpResponse
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.fleet.fleet_start import instance_arguments, serve_fleet
from nestrec.serving.fleet.gateway import Gateway
from nestrec.serving.fleet.readiness_probes import free_port
from nestrec.serving.http.endpoint_spec import EndpointSpec
from nestrec.serving.http.http_app import App
from nestrec.serving.http.routes import all_endpoints
from nestrec.serving.http.serve_config import ServeConfig, create_security, uvicorn_config
from nestrec.serving.http.server_logging import JsonLogFormatter, LogConfig, TextLogFormatter
from nestrec.serving.http.signals import SignalHandler
from nestrec.serving.http.sockets import Server, bind_sockets, port_of
from nestrec.serving.security import security_config
from nestrec.serving.security.auth import ApiKeyEntry, add_entry, digest_of, generate_key
from nestrec.serving.security.security_config import SecurityConfig
from nestrec.serving.security.server_security import CertificateReloader, ServerSecurity
from nestrec.serving.server import serve
from nestrec_bench.load_test.load_test import LoadTestConfig, request_items, run_load_test

LIMITS = LimitsConfig(default_timeout_ms=10_000)
WAIT_S = 60.0
DAY_S = 86_400.0
EVENTS = {"items": ["1", "2"], "times_ms": [1, 2]}
BODIES = {
    "/v1/recommend": {"user": "u", "history": EVENTS, "k": 2},
    "/v1/rank": {"user": "u", "history": EVENTS, "candidates": ["3"]},
    "/v1/preinfer": {"user": "u", "history": EVENTS},
    "/v1/events": {"user": "u", "history": EVENTS},
    "/v1/titles": {"items": ["1"]},
    "/v1/admin/drain": {"drain": False},
}
ROLES_OF_AUDIENCE = {
    "anyone": {"none", "wrong", "expired", "public", "monitor", "admin"},
    "clients": {"public", "admin"},
    "watchers": {"monitor", "admin"},
    "admins": {"admin"},
}


async def _respond(context, request):
    return {"status": "done"}


async def _fail(context, request):
    raise KeyError("user-4711-secret")


ENDPOINTS = {
    **all_endpoints(),
    "admin_post": EndpointSpec(method="POST", path="/v1/admin/probe", summary="-", handle=_respond, admin=True),
    "admin_get": EndpointSpec(method="GET", path="/v1/probe", summary="-", handle=_respond, admin=True),
    "fails": EndpointSpec(method="GET", path="/v1/fails", summary="-", handle=_fail),
}


@pytest.fixture
def key_store(tmp_path):
    """Return a file of API keys, and keys by kind."""
    path = tmp_path / "keys.toml"
    keys = {name: generate_key() for name in ("public", "monitor", "admin", "expired", "slow")}
    for name, key in keys.items():
        entry = {
            "role": name if name in ("public", "monitor", "admin") else "public",
            "expires_at": "2020-01-01T00:00:00Z" if name == "expired" else "2900-01-01T00:00:00+01:00",
            "requests_per_s": 0.001 if name == "slow" else None,
        }
        add_entry(path, ApiKeyEntry(name=name, sha256=digest_of(key.encode()).hex(), **entry))
    return path, {**keys, "wrong": generate_key(), "none": ""}


def config_with_keys(path, **options):
    return ServeConfig(limits=LIMITS, security=SecurityConfig(api_keys=str(path)), **options)


@contextlib.asynccontextmanager
async def single(service, cfg):
    """Serve one instance; yield its port."""
    async with listening(App(service, LIMITS, endpoints=ENDPOINTS), cfg) as port:
        yield port


@contextlib.asynccontextmanager
async def behind_gateway(service, cfg):
    """Serve two instances that accept only requests of their gateway; yield the port of the gateway."""
    inner = ServeConfig(limits=LIMITS, security=SecurityConfig(behind="gateway"), log=LogConfig(access_log=True))
    async with contextlib.AsyncExitStack() as exit_stack:
        apps = [App(service, LIMITS, endpoints=ENDPOINTS) for _ in range(2)]
        ports = [await exit_stack.enter_async_context(listening(app, inner)) for app in apps]
        gateway = Gateway(ports, LIMITS)
        exit_stack.push_async_callback(gateway.close)
        yield await exit_stack.enter_async_context(listening(gateway, cfg))


def run_client(deployment, service, cfg, use):
    """Serve with a config and return the result of `use(client, port)`."""

    async def run():
        async with deployment(service, cfg) as port, httpx.AsyncClient(timeout=WAIT_S) as client:
            client.base_url = f"http://127.0.0.1:{port}"
            return await use(client, port)

    return asyncio.run(run())


@pytest.mark.parametrize("deployment", [single, behind_gateway])
def test_authorization_of_every_endpoint(deployment, service, key_store, monkeypatch):
    path, keys = key_store
    monkeypatch.setattr("nestrec.serving.http.serve_config.all_endpoints", lambda: ENDPOINTS)

    times_ms = itertools.count(1)
    header_kinds = itertools.cycle(("authorization", "x-api-key"))

    def body_of(route):
        body = BODIES.get(route, {})
        if route != "/v1/events":
            return body
        # Events must not be older than the stored ones.
        return {**body, "history": {"items": ["1"], "times_ms": [next(times_ms)]}}

    def expected_statuses(endpoint):
        statuses = {401, 403, endpoint.status}
        if endpoint.path == "/v1/fails":
            return statuses | {500}
        return statuses | {400, 404, 409} if endpoint.admin else statuses

    async def use(client, _):
        counts = {}
        for endpoint in ENDPOINTS.values():
            audience = "admins" if endpoint.admin else endpoint.audience
            for kind, key in keys.items():
                if kind == "slow":
                    continue
                header_kind = next(header_kinds)
                header = {header_kind: f"Bearer {key}" if header_kind == "authorization" else key}
                response = await client.request(
                    endpoint.method,
                    endpoint.path.replace("{id}", "ann"),
                    headers={} if kind == "none" else header,
                    **({"json": body_of(endpoint.path)} if endpoint.method == "POST" else {}),
                )
                status = response.status_code
                is_authorized = status not in (401, 403)
                assert is_authorized == (kind in ROLES_OF_AUDIENCE[audience]), (endpoint.path, kind, status)
                assert status in expected_statuses(endpoint)
                assert ("www-authenticate" in response.headers) == (status == 401)
                counts[status] = counts.get(status, 0) + 1
        return counts

    counts = run_client(deployment, service, config_with_keys(path), use)
    assert min(counts[status] for status in (200, 401, 403)) > 10


def test_authorization_admin_path_spellings(service, key_store):
    path, keys = key_store

    async def use(client, port):
        public = f"authorization: Bearer {keys['public']}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
        spellings = [b"/v1/%61dmin/probe", b"http://localhost/v1/admin/probe", b"/v1/admin/probe?a=b", b"/v1/pr%6fbe"]
        for target in (*spellings, b"/v1/admin/gateway-only"):
            method = b"GET " if b"pr%6f" in target else b"POST "
            response = await asyncio.to_thread(
                exchange, port, method + target + b" HTTP/1.1\r\nhost: localhost\r\n" + public
            )
            assert status_of(response) == 403, target

    run_client(single, service, config_with_keys(path), use)


def test_authentication_rejects_malformed_credentials(service, key_store):
    path, keys = key_store
    rng = random.Random(3)
    valid = keys["public"].encode()

    def malformed():
        scheme = rng.choice([b"Bearer ", b"Basic ", b"bearer", b"", b"Bearer\t", b"Digest "])
        token = rng.choice(
            [
                rng.randbytes(rng.randint(0, 200)).replace(b"\r", b"").replace(b"\n", b""),
                valid[:-1],
                valid + b"x",
                valid[1:],
                valid.swapcase(),
                b"x" * rng.randint(513, 9000),
                b"",
                b"%s,%s" % (valid, valid),
                b'"%s"' % valid,
            ]
        )
        lines = [b"authorization: " + scheme + token] if rng.random() < 0.7 else [b"x-api-key: " + token]
        if rng.random() < 0.2:
            lines.append(rng.choice([b"x-api-key: ", b"authorization: Bearer "]) + valid)  # a second credential
        return b"\r\n".join(lines)

    async def use(client, port):
        statuses = {}
        head, end = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n", b"\r\nconnection: close\r\n\r\n"

        async def send_malformed():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + malformed() + end)
            status = status_of(await reader.read())
            writer.close()
            statuses[status] = statuses.get(status, 0) + 1

        for _ in range(50):
            await asyncio.gather(*(send_malformed() for _ in range(20)))
        assert sum(statuses.values()) == 1000
        assert set(statuses) <= {400, 401}, "no request is authorized, and none causes a server error"
        assert statuses[401] > 500
        response = await client.get("/v1/models", headers={"authorization": f"bearer  {keys['public']}"})
        assert response.status_code == 200

    run_client(single, service, config_with_keys(path), use)


def test_api_keys_are_reloaded_without_restart(service, key_store):
    path, keys = key_store

    async def use(client, _):
        async def until(key, status):
            while (await client.get("/v1/models", headers={"x-api-key": key})).status_code != status:
                await asyncio.sleep(0.02)  # a thread polls the file: there is no clock to inject

        new_key = generate_key()
        before = path.read_text()
        await until(new_key, 401)
        add_entry(path, ApiKeyEntry(name="new", sha256=digest_of(new_key.encode()).hex()))
        await asyncio.wait_for(until(new_key, 200), WAIT_S)
        path.write_text(before)
        await asyncio.wait_for(until(new_key, 401), WAIT_S)
        reload_log = logging.getLogger("nestrec.serving.core.background_tasks")
        is_logged = asyncio.Event()
        loop = asyncio.get_running_loop()
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: "sha256" in record.getMessage() and loop.call_soon_threadsafe(is_logged.set)
        reload_log.addHandler(handler)
        path.write_text("[[key]]\nname = 'no digest'")
        await asyncio.wait_for(is_logged.wait(), WAIT_S)
        reload_log.removeHandler(handler)
        await until(keys["public"], 200)
        metrics = (await client.get("/metrics", headers={"x-api-key": keys["monitor"]})).text
        assert re.search(r'nestrec_file_age_seconds\{file="keys"\} [0-9.e-]+\n', metrics)
        assert float(re.search(r'nestrec_background_failures_total\{task="keys"\} (\S+)', metrics)[1]) >= 1

    run_client(single, service, config_with_keys(path), use)


def test_rate_limit_is_per_key(service, key_store):
    path, keys = key_store

    async def use(client, _):
        responses = [await client.get("/v1/models", headers={"x-api-key": keys["slow"]}) for _ in range(3)]
        assert [response.status_code for response in responses] == [200, 429, 429]
        assert int(responses[1].headers["retry-after"]) > 500
        body = BODIES["/v1/rank"]
        assert (await client.post("/v1/rank", json=body, headers={"x-api-key": keys["slow"]})).status_code == 429
        assert (await client.post("/v1/rank", json=body, headers={"x-api-key": keys["public"]})).status_code == 200

    run_client(single, service, config_with_keys(path), use)


def test_load_test_uses_api_key_of_environment(service, key_store, monkeypatch):
    path, keys = key_store
    cfg = LoadTestConfig(requests_per_s=20.0, duration_s=0.2, history_events=3, num_candidates=2)

    async def use(client, port):
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(UserError, match=r"requires an API key(.|\n)*NESTREC_KEY"):
            await asyncio.to_thread(run_load_test, url, cfg)
        monkeypatch.setenv("NESTREC_KEY", keys["public"])
        (row,) = await asyncio.to_thread(run_load_test, url, cfg)
        assert row["requests"] > row["refused"] == 0

    run_client(single, service, config_with_keys(path), use)


def test_instance_accepts_only_its_gateway(service):
    async def use(client, _):
        assert (await client.get("/health/live")).status_code == 403
        guess = {"x-nestrec-gateway-secret": "0" * 64, "x-nestrec-client": "me"}
        assert (await client.post("/v1/rank", json=BODIES["/v1/rank"], headers=guess)).status_code == 403

    run_client(single, service, ServeConfig(limits=LIMITS, security=SecurityConfig(behind="gateway")), use)
    cfg = ServeConfig(
        load_balancer="gateway",
        num_instances=2,
        security=SecurityConfig(api_keys="k", tls_certificate="c", tls_private_key="p"),
    )
    options = {
        "security.api_keys": "k",
        "security.tls_certificate": "c",
        "security.tls_private_key": "p",
        "insecure": "true",
        "port": "1",
    }
    arguments = instance_arguments(cfg, options)
    assert arguments[arguments.index("--security.behind") + 1] == "gateway"
    assert not {"--security.api_keys", "--security.tls_certificate", "--security.tls_private_key", "--insecure"} & set(
        arguments
    )


def test_options_of_instances_are_valid_on_other_hosts():
    """An instance sees the host names that clients of the gateway use, so it accepts all of them."""
    arguments = instance_arguments(ServeConfig(host="0.0.0.0", load_balancer="gateway"), {"host": "0.0.0.0"})
    overrides = {name.removeprefix("--"): value for name, value in zip(arguments[::2], arguments[1::2], strict=True)}
    assert apply_overrides(ServeConfig(), overrides).allowed_hosts == ("*",)


@pytest.mark.parametrize("load_balancer", ["none", "gateway", "ray"])
def test_exposure_requires_api_keys_tls_or_insecure(load_balancer, tmp_path):
    cfg = ServeConfig(host="0.0.0.0", port=0, load_balancer=load_balancer)
    start = serve if load_balancer == "none" else lambda folders, cfg, *rest: serve_fleet(folders, cfg, {}, *rest)
    with pytest.raises(UserError, match=r"host=0\.0\.0\.0: other machines could connect(.|\n)*--insecure"):
        start([tmp_path], cfg, SignalHandler(), print)


def test_admin_endpoints_on_health_port_only(service, key_store):
    path, keys = key_store
    health_port = free_port()
    security = SecurityConfig(api_keys=str(path), admin_on_health_port=True)

    async def use(client, port):
        async def status_of_post(at_port, kind, route="/v1/admin/probe"):
            url = f"http://127.0.0.1:{at_port}{route}"
            key = {"x-api-key": keys[kind]}
            return (await client.post(url, json=BODIES.get(route, {}), headers=key)).status_code

        assert [await status_of_post(port, kind) for kind in ("public", "admin")] == [403, 403]
        assert [await status_of_post(health_port, kind) for kind in ("public", "admin")] == [403, 200]
        assert [await status_of_post(at_port, "admin", "/v1/rank") for at_port in (port, health_port)] == [200, 404]
        assert (await client.get(f"http://127.0.0.1:{health_port}/health/live")).status_code == 200
        assert (await client.get(f"http://127.0.0.1:{health_port}/metrics")).status_code == 401
        await asyncio.to_thread(check_health, f"127.0.0.1:{health_port}")

    run_client(single, service, ServeConfig(limits=LIMITS, health_port=health_port, security=security), use)
    with pytest.raises(UserError, match=r"requires a health port"):
        create_security(ServeConfig(security=security))


def test_authorization_admin_without_keys_is_local(service):
    for host, status in (("127.0.0.1", 200), ("0.0.0.0", 403)):
        cfg = ServeConfig(host=host, limits=LIMITS, insecure=True)

        async def use(client, _, status=status):
            assert (await client.post("/v1/admin/probe", json={})).status_code == status

        run_client(single, service, cfg, use)


# Certificates.


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("deployment", [single, behind_gateway])
def test_tls_reloads_certificate_without_restart(deployment, service, tmp_path):
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    certificate = tmp_path / "now.pem"
    private_key = tmp_path / "now.key"
    for source, target in zip(first, (certificate, private_key), strict=True):
        target.write_bytes(source.read_bytes())
    cfg = ServeConfig(
        limits=LIMITS, security=SecurityConfig(tls_certificate=str(certificate), tls_private_key=str(private_key))
    )

    async def status_with(port, trusted):
        context = ssl.create_default_context(cafile=trusted)
        async with httpx.AsyncClient(verify=context, timeout=WAIT_S) as client:
            try:
                body = BODIES["/v1/rank"]
                return (await client.post(f"https://127.0.0.1:{port}/v1/rank", json=body)).status_code
            except httpx.ConnectError:
                return None

    async def run():
        async with deployment(service, cfg) as port:
            assert await status_with(port, first[0]) == 200
            assert await status_with(port, second[0]) is None
            await asyncio.to_thread(check_health, f"127.0.0.1:{port}")
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(exchange, port, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n") == b"", (
                    "plain HTTP is not served"
                )
            certificate.write_bytes(second[0].read_bytes())  # mismatched pair: not loaded yet
            private_key.write_bytes(second[1].read_bytes())
            end_s = time.monotonic() + WAIT_S
            while await status_with(port, second[0]) != 200:
                assert time.monotonic() < end_s
            assert await status_with(port, first[0]) is None

    asyncio.run(run())


def presented_by(context):
    """Return the certificate that a server with this context shows, as DER."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return client.getpeercert(binary_form=True)


def errors_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def certificates(tmp_path):
    """Return the certificate reloader, its clock, and a function that replaces the certificate files."""
    clock = [time.time() + 60.0]

    def replace_files(days):
        """Write a certificate that is valid for some days from now; return it as DER."""
        pair = make_certificate(tmp_path, f"days{days}", days)
        for source, target in zip(pair, ("now.pem", "now.key"), strict=True):
            (tmp_path / target).write_bytes(source.read_bytes())
        return ssl.PEM_cert_to_DER_cert(pair[0].read_text())

    replace_files(5)
    reloader = CertificateReloader(tmp_path / "now.pem", tmp_path / "now.key", lambda: clock[0])
    return reloader, clock, replace_files


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_expired_certificate_does_not_replace_a_valid_one(certificates, caplog):
    reloader, clock, replace_files = certificates
    first = presented_by(reloader.context)
    clock[0] += 2 * DAY_S
    one_day = replace_files(1)
    for _ in range(3):
        assert not reloader.reload_if_changed()
    assert presented_by(reloader.context) == first
    (rejected,) = errors_in(caplog)
    assert "security.tls_certificate" in rejected
    assert "is expired or not yet valid: valid from" in rejected
    assert "stays in use" in rejected
    clock[0] += 4 * DAY_S
    assert reloader.reload_if_changed(), "both certificates have expired, so the files are loaded"
    assert presented_by(reloader.context) == one_day
    assert "clients reject the certificate" in errors_in(caplog)[-1]
    ten_days = replace_files(10)
    assert reloader.reload_if_changed()
    assert presented_by(reloader.context) == ten_days
    assert len(errors_in(caplog)) == 2


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificate_not_yet_valid_is_loaded_later(certificates):
    reloader, clock, replace_files = certificates
    first = presented_by(reloader.context)
    clock[0] -= DAY_S
    reloader.validity = replace(reloader.validity, first_s=0.0)  # the certificate in use was valid yesterday
    two_days = replace_files(2)
    assert not reloader.reload_if_changed()
    assert presented_by(reloader.context) == first
    clock[0] += DAY_S
    assert reloader.reload_if_changed()
    assert presented_by(reloader.context) == two_days


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("days", [1, 40_000])
def test_certificate_expiry_is_read_from_the_file(tmp_path, days):
    """Certificates that expire after 2049 use another date format."""
    certificate, private_key = make_certificate(tmp_path, "one", days)
    printed = subprocess.run(
        ["openssl", "x509", "-in", certificate, "-noout", "-enddate"], check=True, capture_output=True, text=True
    ).stdout
    cfg = SecurityConfig(tls_certificate=str(certificate), tls_private_key=str(private_key))
    security = ServerSecurity(cfg, "127.0.0.1")
    security.close()
    assert security.certificate_expiry_s == ssl.cert_time_to_seconds(printed.strip().removeprefix("notAfter="))
    assert security.file_ages_s.keys() == {"certificate"}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("kind", [App, Gateway])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_tls_server_restarts_at_once_despite_idle_clients(kind, loop, service, tmp_path):
    """Idle clients do not read, so they do not respond to the TLS shutdown of the server."""
    certificate, private_key = make_certificate(tmp_path, "server")
    cfg = ServeConfig(
        limits=LIMITS, security=SecurityConfig(tls_certificate=str(certificate), tls_private_key=str(private_key))
    )
    context = ssl.create_default_context(cafile=certificate)

    def idle_client(port):
        client = context.wrap_socket(socket.create_connection(("127.0.0.1", port), 20), server_hostname="127.0.0.1")
        client.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += client.recv(65536)
        return client

    async def serve_and_stop(port):
        app = App(service, LIMITS) if kind is App else Gateway([free_port()], LIMITS)
        with contextlib.closing(create_security(cfg)) as security, contextlib.ExitStack() as clients:
            listens = asyncio.Event()
            sockets = bind_sockets("127.0.0.1", port)
            server = Server(uvicorn_config(app, cfg, app, security), listens.set)
            serving = asyncio.create_task(server.serve(sockets))
            await listens.wait()
            connecting = [asyncio.to_thread(idle_client, port_of(sockets)) for _ in range(50)]
            idle = [clients.enter_context(client) for client in await asyncio.gather(*connecting)]
            port = port_of(sockets)
            start_s = time.monotonic()
            server.end(False)
            await serving
            took_s = time.monotonic() - start_s
            assert [client.recv(1) for client in idle] == [b""] * 50, "each connection is closed without an error"
            return port, took_s

    async def run():
        port, first_s = await serve_and_stop(0)
        return first_s, (await serve_and_stop(port))[1]

    with asyncio.Runner(loop_factory=loop) as runner:
        assert max(runner.run(run())) < 5.0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_tls_shutdown_sends_full_response_to_slow_client(loop, tmp_path):
    """The client starts to read after the time at which the server would have closed an idle connection."""
    certificate, private_key = make_certificate(tmp_path, "server")
    cfg = ServeConfig(
        limits=LIMITS, security=SecurityConfig(tls_certificate=str(certificate), tls_private_key=str(private_key))
    )
    content = bytes(200_000)

    async def large(scope, receive, send):
        await HttpResponse(200, content).send(send)

    def slow_client(port):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client = ssl.create_default_context(cafile=certificate).wrap_socket(client, server_hostname="127.0.0.1")
        client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        return client

    async def run():
        with contextlib.closing(create_security(cfg)) as security:
            config = uvicorn_config(large, cfg, None, security)
            config.lifespan = "off"
            listens = asyncio.Event()
            sockets = bind_sockets("127.0.0.1", 0)
            sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            server = Server(config, listens.set)
            serving = asyncio.create_task(server.serve(sockets))
            await listens.wait()
            with await asyncio.to_thread(slow_client, port_of(sockets)) as client:
                server.end(False)
                await asyncio.wait([serving], timeout=1.0)
                assert not serving.done()
                received = await asyncio.to_thread(lambda: b"".join(iter(lambda: client.recv(65536), b"")))
                await serving
            return received

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(run()).endswith(content)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("deployment", [single, behind_gateway])
def test_load_test_sends_known_items_to_tls_server(deployment, service, tmp_path, monkeypatch):
    certificate, private_key = make_certificate(tmp_path, "server")
    cfg = ServeConfig(
        limits=LIMITS, security=SecurityConfig(tls_certificate=str(certificate), tls_private_key=str(private_key))
    )
    load = LoadTestConfig(requests_per_s=20.0, duration_s=0.2, history_events=3, num_candidates=2)
    messages = []

    async def run():
        async with deployment(service, cfg) as port:
            url = f"https://127.0.0.1:{port}"
            with pytest.raises(UserError, match=r"CERTIFICATE_VERIFY_FAILED(.|\n)*SSL_CERT_FILE"):
                await asyncio.to_thread(run_load_test, url, load)
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            (row,) = await asyncio.to_thread(run_load_test, url, load, messages.append)
            assert row["requests"] > row["refused"] == 0
            return await asyncio.to_thread(request_items, url, "")

    items = asyncio.run(run())
    assert items == list(service.deployment(service.ranker).servable.item_keys)
    assert messages[0].startswith(
        "sending synthetic requests: random histories and candidates of 50 items that the server"
    )


def test_tls_invalid_pair_is_rejected_at_start(tmp_path):
    with pytest.raises(UserError, match=r"TLS needs both(.|\n)*--security.tls_private_key"):
        SecurityConfig(tls_certificate="a.pem")
    for name in ("a.pem", "a.key"):
        (tmp_path / name).write_text("nothing")
    cfg = SecurityConfig(tls_certificate=str(tmp_path / "a.pem"), tls_private_key=str(tmp_path / "a.key"))
    with pytest.raises(UserError, match=r"security.tls_certificate=.*a\.pem: the certificate cannot be used"):
        serve([tmp_path], ServeConfig(port=0, security=cfg), SignalHandler(), print)


# Request ids and the log.


@contextlib.contextmanager
def captured_log(formatter):
    """Yield a text buffer that receives the log lines."""
    text = io.StringIO()
    root = logging.getLogger()
    handler = logging.StreamHandler(text)
    handler.setFormatter(formatter)
    level = logging.getLogger("nestrec").level
    root.addHandler(handler)
    logging.getLogger("nestrec").setLevel(logging.INFO)
    try:
        yield text
    finally:
        root.removeHandler(handler)
        logging.getLogger("nestrec").setLevel(level)


@pytest.mark.parametrize("deployment", [single, behind_gateway])
def test_responses_contain_request_id(deployment, service):
    async def use(client, port):
        def request_id_of(response):
            return response.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()

        headers = {"x-request-id": "my-id.1:2"}
        responses = [
            await client.post("/v1/rank", json=BODIES["/v1/rank"], headers=headers),
            await client.post("/v1/rank", content=b"no json", headers={**headers, "content-type": "application/json"}),
            await client.get("/nothing", headers=headers),
            await client.get("/v1/models", headers=headers),
            await client.get("/health/live", headers={**headers, "host": "elsewhere.example"}),
        ]
        assert [response.status_code for response in responses] == [200, 400, 404, 200, 421]
        assert [response.headers.get_list("x-request-id") for response in responses] == [["my-id.1:2"]] * 5
        for invalid in ("x" * 129, "a b", "<b>", "\xe4", "a\tb", ""):
            response = await client.get("/v1/models", headers={"x-request-id": invalid.encode("latin-1")})
            assert len(response.headers["x-request-id"]) == 16 != len(invalid)
        for malformed in (b"no request\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 9000):
            assert len(request_id_of(await asyncio.to_thread(exchange, port, malformed))) == 16

    with captured_log(JsonLogFormatter()) as text:
        run_client(deployment, service, ServeConfig(limits=LIMITS), use)
    if deployment is behind_gateway:
        lines = [json.loads(line) for line in text.getvalue().splitlines() if "nestrec.access" in line]
        assert {"my-id.1:2"} < {line["request_id"] for line in lines}, "instances log the same request id"


def test_access_log_of_instance_omits_health_checks(service):
    cfg = ServeConfig(limits=LIMITS, security=SecurityConfig(behind="gateway"), log=LogConfig(access_log=True))

    async def use(client, _):
        client.headers[security_config.GATEWAY_SECRET_HEADER.decode()] = security_config.gateway_secret()
        for path in ("/health/live", "/health/ready", "/v1/models"):
            assert (await client.get(path)).status_code == 200

    with captured_log(JsonLogFormatter()) as text:
        run_client(single, service, cfg, use)
    routes = [json.loads(line)["route"] for line in text.getvalue().splitlines() if "nestrec.access" in line]
    assert routes == ["/v1/models"]


def test_access_log_of_gateway_names_scale_route(service, key_store):
    path, keys = key_store

    async def use(client, _):
        headers = {"x-api-key": keys["admin"]}
        assert (await client.post("/v1/admin/scale", json={"instances": 3}, headers=headers)).status_code == 409

    with captured_log(JsonLogFormatter()) as text:
        run_client(behind_gateway, service, config_with_keys(path, log=LogConfig(access_log=True)), use)
    routes = [json.loads(line)["route"] for line in text.getvalue().splitlines() if "nestrec.access" in line]
    assert "/v1/admin/scale" in routes
    assert "other" not in routes


def test_access_log_contains_no_user_data(service, key_store):
    path, keys = key_store
    secrets = ["user-4711-secret", "item-0815-secret", keys["public"]]

    async def use(client, _):
        headers = {"x-api-key": keys["public"], "x-request-id": "one-1"}
        body = {"user": secrets[0], "history": {"items": [secrets[1], "2"], "times_ms": [1, 2]}}
        for options in ({"k": 2}, {"k": 0}, {"on_unknown": "reject"}):
            await client.post("/v1/recommend", json={**body, **options}, headers=headers)
        await client.get("/v1/fails", headers=headers)
        await client.delete(f"/v1/users/{secrets[0]}/events", headers=headers)
        await client.get(f"/v1/users/{secrets[0]}/nothing", headers=headers)
        await client.get("/v1/models", headers={"x-api-key": secrets[0]})

    for formatter in (JsonLogFormatter(), TextLogFormatter()):
        with captured_log(formatter) as text:
            run_client(single, service, config_with_keys(path, log=LogConfig(access_log=True)), use)
        assert not any(secret in text.getvalue() for secret in secrets)
        if isinstance(formatter, JsonLogFormatter):
            lines = [json.loads(line) for line in text.getvalue().splitlines() if "nestrec" in line]
            responses = [line for line in lines if line["logger"] == "nestrec.access"]
            logged = [(line["status"], line["route"], line.get("key")) for line in responses]
            assert logged == [
                (200, "/v1/recommend", "public"),
                (400, "/v1/recommend", "public"),
                (400, "/v1/recommend", "public"),
                (500, "/v1/fails", "public"),
                (204, "/v1/users/{id}/events", "public"),
                (404, "other", "public"),
                (401, "/v1/models", None),
            ]
            assert all(line["request_id"] == "one-1" and line["milliseconds"] >= 0 for line in responses[:-1])
            failed = next(line for line in lines if line["message"] == "request failed")
            assert failed["request_id"] == "one-1"
            assert failed["exception"][0] == "KeyError"
            assert any(" in _fail" in frame for frame in failed["exception"])
