"""OpenTelemetry tracing of requests, from the gateway to the engine; if it is off, it costs one comparison.

Clients pass the trace context in the W3C header traceparent, and gateways and frontends forward it to their instance.
Spans contain routes, statuses, sizes and the cache source, but no user ids and no request contents.
"""

import contextlib
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nestrec.base.config import config
from nestrec.base.config_values import Fraction
from nestrec.base.lazy import import_extra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer


HEADER = b"traceparent"
_NAME = "nestrec"


@config
class TracingConfig:
    otlp_endpoint: str = ""
    """URL of a collector for OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; empty disables tracing."""
    sample_rate: Fraction = 0.01
    """Fraction of requests without a trace context that start a trace; for all others, the context decides."""


class _Tracing:
    """Tracing state of this process."""

    tracer: "Tracer | None" = None
    provider: "TracerProvider | None" = None


def start(cfg: TracingConfig) -> None:
    """Start to export spans if an endpoint is configured."""
    if not cfg.otlp_endpoint:
        return
    for module in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
        import_extra(module, "otel", "required for tracing but not installed")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    sampler = ParentBased(TraceIdRatioBased(cfg.sample_rate))
    provider = TracerProvider(sampler=sampler, resource=Resource.create({"service.name": _NAME}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=cfg.otlp_endpoint)))
    use(provider)


def use(provider: "TracerProvider | None") -> None:
    """Create spans with this provider; None disables tracing."""
    _Tracing.provider = provider
    _Tracing.tracer = None if provider is None else provider.get_tracer(_NAME)


def stop() -> None:
    """Flush pending spans and disable tracing."""
    if _Tracing.provider is not None:
        _Tracing.provider.shutdown()
    use(None)


def is_on() -> bool:
    return _Tracing.tracer is not None


async def traced(work: Awaitable[None], parent: bytes, name: str, request_id: str) -> None:
    """Serve a request inside a span.

    Args:
        work: Serves the request.
        parent: Value of the request's traceparent header, or empty.
        name: Route of the request.
        request_id: Id of the request.
    """
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    assert _Tracing.tracer is not None
    context = TraceContextTextMapPropagator().extract({HEADER.decode(): parent.decode("latin-1")})
    attributes = {"http.route": name, "nestrec.request_id": request_id}
    span = _Tracing.tracer.start_as_current_span(
        "serve.request", context=context, kind=SpanKind.SERVER, attributes=attributes, record_exception=False
    )
    with span:
        await work


def set_span_attributes(**attributes: str | int | float) -> None:
    """Set attributes of the current span; `__` in a name becomes a dot."""
    if _Tracing.tracer is not None:
        from opentelemetry.trace import get_current_span

        get_current_span().set_attributes({name.replace("__", "."): value for name, value in attributes.items()})


@contextlib.contextmanager
def client_span(slot_port: int) -> Iterator[bytes]:
    """Open a client span around a forwarded request and yield the value of its `HEADER`.

    The value is empty if there is no current trace: requests that a gateway sends on its own behalf are not traced.
    """
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
        "serve.gateway.request", kind=SpanKind.CLIENT, attributes=attributes, record_exception=False
    ):
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        yield carrier.get(HEADER.decode(), "").encode()


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Times of a request in an engine, on the `perf_counter` clock that all processes of a machine share."""

    arrived_s: float
    planned_s: float
    computed_s: float
    """Device seconds of all batches that contained a part of the request."""
    ended_s: float
    num_tokens: int


def record_engine_spans(
    times: EngineTimes, *, prefix_source: str, num_cached: int, model_version: str, num_candidates: int
) -> None:
    """Record the engine's spans of a request after the fact, from the times that the engine measured."""
    if _Tracing.tracer is None:
        return
    now_ns, offset_ns = time.time_ns(), time.time_ns() - time.perf_counter_ns()
    arrived_ns, planned_ns = (int(moment_s * 1e9) + offset_ns for moment_s in (times.arrived_s, times.planned_s))
    compute_attributes: dict[str, Any] = {
        "nestrec.cache_source": prefix_source,
        "nestrec.cached_tokens": num_cached,
        "nestrec.num_tokens": times.num_tokens,
        "nestrec.num_candidates": num_candidates,
        "nestrec.model_version": model_version,
        "nestrec.device_seconds": times.computed_s,
    }
    for name, start_ns, end_ns, attributes in (
        ("serve.engine.queue", arrived_ns, planned_ns, {}),
        ("serve.engine.compute", planned_ns, now_ns, compute_attributes),
    ):
        span = _Tracing.tracer.start_span(name, start_time=start_ns, attributes=attributes)
        span.end(end_time=max(start_ns, end_ns))
