"""POST /v1/recommend: the best items of the catalogue, by retrieval alone or by the cascade."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nestrec.serving.core.request_limits import BadRequestError
from nestrec.serving.http.endpoint_spec import EndpointSpec, HotRouteContext
from nestrec.serving.http.endpoints.rank_endpoints import RequestedItems, columns, prefix_of, score
from nestrec.serving.inputs.request_resolver import RequestNotes, RequestResolver, check_feature_names, unknown_of
from nestrec.serving.inputs.request_schema import ItemId, RecommendRequest
from nestrec.serving.inputs.responses import Prefix, RecommendResponse
from nestrec.serving.model.request_inputs import Candidates, distinct
from nestrec.serving.model.servable_spec import shown_version
from nestrec.serving.service.inference_service import ModelDeployment

_USUAL_K = 10


async def recommend(front: HotRouteContext, request: RecommendRequest) -> RecommendResponse:
    """Where a ranking model is served too, its signal goes out first, then retrieval, then ranking of what it found."""
    service = front.service
    if "retrieval" not in service.fleets:
        raise BadRequestError("no retrieval model is served; give candidates to /v1/rank", status=404)
    check_feature_names(request, *(fleet.servable for fleet in service.fleets.values()))
    fleets = service.fleets  # one look: a swap of both models lies before or after it
    retrieval = fleets["retrieval"]
    ranking = fleets.get("ranking")
    recommending = _Recommending(front, request, retrieval)
    return await recommending.found() if ranking is None else await recommending.ranked_by(ranking)


class _Recommending:
    """One request on its way through the models."""

    def __init__(self, front: HotRouteContext, request: RecommendRequest, retrieval: ModelDeployment):
        self._front = front
        self._request = request
        self._retrieval = retrieval
        self._notes = RequestNotes(request.unknown)
        self._k = request.k or _USUAL_K
        self._reader = RequestResolver(retrieval.servable, front.limits, self._notes)
        self._asked = self._reader.user(request)

    async def found(self, least: int = 0) -> RecommendResponse:
        """What retrieval finds: so many as are wanted, and at least so many."""
        asked = self._asked
        request = self._request
        servable = self._retrieval.servable
        seen = distinct(asked.seen) if request.exclude_seen in (None, True) else np.zeros(0, np.int64)
        best = Candidates(
            items=np.zeros(0, np.int64),
            now_ms=asked.now_ms,
            num_best=max(self._k, least),
            excluded=np.union1d(seen, self._listed(request.exclude, "exclude")) if request.exclude else seen,
            allowed=None if request.allow is None else self._listed(request.allow, "allow"),
        )
        found = await self._front.service.rank(
            self._retrieval, asked.user, asked.history, best, timeout_s=asked.timeout_s
        )
        said = self._notes.said()
        answer: RecommendResponse = {
            "items": [servable.item_keys[i - 1] for i in found.items.tolist()],
            "scores": columns(self._retrieval, found.scores),
            "model": shown_version(found.version),
            "unknown": said["unknown"],
            "defaults": said["defaults"],
        }
        return self._with_prefix(answer, prefix_of(found))

    async def ranked_by(self, ranking: ModelDeployment) -> RecommendResponse:
        """The best of what retrieval finds, in the order of the ranking model."""
        service = self._front.service
        notes = self._notes
        preranked = self._front.service.cfg.preranked
        reader = RequestResolver(ranking.servable, self._front.limits, notes)
        asked = reader.user(self._request)
        features = reader.candidate_features(self._request, 1)
        await service.preinfer(ranking, asked.user, asked.history, asked.now_ms, preranked, timeout_s=asked.timeout_s)
        keys = (await self.found(preranked))["items"]
        of_all = {name: np.broadcast_to(values, len(keys)) for name, values in features.items()}
        notes.policy = "last" if notes.policy == "refuse" else notes.policy  # the client has named none of these
        scored = await score(self._front, ranking, asked, RequestedItems(keys, of_all, "items"), notes)
        order = np.argsort(-scored.scores[:, 0], kind="stable")[: self._k]
        said = notes.said()
        answer: RecommendResponse = {
            "items": [str(scored.keys[i]) for i in order],
            "scores": columns(ranking, scored.scores[order]),
            "model": shown_version(scored.version),
            "unknown": said["unknown"],
            "defaults": said["defaults"],
        }
        return self._with_prefix(answer, scored.prefix)

    def _with_prefix(self, answer: RecommendResponse, prefix: Prefix) -> RecommendResponse:
        if self._front.limits.tells_prefix:
            answer["prefix"] = prefix
        return answer

    def _listed(self, keys: Sequence[ItemId], field: str) -> NDArray[np.int64]:
        """Ids of the known items of a list."""
        ids = self._reader.items(keys, field)
        if not ids.all():
            self._notes.add_unknown(field, unknown_of(keys, ids), "dropped")
        return np.unique(ids[ids > 0])


RECOMMEND = EndpointSpec(
    method="POST",
    path="/v1/recommend",
    summary="The best items of the catalogue, best first",
    handle=recommend,
    request=RecommendRequest,
    answer=RecommendResponse,
    takes_kept_history=True,
    takes_plain_lists=True,
    runs_in_fronts=True,
    computed_by="retrieval",
    example={
        "user": "ann",
        "history": {"items": ["12", "7", "301"], "times_ms": [1642271351894, 1642271387634, 1642271468830]},
        "k": 5,
        "exclude": ["300"],
    },
)
