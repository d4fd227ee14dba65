"""What is kept of a user: POST /v1/events, and what forgets it."""

import time

from nestrec.serving.core.asgi import HttpResponse
from nestrec.serving.core.request_limits import BadRequestError
from nestrec.serving.http.endpoint_spec import EndpointSpec, HandlerContext
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver, check_feature_names, parse_user
from nestrec.serving.inputs.request_schema import EventsRequest
from nestrec.serving.inputs.responses import EventsResponse


async def keep_events(front: HandlerContext, request: EventsRequest) -> EventsResponse:
    """Events as they came, in the ids of the source; those that the present model could not read are refused."""
    servable = front.service.fleet(front.service.ranker).servable
    given = request.history
    check_feature_names(request, servable)
    if not given.items or given.times_ms is None:
        raise BadRequestError("must hold items and times_ms", "history")
    RequestResolver(servable, front.limits, RequestNotes()).events(given, int(time.time() * 1000))
    kept = {name: getattr(given, name) for name in ("items", "times_ms", "actions", "features")}
    num_events = await front.store.append(parse_user(request.user, front.limits), kept, _patience_s(front))
    return {} if num_events is None else {"events": num_events}


async def forget_cache(front: HandlerContext, user: str) -> HttpResponse:
    """Prefixes that were computed for the user."""
    front.service.forget(parse_user(user, front.limits))
    return HttpResponse(204, b"")


async def forget_events(front: HandlerContext, user: str) -> HttpResponse:
    """Events that are kept of the user."""
    await front.store.forget(parse_user(user, front.limits), _patience_s(front))
    return HttpResponse(204, b"")


def _patience_s(front: HandlerContext) -> float:
    return front.limits.default_timeout_ms / 1000.0


EVENTS = EndpointSpec(
    method="POST",
    path="/v1/events",
    summary="Events, kept for requests without a history",
    handle=keep_events,
    request=EventsRequest,
    answer=EventsResponse,
    status=202,
    example={"user": "ann", "history": {"items": ["12"], "times_ms": [1642271351894]}},
)
FORGET_CACHE = EndpointSpec(
    method="DELETE",
    path="/v1/users/{id}/cache",
    summary="Forget the prefixes that were computed for a user",
    handle=forget_cache,
    status=204,
)
FORGET_EVENTS = EndpointSpec(
    method="DELETE",
    path="/v1/users/{id}/events",
    summary="Forget the events that are kept of a user",
    handle=forget_events,
    status=204,
)
