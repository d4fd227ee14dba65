"""Who may ask a server for what, over real sockets: keys, roles, rates, certificates and names of requests."""

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

from nestrec.base.errors import UserError
from nestrec.cli.fleet_output import check_health
from nestrec.serving.core.asgi import HttpResponse
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.fleet.fleet_start import instance_arguments, serve_many
from nestrec.serving.fleet.gateway import Gateway
from nestrec.serving.fleet.readiness_probes import free_port
from nestrec.serving.http.endpoint_spec import EndpointSpec
from nestrec.serving.http.http_app import App
from nestrec.serving.http.routes import all_endpoints
from nestrec.serving.http.serve_config import ServeConfig, safety_of, uvicorn_config
from nestrec.serving.http.server_logging import JsonLogFormatter, LogConfig, TextLogFormatter
from nestrec.serving.http.signals import SignalHandler
from nestrec.serving.http.sockets import Server, bound_sockets, port_of
from nestrec.serving.security import security_config
from nestrec.serving.security.auth import ApiKeyEntry, add_entry, digest_of, new_key
from nestrec.serving.security.security_config import SecurityConfig
from nestrec.serving.security.server_security import CertificateReloader, ServerSecurity
from nestrec.serving.server import serve
from nestrec_bench.load_test.load_test import LoadTestConfig, chosen_items, replay

LIMITS = LimitsConfig(default_timeout_ms=10_000)
PATIENCE_S = 60.0
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
MAY_ASK = {
    "anyone": {"none", "wrong", "expired", "public", "monitor", "admin"},
    "clients": {"public", "admin"},
    "watchers": {"monitor", "admin"},
    "admins": {"admin"},
}


async def _say_done(front, request):
    return {"status": "done"}


async def _fail(front, request):
    raise KeyError("user-4711-secret")


ENDPOINTS = {
    **all_endpoints(),
    "swap": EndpointSpec(method="POST", path="/v1/admin/probe", summary="-", handle=_say_done, admin=True),
    "quiet": EndpointSpec(method="GET", path="/v1/probe", summary="-", handle=_say_done, admin=True),
    "fails": EndpointSpec(method="GET", path="/v1/fails", summary="-", handle=_fail),
}


@pytest.fixture
def ring(tmp_path):
    """(file, keys by what they are)"""
    path = tmp_path / "keys.toml"
    keys = {name: new_key() for name in ("public", "monitor", "admin", "expired", "slow")}
    for name, key in keys.items():
        entry = {
            "role": name if name in ("public", "monitor", "admin") else "public",
            "expires": "2020-01-01T00:00:00Z" if name == "expired" else "2900-01-01T00:00:00+01:00",
            "requests_per_s": 0.001 if name == "slow" else None,
        }
        add_entry(path, ApiKeyEntry(name=name, sha256=digest_of(key.encode()).hex(), **entry))
    return path, {**keys, "wrong": new_key(), "none": ""}


def with_keys(path, **named):
    return ServeConfig(limits=LIMITS, safety=SecurityConfig(keys=str(path)), **named)


@contextlib.asynccontextmanager
async def single(service, cfg):
    async with listening(App(service, LIMITS, endpoints=ENDPOINTS), cfg) as port:
        yield port


@contextlib.asynccontextmanager
async def behind_gateway(service, cfg):
    """Two instances that answer their front alone."""
    inner = ServeConfig(limits=LIMITS, safety=SecurityConfig(behind="gateway"), log=LogConfig(requests=True))
    async with contextlib.AsyncExitStack() as made:
        apps = [App(service, LIMITS, endpoints=ENDPOINTS) for _ in range(2)]
        ports = [await made.enter_async_context(listening(app, inner)) for app in apps]
        gateway = Gateway(ports, LIMITS)
        made.push_async_callback(gateway.close)
        yield await made.enter_async_context(listening(gateway, cfg))


def asking(place, service, cfg, use):
    async def run():
        async with place(service, cfg) as port, httpx.AsyncClient(timeout=PATIENCE_S) as client:
            client.base_url = f"http://127.0.0.1:{port}"
            return await use(client, port)

    return asyncio.run(run())


