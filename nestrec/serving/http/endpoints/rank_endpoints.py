"""Endpoints `POST /v1/rank`, which scores candidates, and `POST /v1/preinfer`, which announces a ranking request.

A pre-infer request lets the server prefill the history ahead of time, so that the ranking request finds its keys and
values in the prefix cache and computes only its candidates.
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
    unknown_keys,
)
from nestrec.serving.inputs.request_schema import ItemId, PreinferRequest, RankRequest
from nestrec.serving.inputs.responses import Done, Prefix, PreinferResponse, RankResponse
from nestrec.serving.kv_cache.preinfer_trigger import DEFAULT_CANDIDATES
from nestrec.serving.model.request_inputs import Candidates, select
from nestrec.serving.model.servable_spec import short_version
from nestrec.serving.service.inference_service import ModelDeployment


async def preinfer(context: HotRouteContext, request: PreinferRequest) -> PreinferResponse:
    """Prefill the history if the announced ranking request would otherwise exceed its latency budget.

    If the request contains the number of events instead of the history, only return whether the history is required.
    """
    num_candidates = request.num_candidates or DEFAULT_CANDIDATES
    if request.history is None and request.num_events is not None:
        user = parse_user(request.user, context.limits)
        deployment, expected = await context.service.would_admit_preinfer(user, request.num_events, num_candidates)
        model = short_version(deployment.servable.version)
        return {"admitted": False, "reason": expected.reason, "model": model, **RequestNotes().to_response()}
    deployment = context.service.session_deployment(parse_user(request.user, context.limits))
    notes = RequestNotes(request.on_unknown)
    check_feature_names(request, deployment.servable)
    resolved = RequestResolver(deployment.servable, context.limits, notes).user(request)
    decision = await context.service.preinfer(
        deployment,
        resolved.user,
        resolved.history,
        resolved.now_ms,
        num_candidates,
        timeout_s=resolved.timeout_s,
    )
    return {
        "admitted": decision.is_admitted,
        "reason": decision.reason,
        "model": short_version(deployment.servable.version),
        **notes.to_response(),
    }


PREINFER = EndpointSpec(
    method="POST",
    path="/v1/preinfer",
    summary="Announce a ranking request of this user, so that its history can be prefilled ahead of time",
    handle=preinfer,
    request=PreinferRequest,
    response=PreinferResponse,
    status=202,
    uses_stored_history=True,
    accepts_typed_lists=True,
    runs_in_frontend_workers=True,
    example={
        "user": "ann",
        "history": {"items": ["12", "7", "301"], "times_ms": [1642271351894, 1642271387634, 1642271468830]},
        "num_candidates": 256,
    },
)


LAST = float(np.finfo(np.float32).min)
"""Score of candidates that are ranked last: the smallest float32 number, which JSON can represent."""


@dataclass(frozen=True, slots=True)
class RequestedItems:
    """Items to score."""

    keys: Sequence[ItemId]
    features: Features
    """Resolved features of the items, by name."""
    field: str
    """Field of the request that contains the items; `items` if they were retrieved."""


@dataclass(frozen=True, slots=True)
class _ScoredItems:
    """Scores of items."""

    keys: Sequence[ItemId]
    scores: NDArray[np.float32]
    """Scores of shape (keys, outputs)."""
    prefix: Prefix
    version: str
    """Version of the model that computed the scores."""


async def rank(context: HotRouteContext, request: RankRequest) -> RankResponse:
    """Return the scores of candidates, in their order."""
    deployment = context.service.ranking_deployment(parse_user(request.user, context.limits))
    notes = RequestNotes(request.on_unknown)
    check_feature_names(request, deployment.servable)
    resolver = RequestResolver(deployment.servable, context.limits, notes)
    resolved = resolver.user(request)
    requested = RequestedItems(
        request.candidates, resolver.candidate_features(request, len(request.candidates)), "candidates"
    )
    scored = await score(context, deployment, resolved, requested, notes)
    report = notes.to_response()
    response: RankResponse = {
        "scores": columns(deployment, scored.scores),
        "model": short_version(scored.version),
        "unknown_ids": report["unknown_ids"],
        "defaults_used": report["defaults_used"],
    }
    if context.limits.expose_cache_source:
        response["cache_source"] = scored.prefix
    if notes.policy == "drop":
        response["items"] = list(scored.keys)
    return response


async def score(
    context: HotRouteContext,
    deployment: ModelDeployment,
    resolved: ResolvedRequest,
    requested: RequestedItems,
    notes: RequestNotes,
) -> _ScoredItems:
    """Score items; those that the model does not know are handled by the policy of `notes`."""
    keys = requested.keys
    features = requested.features
    ids = RequestResolver(deployment.servable, context.limits, notes).items(keys, requested.field)
    is_scored = ids > 0
    action = _ACTIONS[notes.policy]
    if not is_scored.all():
        notes.add_unknown(requested.field, unknown_keys(keys, ids), action)
        is_scored |= action == "scored"
    if not is_scored.all():
        features = {name: select(values, is_scored) for name, values in features.items()}
    candidates = Candidates(items=ids[is_scored], now_ms=resolved.now_ms, features=features)
    scores = np.full((len(ids), len(deployment.outputs)), LAST, np.float32)
    prefix: Prefix = {"from": "none", "tokens": 0}
    version = deployment.servable.version
    if len(candidates):
        result = await context.service.rank(
            deployment, resolved.user, resolved.history, candidates, timeout_s=resolved.timeout_s
        )
        scores[is_scored] = result.scores
        prefix = prefix_of(result)
        version = result.version
    if action == "dropped":
        scored_keys = [key for key, is_kept in zip(keys, is_scored, strict=True) if is_kept]
        return _ScoredItems(scored_keys, scores[is_scored], prefix, version)
    return _ScoredItems(keys, scores, prefix, version)


def columns(deployment: ModelDeployment, scores: NDArray[np.float32]) -> dict[str, list[float]]:
    """Return scores by output of the model, as contiguous arrays, which orjson serializes without a copy to lists."""
    outputs = deployment.outputs
    return {name: np.ascontiguousarray(scores[:, i]) for i, name in enumerate(outputs)}  # type: ignore[misc]


def prefix_of(result: RankResult) -> Prefix:
    return {"from": result.source, "tokens": result.num_cached}


_ACTIONS: dict[str, Done] = {"last": "placed_last", "score": "scored", "drop": "dropped", "reject": "placed_last"}

RANK = EndpointSpec(
    method="POST",
    path="/v1/rank",
    summary="Score candidates, in their order",
    handle=rank,
    request=RankRequest,
    response=RankResponse,
    uses_stored_history=True,
    accepts_typed_lists=True,
    runs_in_frontend_workers=True,
    computed_by="ranker",
    example={
        "user": "ann",
        "history": {"items": ["12", "7", "301"], "times_ms": [1642271351894, 1642271387634, 1642271468830]},
        "candidates": ["5", "9", "300"],
    },
)
