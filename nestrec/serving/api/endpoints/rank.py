"""POST /v1/rank: scores of candidates."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestrec.serving.api.answering import HotFront
from nestrec.serving.api.answers import Done, Prefix, RankAnswer
from nestrec.serving.api.endpoint import Endpoint
from nestrec.serving.api.notes import Notes
from nestrec.serving.api.reading import Asked, Features, Reader, check_feature_names, unknown_of
from nestrec.serving.api.requests import ItemId, RankRequest
from nestrec.serving.api.schema import parse_user
from nestrec.serving.engine.work import Answer
from nestrec.serving.model.inputs import Candidates, marked
from nestrec.serving.model.spec import shown_version
from nestrec.serving.service import Fleet

LAST = float(np.finfo(np.float32).min)
"""score of what is placed last: below whatever a model gives, and still a number of JSON"""


@dataclass(frozen=True, slots=True)
class Wanted:
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


async def rank(front: HotFront, request: RankRequest) -> RankAnswer:
    """Scores in the order of the candidates."""
    fleet = front.service.ranking_fleet(parse_user(request.user, front.limits))
    notes = Notes(request.unknown)
    check_feature_names(request, fleet.servable)
    reader = Reader(fleet.servable, front.limits, notes)
    asked = reader.user(request)
    wanted = Wanted(request.candidates, reader.candidate_features(request, len(request.candidates)), "candidates")
    scored = await score(front, fleet, asked, wanted, notes)
    said = notes.said()
    answer: RankAnswer = {
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


async def score(front: HotFront, fleet: Fleet, asked: Asked, wanted: Wanted, notes: Notes) -> _Scored:
    """Scores of items by a model, which may not know some of them."""
    keys, features = wanted.keys, wanted.features
    ids = Reader(fleet.servable, front.limits, notes).items(keys, wanted.field)
    is_scored, done = ids > 0, _DONE[notes.policy]
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
        scores[is_scored], prefix, version = answer.scores, prefix_of(answer), answer.version
    if done == "dropped":
        kept = [key for key, keeps in zip(keys, is_scored, strict=True) if keeps]
        return _Scored(kept, scores[is_scored], prefix, version)
    return _Scored(keys, scores, prefix, version)


def columns(fleet: Fleet, scores: NDArray[np.float32]) -> dict[str, list[float]]:
    """By name of the model's outputs; JSON is written from arrays."""
    outputs = fleet.outputs
    return {name: np.ascontiguousarray(scores[:, i]) for i, name in enumerate(outputs)}  # type: ignore[misc]


def prefix_of(answer: Answer) -> Prefix:
    return {"from": answer.source, "tokens": answer.num_cached}


_DONE: dict[str, Done] = {"last": "placed_last", "score": "scored", "drop": "dropped", "refuse": "placed_last"}

RANK = Endpoint(
    method="POST",
    path="/v1/rank",
    summary="Scores of candidates, in their order",
    handle=rank,
    request=RankRequest,
    answer=RankAnswer,
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