@pytest.mark.parametrize("place", [single, behind_gateway])
def test_every_endpoint_answers_those_it_is_for_and_nobody_else(place, service, ring, monkeypatch):
    path, keys = ring
    monkeypatch.setattr("nestrec.serving.http.serve_config.all_endpoints", lambda: ENDPOINTS)

    moments, turns = itertools.count(1), itertools.count()

    def body_of(route):
        body = BODIES.get(route, {})  # events must not be older than those before them
        return {**body, "history": {"items": ["1"], "times_ms": [next(moments)]}} if route == "/v1/events" else body

    async def use(client, _):
        found = {}
        for endpoint in ENDPOINTS.values():
            audience = "admins" if endpoint.admin else endpoint.audience
            for who, key in keys.items():
                if who == "slow":
                    continue
                header = ({"authorization": f"Bearer {key}"}, {"x-api-key": key})[next(turns) % 2]
                asked = await client.request(
                    endpoint.method,
                    endpoint.path.replace("{id}", "ann"),
                    headers={} if who == "none" else header,
                    **({"json": body_of(endpoint.path)} if endpoint.method == "POST" else {}),
                )
                is_let_in = asked.status_code not in (401, 403)
                assert is_let_in == (who in MAY_ASK[audience]), (endpoint.path, who, asked.status_code)
                may_fail = {500} if endpoint.path == "/v1/fails" else {400, 404, 409} if endpoint.admin else set()
                assert asked.status_code in {401, 403, endpoint.status} | may_fail
                assert ("www-authenticate" in asked.headers) == (asked.status_code == 401)
                found[asked.status_code] = found.get(asked.status_code, 0) + 1
        return found

    found = asking(place, service, with_keys(path), use)
    assert min(found[status] for status in (200, 401, 403)) > 10


def test_an_admin_path_in_another_spelling_is_no_way_round(service, ring):
    path, keys = ring

    async def use(client, port):
        public = f"authorization: Bearer {keys['public']}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode()
        spelt = [b"/v1/%61dmin/probe", b"http://localhost/v1/admin/probe", b"/v1/admin/probe?a=b", b"/v1/pr%6fbe"]
        for target in (*spelt, b"/v1/admin/what-only-a-front-has"):
            method = b"GET " if b"pr%6f" in target else b"POST "
            answer = await asyncio.to_thread(
                exchange, port, method + target + b" HTTP/1.1\r\nhost: localhost\r\n" + public
            )
            assert status_of(answer) == 403, target

    asking(single, service, with_keys(path), use)


def test_a_thousand_malformed_credentials_are_refused_and_break_nothing(service, ring):
    path, keys = ring
    rng = random.Random(3)
    right = keys["public"].encode()

    def malformed():
        scheme = rng.choice([b"Bearer ", b"Basic ", b"bearer", b"", b"Bearer\t", b"Digest "])
        token = rng.choice(
            [
                rng.randbytes(rng.randint(0, 200)).replace(b"\r", b"").replace(b"\n", b""),
                right[:-1],
                right + b"x",
                right[1:],
                right.swapcase(),
                b"x" * rng.randint(513, 9000),
                b"",
                b"%s,%s" % (right, right),
                b'"%s"' % right,
            ]
        )
        lines = [b"authorization: " + scheme + token] if rng.random() < 0.7 else [b"x-api-key: " + token]
        if rng.random() < 0.2:
            lines.append(rng.choice([b"x-api-key: ", b"authorization: Bearer "]) + right)  # two of them
        return b"\r\n".join(lines)

    async def use(client, port):
        statuses = {}
        head, end = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n", b"\r\nconnection: close\r\n\r\n"

        async def one():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + malformed() + end)
            status = status_of(await reader.read())
            writer.close()
            statuses[status] = statuses.get(status, 0) + 1

        for _ in range(50):
            await asyncio.gather(*(one() for _ in range(20)))
        assert sum(statuses.values()) == 1000
        assert set(statuses) <= {400, 401}, "neither let in, nor an error of the server"
        assert statuses[401] > 500
        answered = await client.get("/v1/models", headers={"authorization": f"bearer  {keys['public']}"})
        assert answered.status_code == 200

    asking(single, service, with_keys(path), use)


