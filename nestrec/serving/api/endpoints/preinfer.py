"""POST /v1/preinfer: a ranking request is on its way."""

from nestrec.serving.api.answering import HotFront
from nestrec.serving.api.answers import PreinferAnswer
from nestrec.serving.api.endpoint import Endpoint
from nestrec.serving.api.notes import Notes
from nestrec.serving.api.reading import Reader, check_feature_names
from nestrec.serving.api.requests import PreinferRequest
from nestrec.serving.api.schema import parse_user
from nestrec.serving.model.spec import shown_version
from nestrec.serving.prefix.trigger import USUAL_CANDIDATES


async def preinfer(front: HotFront, request: PreinferRequest) -> PreinferAnswer:
    """The history is computed ahead where ranking would be late otherwise. Who tells its length alone learns whether it
    is worth sending."""
    num_candidates = request.num_candidates or USUAL_CANDIDATES
    if request.history is None and request.events is not None:
        user = parse_user(request.user, front.limits)
        fleet, foreseen = await front.service.foresee(user, request.events, num_candidates)
        model = shown_version(fleet.servable.version)
        return {"admitted": False, "reason": foreseen.reason, "model": model, **Notes().said()}
    fleet, notes = front.service.announced_fleet(parse_user(request.user, front.limits)), Notes(request.unknown)
    check_feature_names(request, fleet.servable)
    asked = Reader(fleet.servable, front.limits, notes).user(request)
    decision = await front.service.preinfer(
        fleet,
        asked.user,
        asked.history,
        asked.now_ms,
        num_candidates,
        timeout_s=asked.timeout_s,
    )
    return {
        "admitted": decision.is_admitted,
        "reason": decision.reason,
        "model": shown_version(fleet.servable.version),
        **notes.said(),
    }


PREINFER = Endpoint(
    method="POST",
    path="/v1/preinfer",
    summary="A ranking request of this user is on its way",
    handle=preinfer,
    request=PreinferRequest,
    answer=PreinferAnswer,
    status=202,
    takes_kept_history=True,
    takes_plain_lists=True,
    runs_in_fronts=True,
    example={
        "user": "ann",
        "history": {"items": ["12", "7", "301"], "times_ms": [1642271351894, 1642271387634, 1642271468830]},
        "num_candidates": 256,
    },
)
