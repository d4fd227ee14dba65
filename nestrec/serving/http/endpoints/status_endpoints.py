"""What the server says of itself: pages, health, metrics, models and the description of its routes."""

import time
from typing import Any

from nestrec.base.config import to_plain
from nestrec.serving.core.asgi import HttpResponse, as_json, problem, retry_after
from nestrec.serving.http.endpoint_spec import EndpointSpec, HandlerContext
from nestrec.serving.http.pages import PAGE, PAGE_POLICY, docs_page, openapi
from nestrec.serving.inputs.responses import HealthResponse, LivePageResponse, ModelInfo, ModelsResponse, StatusResponse
from nestrec.serving.kv_cache.preinfer_trigger import USUAL_CANDIDATES
from nestrec.serving.model.servable_spec import shown_version
from nestrec.serving.service.inference_service import ModelDeployment

_POLICY = b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_SECURITY = ((b"x-content-type-options", b"nosniff"), (b"content-security-policy", _POLICY))
_HTML, _PROMETHEUS = "text/html; charset=utf-8", "text/plain; version=0.0.4; charset=utf-8"


async def live_page(front: HandlerContext, _: Any) -> HttpResponse:
    """How the server fares, once a second, and a place to try requests."""
    return HttpResponse(200, PAGE, _HTML.encode(), _SECURITY[0], PAGE_POLICY)


async def describe_page(front: HandlerContext, _: Any) -> HttpResponse:
    """The description of the routes, for people."""
    return HttpResponse(200, docs_page(openapi(front.endpoints, front.limits)), _HTML.encode(), *_SECURITY)


async def describe(front: HandlerContext, _: Any) -> Any:
    """The description of the routes, for programs."""
    return openapi(front.endpoints, front.limits)


async def status(front: HandlerContext, _: Any) -> Any:
    """What the live page shows."""
    return (await front.metrics.gathered()).status()


async def now(front: HandlerContext, _: Any) -> Any:
    """How it stands, how it went, and the last requests of the relay."""
    metrics = await front.metrics.gathered()
    now_s = time.perf_counter()
    recent = {
        role: [one for engine in fleet.engines for one in engine.recent.told(now_s)]
        for role, fleet in front.service.fleets.items()
    }
    return {"status": metrics.status(), "timeline": metrics.timeline.columns(), "relay": recent}


async def live(front: HandlerContext, _: Any) -> HealthResponse | HttpResponse:
    """The process is worth keeping: whoever supervises it starts another one where it is not."""
    return {"status": "live"} if front.service.is_live else as_json({"status": "dead"}, 503)


async def ready(front: HandlerContext, _: Any) -> HealthResponse | HttpResponse:
    """Requests can be served: models are loaded and warmed up, and nobody has asked to drain."""
    if not front.service.is_ready:
        return problem(503, "not ready", "", retry_after(1))
    models = {role: shown_version(fleet.servable.version) for role, fleet in front.service.fleets.items()}
    return {"status": "ready", "models": models, "signals_from": front.service.signals_from(USUAL_CANDIDATES)}


async def metrics(front: HandlerContext, _: Any) -> HttpResponse:
    """Counters for Prometheus."""
    return HttpResponse(200, (await front.metrics.gathered()).exposition(), _PROMETHEUS.encode())


async def models(front: HandlerContext, _: Any) -> ModelsResponse:
    """What requests must tell."""
    return {"models": {role: _model(fleet) for role, fleet in front.service.fleets.items()}}


def _model(fleet: ModelDeployment) -> ModelInfo:
    servable = fleet.servable
    form = fleet.engines[0].form
    features, user_features = list(servable.event_features), list(servable.user_features)
    of_events = {"times_ms": servable.reads_times, "actions": servable.reads_actions}
    of_asked = features if servable.serving.reads_candidate_features else servable.context_features
    reads = [f"context.{name}" for name in of_asked]
    if servable.reads_items:
        of_history = ["history.items", *(f"history.{name}" for name, is_read in of_events.items() if is_read)]
        reads = of_history + [f"history.features.{name}" for name in features] + reads
    answer: ModelInfo = {
        "version": shown_version(servable.version),
        "name": servable.spec.name,
        "outputs": list(fleet.outputs),
        "items": servable.spec.num_items,
        "max_events": form.max_events,
        "reads": reads + [f"user_features.{name}" for name in user_features],
        "actions": dict(servable.spec.action_bits) if servable.reads_actions else {},
        "features": features,
        "user_features": user_features,
        "defaults": to_plain(servable.spec.defaults),
    }
    if servable.precision is not None:
        answer["precision"] = to_plain(servable.precision)
    if servable.index is not None:
        answer["search"] = {"kind": servable.search_kind, **(to_plain(servable.spec.recall) or {})}
    return answer


PAGE_LIVE = EndpointSpec(
    method="GET",
    path="/",
    summary="The live page",
    handle=live_page,
    content_type=_HTML,
    audience="anyone",
)
PAGE_DOCS = EndpointSpec(
    method="GET",
    path="/docs",
    summary="This page",
    handle=describe_page,
    content_type=_HTML,
    audience="anyone",
)
OPENAPI = EndpointSpec(
    method="GET",
    path="/openapi.json",
    summary="This description",
    handle=describe,
    answer=dict[str, Any],
    audience="anyone",
)
STATUS = EndpointSpec(
    method="GET",
    path="/v1/status",
    summary="What the live page shows",
    handle=status,
    answer=StatusResponse,
    audience="watchers",
)
NOW = EndpointSpec(
    method="GET",
    path="/v1/live",
    summary="What the live page draws: the last ten minutes, and the last requests of the relay",
    handle=now,
    answer=LivePageResponse,
    audience="watchers",
)
MODELS = EndpointSpec(
    method="GET", path="/v1/models", summary="What the models read and give", handle=models, answer=ModelsResponse
)
LIVE = EndpointSpec(
    method="GET",
    path="/health/live",
    summary="The process runs, and its engines",
    handle=live,
    answer=HealthResponse,
    audience="anyone",
)
READY = EndpointSpec(
    method="GET",
    path="/health/ready",
    summary="Requests can be served",
    handle=ready,
    answer=HealthResponse,
    audience="anyone",
)
METRICS = EndpointSpec(
    method="GET",
    path="/metrics",
    summary="Counters for Prometheus",
    handle=metrics,
    content_type=_PROMETHEUS,
    audience="watchers",
)