def test_keys_come_and_go_while_the_server_runs(service, ring):
    path, keys = ring

    async def use(client, _):
        async def until(key, status):
            while (await client.get("/v1/models", headers={"x-api-key": key})).status_code != status:
                await asyncio.sleep(0.02)  # a thread looks at the file: there is no clock to inject

        fresh = new_key()
        before = path.read_text()
        await until(fresh, 401)
        add_entry(path, ApiKeyEntry(name="fresh", sha256=digest_of(fresh.encode()).hex()))
        await asyncio.wait_for(until(fresh, 200), PATIENCE_S)
        path.write_text(before)
        await asyncio.wait_for(until(fresh, 401), PATIENCE_S)
        fresh_log = logging.getLogger("nestrec.serving.core.background_tasks")
        heard = asyncio.Event()
        loop = asyncio.get_running_loop()
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: "sha256" in record.getMessage() and loop.call_soon_threadsafe(heard.set)
        fresh_log.addHandler(handler)
        path.write_text("[[key]]\nname = 'no digest'")
        await asyncio.wait_for(heard.wait(), PATIENCE_S)
        fresh_log.removeHandler(handler)
        await until(keys["public"], 200)
        metrics = (await client.get("/metrics", headers={"x-api-key": keys["monitor"]})).text
        assert re.search(r'nestrec_file_age_seconds\{file="keys"\} [0-9.e-]+\n', metrics)
        assert float(re.search(r'nestrec_background_failures_total\{task="keys"\} (\S+)', metrics)[1]) >= 1

    asking(single, service, with_keys(path), use)


