"""Spans of a request from the front to the engine, by the trace that its client names."""

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
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter.get_finished_spans
    tracing.stop()


def asked(service, use):
    cfg = ServeConfig(limits=LIMITS)

    async def run():
        async with contextlib.AsyncExitStack() as made:
            ports = [await made.enter_async_context(listening(App(service, LIMITS), cfg)) for _ in range(2)]
            gateway = Gateway(ports, LIMITS)
            made.push_async_callback(gateway.close)
            port = await made.enter_async_context(listening(gateway, cfg))
            client = await made.enter_async_context(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0)
            )
            return await use(client)

    return asyncio.run(run())


def test_one_trace_goes_from_the_client_over_the_front_to_the_engine(service, spans):
    async def use(client):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "one"}
        assert (await client.post("/v1/rank", json=BODY, headers=headers)).status_code == 200
        for path in ("/health/live", "/metrics"):  # the second asks every instance
            assert (await client.get(path)).status_code == 200

    asked(service, use)
    found = {}
    for span in spans():
        assert f"{span.context.trace_id:032x}" == TRACE
        found.setdefault(span.name, []).append(span)
    assert {name: len(each) for name, each in found.items()} == {
        "serve.request": 2,
        "serve.front.send": 1,
        "serve.engine.queue": 1,
        "serve.engine.compute": 1,
    }
    (send,), (queue,), (compute,) = (found[f"serve.{n}"] for n in ("front.send", "engine.queue", "engine.compute"))
    front = next(span for span in found["serve.request"] if f"{span.parent.span_id:016x}" == PARENT)
    instance = next(span for span in found["serve.request"] if span is not front)
    assert send.parent.span_id == front.context.span_id
    assert instance.parent.span_id == send.context.span_id
    assert queue.parent.span_id == compute.parent.span_id == instance.context.span_id
    assert front.start_time <= instance.start_time <= queue.start_time <= queue.end_time == compute.start_time
    assert compute.end_time <= instance.end_time <= front.end_time
    for span in (front, instance):
        assert span.attributes["http.route"] == "/v1/rank"
        assert span.attributes["http.response.status_code"] == 200
        assert span.attributes["nestrec.request_id"] == "one"
    assert compute.attributes["nestrec.prefix"] == "none"
    assert compute.attributes["nestrec.candidates"] == 1
    told = [(span.name, *span.attributes.values()) for span in spans()]
    assert "4711" not in str(told), "who asked is nobody's business"  # times and ids of spans may hold it by chance


def test_a_request_that_is_refused_has_a_span_with_its_status_and_none_begins_a_trace_of_others(service, spans):
    async def use(client):
        answer = await client.post("/v1/rank", json={"user": "user-4711"}, headers={"traceparent": "no trace"})
        assert answer.status_code == 400

    asked(service, use)
    statuses = [span.attributes["http.response.status_code"] for span in spans() if span.name == "serve.request"]
    assert statuses == [400, 400]
    assert len({span.context.trace_id for span in spans()}) == 1


def test_without_the_package_spans_are_refused_with_its_name(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UserError, match=r"is needed for spans(.|\n)*nestrec\[otel\]"):
        tracing.start(tracing.TracingConfig(otlp="http://127.0.0.1:4318/v1/traces"))
    assert not tracing.is_on()
