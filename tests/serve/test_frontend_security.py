"""Frontend workers with API keys, TLS, tracing and a model that follows a run; all tests share one server."""

import asyncio
import collections
import contextlib
import re
import shutil
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest
from certificates import make_certificate
from changing_run import ChangingRun
from frontend_processes import NUM_WORKERS, wait_for, workers_of
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from server_process import running_server

from nestrec.distributed import Topology
from nestrec.inference.recommender import Recommender
from nestrec.serving.security.auth import ApiKeyEntry, add_entry, digest_of, generate_key
from support.tiny_runs import make_datasets

LIMIT_S = 300.0
"""Time for processes to start and respond, on a machine that other jobs share."""
pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
    pytest.mark.timeout(2 * LIMIT_S),
]
HISTORY = {"items": ["1", "2", "3"], "times_ms": [1, 2, 3], "actions": [1, 0, 1]}
RANK_BODY = {"user": "user-4711", "history": HISTORY, "candidates": ["4", "5", "6"], "now_ms": 4, "timeout_ms": 10_000}
BURST = 5
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_SPAN_ID = "b7ad6b7169203331"


class SpanCollector(BaseHTTPRequestHandler):
    """Handler of an OpenTelemetry collector that records all spans."""

    spans = ()

    def do_POST(self):
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def spans():
    """Start a collector and return its URL and the list of received spans."""
    SpanCollector.spans = []
    with ThreadingHTTPServer(("127.0.0.1", 0), SpanCollector) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", SpanCollector.spans
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Return the key file and the keys by name."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys = {}
    for name, options in {
        "public": {},
        "admin": {"role": "admin"},
        "expired": {"expires_at": "2020-01-01T00:00:00Z"},
        "slow": {"requests_per_s": 0.001, "burst": BURST},
    }.items():
        keys[name] = generate_key()
        add_entry(path, ApiKeyEntry(name=name, sha256=digest_of(keys[name].encode()).hex(), **options))
    return path, keys


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return the address of published versions, a function that publishes another one, and the exports by version."""
    folder = tmp_path_factory.mktemp("run")
    make_datasets(folder / "data", num_topics=5)
    address = str(folder / "published")
    exports = {}
    run = ChangingRun.begin(Topology.single(), folder / "data", address, family="hstu", store="lru", seed=5)

    def publish():
        run.change()
        run.publisher.publish(run.session, run.step)
        run.publisher.close()
        version = run.publisher.newest.folder
        exports[version] = run.export(folder)
        return version

    publish()
    return address, publish, exports


@pytest.fixture(scope="module")
def served(tmp_path_factory, published, keys, spans):
    """Start a server; return a client that opens a connection per request, (URL, TLS context), and the process."""
    certificate, private_key = make_certificate(tmp_path_factory.mktemp("tls"), "server")
    options = (
        "--follow", "--follow.poll_interval_s", "0.02", "--frontend_workers", str(NUM_WORKERS),
        "--security.api_keys", str(keys[0]), "--security.tls_certificate", str(certificate),
        "--security.tls_private_key", str(private_key), "--tracing.otlp_endpoint", spans[0],
        "--tracing.sample_rate", "0", "--service.engine.max_queue_delay_s", "1000",
    )  # fmt: skip
    with running_server(published[0], *options, OTEL_BSP_SCHEDULE_DELAY="20") as (port, process):
        workers_of(process)
        context = ssl.create_default_context(cafile=certificate)
        limits = httpx.Limits(max_keepalive_connections=0)
        url = f"https://127.0.0.1:{port}"
        with httpx.Client(base_url=url, verify=context, limits=limits, timeout=60.0) as client:
            yield client, (url, context), process


def counter_values(client, admin, name):
    """Return the values of a counter by its labels."""
    text = client.get("/metrics", headers=admin).text
    return collections.Counter({labels: float(v) for labels, v in re.findall(name + r"_total\{(.*)\} (\S+)", text)})


def with_key(keys, name):
    return {"x-api-key": keys[1][name]}


def test_frontend_workers_tls_and_authentication(served, keys):
    client, (url, _), _ = served
    admin = with_key(keys, "admin")
    with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
        assert httpx.get(url.replace("https", "http") + "/health/live").status_code >= 400, "plain HTTP is not served"
    counter_values(
        client, admin, "nestrec_auth_failures"
    )  # a late report of a worker is contained in the next response
    before = counter_values(client, admin, "nestrec_auth_failures")
    for _ in range(8):  # the kernel chooses the worker of a connection
        statuses = [
            client.post("/v1/rank", json=RANK_BODY, headers=h).status_code for h in (with_key(keys, "public"), {})
        ]
        assert statuses == [200, 401]
        assert client.get("/v1/models", headers=with_key(keys, "expired")).status_code == 401
        assert client.get("/v1/admin/fleet", headers=with_key(keys, "public")).status_code == 403
        assert client.get("/health/live").status_code == 200
    assert client.get("/v1/admin/fleet", headers=admin).status_code == 200
    expected = {'reason="missing"': 8.0, 'reason="expired"': 8.0, 'reason="role"': 8.0}
    wait_for(lambda: counter_values(client, admin, "nestrec_auth_failures") - before == expected)


def test_frontend_workers_share_rate_limits(served, keys):
    client, _, _ = served
    slow = with_key(keys, "slow")
    with ThreadPoolExecutor(4) as pool:
        responses = [*pool.map(lambda _: client.post("/v1/rank", json=RANK_BODY, headers=slow), range(8 * BURST))]
    assert collections.Counter(response.status_code for response in responses) == {200: BURST, 429: 7 * BURST}
    assert all(int(response.headers["retry-after"]) > 500 for response in responses if response.status_code == 429)
    assert client.post("/v1/rank", json=RANK_BODY, headers=with_key(keys, "public")).status_code == 200


def test_frontend_worker_tracing_omits_user_ids(served, keys, spans):
    client, _, _ = served
    received = spans[1]
    received.clear()
    headers = {**with_key(keys, "public"), "traceparent": f"00-{TRACE_ID}-{PARENT_SPAN_ID}-01", "x-request-id": "one"}
    assert client.post("/v1/rank", json=RANK_BODY, headers=headers).status_code == 200
    assert client.delete("/v1/users/user-4711/events", headers=headers).status_code == 204
    assert client.get("/health/ready").status_code == 200
    wait_for(lambda: len(received) >= 6)
    assert {span.trace_id.hex() for span in received} == {TRACE_ID}
    by_id = {span.span_id: span for span in received}

    def attributes(span):
        return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}

    def path_to(span):
        """Return the names and routes of the spans from the root to a span."""
        ancestors = path_to(by_id[span.parent_span_id]) if span.parent_span_id in by_id else ()
        return *ancestors, (span.name, attributes(span).get("http.route", ""))

    ranked = ("serve.request", "/v1/rank")
    erased = ("serve.request", "/v1/users/{id}/events")
    assert sorted(map(path_to, received)) == sorted([
        (ranked,), (ranked, ("serve.engine.queue", "")), (ranked, ("serve.engine.compute", "")),
        (erased,), (erased, ("serve.gateway.request", "")), (erased, ("serve.gateway.request", ""), erased),
    ])  # fmt: skip
    requests = [span for span in received if span.name == "serve.request"]
    assert [span.parent_span_id.hex() for span in requests].count(PARENT_SPAN_ID) == 2
    assert sorted(attributes(span)["http.response.status_code"] for span in requests) == [200, 204, 204]
    assert {attributes(span)["nestrec.request_id"] for span in requests} == {"one"}
    assert "4711" not in str([(span.name, attributes(span)) for span in received])


def test_frontend_workers_deltas_never_mix_versions(served, keys, published):
    _, (url, context), _ = served
    _, publish, exports = published
    responses = []
    is_over = asyncio.Event()

    async def rank_until_over(client, user):
        """Send ranking requests of a user, and return the versions of the responses."""
        versions = []
        while not is_over.is_set():
            response = await client.post("/v1/rank", json={**RANK_BODY, "user": user})
            assert response.status_code == 200, response.text
            responses.append(response.json())
            versions.append(responses[-1]["model"])
        return versions

    async def run():
        options = {"verify": context, "headers": with_key(keys, "public"), "timeout": 60.0}
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(httpx.AsyncClient(base_url=url, **options)) for _ in range(6)]
            tasks = [asyncio.create_task(rank_until_over(client, f"user {i}")) for i, client in enumerate(clients)]
            for _ in range(5):
                version = await asyncio.to_thread(publish)
                before = len(responses)
                while sum(response["model"] == version for response in responses[before:]) < 2 * len(clients):
                    await asyncio.sleep(0.005)
                    assert not any(task.done() for task in tasks)
            is_over.set()
            return await asyncio.gather(*tasks)

    for versions in asyncio.run(asyncio.wait_for(run(), LIMIT_S)):
        assert versions == sorted(versions, key=list(exports).index), "no user gets an older version again"
    expected = {
        version: Recommender(servable).rank({**HISTORY, "now_ms": 4}, RANK_BODY["candidates"]).scores
        for version, servable in exports.items()
    }
    assert len({response["model"] for response in responses}) >= 5
    for response in responses:
        for name, scores in response["scores"].items():
            assert np.allclose(scores, expected[response["model"]][name], rtol=1e-4, atol=1e-5), response["model"]