def test_a_key_has_its_rate_and_others_do_not_wait_for_it(service, ring):
    path, keys = ring

    async def use(client, _):
        answers = [await client.get("/v1/models", headers={"x-api-key": keys["slow"]}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 429, 429]
        assert int(answers[1].headers["retry-after"]) > 500
        body = BODIES["/v1/rank"]
        assert (await client.post("/v1/rank", json=body, headers={"x-api-key": keys["slow"]})).status_code == 429
        assert (await client.post("/v1/rank", json=body, headers={"x-api-key": keys["public"]})).status_code == 200

    asking(single, service, with_keys(path), use)


def test_a_load_is_sent_with_the_key_of_the_environment(service, ring, monkeypatch):
    path, keys = ring
    cfg = LoadTestConfig(rate=20.0, duration_s=0.2, history=3, candidates=2)

    async def use(client, port):
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(UserError, match=r"asks for a key(.|\n)*NESTREC_KEY"):
            await asyncio.to_thread(replay, url, cfg)
        monkeypatch.setenv("NESTREC_KEY", keys["public"])
        (row,) = await asyncio.to_thread(replay, url, cfg)
        assert row["requests"] > row["refused"] == 0

    asking(single, service, with_keys(path), use)


def test_an_instance_answers_nobody_but_its_front(service):
    async def use(client, _):
        assert (await client.get("/health/live")).status_code == 403
        guess = {"x-nestrec-front": "0" * 64, "x-nestrec-client": "me"}
        assert (await client.post("/v1/rank", json=BODIES["/v1/rank"], headers=guess)).status_code == 403

    asking(single, service, ServeConfig(limits=LIMITS, safety=SecurityConfig(behind="gateway")), use)
    cfg = ServeConfig(front="gateway", instances=2, safety=SecurityConfig(keys="k", certificate="c", private_key="p"))
    typed = {"safety.keys": "k", "safety.certificate": "c", "safety.private_key": "p", "insecure": "true", "port": "1"}
    words = instance_arguments(cfg, typed)
    assert words[words.index("--safety.behind") + 1] == "gateway"
    assert not {"--safety.keys", "--safety.certificate", "--safety.private_key", "--insecure"} & set(words)


@pytest.mark.parametrize("front", ["none", "gateway", "ray"])
def test_other_machines_are_let_in_by_keys_tls_or_an_explicit_word(front, tmp_path):
    cfg = ServeConfig(host="0.0.0.0", port=0, front=front)
    start = serve if front == "none" else lambda folders, cfg, *rest: serve_many(folders, cfg, {}, *rest)
    with pytest.raises(UserError, match=r"host=0\.0\.0\.0: lets other machines ask(.|\n)*--insecure"):
        start([tmp_path], cfg, SignalHandler(), print)


def test_admin_endpoints_can_be_had_on_the_health_port_alone(service, ring):
    path, keys = ring
    health_port = free_port()
    safety = SecurityConfig(keys=str(path), admin_on_health_port=True)

    async def use(client, port):
        async def asked(where, who, route="/v1/admin/probe"):
            url = f"http://127.0.0.1:{where}{route}"
            key = {"x-api-key": keys[who]}
            return (await client.post(url, json=BODIES.get(route, {}), headers=key)).status_code

        assert [await asked(port, who) for who in ("public", "admin")] == [403, 403]
        assert [await asked(health_port, who) for who in ("public", "admin")] == [403, 200]
        assert [await asked(where, "admin", "/v1/rank") for where in (port, health_port)] == [200, 404]
        assert (await client.get(f"http://127.0.0.1:{health_port}/health/live")).status_code == 200
        assert (await client.get(f"http://127.0.0.1:{health_port}/metrics")).status_code == 401
        await asyncio.to_thread(check_health, f"127.0.0.1:{health_port}")

    asking(single, service, ServeConfig(limits=LIMITS, health_port=health_port, safety=safety), use)
    with pytest.raises(UserError, match=r"has no port to go to"):
        safety_of(ServeConfig(safety=safety))


def test_admin_endpoints_of_an_open_server_are_for_its_own_machine(service):
    for host, status in (("127.0.0.1", 200), ("0.0.0.0", 403)):
        cfg = ServeConfig(host=host, limits=LIMITS, insecure=True)

        async def use(client, _, status=status):
            assert (await client.post("/v1/admin/probe", json={})).status_code == status

        asking(single, service, cfg, use)


# Certificates.


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("place", [single, behind_gateway])
def test_tls_is_spoken_and_a_new_certificate_is_taken_without_a_restart(place, service, tmp_path):
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    certificate = tmp_path / "now.pem"
    private_key = tmp_path / "now.key"
    for source, target in zip(first, (certificate, private_key), strict=True):
        target.write_bytes(source.read_bytes())
    cfg = ServeConfig(limits=LIMITS, safety=SecurityConfig(certificate=str(certificate), private_key=str(private_key)))

    async def status_with(port, trusted):
        context = ssl.create_default_context(cafile=trusted)
        async with httpx.AsyncClient(verify=context, timeout=PATIENCE_S) as client:
            try:
                body = BODIES["/v1/rank"]
                return (await client.post(f"https://127.0.0.1:{port}/v1/rank", json=body)).status_code
            except httpx.ConnectError:
                return None

    async def run():
        async with place(service, cfg) as port:
            assert await status_with(port, first[0]) == 200
            assert await status_with(port, second[0]) is None
            await asyncio.to_thread(check_health, f"127.0.0.1:{port}")
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(exchange, port, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n") == b"", "no plain"
            certificate.write_bytes(second[0].read_bytes())  # one half: nothing to be taken yet
            private_key.write_bytes(second[1].read_bytes())
            end_s = time.monotonic() + PATIENCE_S
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
    """(certificates in use, their clock, what puts other files in their place)"""
    clock = [time.time() + 60.0]

    def put(days):
        pair = make_certificate(tmp_path, f"days{days}", days)
        for source, target in zip(pair, ("now.pem", "now.key"), strict=True):
            (tmp_path / target).write_bytes(source.read_bytes())
        return ssl.PEM_cert_to_DER_cert(pair[0].read_text())

    put(5)
    found = CertificateReloader(tmp_path / "now.pem", tmp_path / "now.key", lambda: clock[0])
    return found, clock, put


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_expired_certificate_does_not_replace_a_valid_one(certificates, caplog):
    found, clock, put = certificates
    first = presented_by(found.context)
    clock[0] += 2 * DAY_S
    one_day = put(1)
    for _ in range(3):
        assert not found.reload_if_changed()
    assert presented_by(found.context) == first
    (refused,) = errors_in(caplog)
    assert "safety.certificate" in refused
    assert "is not valid now: valid from" in refused
    assert "stays in use" in refused
    clock[0] += 4 * DAY_S
    assert found.reload_if_changed(), "both have expired: the files decide"
    assert presented_by(found.context) == one_day
    assert "so clients reject it" in errors_in(caplog)[-1]
    ten_days = put(10)
    assert found.reload_if_changed()
    assert presented_by(found.context) == ten_days
    assert len(errors_in(caplog)) == 2


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificate_of_the_future_waits_until_it_is_valid(certificates):
    found, clock, put = certificates
    first = presented_by(found.context)
    clock[0] -= DAY_S
    found.validity = replace(found.validity, first_s=0.0)  # the one in use was valid yesterday
    two_days = put(2)
    assert not found.reload_if_changed()
    assert presented_by(found.context) == first
    clock[0] += DAY_S
    assert found.reload_if_changed()
    assert presented_by(found.context) == two_days


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("days", [1, 40_000])
def test_certificate_expiry_is_read_from_the_file(tmp_path, days):
    """After 2049 the format of the date is another one."""
    certificate, private_key = make_certificate(tmp_path, "one", days)
    printed = subprocess.run(
        ["openssl", "x509", "-in", certificate, "-noout", "-enddate"], check=True, capture_output=True, text=True
    ).stdout
    cfg = SecurityConfig(certificate=str(certificate), private_key=str(private_key))
    safety = ServerSecurity(cfg, "127.0.0.1")
    safety.close()
    assert safety.certificate_expiry_s == ssl.cert_time_to_seconds(printed.strip().removeprefix("notAfter="))
    assert safety.file_ages_s.keys() == {"certificate"}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("kind", [App, Gateway])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_tls_server_restarts_at_once_despite_idle_clients(kind, loop, service, tmp_path):
    """Idle clients do not read, so they do not answer the server's end of the connection."""
    certificate, private_key = make_certificate(tmp_path, "server")
    cfg = ServeConfig(limits=LIMITS, safety=SecurityConfig(certificate=str(certificate), private_key=str(private_key)))
    context = ssl.create_default_context(cafile=certificate)

    def idle_client(port):
        client = context.wrap_socket(socket.create_connection(("127.0.0.1", port), 20), server_hostname="127.0.0.1")
        client.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(65536)
        return client

    async def restarted(port):
        app = App(service, LIMITS) if kind is App else Gateway([free_port()], LIMITS)
        with contextlib.closing(safety_of(cfg)) as safety, contextlib.ExitStack() as clients:
            listens = asyncio.Event()
            sockets = bound_sockets("127.0.0.1", port)
            server = Server(uvicorn_config(app, cfg, app, safety), listens.set)
            serving = asyncio.create_task(server.serve(sockets))
            await listens.wait()
            ask = [asyncio.to_thread(idle_client, port_of(sockets)) for _ in range(50)]
            idle = [clients.enter_context(client) for client in await asyncio.gather(*ask)]
            port = port_of(sockets)
            start_s = time.monotonic()
            server.end(False)
            await serving
            took_s = time.monotonic() - start_s
            assert [client.recv(1) for client in idle] == [b""] * 50, "each connection ends in order"
            return port, took_s

    async def run():
        port, first_s = await restarted(0)
        return first_s, (await restarted(port))[1]

    with asyncio.Runner(loop_factory=loop) as runner:
        assert max(runner.run(run())) < 5.0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_tls_server_that_stops_sends_slow_clients_all(loop, tmp_path):
    """The client begins to read after the server would have ended an idle connection."""
    certificate, private_key = make_certificate(tmp_path, "server")
    cfg = ServeConfig(limits=LIMITS, safety=SecurityConfig(certificate=str(certificate), private_key=str(private_key)))
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
        with contextlib.closing(safety_of(cfg)) as safety:
            config = uvicorn_config(large, cfg, None, safety)
            config.lifespan = "off"
            listens = asyncio.Event()
            sockets = bound_sockets("127.0.0.1", 0)
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
@pytest.mark.parametrize("place", [single, behind_gateway])
def test_replay_sends_known_items_to_a_tls_server(place, service, tmp_path, monkeypatch):
    certificate, private_key = make_certificate(tmp_path, "server")
    cfg = ServeConfig(limits=LIMITS, safety=SecurityConfig(certificate=str(certificate), private_key=str(private_key)))
    load = LoadTestConfig(rate=20.0, duration_s=0.2, history=3, candidates=2)
    said = []

    async def run():
        async with place(service, cfg) as port:
            url = f"https://127.0.0.1:{port}"
            with pytest.raises(UserError, match=r"CERTIFICATE_VERIFY_FAILED(.|\n)*SSL_CERT_FILE"):
                await asyncio.to_thread(replay, url, load)
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            (row,) = await asyncio.to_thread(replay, url, load, said.append)
            assert row["requests"] > row["refused"] == 0
            return await asyncio.to_thread(chosen_items, url, "")

    items = asyncio.run(run())
    assert items == list(service.fleet(service.ranker).servable.item_keys)
    assert said[0].startswith("sending synthetic requests: random histories and candidates of 50 items that the server")


def test_half_a_pair_and_what_is_no_certificate_are_told_at_the_start(tmp_path):
    with pytest.raises(UserError, match=r"one half of a pair(.|\n)*--safety.private_key"):
        SecurityConfig(certificate="a.pem")
    for name in ("a.pem", "a.key"):
        (tmp_path / name).write_text("nothing")
    cfg = SecurityConfig(certificate=str(tmp_path / "a.pem"), private_key=str(tmp_path / "a.key"))
    with pytest.raises(UserError, match=r"safety.certificate=.*a\.pem': cannot be used"):
        serve([tmp_path], ServeConfig(port=0, safety=cfg), SignalHandler(), print)


# Names of requests, and the log.


@contextlib.contextmanager
def heard(formatter):
    """What is logged, as lines."""
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


@pytest.mark.parametrize("place", [single, behind_gateway])
def test_every_answer_names_its_request(place, service):
    async def use(client, port):
        def named(answer):
            return answer.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()

        given = {"x-request-id": "my-id.1:2"}
        asked = [
            await client.post("/v1/rank", json=BODIES["/v1/rank"], headers=given),
            await client.post("/v1/rank", content=b"no json", headers={**given, "content-type": "application/json"}),
            await client.get("/nothing", headers=given),
            await client.get("/v1/models", headers=given),
            await client.get("/health/live", headers={**given, "host": "elsewhere.example"}),
        ]
        assert [answer.status_code for answer in asked] == [200, 400, 404, 200, 421]
        assert [answer.headers.get_list("x-request-id") for answer in asked] == [["my-id.1:2"]] * 5
        for unsound in ("x" * 129, "a b", "<b>", "\xe4", "a\tb", ""):
            answer = await client.get("/v1/models", headers={"x-request-id": unsound.encode("latin-1")})
            assert len(answer.headers["x-request-id"]) == 16 != len(unsound)
        for broken in (b"no request\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 9000):
            assert len(named(await asyncio.to_thread(exchange, port, broken))) == 16

    with heard(JsonLogFormatter()) as text:
        asking(place, service, ServeConfig(limits=LIMITS), use)
    if place is behind_gateway:
        told = [json.loads(line) for line in text.getvalue().splitlines() if "answered" in line]
        assert {"my-id.1:2"} < {line["request_id"] for line in told}, "instances know it too"


def test_instance_log_leaves_out_health_checks_of_its_front(service):
    cfg = ServeConfig(limits=LIMITS, safety=SecurityConfig(behind="gateway"), log=LogConfig(requests=True))

    async def use(client, _):
        client.headers[security_config.HEADER.decode()] = security_config.front_secret()
        for path in ("/health/live", "/health/ready", "/v1/models"):
            assert (await client.get(path)).status_code == 200

    with heard(JsonLogFormatter()) as text:
        asking(single, service, cfg, use)
    routes = [json.loads(line)["route"] for line in text.getvalue().splitlines() if "answered" in line]
    assert routes == ["/v1/models"]


def test_lines_of_the_log_name_requests_and_hold_nothing_of_what_was_asked(service, ring):
    path, keys = ring
    secrets = ["user-4711-secret", "item-0815-secret", keys["public"]]

    async def use(client, _):
        headers = {"x-api-key": keys["public"], "x-request-id": "one-1"}
        body = {"user": secrets[0], "history": {"items": [secrets[1], "2"], "times_ms": [1, 2]}}
        for asked in ({"k": 2}, {"k": 0}, {"unknown": "refuse"}):
            await client.post("/v1/recommend", json={**body, **asked}, headers=headers)
        await client.get("/v1/fails", headers=headers)
        await client.delete(f"/v1/users/{secrets[0]}/events", headers=headers)
        await client.get(f"/v1/users/{secrets[0]}/nothing", headers=headers)
        await client.get("/v1/models", headers={"x-api-key": secrets[0]})

    for formatter in (JsonLogFormatter(), TextLogFormatter()):
        with heard(formatter) as text:
            asking(single, service, with_keys(path, log=LogConfig(requests=True)), use)
        assert not any(secret in text.getvalue() for secret in secrets)
        if isinstance(formatter, JsonLogFormatter):
            lines = [json.loads(line) for line in text.getvalue().splitlines() if "nestrec" in line]
            answers = [line for line in lines if line["logger"] == "nestrec.requests"]
            shown = [(line["status"], line["route"], line.get("key")) for line in answers]
            assert shown == [
                (200, "/v1/recommend", "public"),
                (400, "/v1/recommend", "public"),
                (400, "/v1/recommend", "public"),
                (500, "/v1/fails", "public"),
                (204, "/v1/users/{id}/events", "public"),
                (404, "other", "public"),
                (401, "/v1/models", None),
            ]
            assert all(line["request_id"] == "one-1" and line["milliseconds"] >= 0 for line in answers[:-1])
            failed = next(line for line in lines if line["message"] == "a request failed")
            assert failed["request_id"] == "one-1"
            assert failed["exception"][0] == "KeyError"
            assert any(" in _fail" in place for place in failed["exception"])
