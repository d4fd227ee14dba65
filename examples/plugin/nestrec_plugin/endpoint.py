"""An endpoint: POST /v1/similar, the items whose vectors are nearest to that of an item."""

from dataclasses import dataclass
from typing import Annotated, TypedDict

import torch

from nestrec.serving.core.request_limits import BadRequestError
from nestrec.serving.http.endpoint_spec import EndpointSpec, HandlerContext
from nestrec.serving.inputs.request_schema import AtLeast, AtMost, ItemId


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarRequest:
    """Which items are like this one?"""

    item: ItemId
    """source id"""
    k: Annotated[int, AtLeast(1), AtMost("max_k")] = 10
    """how many"""


class SimilarAnswer(TypedDict):
    """The nearest first."""

    items: list[str]
    """source ids"""
    scores: list[float]
    """products of their vectors with that of the item"""


async def similar(front: HandlerContext, request: SimilarRequest) -> SimilarAnswer:
    servable = front.service.fleet("retrieval").servable
    [item] = servable.ids_of([request.item])
    if item == 0 or servable.index is None:
        raise BadRequestError("the model does not know it", "item")
    own_D = servable.index.rows(torch.tensor([item - 1]))[0]
    scores_N = torch.cat([part_ND @ own_D for _, part_ND in servable.index.parts()])
    scores_N[item - 1] = -torch.inf
    best = scores_N.topk(min(request.k, len(scores_N) - 1))
    return {"items": [servable.item_keys[i] for i in best.indices.tolist()], "scores": best.values.tolist()}


SIMILAR = EndpointSpec(
    method="POST",
    path="/v1/similar",
    summary="Items like an item, the nearest first",
    handle=similar,
    request=SimilarRequest,
    answer=SimilarAnswer,
    example={"item": "12", "k": 5},
)
