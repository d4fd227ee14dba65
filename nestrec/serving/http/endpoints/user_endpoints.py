"""Endpoints that store the events of a user (POST /v1/events) and delete stored events and cached prefixes."""

import time

from nestrec.serving.core.asgi import HttpResponse
from nestrec.serving.core.request_limits import BadRequestError
from nestrec.serving.http.endpoint_spec import EndpointSpec, HandlerContext
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver, check_feature_names, parse_user
from nestrec.serving.inputs.request_schema import EventsRequest
from nestrec.serving.inputs.responses import EventsResponse


async def store_events(context: HandlerContext, request: EventsRequest) -> EventsResponse:
    """Append events to the history store, with source ids; events that the ranking model cannot read are rejected."""
    servable = context.service.deployment(context.service.ranker).servable
    history = request.history
    check_feature_names(request, servable)
    if not history.items or history.times_ms is None:
        raise BadRequestError("must contain items and times_ms", "history")
    RequestResolver(servable, context.limits, RequestNotes()).events(history, int(time.time() * 1000))
    events = {name: getattr(history, name) for name in ("items", "times_ms", "actions", "features")}
    num_events = await context.store.append(parse_user(request.user, context.limits), events, _store_timeout_s(context))
    return {} if num_events is None else {"events": num_events}


async def forget_cache(context: HandlerContext, user: str) -> HttpResponse:
    """Evict the prefixes of a user from the prefix cache."""
    context.service.forget(parse_user(user, context.limits))
    return HttpResponse(204, b"")


async def forget_events(context: HandlerContext, user: str) -> HttpResponse:
    """Delete the stored events of a user."""
    await context.store.forget(parse_user(user, context.limits), _store_timeout_s(context))
    return HttpResponse(204, b"")


def _store_timeout_s(context: HandlerContext) -> float:
    return context.limits.default_timeout_ms / 1000.0


EVENTS = EndpointSpec(
    method="POST",
    path="/v1/events",
    summary="Store events of a user for later requests without a history",
    handle=store_events,
    request=EventsRequest,
    response=EventsResponse,
    status=202,
    example={"user": "ann", "history": {"items": ["12"], "times_ms": [1642271351894]}},
)
FORGET_CACHE = EndpointSpec(
    method="DELETE",
    path="/v1/users/{id}/cache",
    summary="Evict the prefixes of a user from the prefix cache",
    handle=forget_cache,
    status=204,
)
FORGET_EVENTS = EndpointSpec(
    method="DELETE",
    path="/v1/users/{id}/events",
    summary="Delete the stored events of a user",
    handle=forget_events,
    status=204,
)
