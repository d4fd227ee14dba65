"""Endpoint `POST /v1/recommend`: the best items of the catalog, by retrieval or by a retrieval and ranking cascade.

In the cascade, the retrieval model selects candidates, and the ranking model scores and sorts them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nestrec.serving.core.request_limits import BadRequestError
from nestrec.serving.http.endpoint_spec import EndpointSpec, HotRouteContext
from nestrec.serving.http.endpoints.rank_endpoints import RequestedItems, columns, prefix_of, score
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver, check_feature_names, unknown_keys
from nestrec.serving.inputs.request_schema import ItemId, RecommendRequest
from nestrec.serving.inputs.responses import Prefix, RecommendResponse
from nestrec.serving.model.request_inputs import Candidates, sorted_unique
from nestrec.serving.model.servable_spec import short_version
from nestrec.serving.service.inference_service import ModelDeployment

_USUAL_K = 10


async def recommend(context: HotRouteContext, request: RecommendRequest) -> RecommendResponse:
    """Return the best items for a user.

    If a ranking model is served too, its pre-infer request is sent first, so that the history is prefilled during
    retrieval; then the retrieved items are ranked.
    """
    service = context.service
    if "retrieval" not in service.deployments:
        raise BadRequestError(
            "this server has no retrieval model; send candidates to /v1/rank instead of /v1/recommend", status=404
        )
    check_feature_names(request, *(deployment.servable for deployment in service.deployments.values()))
    # Read once, so that a concurrent swap replaces both models or none for this request.
    deployments = service.deployments
    retrieval = deployments["retrieval"]
    ranking = deployments.get("ranking")
    cascade = _Cascade(context, request, retrieval)
    return await cascade.retrieve() if ranking is None else await cascade.rank_with(ranking)


class _Cascade:
    """State of one recommendation request while the models process it."""

    def __init__(self, context: HotRouteContext, request: RecommendRequest, retrieval: ModelDeployment):
        self._context = context
        self._request = request
        self._retrieval = retrieval
        self._notes = RequestNotes(request.on_unknown)
        self._k = request.k or _USUAL_K
        self._resolver = RequestResolver(retrieval.servable, context.limits, self._notes)
        self._resolved = self._resolver.user(request)

    async def retrieve(self, min_items: int = 0) -> RecommendResponse:
        """Return the best items of the retrieval model: as many as requested, and at least `min_items`."""
        resolved = self._resolved
        request = self._request
        servable = self._retrieval.servable
        seen = sorted_unique(resolved.seen) if request.exclude_seen in (None, True) else np.zeros(0, np.int64)
        best = Candidates(
            items=np.zeros(0, np.int64),
            now_ms=resolved.now_ms,
            num_best=max(self._k, min_items),
            excluded=np.union1d(seen, self._known_ids(request.exclude, "exclude")) if request.exclude else seen,
            allowed=None if request.allow is None else self._known_ids(request.allow, "allow"),
        )
        retrieved = await self._context.service.rank(
            self._retrieval, resolved.user, resolved.history, best, timeout_s=resolved.timeout_s
        )
        report = self._notes.to_response()
        response: RecommendResponse = {
            "items": [servable.item_keys[i - 1] for i in retrieved.items.tolist()],
            "scores": columns(self._retrieval, retrieved.scores),
            "model": short_version(retrieved.version),
            "unknown_ids": report["unknown_ids"],
            "defaults_used": report["defaults_used"],
        }
        return self._with_cache_source(response, prefix_of(retrieved))

    async def rank_with(self, ranking: ModelDeployment) -> RecommendResponse:
        """Return the best retrieved items, sorted by the ranking model."""
        service = self._context.service
        notes = self._notes
        num_retrieved = self._context.service.cfg.num_retrieved
        resolver = RequestResolver(ranking.servable, self._context.limits, notes)
        resolved = resolver.user(self._request)
        features = resolver.candidate_features(self._request, 1)
        await service.preinfer(
            ranking, resolved.user, resolved.history, resolved.now_ms, num_retrieved, timeout_s=resolved.timeout_s
        )
        keys = (await self.retrieve(num_retrieved))["items"]
        candidate_features = {name: np.broadcast_to(values, len(keys)) for name, values in features.items()}
        # The client did not send these items, so it is not rejected if the ranking model does not know some of them.
        notes.policy = "last" if notes.policy == "reject" else notes.policy
        scored = await score(self._context, ranking, resolved, RequestedItems(keys, candidate_features, "items"), notes)
        order = np.argsort(-scored.scores[:, 0], kind="stable")[: self._k]
        report = notes.to_response()
        response: RecommendResponse = {
            "items": [str(scored.keys[i]) for i in order],
            "scores": columns(ranking, scored.scores[order]),
            "model": short_version(scored.version),
            "unknown_ids": report["unknown_ids"],
            "defaults_used": report["defaults_used"],
        }
        return self._with_cache_source(response, scored.prefix)

    def _with_cache_source(self, response: RecommendResponse, prefix: Prefix) -> RecommendResponse:
        if self._context.limits.expose_cache_source:
            response["cache_source"] = prefix
        return response

    def _known_ids(self, keys: Sequence[ItemId], field: str) -> NDArray[np.int64]:
        """Return the sorted item ids of a list without unknown items, which are recorded as dropped."""
        ids = self._resolver.items(keys, field)
        if not ids.all():
            self._notes.add_unknown(field, unknown_keys(keys, ids), "dropped")
        return np.unique(ids[ids > 0])


RECOMMEND = EndpointSpec(
    method="POST",
    path="/v1/recommend",
    summary="Recommend items of the catalog, best first",
    handle=recommend,
    request=RecommendRequest,
    response=RecommendResponse,
    uses_stored_history=True,
    accepts_typed_lists=True,
    runs_in_frontend_workers=True,
    computed_by="retrieval",
    example={
        "user": "ann",
        "history": {"items": ["12", "7", "301"], "times_ms": [1642271351894, 1642271387634, 1642271468830]},
        "k": 5,
        "exclude": ["300"],
    },
)
