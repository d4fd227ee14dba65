"""Spans of requests for OpenTelemetry, from a front to the engine; where nobody asked for them they cost a comparison.

Whoever asks names the trace in the header traceparent (W3C), and a front hands it on to its instance. Spans hold
routes, statuses, sizes and where a prefix was; never who asked or for what.
"""

import contextlib
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nestrec.base.config import config
from nestrec.base.config_values import Share
from nestrec.base.lazy import import_extra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer


HEADER = b"traceparent"
_NAME = "nestrec"


@config
class TracingConfig:
    otlp: str = ""
    """address of a collector that takes OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; empty: no spans"""
    sampled: Share = 0.01
    """share of requests that begin a trace here; one that brings a trace is followed as that trace says"""


class _Tracing:
    """Of this process."""

    tracer: "Tracer | None" = None
    provider: "TracerProvider | None" = None


def start(cfg: TracingConfig) -> None:
    """Send spans from now on, where that is asked for."""
    if not cfg.otlp:
        return
    for module in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
        import_extra(module, "otel", "is needed for spans")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    sampler = ParentBased(TraceIdRatioBased(cfg.sampled))
    provider = TracerProvider(sampler=sampler, resource=Resource.create({"service.name": _NAME}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=cfg.otlp)))
    use(provider)


def use(provider: "TracerProvider | None") -> None:
    """Make spans with this one; none: make none."""
    _Tracing.provider = provider
    _Tracing.tracer = None if provider is None else provider.get_tracer(_NAME)


def stop() -> None:
    """Send what waits."""
    if _Tracing.provider is not None:
        _Tracing.provider.shutdown()
    use(None)


def is_on() -> bool:
    return _Tracing.tracer is not None


async def traced(work: Awaitable[None], parent: bytes, name: str, request_id: str) -> None:
    """Serve a request inside of a span. parent: the traceparent that it brought, or nothing."""
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    assert _Tracing.tracer is not None
    given = TraceContextTextMapPropagator().extract({HEADER.decode(): parent.decode("latin-1")})
    attributes = {"http.route": name, "nestrec.request_id": request_id}
    span = _Tracing.tracer.start_as_current_span(
        "serve.request", context=given, kind=SpanKind.SERVER, attributes=attributes, record_exception=False
    )
    with span:
        await work


def note(**attributes: str | int | float) -> None:
    """Of the span that is under way."""
    if _Tracing.tracer is not None:
        from opentelemetry.trace import get_current_span

        get_current_span().set_attributes({name.replace("__", "."): value for name, value in attributes.items()})


@contextlib.contextmanager
def sending(slot_port: int) -> Iterator[bytes]:
    """Open a span around a request that a front sends for another one; yield the value of its `HEADER`.

    The value is empty if there is no trace: requests that a front sends of its own accord belong to none."""
    if _Tracing.tracer is None:
        yield b""
        return
    from opentelemetry.trace import SpanKind, get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not get_current_span().get_span_context().is_valid:
        yield b""
        return
    attributes = {"server.port": slot_port}
    with _Tracing.tracer.start_as_current_span(
        "serve.front.send", kind=SpanKind.CLIENT, attributes=attributes, record_exception=False
    ):
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        yield carrier.get(HEADER.decode(), "").encode()


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """What an engine has taken down of a request; moments are of `perf_counter`, which all processes share."""

    arrived_s: float
    planned_s: float
    computed_s: float
    """device seconds of the batches that it had a part in"""
    ended_s: float
    num_tokens: int


def note_engine(
    times: EngineTimes, *, prefix_source: str, num_cached: int, model_version: str, num_candidates: int
) -> None:
    """Spans of what an engine has done for a request, made afterwards from the times that it took down."""
    if _Tracing.tracer is None:
        return
    now_ns, offset_ns = time.time_ns(), time.time_ns() - time.perf_counter_ns()
    arrived_ns, planned_ns = (int(moment_s * 1e9) + offset_ns for moment_s in (times.arrived_s, times.planned_s))
    facts: dict[str, Any] = {
        "nestrec.prefix": prefix_source,
        "nestrec.cached_tokens": num_cached,
        "nestrec.tokens": times.num_tokens,
        "nestrec.candidates": num_candidates,
        "nestrec.model_version": model_version,
        "nestrec.device_seconds": times.computed_s,
    }
    for name, start_ns, end_ns, attributes in (
        ("serve.engine.queue", arrived_ns, planned_ns, {}),
        ("serve.engine.compute", planned_ns, now_ns, facts),
    ):
        span = _Tracing.tracer.start_span(name, start_time=start_ns, attributes=attributes)
        span.end(end_time=max(start_ns, end_ns))
