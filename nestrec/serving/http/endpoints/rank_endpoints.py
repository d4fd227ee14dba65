"""Endpoints `POST /v1/rank` and `POST /v1/preinfer`.

POST /v1/preinfer: a ranking request is on its way.

POST /v1/rank: scores of candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestrec.serving.http.endpoint_spec import EndpointSpec, HotRouteContext
from nestrec.serving.inputs.engine_request import RankResult
from nestrec.serving.inputs.request_resolver import (
    Features,
    RequestNotes,
    RequestResolver,
    ResolvedRequest,
    check_feature_names,
    parse_user,
    unknown_of,
)
from nestrec.serving.inputs.request_schema import ItemId, PreinferRequest, RankRequest
from nestrec.serving.inputs.responses import Done, Prefix, PreinferResponse, RankResponse
from nestrec.serving.kv_cache.preinfer_trigger import USUAL_CANDIDATES
from nestrec.serving.model.request_inputs import Candidates, marked
from nestrec.serving.model.servable_spec import shown_version
from nestrec.serving.service.inference_service import ModelDeployment


async def preinfer(front: HotRouteContext, request: PreinferRequest) -> PreinferResponse:
    """The history is computed ahead where ranking would be late otherwise. Who tells its length alone learns whether it
    is worth sending."""
    num_candidates = request.num_candidates or USUAL_CANDIDATES
    if request.history is None and request.events is not None:
        user = parse_user(request.user, front.limits)
        fleet, foreseen = await front.service.foresee(user, request.events, num_candidates)
        model = shown_version(fleet.servable.version)
        return {"admitted": False, "reason": foreseen.reason, "model": model, **RequestNotes().said()}
    fleet = front.service.announced_fleet(parse_user(request.user, front.limits))
    notes = RequestNotes(request.unknown)
    check_feature_names(request, fleet.servable)
    asked = RequestResolver(fleet.servable, front.limits, notes).user(request)
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


PREINFER = EndpointSpec(
    method="POST",
    path="/v1/preinfer",
    summary="A ranking request of this user is on its way",
    handle=preinfer,
    request=PreinferRequest,
    answer=PreinferResponse,
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


LAST = float(np.finfo(np.float32).min)
"""score of what is placed last: below whatever a model gives, and still a number of JSON"""


@dataclass(frozen=True, slots=True)
class RequestedItems:
    """Items to be scored."""

    keys: Sequence[ItemId]
    features: Features
    """of all of them, in the ids of the model"""
    field: str
    """where they come from"""


@dataclass(frozen=True, slots=True)
class _Scored:
    """Candidates with their scores."""

    keys: Sequence[ItemId]
    scores: NDArray[np.float32]
    """(keys, outputs)"""
    prefix: Prefix
    version: str
    """of the model that computed them"""


async def rank(front: HotRouteContext, request: RankRequest) -> RankResponse:
    """Scores in the order of the candidates."""
    fleet = front.service.ranking_fleet(parse_user(request.user, front.limits))
    notes = RequestNotes(request.unknown)
    check_feature_names(request, fleet.servable)
    reader = RequestResolver(fleet.servable, front.limits, notes)
    asked = reader.user(request)
    wanted = RequestedItems(
        request.candidates, reader.candidate_features(request, len(request.candidates)), "candidates"
    )
    scored = await score(front, fleet, asked, wanted, notes)
    said = notes.said()
    answer: RankResponse = {
        "scores": columns(fleet, scored.scores),
        "model": shown_version(scored.version),
        "unknown": said["unknown"],
        "defaults": said["defaults"],
    }
    if front.limits.tells_prefix:
        answer["prefix"] = scored.prefix
    if notes.policy == "drop":
        answer["items"] = list(scored.keys)
    return answer


async def score(
    front: HotRouteContext, fleet: ModelDeployment, asked: ResolvedRequest, wanted: RequestedItems, notes: RequestNotes
) -> _Scored:
    """Scores of items by a model, which may not know some of them."""
    keys = wanted.keys
    features = wanted.features
    ids = RequestResolver(fleet.servable, front.limits, notes).items(keys, wanted.field)
    is_scored = ids > 0
    done = _DONE[notes.policy]
    if not is_scored.all():
        notes.add_unknown(wanted.field, unknown_of(keys, ids), done)
        is_scored |= done == "scored"
    if not is_scored.all():
        features = {name: marked(values, is_scored) for name, values in features.items()}
    chosen = Candidates(items=ids[is_scored], now_ms=asked.now_ms, features=features)
    scores = np.full((len(ids), len(fleet.outputs)), LAST, np.float32)
    prefix: Prefix = {"from": "none", "tokens": 0}
    version = fleet.servable.version
    if len(chosen):
        answer = await front.service.rank(fleet, asked.user, asked.history, chosen, timeout_s=asked.timeout_s)
        scores[is_scored] = answer.scores
        prefix = prefix_of(answer)
        version = answer.version
    if done == "dropped":
        kept = [key for key, keeps in zip(keys, is_scored, strict=True) if keeps]
        return _Scored(kept, scores[is_scored], prefix, version)
    return _Scored(keys, scores, prefix, version)


def columns(fleet: ModelDeployment, scores: NDArray[np.float32]) -> dict[str, list[float]]:
    """By name of the model's outputs; JSON is written from arrays."""
    outputs = fleet.outputs
    return {name: np.ascontiguousarray(scores[:, i]) for i, name in enumerate(outputs)}  # type: ignore[misc]


def prefix_of(answer: RankResult) -> Prefix:
    return {"from": answer.source, "tokens": answer.num_cached}


_DONE: dict[str, Done] = {"last": "placed_last", "score": "scored", "drop": "dropped", "refuse": "placed_last"}

RANK = EndpointSpec(
    method="POST",
    path="/v1/rank",
    summary="Scores of candidates, in their order",
    handle=rank,
    request=RankRequest,
    answer=RankResponse,
    takes_kept_history=True,
    takes_plain_lists=True,
    runs_in_fronts=True,
    computed_by="ranker",
    example={
        "user": "ann",
        "history": {"items": ["12", "7", "301"], "times_ms": [1642271351894, 1642271387634, 1642271468830]},
        "candidates": ["5", "9", "300"],
    },
)
