"""Trace spans of a request from the gateway to the engine, in the trace of the client."""

import asyncio
import contextlib

import httpx
import pytest
from listening_app import listening
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nestrec.base.errors import UserError
from nestrec.serving.core import tracing
from nestrec.serving.core.request_limits import LimitsConfig
from nestrec.serving.fleet.gateway import Gateway
from nestrec.serving.http.http_app import App
from nestrec.serving.http.serve_config import ServeConfig

LIMITS = LimitsConfig(default_timeout_ms=10_000)
BODY = {"user": "user-4711", "history": {"items": ["1", "2"], "times_ms": [1, 2]}, "candidates": ["3"]}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter.get_finished_spans
    tracing.stop()


def run_client(service, use):
    """Serve a gateway with two instances and return the result of `use(client)`."""
    cfg = ServeConfig(limits=LIMITS)

    async def run():
        async with contextlib.AsyncExitStack() as exit_stack:
            ports = [await exit_stack.enter_async_context(listening(App(service, LIMITS), cfg)) for _ in range(2)]
            gateway = Gateway(ports, LIMITS)
            exit_stack.push_async_callback(gateway.close)
            port = await exit_stack.enter_async_context(listening(gateway, cfg))
            client = await exit_stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0)
            )
            return await use(client)

    return asyncio.run(run())


def test_tracing_spans_from_client_to_engine(service, spans):
    async def use(client):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "one"}
        assert (await client.post("/v1/rank", json=BODY, headers=headers)).status_code == 200
        for path in ("/health/live", "/metrics"):  # the gateway sends the second to every instance
            assert (await client.get(path)).status_code == 200

    run_client(service, use)
    found = {}
    for span in spans():
        assert f"{span.context.trace_id:032x}" == TRACE
        found.setdefault(span.name, []).append(span)
    assert {name: len(each) for name, each in found.items()} == {
        "serve.request": 2,
        "serve.gateway.request": 1,
        "serve.engine.queue": 1,
        "serve.engine.compute": 1,
    }
    (send,), (queue,), (compute,) = (found[f"serve.{n}"] for n in ("gateway.request", "engine.queue", "engine.compute"))
    gateway = next(span for span in found["serve.request"] if f"{span.parent.span_id:016x}" == PARENT)
    instance = next(span for span in found["serve.request"] if span is not gateway)
    assert send.parent.span_id == gateway.context.span_id
    assert instance.parent.span_id == send.context.span_id
    assert queue.parent.span_id == compute.parent.span_id == instance.context.span_id
    assert gateway.start_time <= instance.start_time <= queue.start_time <= queue.end_time == compute.start_time
    assert compute.end_time <= instance.end_time <= gateway.end_time
    for span in (gateway, instance):
        assert span.attributes["http.route"] == "/v1/rank"
        assert span.attributes["http.response.status_code"] == 200
        assert span.attributes["nestrec.request_id"] == "one"
    assert compute.attributes["nestrec.cache_source"] == "none"
    assert compute.attributes["nestrec.num_candidates"] == 1
    exported = [(span.name, *span.attributes.values()) for span in spans()]
    # Times and ids of spans are not checked, because they may contain these digits by chance.
    assert "4711" not in str(exported), "spans must not contain the user id"


def test_tracing_rejected_request_has_span(service, spans):
    async def use(client):
        response = await client.post("/v1/rank", json={"user": "user-4711"}, headers={"traceparent": "no trace"})
        assert response.status_code == 400

    run_client(service, use)
    statuses = [span.attributes["http.response.status_code"] for span in spans() if span.name == "serve.request"]
    assert statuses == [400, 400]
    assert len({span.context.trace_id for span in spans()}) == 1


def test_tracing_without_opentelemetry_names_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UserError, match=r"required for tracing(.|\n)*\[otel\]"):
        tracing.start(tracing.TracingConfig(otlp_endpoint="http://127.0.0.1:4318/v1/traces"))
    assert not tracing.is_on()
