"""Status endpoints: liveness and readiness probes, Prometheus metrics, models, live page, and API documentation."""

import time
from typing import Any

from nestrec.base.config import to_plain
from nestrec.serving.core.asgi import HttpResponse, as_json, problem, retry_after
from nestrec.serving.http.endpoint_spec import EndpointSpec, HandlerContext
from nestrec.serving.http.pages import PAGE, PAGE_POLICY, docs_page, openapi
from nestrec.serving.inputs.responses import HealthResponse, LivePageResponse, ModelInfo, ModelsResponse, StatusResponse
from nestrec.serving.kv_cache.preinfer_trigger import DEFAULT_CANDIDATES
from nestrec.serving.model.servable_spec import short_version
from nestrec.serving.service.inference_service import ModelDeployment

_POLICY = b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_SECURITY = ((b"x-content-type-options", b"nosniff"), (b"content-security-policy", _POLICY))
_HTML, _PROMETHEUS = "text/html; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"


async def live_page(context: HandlerContext, _: Any) -> HttpResponse:
    """Return the live page: charts that are updated every second, and a form to try requests."""
    return HttpResponse(200, PAGE, _HTML.encode(), _SECURITY[0], PAGE_POLICY)


async def describe_page(context: HandlerContext, _: Any) -> HttpResponse:
    """Return the API documentation as an HTML page."""
    return HttpResponse(200, docs_page(openapi(context.endpoints, context.limits)), _HTML.encode(), *_SECURITY)


async def describe(context: HandlerContext, _: Any) -> Any:
    """Return the OpenAPI description."""
    return openapi(context.endpoints, context.limits)


async def status(context: HandlerContext, _: Any) -> Any:
    """Return the current status of the server."""
    return (await context.metrics.collect_from_workers()).status()


async def now(context: HandlerContext, _: Any) -> Any:
    """Return the data of the live page: current status, time series, and the latest requests."""
    metrics = await context.metrics.collect_from_workers()
    now_s = time.perf_counter()
    recent = {
        role: [entry for engine in deployment.engines for entry in engine.recent.to_json(now_s)]
        for role, deployment in context.service.deployments.items()
    }
    return {"status": metrics.status(), "timeline": metrics.timeline.columns(), "relay": recent}


async def live(context: HandlerContext, _: Any) -> HealthResponse | HttpResponse:
    """Liveness probe: fails if an engine of the process has stopped, so that a supervisor restarts the process."""
    return {"status": "live"} if context.service.is_live else as_json({"status": "dead"}, 503)


async def ready(context: HandlerContext, _: Any) -> HealthResponse | HttpResponse:
    """Readiness probe: succeeds if the models are loaded and warmed up and the instance is not draining."""
    if not context.service.is_ready:
        return problem(503, "the server is not ready", "", retry_after(1))
    models = {
        role: short_version(deployment.servable.version) for role, deployment in context.service.deployments.items()
    }
    return {
        "status": "ready",
        "models": models,
        "min_preinfer_events": context.service.min_preinfer_events(DEFAULT_CANDIDATES),
    }


async def metrics(context: HandlerContext, _: Any) -> HttpResponse:
    """Return the metrics in the text format of Prometheus."""
    return HttpResponse(200, (await context.metrics.collect_from_workers()).exposition(), _PROMETHEUS.encode())


async def models(context: HandlerContext, _: Any) -> ModelsResponse:
    """Return the inputs and outputs of the served models."""
    return {"models": {role: _model(deployment) for role, deployment in context.service.deployments.items()}}


def _model(deployment: ModelDeployment) -> ModelInfo:
    servable = deployment.servable
    adapter = deployment.engines[0].adapter
    features, user_features = list(servable.event_features), list(servable.user_features)
    event_fields = {"times_ms": servable.reads_times, "actions": servable.reads_actions}
    context_features = features if servable.serving.reads_candidate_features else servable.context_features
    required = [f"context.{name}" for name in context_features]
    if servable.reads_items:
        history = ["history.items", *(f"history.{name}" for name, is_read in event_fields.items() if is_read)]
        required = history + [f"history.features.{name}" for name in features] + required
    info: ModelInfo = {
        "version": short_version(servable.version),
        "name": servable.spec.name,
        "outputs": list(deployment.outputs),
        "items": servable.spec.num_items,
        "max_events": adapter.max_events,
        "required_fields": required + [f"user_features.{name}" for name in user_features],
        "actions": dict(servable.spec.action_bits) if servable.reads_actions else {},
        "features": features,
        "user_features": user_features,
        "defaults": to_plain(servable.spec.defaults),
    }
    if servable.precision is not None:
        info["precision"] = to_plain(servable.precision)
    if servable.index is not None:
        info["search"] = {"kind": servable.search_kind, **(to_plain(servable.spec.recall) or {})}
    return info


PAGE_LIVE = EndpointSpec(
    method="GET",
    path="/",
    summary="Show the live page",
    handle=live_page,
    content_type=_HTML,
    audience="anyone",
)
PAGE_DOCS = EndpointSpec(
    method="GET",
    path="/docs",
    summary="Show this page",
    handle=describe_page,
    content_type=_HTML,
    audience="anyone",
)
OPENAPI = EndpointSpec(
    method="GET",
    path="/openapi.json",
    summary="Get the OpenAPI description",
    handle=describe,
    response=dict[str, Any],
    audience="anyone",
)
STATUS = EndpointSpec(
    method="GET",
    path="/v1/status",
    summary="Get the current status of the server",
    handle=status,
    response=StatusResponse,
    audience="watchers",
)
NOW = EndpointSpec(
    method="GET",
    path="/v1/live",
    summary="Get the data of the live page: status, time series of the last ten minutes, and the latest requests",
    handle=now,
    response=LivePageResponse,
    audience="watchers",
)
MODELS = EndpointSpec(
    method="GET",
    path="/v1/models",
    summary="Get the inputs and outputs of the models",
    handle=models,
    response=ModelsResponse,
)
LIVE = EndpointSpec(
    method="GET",
    path="/health/live",
    summary="Liveness probe: the process and its engines run",
    handle=live,
    response=HealthResponse,
    audience="anyone",
)
READY = EndpointSpec(
    method="GET",
    path="/health/ready",
    summary="Readiness probe: requests can be served",
    handle=ready,
    response=HealthResponse,
    audience="anyone",
)
METRICS = EndpointSpec(
    method="GET",
    path="/metrics",
    summary="Get metrics in the text format of Prometheus",
    handle=metrics,
    content_type=_PROMETHEUS,
    audience="watchers",
)
