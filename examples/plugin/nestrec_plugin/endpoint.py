"""Endpoint POST /v1/similar: the items whose vectors are nearest to that of an item."""

from dataclasses import dataclass
from typing import Annotated, TypedDict

import torch

from nestrec.serving.core.request_limits import BadRequestError
from nestrec.serving.http.endpoint_spec import EndpointSpec, HandlerContext
from nestrec.serving.inputs.request_schema import AtLeast, AtMost, ItemId


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarRequest:
    """Request for similar items."""

    item: ItemId
    """Id of the item."""
    k: Annotated[int, AtLeast(1), AtMost("max_k")] = 10
    """Maximum number of items in the response."""


class SimilarResponse(TypedDict):
    """Similar items, nearest first."""

    items: list[str]
    """Ids of the items."""
    scores: list[float]
    """Dot products of their vectors with the vector of the requested item."""


async def similar(front: HandlerContext, request: SimilarRequest) -> SimilarResponse:
    servable = front.service.deployment("retrieval").servable
    [item] = servable.ids_of([request.item])
    if item == 0 or servable.index is None:
        raise BadRequestError("item: the model does not know this item", "item")
    own_D = servable.index.rows(torch.tensor([item - 1]))[0]
    scores_N = torch.cat([part_ND @ own_D for _, part_ND in servable.index.parts()])
    scores_N[item - 1] = -torch.inf
    best = scores_N.topk(min(request.k, len(scores_N) - 1))
    return {"items": [servable.item_keys[i] for i in best.indices.tolist()], "scores": best.values.tolist()}


SIMILAR = EndpointSpec(
    method="POST",
    path="/v1/similar",
    summary="Similar items, nearest first",
    handle=similar,
    request=SimilarRequest,
    response=SimilarResponse,
    example={"item": "12", "k": 5},
)
