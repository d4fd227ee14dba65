"""Fronts in processes of their own with all that a server can have before and behind them: keys, TLS, traces, and a
model that follows a run. One server for the whole file."""

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
from front_processes import NUM_FRONTS, fronts_of, wait_for
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from server_process import running_server

from nestrec.distributed import Topology
from nestrec.inference.recommender import Recommender
from nestrec.serving.security.auth import ApiKeyEntry, add_entry, digest_of, new_key
from support.tiny_runs import make_datasets

LIMIT_S = 300.0
"""for processes to start and answer, on a machine that others share"""
pytestmark = [
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
    pytest.mark.timeout(2 * LIMIT_S),
]
HISTORY = {"items": ["1", "2", "3"], "times_ms": [1, 2, 3], "actions": [1, 0, 1]}
ASKED = {"user": "user-4711", "history": HISTORY, "candidates": ["4", "5", "6"], "now_ms": 4, "timeout_ms": 10_000}
BURST = 5
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(BaseHTTPRequestHandler):
    """Takes spans as OpenTelemetry sends them."""

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
    """(address of a collector, what it was sent)"""
    Collector.spans = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", Collector.spans
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """(file, keys by name)"""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys = {}
    for name, options in {
        "public": {},
        "admin": {"role": "admin"},
        "expired": {"expires": "2020-01-01T00:00:00Z"},
        "slow": {"requests_per_s": 0.001, "burst": BURST},
    }.items():
        keys[name] = new_key()
        add_entry(path, ApiKeyEntry(name=name, sha256=digest_of(keys[name].encode()).hex(), **options))
    return path, keys


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(address, run, exports by the version that answers name)"""
    folder = tmp_path_factory.mktemp("run")
    make_datasets(folder / "data", num_topics=5)
    address = str(folder / "published")
    exported = {}
    run = ChangingRun.begin(Topology.single(), folder / "data", address, family="hstu", store="lru", seed=5)

    def publish():
        run.change()
        run.publisher.publish(run.session, run.step)
        run.publisher.close()
        version = run.publisher.newest.folder
        exported[version] = run.export(folder)
        return version

    publish()
    return address, publish, exported


@pytest.fixture(scope="module")
def served(tmp_path_factory, published, keys, spans):
    """(client that opens a connection for each request, its address, process)"""
    certificate, private_key = make_certificate(tmp_path_factory.mktemp("tls"), "server")
    options = (
        "--follow", "--follow.poll_s", "0.02", "--front_processes", str(NUM_FRONTS),
        "--safety.keys", str(keys[0]), "--safety.certificate", str(certificate), "--safety.private_key",
        str(private_key), "--tracing.otlp", spans[0], "--tracing.sampled", "0", "--service.engine.max_queue_s", "1000",
    )  # fmt: skip
    with running_server(published[0], *options, OTEL_BSP_SCHEDULE_DELAY="20") as (port, process):
        fronts_of(process)
        context = ssl.create_default_context(cafile=certificate)
        limits = httpx.Limits(max_keepalive_connections=0)
        address = f"https://127.0.0.1:{port}"
        with httpx.Client(base_url=address, verify=context, limits=limits, timeout=60.0) as client:
            yield client, (address, context), process


def counted(client, admin, name):
    """The values of a counter, by its labels."""
    text = client.get("/metrics", headers=admin).text
    return collections.Counter({labels: float(v) for labels, v in re.findall(name + r"_total\{(.*)\} (\S+)", text)})


def with_key(keys, name):
    return {"x-api-key": keys[1][name]}


def test_every_front_speaks_tls_and_asks_for_keys_and_one_exposition_counts_whom_they_refuse(served, keys):
    client, (address, _), _ = served
    admin = with_key(keys, "admin")
    with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
        assert httpx.get(address.replace("https", "http") + "/health/live").status_code >= 400, "no plain HTTP"
    counted(client, admin, "nestrec_refused_credentials")  # what a front was late to tell is in the next one
    before = counted(client, admin, "nestrec_refused_credentials")
    for _ in range(8):  # where a connection goes is the system's choice
        statuses = [client.post("/v1/rank", json=ASKED, headers=h).status_code for h in (with_key(keys, "public"), {})]
        assert statuses == [200, 401]
        assert client.get("/v1/models", headers=with_key(keys, "expired")).status_code == 401
        assert client.get("/v1/admin/fleet", headers=with_key(keys, "public")).status_code == 403
        assert client.get("/health/live").status_code == 200
    assert client.get("/v1/admin/fleet", headers=admin).status_code == 200
    wanted = {'reason="missing"': 8.0, 'reason="expired"': 8.0, 'reason="role"': 8.0}
    wait_for(lambda: counted(client, admin, "nestrec_refused_credentials") - before == wanted)


def test_the_rate_of_a_key_holds_for_all_fronts_together(served, keys):
    client, _, _ = served
    slow = with_key(keys, "slow")
    with ThreadPoolExecutor(4) as at_once:
        answers = [*at_once.map(lambda _: client.post("/v1/rank", json=ASKED, headers=slow), range(8 * BURST))]
    assert collections.Counter(one.status_code for one in answers) == {200: BURST, 429: 7 * BURST}
    assert all(int(one.headers["retry-after"]) > 500 for one in answers if one.status_code == 429)
    assert client.post("/v1/rank", json=ASKED, headers=with_key(keys, "public")).status_code == 200


def test_one_trace_goes_from_the_client_through_a_front_to_the_engine_and_names_nobody(served, keys, spans):
    client, _, _ = served
    found = spans[1]
    found.clear()
    headers = {**with_key(keys, "public"), "traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "one"}
    assert client.post("/v1/rank", json=ASKED, headers=headers).status_code == 200
    assert client.delete("/v1/users/user-4711/events", headers=headers).status_code == 204
    assert client.get("/health/ready").status_code == 200
    wait_for(lambda: len(found) >= 6)
    assert {span.trace_id.hex() for span in found} == {TRACE}
    by_id = {span.span_id: span for span in found}

    def attributes(span):
        return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}

    def way(span):
        """From the client to this one."""
        above = way(by_id[span.parent_span_id]) if span.parent_span_id in by_id else ()
        return *above, (span.name, attributes(span).get("http.route", ""))

    ranked, erased = ("serve.request", "/v1/rank"), ("serve.request", "/v1/users/{id}/events")
    assert sorted(map(way, found)) == sorted([
        (ranked,), (ranked, ("serve.engine.queue", "")), (ranked, ("serve.engine.compute", "")),
        (erased,), (erased, ("serve.front.send", "")), (erased, ("serve.front.send", ""), erased),
    ])  # fmt: skip
    requests = [span for span in found if span.name == "serve.request"]
    assert [span.parent_span_id.hex() for span in requests].count(PARENT) == 2
    assert sorted(attributes(span)["http.response.status_code"] for span in requests) == [200, 204, 204]
    assert {attributes(span)["nestrec.request_id"] for span in requests} == {"one"}
    assert "4711" not in str([(span.name, attributes(span)) for span in found])


def test_every_answer_is_that_of_one_version_while_deltas_come(served, keys, published):
    _, (address, context), _ = served
    _, publish, exported = published
    answers = []
    is_over = asyncio.Event()

    async def ask_on(client, user):
        """The versions that a user meets."""
        met = []
        while not is_over.is_set():
            answer = await client.post("/v1/rank", json={**ASKED, "user": user})
            assert answer.status_code == 200, answer.text
            answers.append(answer.json())
            met.append(answers[-1]["model"])
        return met

    async def run():
        options = {"verify": context, "headers": with_key(keys, "public"), "timeout": 60.0}
        async with contextlib.AsyncExitStack() as made:
            clients = [await made.enter_async_context(httpx.AsyncClient(base_url=address, **options)) for _ in range(6)]
            asking = [asyncio.create_task(ask_on(client, f"user {i}")) for i, client in enumerate(clients)]
            for _ in range(5):
                version = await asyncio.to_thread(publish)
                before = len(answers)
                while sum(answer["model"] == version for answer in answers[before:]) < 2 * len(clients):
                    await asyncio.sleep(0.005)
                    assert not any(task.done() for task in asking)
            is_over.set()
            return await asyncio.gather(*asking)

    for met in asyncio.run(asyncio.wait_for(run(), LIMIT_S)):
        assert met == sorted(met, key=list(exported).index), "nobody goes back"
    expected = {
        version: Recommender(servable).rank({**HISTORY, "now_ms": 4}, ASKED["candidates"]).scores
        for version, servable in exported.items()
    }
    assert len({answer["model"] for answer in answers}) >= 5
    for answer in answers:
        for name, scores in answer["scores"].items():
            assert np.allclose(scores, expected[answer["model"]][name], rtol=1e-4, atol=1e-5), answer["model"]
